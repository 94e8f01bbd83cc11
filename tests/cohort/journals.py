"""What the tests of journals share."""

from dataclasses import replace

import numpy as np
import pytest

from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.cohort.ticket import JournalRefused, Ticket, members_digest
from dpray.platform.privacy.ledger import Head

ABC = ("a", "b", "c")
ALL = members_digest(ABC)
SEARCH = ("p", "search")
MESSAGE = np.array([5, -7, 2**60])


def ticket(step=0, **changes):
    return replace(Ticket("p", "r", "training", "sum", step, 1, "request", 2.5, 100, Head(10, "d" * 64)), **changes)


def reopened(journal):
    journal.close()
    return SiteJournal(journal.path)


def refused(kind, call, *arguments):
    with pytest.raises(JournalRefused) as caught:
        call(*arguments)
    assert caught.value.kind == kind
    return caught.value.sentence


def reveal(journal, asked, members=ABC, participants=ALL, message=MESSAGE):
    journal.prepare(asked, members)
    journal.reveal(asked, participants, members, message)
