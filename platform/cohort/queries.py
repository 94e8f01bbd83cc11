"""What clients are asked: public, frozen, shipped to their hosts; each query makes one message per client.

| symbol | code         | meaning                                                   | shape  |
|--------|--------------|-----------------------------------------------------------|--------|
| θ      | `theta`      | parameters the server sends out                           | (d,)   |
| C      | `clip`       | clipping bound of a record (GradientSum) or client (ClientUpdate), L2 |  |
| u_i    |              | message of client i, before noise                         | (d,)   |
| n_i    |              | number of records of client i, public                     |        |
| p, k   |              | candidates, votes of each client                          |        |

Replacing a client's records, or all that user code does with them, changes row i of `messages` only, and nothing else
that leaves a host: code that fails gives a zero row (a random ballot in a vote).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dpray.platform.cohort.client import ClientTask, FloatArray, IntArray, Records, Stack
from dpray.platform.cohort.errors import CohortError
from dpray.platform.confine import EVERYONE, Confinement
from dpray.platform.privacy.mechanisms import (
    ClippedSum,
    Mechanism,
    TopKVotes,
    Unit,
    VoteWinner,
    clip_rows,
    top_k_votes,
)


@dataclass(frozen=True)
class Terms:
    """What is public about a cohort and bears on sensitivities.

    Attributes:
        dimension, relative_error: the task's.
        clients, records: how many take part at most.
    """

    dimension: int
    relative_error: float
    clients: int
    records: int


class HostedClients(Protocol):
    """Some of a host's clients, as a query sees them."""

    task: ClientTask
    names: Sequence[str]
    shards: Stack
    confinement: Confinement

    def scores(self, run: str, candidates: int) -> FloatArray:
        """(clients, p) stored scores of a search on the population that is asked; NaN where there is none."""

    def generator(self, client: str, *key: str | int) -> np.random.Generator:
        """A client's private generator, the same for the same key."""

    def coins(self, client: str) -> np.random.Generator:
        """What a client draws its sample with: as good as its noise, and drawn afresh whenever a message is made."""


class Query(ABC):
    """A public request to every client, answered with one vector each."""

    @abstractmethod
    def check(self, mechanism: Mechanism | VoteWinner, terms: Terms) -> None:
        """Refuse a mechanism that states another sensitivity than this query has (`CohortError`). Done by hosts too."""

    @abstractmethod
    def messages(self, clients: HostedClients) -> FloatArray | IntArray:
        """(clients, d): one bounded message each; row i depends on client i only."""

    @abstractmethod
    def largest(self, terms: Terms) -> float:
        """Largest absolute coordinate that the whole cohort's un-noised sum can have: public, sizes a masked sum."""

    def describe(self) -> dict[str, Any]:
        """The public request, for the digest under which it is charged: plain values and arrays."""
        named = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"query": type(self).__name__, **named}


@dataclass(frozen=True, eq=False)
class GradientSum(Query):
    """Clipped sums of record gradients: u_i = Σ_x min(1, C/‖g_x‖) g_x, unit record, `ClippedSum(C, record)`.

    Args:
        theta: (d,) float64.
        clip: C, in units of a record's gradient.
        floor: weight clients alike: u_i is multiplied by min(1, floor/n_i), n_i public, so that with the smallest
            client's count Σ is floor times a sum of client means. Weights ≤ 1 leave Δ = 2C.
    """

    theta: FloatArray
    clip: float
    floor: int | None = None

    def check(self, mechanism: Mechanism | VoteWinner, terms: Terms) -> None:
        """As `Query.check`: a ClippedSum of unit record, with this C, over at least the cohort's records."""
        _check_sum(self, mechanism, terms, Unit.RECORD, self.theta, terms.records, terms.relative_error)
        if self.floor is not None and self.floor < 1:
            raise CohortError(f"GradientSum.floor is a number of records, at least 1; {self.floor} was given.")

    def messages(self, clients: HostedClients) -> FloatArray:
        """(clients, d) float64, rows of norm ≤ n_i·C: the backstop for a task that does not clip."""
        task, theta, clip = clients.task, self.theta, self.clip
        shape = (len(clients.names), len(theta))
        rows = clients.confinement.run(
            EVERYONE, lambda: _checked(task.clipped_sums(_own(theta), clients.shards, clip), shape)
        )
        if rows is None:
            rows = _one_by_one(clients, shape, lambda records: task.clipped_sum(_own(theta), records, clip))
        counts = clients.shards.counts
        return self.weighted(_within(rows, np.asarray(counts * self.clip, dtype=np.float64)), counts)

    def weighted(self, rows: FloatArray, counts: IntArray) -> FloatArray:
        """Rows times min(1, floor/n_i), n_i the clients' public counts; as they are without a floor."""
        return rows if self.floor is None else rows * (self.floor / np.maximum(counts, self.floor))[:, None]

    def largest(self, terms: Terms) -> float:
        """N·C."""
        return terms.records * self.clip


@dataclass(frozen=True, eq=False)
class ClientUpdate(Query):
    """Whole updates of clients, clipped here to C: unit client, `ClippedSum(C, client)`.

    Args:
        theta: (d,) float64.
        clip: C, in units of a parameter.
        settings: public, for the task's `update`: number of local steps, their rate, …
    """

    theta: FloatArray
    clip: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    def check(self, mechanism: Mechanism | VoteWinner, terms: Terms) -> None:
        """As `Query.check`: a ClippedSum of unit client, with this C, over at least the cohort's clients."""
        _check_sum(self, mechanism, terms, Unit.CLIENT, self.theta, terms.clients, 0.0)

    def messages(self, clients: HostedClients) -> FloatArray:
        """(clients, d) float64, rows of norm ≤ C."""
        task, theta = clients.task, self.theta
        shape = (len(clients.names), len(theta))
        rows = _one_by_one(clients, shape, lambda records: task.update(_own(theta), records, deepcopy(self.settings)))
        return clip_rows(rows, self.clip)

    def largest(self, terms: Terms) -> float:
        """n·C."""
        return terms.clients * self.clip


@dataclass(frozen=True)
class Votes(Query):
    """Ballots with ones at each client's top k candidates, from scores stored by `evaluate`.

    Their noisy sum is released by `TopKVotes(k, p)`, the winner alone by `VoteWinner(k, p)`.

    A missing score is the worst; a client without any votes at random, by its private generator.

    Args:
        run: the search whose scores count.
        candidates: p.
        votes: k.
    """

    run: str
    candidates: int
    votes: int

    def check(self, mechanism: Mechanism | VoteWinner, terms: Terms) -> None:
        """As `Query.check`: a TopKVotes or a VoteWinner with these k and p."""
        if not isinstance(mechanism, TopKVotes | VoteWinner) or (mechanism.votes, mechanism.candidates) != (
            self.votes,
            self.candidates,
        ):
            raise CohortError(
                f"{self.votes} votes for {self.candidates} candidates are released by TopKVotes(votes={self.votes}, "
                f"candidates={self.candidates}) or a VoteWinner of the same; {mechanism.describe()} was given."
            )

    def messages(self, clients: HostedClients) -> IntArray:
        """(clients, p) int64 of zeros and exactly k ones a row."""
        scores = clients.scores(self.run, self.candidates)
        ballots = [
            top_k_votes(row, self.votes, clients.generator(client, "vote", self.run))
            for client, row in zip(clients.names, scores, strict=True)
        ]
        return np.stack(ballots)

    def largest(self, terms: Terms) -> float:
        """n: everybody may vote for the same candidate."""
        return float(terms.clients)


def _check_sum(
    query: GradientSum | ClientUpdate,
    mechanism: Mechanism | VoteWinner,
    terms: Terms,
    unit: Unit,
    theta: FloatArray,
    summands: int,
    relative_error: float,
) -> None:
    name = type(query).__name__
    if not isinstance(mechanism, ClippedSum) or mechanism.unit is not unit or mechanism.clip != query.clip:
        raise CohortError(
            f"A {name} with clip {query.clip} is released by ClippedSum(clip={query.clip}, unit={str(unit)!r}, …); "
            f"{mechanism.describe()} was given."
        )
    if not isinstance(theta, np.ndarray) or theta.dtype != np.float64 or theta.shape != (terms.dimension,):
        raise CohortError(f"{name}.theta is a float64 vector of the task's dimension {terms.dimension}.")
    if not np.all(np.isfinite(theta)):
        raise CohortError(
            f"{name}.theta has values that are not finite: the training has diverged. Use a smaller step."
        )
    if mechanism.dimension != terms.dimension:
        raise CohortError(f"The mechanism has dimension {mechanism.dimension}, and the task {terms.dimension}.")
    if mechanism.records < summands:
        raise CohortError(
            f"The mechanism bounds its rounding for {mechanism.records} summands, and the cohort sums {summands}."
        )
    if mechanism.relative_error < relative_error:
        raise CohortError(
            f"The task's arithmetic needs ClippedSum(relative_error={relative_error}); {mechanism.relative_error} was "
            "given."
        )


def _own(theta: FloatArray) -> FloatArray:
    """A copy for one call of user code: what it writes there, the next client is not given.

    It is read-only, and that alone would not do: `torch.from_numpy` makes a tensor of it that is not.
    """
    copy = theta.copy()
    copy.flags.writeable = False
    return copy


def _one_by_one(clients: HostedClients, shape: tuple[int, int], call: Callable[[Records], Any]) -> FloatArray:
    """A row a client; zero where the call fails. Bit for bit the same whatever else is on the host."""
    rows = np.zeros(shape)
    for index, client in enumerate(clients.names):
        records = clients.shards[index]
        row = clients.confinement.run(client, lambda records=records: _checked(call(records), shape[1:]))  # type: ignore[misc]
        if row is not None:
            rows[index] = row
    return rows


def _checked(result: Any, shape: tuple[int, ...]) -> FloatArray | None:
    """A result of user code as numbers of the right shape; None if it is none. Runs confined, like the code itself."""
    if result is None:
        return None
    array = np.asarray(result)
    return array.astype(np.float64) if array.shape == shape and array.dtype.kind in "biuf" else None


def _within(rows: FloatArray, bounds: FloatArray) -> FloatArray:
    """Rows that are not finite become zero, those beyond their bound are scaled onto it; all others keep their bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    beyond = np.flatnonzero(~(norms <= bounds))  # NaN compares false
    for index in beyond:
        rows[index] = clip_rows(rows[index][None], float(bounds[index]))[0]
    return rows
