"""A release on its way: charged, being computed, handed out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from dpray.platform.privacy.budget import to_mu
from dpray.platform.privacy.ledger.chain import Head
from dpray.platform.privacy.ledger.errors import KeyConflict, LedgerError
from dpray.platform.privacy.ledger.plan import Releasable, ReleaseKey, charged_text, checked_name
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger.run import Run


@dataclass
class Attempt:
    """One computation of a charged release. There may be several (a crash, a zombie); the first stored value wins.

    Attributes:
        run, key: what is being released.
        quanta: what was charged, in the release's own unit; None: without noise.
        epoch: lease of the computation; clients refuse older ones.
        head: end of the ledger's chain when this was charged or committed; an anchor for clients.
        participants: the set an earlier computation committed to before its point of no return; None: none did. Where
            there is one, the value is repeated byte for byte over that set, or the release is lost.
        release: number of the entry that charged it.
        unit, mechanism, trust: what was charged for; `mechanism` as `charged_text`. Nothing else may be computed.
        stamps: facts the computation adds to the release (see `stamp`).
        handed_out: whether a value drawn afresh was returned for it (see `hand_out`).
    """

    run: Run = field(repr=False, compare=False)
    key: ReleaseKey
    quanta: int | None
    epoch: int
    head: Head
    participants: frozenset[str] | None
    release: int
    unit: Unit
    mechanism: str
    trust: str
    stamps: tuple[str, ...] = ()
    handed_out: bool = field(default=False, compare=False)

    @property
    def mu(self) -> float:
        """μ this release may spend, rounded down; ∞ without noise."""
        return math.inf if self.quanta is None else to_mu(self.quanta)

    def check(self, mechanism: Releasable, trust: str) -> None:
        """Refuse to compute anything but what was charged (KeyConflict)."""
        asked = charged_text(mechanism)
        if asked != self.mechanism:
            raise KeyConflict(
                f"Release {self.key} was charged for {self.mechanism}, and {asked} is to be computed: its charge would "
                "not cover it. Charge the mechanism that is computed."
            )
        if trust != self.trust:
            raise KeyConflict(
                f"Release {self.key} was charged under trust mode {self.trust!r}, and is to be computed under "
                f"{trust!r}: the statement would say what is not true. Charge it with trust={trust!r}."
            )

    def stamp(self, *stamps: str) -> None:
        """Add facts a reader must know, such as `SEEDED`: recorded with the commit, or else with the stored value."""
        self.stamps = tuple(sorted({*self.stamps, *(checked_name("stamp", stamp) for stamp in stamps)}))

    def hand_out(self) -> None:
        """Note that a value with noise drawn afresh is returned now; a second one is refused (LedgerError).

        Means of several values of one charge would lose their noise. A computation that is begun again before anything
        was stored charges the key again, which costs nothing, and gets an attempt of its own.
        """
        if self.handed_out:
            raise LedgerError(
                f"A value of release {self.key} was computed under this attempt already: store it. Its noise is not "
                "drawn a second time."
            )
        self.handed_out = True

    def commit(self, participants: Iterable[str], *, sample_inside: bool = False) -> Head:
        """Record durably who takes part, before anything can be seen: the last step before the point of no return.

        The same set again changes nothing. Returns the head of the chain, for the clients' journals.

        Args:
            participants: everyone whose message is in the release.
            sample_inside: of a release over sampled clients: each has drawn its own place in the sample and sends a
                message either way, so that this set does not follow from the sample, which has to stay secret.

        Errors: ParticipantsChanged on another set; LeaseLost if another process has opened the run; ReleaseLost,
        RunClosed.
        """
        if isinstance(participants, str):
            raise LedgerError(f"Participants are a set of client names; the one text {participants!r} was given.")
        members = frozenset(participants)
        if not members or not all(isinstance(member, str) and member for member in members):
            raise LedgerError("Participants are a set of client names, at least one of them.")
        self.head = self.run.commit(self, members, sample_inside=sample_inside)
        self.participants = members
        return self.head


@dataclass(frozen=True, eq=False)
class Release:
    """A value that was handed out. `first`: computed just now; otherwise it is what the ledger had stored.

    `value` is read-only: float64 or int64, as stored. `quanta` is what was charged, once.
    """

    key: ReleaseKey
    value: NDArray[Any]
    quanta: int | None
    first: bool
