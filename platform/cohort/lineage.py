"""Which entries of its ledger a driver must name so that clients' journals can tell it from a copy that was restored.

A journal keeps the last entry it has seen (its anchor) and goes on only with a ledger that still has this entry. The
driver remembers the number of the entry it showed each host last, and names the digests that *the ledger it uses now*
has under these numbers: they are looked up for every request and never remembered. A journal that another run has moved
on meanwhile refuses with its anchor's number; the next request names that one too. So a usual round costs no call more.

A request shows the ledger as it was after the charge. That the release was *stored* is shown by the next request, and
after the last one by `anchor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.errors import ClientsRefused
from dpray.platform.cohort.request import Refusal, Request
from dpray.platform.cohort.ticket import LedgerEnd
from dpray.platform.privacy.ledger import Attempt, Ledger, Standing

_TRIES = 4
"""Calls to a journal that other runs move on meanwhile: it says where it is, and is told that entry next."""


@dataclass
class Shown:
    """Number of the last entry each host's journal is known to have seen."""

    last: dict[int, int] = field(default_factory=dict)

    def ask(self, attempt: Attempt) -> Standing:
        """Where release and ledger stand now, with all entries that the journals may ask for."""
        return attempt.run.standing(attempt, set(self.last.values()))

    def note(self, answers: Mapping[int, Any], sequence: int) -> None:
        """Take answers of hosts that were shown the entry `sequence` as the ledger's end."""
        for host, answer in answers.items():
            if not isinstance(answer, Refusal):
                self.last[host] = sequence
            elif answer.seen is not None:
                self.last[host] = answer.seen


def shown_as(request: Request, standing: Standing) -> Request:
    """The request under the ledger as it stands."""
    return replace(request, head=standing.head, ledger=standing.ledger, lineage=standing.lineage)


def anchor(dispatch: Dispatch, hosts: int, ledger: Ledger, shown: Shown) -> tuple[int, ...]:
    """Show every host how far the ledger has come; the hosts whose journals know it now, dropouts left out.

    Raises:
        ClientsRefused: it is not the ledger a journal knows, or an older copy of it.
    """
    known, left = list[int](), list(range(hosts))
    refusals: list[Refusal] = []
    for _ in range(_TRIES):
        head, identity, lineage = ledger.descent(set(shown.last.values()))
        end = LedgerEnd(head, identity, lineage)
        answers = dispatch.call("advance", dict.fromkeys(left, (end,)))
        shown.note(answers, head.sequence)
        known += [host for host, answer in answers.items() if not isinstance(answer, Refusal)]
        refusals = [answer for answer in answers.values() if isinstance(answer, Refusal)]
        left = [host for host, answer in answers.items() if isinstance(answer, Refusal) and answer.kind == "head"]
        if not left:
            break
    for refusal in refusals:
        if refusal.kind in ("head", "ledger"):
            raise ClientsRefused(refusal.sentence)
    return tuple(sorted(known))
