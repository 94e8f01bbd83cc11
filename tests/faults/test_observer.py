"""The observer of the fault suite sees what it is there to see: each wrong, done to a ledger or a journal by hand."""

import sqlite3

import numpy as np
import pytest

from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.cohort.ticket import Ticket, members_digest
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Unit

from .observer import Observer

MECHANISM, QUANTA = ClippedSum(1.0, Unit.RECORD, 2, 10), 1000


@pytest.fixture
def observer(tmp_path):
    """It has looked at a release that was charged, committed, revealed by a client, and stored."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        people = ledger.population("people")
        people.account("record", Budget(6, 1e-5))
        run = people.run("r")
        attempt = run.charge(ReleaseKey("training", "sum", 1), {}, MECHANISM, QUANTA)
        head = attempt.commit({"a", "b"})
        journal = SiteJournal(tmp_path / "sites" / "journal.db")
        journal.enrol(("a", "b"))
        ticket = Ticket("people", "r", "training", "sum", 1, 1, "request", 2.5, QUANTA, head, ledger="l")
        journal.prepare(ticket, ("a", "b"))
        journal.reveal(ticket, members_digest(("a", "b")), ("a", "b"), np.array([5, -7]))
        run.store(attempt, np.array([5.0, -7.0]))
        journal.close()
    made = Observer(str(tmp_path / "ledger.db"), tmp_path / "sites")
    made.look()
    assert list(made.problems) == []
    assert made.looks == 1
    return made


WRONGS = {
    "a charge that is gone": ("ledger.db", "DELETE FROM releases", "lost charge"),
    "a spend that went down": ("ledger.db", "UPDATE accounts SET spent = '999'", "lost charge"),
    "a spend beyond the budget": ("ledger.db", "UPDATE accounts SET reserved = budget", "overspent"),
    "a second value": ("ledger.db", "UPDATE released_values SET digest = 'other'", "stored two values"),
    "a second charge": ("ledger.db", "UPDATE releases SET request = 'other'", "charged twice"),
    "a reveal before the commit": ("ledger.db", "UPDATE releases SET state = 'charged'", "before it was committed"),
    "a reveal that costs more": ("sites/journal.db", "UPDATE messages SET quanta = '1001'", "lost charge"),
    "a reveal without a charge": ("sites/journal.db", "UPDATE messages SET step = 2", "lost charge"),
    "other bytes": ("sites/journal.db", "UPDATE messages SET message = x'00'", "revealed with two values"),
    "another set": ("sites/journal.db", "UPDATE messages SET participants = 'x'", "another request or set"),
}


@pytest.mark.parametrize(("file", "statement", "told"), WRONGS.values(), ids=WRONGS)
def test_a_wrong_is_told(observer, tmp_path, file, statement, told):
    with sqlite3.connect(tmp_path / file) as database:
        assert database.execute(statement).rowcount > 0
    database.close()
    observer.look()
    assert any(told in problem for problem in observer.problems), observer.problems


def test_what_stays_as_it_is_tells_nothing(observer):
    observer.look()
    assert list(observer.problems) == []
    assert observer.looks == 2
