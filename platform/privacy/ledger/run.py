"""A run: the lease under which a process plans and releases, each release exactly once.

Order of a release: **charge** (one durable transaction over all accounts) → **compute** inside the trust boundary →
**store** (the first value wins) → hand out.

| state of a key | next | on a retry |
|---|---|---|
| – | charged: every account paid | |
| charged | committed, stored, lost | computed again, not charged again: nothing was revealed |
| committed | stored, lost | the same participants, byte for byte, or lost |
| stored | | the stored value |
| lost | | refused: the charge stands |

Guarantee: charged ≥ revealed after a crash at any point; one key never hands out two different values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from sqlalchemy import bindparam, select, update

from dpray.platform.privacy.ledger import releasing, reserving, rows, schema, standing, storing
from dpray.platform.privacy.ledger.attempt import Attempt, Release
from dpray.platform.privacy.ledger.chain import Head, Transaction, canonical
from dpray.platform.privacy.ledger.errors import (
    KeyConflict,
    LeaseLost,
    LedgerError,
    ParticipantsChanged,
    ReleaseLost,
    RunClosed,
)
from dpray.platform.privacy.ledger.plan import (
    Plan,
    Releasable,
    ReleaseKey,
    charged_text,
    checked_name,
    request_digest,
    spend,
)
from dpray.platform.privacy.ledger.prepared import Prepared
from dpray.platform.privacy.ledger.rows import ReleaseRow, RunRow
from dpray.platform.privacy.ledger.standing import Standing
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger.population import Population


_MOVE = Prepared(
    update(schema.releases)
    .where(schema.releases.c.sequence == bindparam("release"))
    .values({name: bindparam(name) for name in ("state", "stamps", "participants", "reason")})
)


class Run:
    """A named run of a population, held by lease number `epoch`. Opened by `Population.run`.

    `stamps` are facts kept with every release of this lease, such as "NOT PRIVATE (seeded noise)".
    """

    def __init__(self, population: Population, name: str, epoch: int, stamps: tuple[str, ...]) -> None:
        self.population, self.name, self.epoch, self.stamps = population, name, epoch, stamps
        self._storage, self._files = population.storage, population.files

    def __repr__(self) -> str:
        return f"Run({self.population.name!r}, {self.name!r}, epoch={self.epoch})"

    @property
    def closed(self) -> bool:
        """Whether the run is finished."""
        return self._storage.read(lambda connection: rows.run(connection, self.population.name, self.name)).closed

    def reserve(self, plan: Plan) -> None:
        """Set the whole plan aside on every account, or nothing. No other run can use it; `close` gives back the rest.

        The same plan again changes nothing.

        Errors: BudgetExceeded with both numbers; PlanConflict for another plan, or after the first release; LeaseLost;
        RunClosed; LedgerError without an account.
        """

        def work(transaction: Transaction) -> None:
            reserving.reserve(transaction, self.population.name, self.name, self._held(transaction), plan)

        self._storage.write(work)

    def release(
        self,
        key: ReleaseKey,
        query: Mapping[str, Any],
        mechanism: Releasable,
        quanta: int | None,
        compute: Callable[[Attempt], NDArray[Any]],
        *,
        trust: str = "central",
    ) -> Release:
        """Charge, compute, store and hand out; or hand out what is stored under this key, without a second charge.

        Args:
            key: names the release.
            query: the public request: JSON values and arrays. Never data, never losses.
            mechanism: states unit and constants.
            quanta: μ² of this release in its own unit; None: without noise.
            compute: draws the noise and returns a float64 or int64 array. Called at most once here, and never in
                anything that is retried by itself. It may raise ReleaseLost: then the key is lost, its charge stands.
            trust: who may see what, for the statement.

        Errors: as `charge`; whatever `compute` raises (the charge stands; the key can be tried again).
        """
        charged = self.charge(key, query, mechanism, quanta, trust)
        if isinstance(charged, Release):
            return charged
        try:
            value = compute(charged)
        except ReleaseLost as error:
            winner = self.lose(charged, str(error) or "lost by the computation")
            if winner is None:
                raise
            return winner
        return self.store(charged, value)

    def charge(
        self,
        key: ReleaseKey,
        query: Mapping[str, Any],
        mechanism: Releasable,
        quanta: int | None,
        trust: str = "central",
    ) -> Attempt | Release:
        """First half of `release`: charge every account, durably. A stored key is returned as its Release.

        Errors: BudgetExceeded with both numbers, nothing charged; KeyConflict if the key was used for another request;
        LeaseLost; ReleaseLost; RunClosed; LedgerError without an account, without noise on a private account, or for
        quanta that are not a whole number ≥ 1.
        """
        quanta, trust = spend(quanta), checked_name("trust mode", trust)
        request = request_digest(query, mechanism, quanta, trust)
        ask = releasing.Ask(key, mechanism, quanta, request, trust, self.stamps)
        what = Unit(mechanism.unit), charged_text(mechanism), trust

        def work(transaction: Transaction) -> Attempt | None:
            run = self._held(transaction)
            found = rows.release(transaction.connection, self.population.name, self.name, key)
            if found is None:
                if run.closed:
                    raise self._finished()
                sequence = releasing.charge(transaction, self.population.name, self.name, run, ask)
                return Attempt(self, key, quanta, self.epoch, transaction.head, None, sequence, *what)
            if found.request != request:
                raise KeyConflict(
                    f"{self._words(key)} was charged for another request (query, mechanism, spend or trust mode): a "
                    "key is used for one request only. Give the new request a step of its own."
                )
            if found.state == "stored":
                return None
            self._refuse_lost(key, found)
            if run.closed:
                raise self._finished()
            return Attempt(self, key, quanta, self.epoch, transaction.head, found.participants, found.sequence, *what)

        attempt = self._storage.write(work)
        return self._stored(key) if attempt is None else attempt

    def store(self, attempt: Attempt, value: NDArray[Any]) -> Release:
        """Second half of `release`: keep the value, if no other computation was faster; else hand out the first one.

        A computation that has lost its lease may store too: it was charged, and the first value wins.

        Errors: LedgerError for anything but a float64 or int64 array; ReleaseLost; RunClosed.
        """
        encoded = storing.encode(value)
        key = attempt.key
        place = storing.place(self._files, self._prefix(), attempt, encoded)

        def work(transaction: Transaction) -> bool:
            run = rows.run(transaction.connection, self.population.name, self.name)
            found = self._charged(transaction, attempt)
            if found.state == "stored":
                return False
            self._refuse_lost(key, found)
            if run.closed:
                raise self._finished()
            if not storing.on_disk(self._files, place):
                raise self._stale(run.epoch)
            storing.record(transaction, found.sequence, encoded, place)
            stamps = self._stamp(attempt, found)
            body = {"digest": encoded.digest, "dtype": encoded.dtype, "shape": encoded.shape, "size": len(encoded.data)}
            self._move(
                transaction, "store", key, found, {"state": "stored"}, {**body, "place": place, "stamps": stamps}
            )
            return True

        first = False
        try:
            first = self._storage.write(work)
        finally:
            if not first:
                self._discard(attempt, place)
        if first:
            return Release(key, storing.decode(encoded.dtype, encoded.shape, encoded.data), attempt.quanta, first=True)
        return self._stored(key)

    def lose(self, attempt: Attempt, reason: str) -> Release | None:
        """Mark a release as lost: its charge stands and no value will ever come. Returns the value if one was stored.

        Errors: LeaseLost if another process has opened the run: it may still finish the release.
        """
        reason = checked_reason(reason)

        def work(transaction: Transaction) -> bool:
            found = self._charged(transaction, attempt)
            if found.state == "stored":
                return False
            self._held(transaction)
            if found.state != "lost":
                cells = {"state": "lost", "reason": reason}
                self._move(transaction, "lose", attempt.key, found, cells, {"reason": reason})
            return True

        return None if self._storage.write(work) else self._stored(attempt.key)

    def commit(self, attempt: Attempt, participants: frozenset[str], *, sample_inside: bool = False) -> Head:
        """Record the participant set of an attempt; called by `Attempt.commit`."""
        names = canonical(sorted(participants))

        def work(transaction: Transaction) -> Head:
            run, found = self._held(transaction), self._charged(transaction, attempt)
            self._refuse_lost(attempt.key, found)
            if found.members is not None:
                if found.members != names:
                    before = frozenset(json.loads(found.members))
                    gone, new = sorted(before - participants), sorted(participants - before)
                    raise ParticipantsChanged(
                        f"{self._words(attempt.key)} was committed to {len(before)} participants, and "
                        f"another set was given now (without {gone[:3]}, with {new[:3]}): repeat it over the first "
                        "set byte for byte, or raise ReleaseLost."
                    )
                return transaction.head
            if run.closed:
                raise self._finished()
            if found.sampling < 1 and found.unit is Unit.CLIENT and not sample_inside:
                raise LedgerError(
                    f"{self._words(attempt.key)} is a sum over sampled clients: its participants are its sample, which "
                    "has to stay secret, and cannot be committed to. Let every client draw its own place in the "
                    "sample and answer either way (`sample_inside`)."
                )
            if found.state == "stored":
                raise LedgerError(f"{self._words(attempt.key)} is stored already: there is nothing left to commit.")
            stamps = self._stamp(attempt, found)
            body = {"participants": storing.text_digest(names), "count": len(participants), "stamps": stamps}
            self._move(transaction, "commit", attempt.key, found, {"state": "committed", "participants": names}, body)
            return transaction.head

        return self._storage.write(work)

    def standing(self, attempt: Attempt, passed: Iterable[int] = ()) -> Standing:
        """Where a charged release stands, and the ledger it is in: one read, right before it is computed.

        Args:
            attempt: of this run.
            passed: numbers of entries whose digests are asked for.

        Errors: LedgerError, KeyConflict where the attempt is not what was charged.
        """
        return self._storage.read(lambda connection: standing.read(connection, attempt, passed))

    def stored(self, key: ReleaseKey) -> NDArray[Any] | None:
        """The value stored under a key, or None. Errors: ValuePruned; LedgerTampered if its bytes were changed."""
        return self._storage.read(
            lambda connection: storing.load(connection, self._files, self.population.name, self.name, key)
        )

    def prune(self, label: str, mechanism: str, before_step: int) -> int:
        """Drop the large stored values of earlier steps, for which a checkpoint stands; their hashes stay.

        Returns how many were dropped. Errors: LeaseLost.
        """

        def work(transaction: Transaction) -> tuple[str, ...]:
            self._held(transaction)
            where = (self.population.name, self.name, label, mechanism, before_step)
            return storing.prune(transaction, *where)

        places = self._storage.write(work)
        for place in places:
            storing.remove(self._files, place)
        return len(places)

    def close(self) -> None:
        """Finish the run and give back what it had set aside. Closing twice changes nothing. Errors: LeaseLost."""

        def work(transaction: Transaction) -> None:
            run = self._held(transaction)
            if not run.closed:
                reserving.close(transaction, self.population.name, self.name, run)

        self._storage.write(work)

    def _held(self, transaction: Transaction) -> RunRow:
        run = rows.run(transaction.connection, self.population.name, self.name)
        if run.epoch != self.epoch:
            raise self._stale(run.epoch)
        return run

    def _stale(self, epoch: int) -> LeaseLost:
        return LeaseLost(
            f"Run {self.name!r} of population {self.population.name!r} was opened again (lease {epoch}); this process "
            f"holds lease {self.epoch}, and may not charge or commit any more. End it, or open the run again."
        )

    def _finished(self) -> RunClosed:
        return RunClosed(
            f"Run {self.name!r} of population {self.population.name!r} is closed: what it stored can be read, nothing "
            "new is released. Give a new run another name."
        )

    def _words(self, key: ReleaseKey) -> str:
        return f"Release {key} of run {self.name!r}, population {self.population.name!r},"

    def _refuse_lost(self, key: ReleaseKey, found: ReleaseRow) -> None:
        if found.state == "lost":
            raise ReleaseLost(
                f"{self._words(key)} is lost ({found.reason}): its charge stands and its noise is never drawn again. "
                "A new release is another step with a charge of its own."
            )

    def _charged(self, transaction: Transaction, attempt: Attempt) -> ReleaseRow:
        found = rows.release(transaction.connection, self.population.name, self.name, attempt.key)
        if found is None or found.sequence != attempt.release:
            raise LedgerError(f"{self._words(attempt.key)} was not charged for this attempt: charge it first.")
        return found

    def _stored(self, key: ReleaseKey) -> Release:
        def work(connection: Any) -> Release:
            found = rows.release(connection, self.population.name, self.name, key)
            value = storing.load(connection, self._files, self.population.name, self.name, key)
            if found is None or value is None:  # pragma: no cover - the state was read a moment ago and is final
                raise LedgerError(f"{self._words(key)} has no stored value.")
            return Release(key, value, found.quanta, first=False)

        return self._storage.read(work)

    def _stamp(self, attempt: Attempt, found: ReleaseRow) -> list[str]:
        """Stamps of a release once this lease and this attempt have had a part in it."""
        return sorted({*found.stamps, *self.stamps, *attempt.stamps})

    def _move(
        self,
        transaction: Transaction,
        kind: str,
        key: ReleaseKey,
        found: ReleaseRow,
        cells: dict[str, Any],
        body: dict[str, Any],
    ) -> None:
        """Change a release's row and append the entry that says so."""
        now = {
            "state": found.state,
            "stamps": canonical(body.get("stamps", list(found.stamps))),
            "participants": found.members,
            "reason": found.reason,
        }
        _MOVE.run(transaction.connection, {**now, **cells, "release": found.sequence})
        name = {"population": self.population.name, "run": self.name, "epoch": self.epoch, "release": found.sequence}
        transaction.append(kind, {**name, "label": key.label, "mechanism": key.mechanism, "step": key.step, **body})

    def _prefix(self) -> str:
        return storing.prefix(self.population.name, self.name)

    def _discard(self, attempt: Attempt, place: str) -> None:
        """Remove this computation's file after a lost race: unless the row that won names it."""
        query = select(schema.released_values.c.place).where(schema.released_values.c.release == attempt.release)
        with suppress(LedgerError):
            if self._storage.read(lambda connection: connection.execute(query).scalar_one_or_none()) != place:
                storing.remove(self._files, place)


def checked_reason(reason: str) -> str:
    """A reason with something in it."""
    text = str(reason).strip()
    if not text:
        raise LedgerError("A release is lost for a reason that the history can show: give one.")
    return text[:2000]
