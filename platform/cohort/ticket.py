# ruff: noqa: N818 - the names are the outcomes that callers handle, and read as such
"""What a site's journal is asked: the ticket of a request, the refusals, and how sets of clients are named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from dpray.platform.cohort.client import IntArray
from dpray.platform.privacy.ledger import Head


class JournalRefused(Exception):
    """The journal's guard: a sentence without private values, and the `kind` of refusal for the driver.

    Kinds: `stale` (old lease), `head` (an older ledger, or one that has not said what it has at the entry `seen`),
    `ledger` (another ledger, or one that was rewritten), `population` (of another name than the site answers for),
    `cap`, `conflict` (key used for something else), `lost` (a committed key that cannot be repeated), `again` (prepare
    first: this process holds no message).
    """

    def __init__(self, kind: str, sentence: str, seen: int | None = None) -> None:
        super().__init__(sentence)
        self.kind, self.sentence, self.seen = kind, sentence, seen


@dataclass(frozen=True)
class Ticket:
    """What a request is, for the journal: its key, its lease and what it costs.

    Attributes:
        population, run, label, mechanism, step: the release key.
        epoch: lease of the asking driver.
        request: digest of the public request, noise included.
        share: noise std one client adds (0 where the server does).
        quanta: μ² it costs each client; None: infinite.
        head: end of the ledger's chain.
        committed: whether an earlier computation has committed participants for this key.
        ledger: digest of the ledger's first entry, which names it.
        lineage: digests of earlier entries of the ledger by number: those that journals may have seen last.
    """

    population: str
    run: str
    label: str
    mechanism: str
    step: int
    epoch: int
    request: str
    share: float
    quanta: int | None
    head: Head
    committed: bool = False
    ledger: str = ""
    lineage: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def series(self) -> str:
        """Names the releases that differ in their step only."""
        return json.dumps([self.population, self.run, self.label, self.mechanism])

    @cached_property
    def lease(self) -> str:
        """Names the run whose epoch counts."""
        return json.dumps([self.population, self.run])

    @cached_property
    def words(self) -> str:
        """The key in a sentence."""
        return f"{self.label}/{self.mechanism} step {self.step} of run {self.run!r}"


@dataclass(frozen=True)
class LedgerEnd:
    """How far a ledger has come, told to journals without asking for anything: fields as in `Ticket`."""

    head: Head
    ledger: str
    lineage: Mapping[int, str]


@dataclass(frozen=True)
class Stored:
    """A message that was revealed: whose it is, and its integers on the grid."""

    members: tuple[str, ...]
    message: IntArray


@lru_cache(maxsize=64)
def members_digest(members: tuple[str, ...]) -> str:
    """SHA-256 over a set of client names, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(members)).encode()).hexdigest()
