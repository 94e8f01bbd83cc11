"""A host: the clients of one actor, their records, journal and noise. Plain Python; `actors` puts it on Ray.

| symbol  | code             | meaning                                                        | shape |
|---------|------------------|----------------------------------------------------------------|-------|
| u_i     | rows             | bounded message of client i                                    | (d,)  |
| g       | `noise.grid`     | grid of the release                                            |       |
| z_i     |                  | noise of client i, std `noise.share`                           | (d,)  |
| m       | message          | Σ_i (round(u_i/g) + round(z_i/g)) over the host's clients      | (d,) int64 |

A host trusts the driver with nothing it can work out itself: it calibrates the noise from mechanism, charge, regime and
the number of clients *it* was told are counted on, checks that query and mechanism state the same sensitivity, counts
what its clients spend, and keeps its journal. It says three kinds of thing: a `Refusal` with a sentence, an answer, or
nothing (it is lost). Integer sums make the answer independent of how clients are laid out over hosts; rows of the
one-by-one path are bit for bit the same in every layout, those of a vectorised pass as far as its BLAS calls are.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dpray.platform.cohort.client import ClientTask, FloatArray, IntArray, Stack, refuse_larger
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.cohort.local_steps import NoisedQuery
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.rehearsal import Rehearsal
from dpray.platform.cohort.request import Message, Prepared, Ready, Request, charged, digest_of, noise_of
from dpray.platform.cohort.secure_sum import Masked, Trusted
from dpray.platform.cohort.ticket import JournalRefused, LedgerEnd, Ticket, members_digest
from dpray.platform.confine import PATIENCE, Confinement, Marker, brief
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Head, ReleaseKey
from dpray.platform.privacy.mechanisms import Regime
from dpray.platform.privacy.noise import GridNoise, NoiseSource, to_grid

_BLOCK = 1 << 22
"""Numbers held at once: clients are taken in blocks of so many coordinates."""
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class HostSpec:
    """Everything a host is made of, picklable; a rebuilt actor is made of it again.

    Attributes:
        name: names the host's marker file.
        clients: its clients.
        task: what they run.
        load: gives their records, one `Records` a client, stacked.
        folder: the site's folder, on the host's machine.
        terms: what is public about the whole cohort.
        quorum: fewest clients that may take part in a sum.
        n_min: clients whose noise is counted on.
        noise: source of noise; a seeded one also gives the clients' private seeds (tests).
        cap: own lifetime budget of each client, or None.
        limit: seconds for one call of user code, or None.
        site: whether the records are a real site's, whose journal answers for one population.
        masked: the masked sum that regime `distributed` uses; None: the trusted one.
        everyone: all clients of the cohort, in its order (for a masked sum), and
        colluders: how many of them may pool what they know.
    """

    name: str
    clients: tuple[str, ...]
    task: ClientTask
    load: Callable[[], Stack]
    folder: str
    terms: Terms
    quorum: int
    n_min: int
    noise: NoiseSource
    cap: Budget | None
    limit: float | None
    site: bool = False
    masked: Masked | None = None
    everyone: tuple[str, ...] = ()
    colluders: int = 1


@dataclass
class _Held:
    members: tuple[str, ...]
    kept: IntArray
    ticket: Ticket


class Host:
    """A host's clients, loaded. Methods answer or raise JournalRefused or CohortError, whose sentences may travel."""

    journal_type: ClassVar[type[SiteJournal]] = SiteJournal

    def __init__(self, spec: HostSpec, secure_sum: Trusted | None = None) -> None:
        self._spec, self._sum = spec, secure_sum or Trusted()
        self._shards = _loaded(spec)
        self._journal = self.journal_type(Path(spec.folder).expanduser() / "journal.db", spec.cap, site=spec.site)
        self._marker = Marker(marker_path(spec))
        self._place = {client: index for index, client in enumerate(spec.clients)}
        seeds = self._journal.enrol(spec.clients)
        if spec.noise.reproducible:
            seeds = {client: spec.noise.generator("private seed", client).bytes(32) for client in spec.clients}
        self._seeds = seeds
        self._held: dict[str, _Held] = {}
        left = self._marker.left()
        if left is not None:
            self._journal.note_death(*left)
            self._marker.clear()

    def ready(self) -> Ready:
        """Says that the host is up."""
        return Ready(os.getpid(), self._shards.x.shape[1:])

    def anchor(self) -> Head | None:
        """Newest ledger head its clients have seen."""
        return self._journal.anchor()

    def advance(self, end: LedgerEnd) -> None:
        """Have the journal remember how far the ledger has come."""
        self._journal.advance(end)

    def close(self) -> None:
        """Close the files."""
        self._journal.close()
        self._marker.close()

    # sums

    def contribute(self, request: Request) -> Message:
        """Regime central: the clients' un-noised messages, added up; the trusted server adds the noise."""
        ticket, noise = self._ticket(request)
        self._journal.contribute(ticket, self._spec.clients)
        steps = self._message(request, ticket, noise, self._spec.clients)
        return Message(steps, len(self._spec.clients))

    def prepare(self, request: Request) -> Prepared:
        """First half of a sum under noise shares: make the message and hold it. Nothing of it can be seen yet."""
        ticket, noise = self._ticket(request)
        wanted = None if request.participants is None else set(request.participants)
        members = [client for client in self._spec.clients if wanted is None or client in wanted]
        members = list(self._journal.prepare(ticket, members))
        steps = self._message(request, ticket, noise, members)
        sealed = self._sum.prepare(steps)
        self._held = {held: entry for held, entry in self._held.items() if entry.ticket.lease != ticket.lease}
        self._held[_key(ticket)] = _Held(tuple(members), sealed.kept, ticket)
        return Prepared(sealed.sent, noise)

    def reveal(
        self,
        run: tuple[str, str],
        key: ReleaseKey,
        participants: tuple[str, ...],
        head: Head,
        lineage: Mapping[int, str] | None = None,
    ) -> list[Message]:
        """Second half: after the commit, write the message down and give it out; again, the same bytes.

        Args:
            run: (population, run).
            participants: the committed set.
            head: end of the ledger's chain, commit included.
            lineage: digests of earlier entries; None: those of the preparation.
        """
        held = next((h for h in self._held.values() if _names(h.ticket) == (run, key)), None)
        if held is None:
            raise JournalRefused("again", "Prepare first: this host holds no message under the key.")
        if len(participants) < self._spec.quorum:
            raise CohortError(
                f"{len(participants)} clients were committed, fewer than the quorum of {self._spec.quorum} that these "
                "clients count on."
            )
        if not set(held.members) <= set(participants):
            raise JournalRefused("again", "The committed set leaves out clients whose message was prepared.")
        lineage = held.ticket.lineage if lineage is None else lineage
        ticket, digest = replace(held.ticket, head=head, lineage=lineage), members_digest(participants)
        kept = self._sum.reveal(held.kept, participants)
        self._journal.reveal(ticket, digest, held.members, kept)
        held.members = ()  # written down: from here on the journal answers
        stored = self._journal.revealed(ticket, digest, self._spec.clients)
        return [Message(each.message, len(each.members)) for each in stored]

    def _ticket(self, request: Request) -> tuple[Ticket, GridNoise]:
        """The request as this host understands it: its own noise, its own μ."""
        mechanism, central = request.mechanism, request.regime is Regime.CENTRAL
        request.query.check(mechanism, self._spec.terms)
        refuse_larger(self._shards.counts.tolist(), request.records_per_client, request.population)
        noise = noise_of(mechanism, request.mu, request.regime, self._spec.n_min)
        quanta, share = charged(request, noise), 0.0 if central else noise.share
        names = (request.population, request.run, request.key.label, request.key.mechanism, request.key.step)
        digest, committed = digest_of(request, noise), request.participants is not None
        ledger = request.head, committed, request.ledger, request.lineage
        return Ticket(*names, request.epoch, digest, share, quanta, *ledger), noise

    def _message(self, request: Request, ticket: Ticket, noise: GridNoise, members: Sequence[str]) -> IntArray:
        """Σ over members of their rows on the grid, and of their noise where they add it; (d,) int64."""
        total = np.zeros(request.mechanism.dimension, dtype=np.int64)
        for _, rows in self._rows(request, ticket, noise, members):
            total += rows.sum(axis=0)
        return total

    def _rows(
        self, request: Request, ticket: Ticket, noise: GridNoise, members: Sequence[str]
    ) -> Iterator[tuple[Sequence[str], IntArray]]:
        """Blocks of members, and their noised messages on the grid, (clients, d) int64."""
        query, dimension = request.query, request.mechanism.dimension
        calls = query.calls if isinstance(query, NoisedQuery) else 1
        confinement = self._confinement(_key(ticket), 1 / calls)
        for block in _blocks(members, dimension):
            view = _View(self, ticket, block, confinement)
            if isinstance(query, NoisedQuery):
                query.refuse_regime(request.regime)
                draw = partial(self._noise_of_step, ticket, noise, block, dimension // self._spec.terms.clients)
                yield block, query.noised(view, noise.grid, draw)
                continue
            rows = to_grid(query.messages(view), noise.grid)
            if request.regime is not Regime.CENTRAL and noise.private:
                rows += self._noise(ticket, noise, block, dimension)
            yield block, rows

    def _noise_of_step(
        self, ticket: Ticket, noise: GridNoise, members: Sequence[str], dimension: int, step: int
    ) -> IntArray:
        if not noise.private:
            return np.zeros((len(members), dimension), dtype=np.int64)
        return self._noise(ticket, noise, members, dimension, step)

    def _noise(self, ticket: Ticket, noise: GridNoise, members: Sequence[str], dimension: int, *part: int) -> IntArray:
        source = self._spec.noise
        if not source.reproducible:
            return source.draw(noise, (len(members), dimension))
        return np.stack([source.draw(noise, dimension, *_release(ticket), client, *part) for client in members])

    # the search

    def evaluate(self, run: tuple[str, str], candidate: int, config: Mapping[str, Any]) -> int:
        """Train and score one candidate: see `evaluate_all`."""
        return self.evaluate_all(run, {candidate: config})

    def evaluate_all(self, run: tuple[str, str], candidates: Mapping[int, Mapping[str, Any]]) -> int:
        """Train and score candidates at every client that has no score of them. Scores stay; returns how many clients.

        `run`: (population, search). A vote on a population counts the scores of that population only.
        """
        digests = {number: _digest(config) for number, config in candidates.items()}
        there = {number: self._journal.scores(run, number, digest) for number, digest in digests.items()}
        rehearsal = Rehearsal(
            self._spec.task,
            candidates,
            alone={number: self._confinement(json.dumps(["score", *run, number])) for number in candidates},
            together=self._confinement(json.dumps(["scores", *run, _digest(digests)]), calls=len(candidates)),
        )
        new, kept_at = dict[str, Mapping[int, float]](), time.monotonic()
        for client in self._spec.clients:
            missing = [number for number in candidates if client not in there[number]]
            if not missing:
                continue
            # One stream for all candidates: the same folds and rehearsal noise, so that scores differ by candidate.
            make = partial(self.generator, client, "score", *run)
            new[client] = rehearsal.scores(client, self._shards[self._place[client]], missing, make)
            if time.monotonic() - kept_at > _FLUSH_SECONDS:
                self._journal.keep_scores(run, digests, new)
                new, kept_at = {}, time.monotonic()
        if new:
            self._journal.keep_scores(run, digests, new)
        return len(self._spec.clients)

    def forget(self, run: tuple[str, str]) -> None:
        """Drop the scores of a search that has ended."""
        self._journal.forget_scores(run)

    # what queries see

    def generator(self, client: str, *key: str | int) -> np.random.Generator:
        """A client's private generator for votes and rehearsals, never for noise; the same for the same key."""
        text = json.dumps([client, *key]).encode()
        secret = hashlib.blake2b(text, key=self._seeds[client], digest_size=32, person=b"dpray client").digest()
        return np.random.default_rng(int.from_bytes(secret, "little"))

    def coins(self, client: str, release: tuple[str | int, ...]) -> np.random.Generator:
        """What a client draws its sample of a release with: the noise's own source, another stream of it."""
        return self._spec.noise.generator("sample", *release, client)

    def scores(self, run: tuple[str, str], candidates: int, clients: Sequence[str]) -> FloatArray:
        """(clients, p) scores of a run; NaN where there is none."""
        rows, place = np.full((len(clients), candidates), np.nan), {name: i for i, name in enumerate(clients)}
        for candidate, client, score in self._journal.all_scores(run):
            if client in place and 0 <= candidate < candidates:
                rows[place[client], candidate] = score
        return rows

    def shards(self, clients: Sequence[str]) -> Stack:
        """The records of some clients."""
        return self._shards.take([self._place[client] for client in clients])

    @property
    def task(self) -> ClientTask:
        """What the clients run."""
        return self._spec.task

    def _confinement(self, key: str, calls: float = 1.0) -> Confinement:
        """For code that may take the time of so many calls; one for several has one death, and is then made singly."""
        limit = None if self._spec.limit is None else self._spec.limit * calls
        patience = PATIENCE if calls <= 1 else 1
        key = brief(key)
        return Confinement(key, self._marker, self._journal.deaths(key), limit, patience)


class _View:
    """Some of a host's clients, asked under one ticket: a `HostedClients`."""

    def __init__(self, host: Host, ticket: Ticket, names: Sequence[str], confinement: Confinement) -> None:
        self._host, self._ticket, self.names, self.confinement = host, ticket, names, confinement
        self.task, self.shards = host.task, host.shards(names)

    def scores(self, run: str, candidates: int) -> FloatArray:
        return self._host.scores((self._ticket.population, run), candidates, self.names)

    def generator(self, client: str, *key: str | int) -> np.random.Generator:
        return self._host.generator(client, self._ticket.population, *key)

    def coins(self, client: str) -> np.random.Generator:
        return self._host.coins(client, _release(self._ticket))


def marker_path(spec: HostSpec) -> Path:
    """File of the host's marker (see `confine`)."""
    return Path(spec.folder).expanduser() / f"running-{spec.name}"


def _loaded(spec: HostSpec) -> Stack:
    """The records, or a sentence that tells nothing of them."""
    try:
        shards = spec.load()
        fits = isinstance(shards, Stack) and len(shards) == len(spec.clients)
    except BaseException:  # the loader is user code on private data, too
        fits = False
    if not fits:
        raise CohortError(
            f"The records of {_some(spec.clients)} could not be loaded, or are not as many as declared. Run the "
            "loader at the site to see why: what it says stays there."
        ) from None
    return shards


def _digest(public: Any) -> str:
    return hashlib.sha256(json.dumps(public, sort_keys=True, default=repr).encode()).hexdigest()


def _some(names: Sequence[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} and {len(names) - 1} more clients"


def _key(ticket: Ticket) -> str:
    return json.dumps([ticket.series, ticket.step])


def _release(ticket: Ticket) -> tuple[str | int, ...]:
    """What names the noise of a release."""
    return ticket.population, ticket.run, ticket.label, ticket.mechanism, ticket.step


def _names(ticket: Ticket) -> tuple[tuple[str, str], ReleaseKey]:
    return (ticket.population, ticket.run), ReleaseKey(ticket.label, ticket.mechanism, ticket.step)


def _blocks(members: Sequence[str], dimension: int) -> Iterator[Sequence[str]]:
    size = max(1, _BLOCK // dimension)
    for start in range(0, len(members), size):
        yield members[start : start + size]
