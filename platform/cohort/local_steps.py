"""What clients are asked for several local steps: messages that hold noise at every step, private one by one.

| symbol | code | meaning | shape |
|---|---|---|---|
| θ | `theta` | parameters at the server | (d,) |
| C, K, η_l | `clip`, `steps`, `rate` | bound of a record's gradient, steps, their rate | |
| c_i, c | `controls`, `control` | control variates of client i and of the server; released, public | (n, d), (d,) |
| n_i | | records of client i, public | |
| y | | client i's parameters, y⁰ = θ | (d,) |
| ũ^k | | Σ_x clip(g_x(y^{k−1})), on the grid, plus noise | (d,) |
| m_i | | Σ_k ũ^k, client i's message | (d,) |

    y^k = y^{k−1} − η_l (ũ^k/n_i − c_i + c)          k = 1 … K

Every step uses earlier sums with their noise only; so K releases compose (`privacy.local_steps`), and everything else a
server might want of the client, its update and its new control variate, is made of m_i. Client i's message stands in
the i-th block of the release, with zeros in all others: a sum over clients keeps them apart.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from dpray.platform.cohort.client import FloatArray, IntArray
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.queries import GradientSum, HostedClients, Query, Terms
from dpray.platform.confine import EVERYONE, Confinement
from dpray.platform.privacy.local_steps import LocalSteps
from dpray.platform.privacy.mechanisms import Mechanism, Regime, VoteWinner
from dpray.platform.privacy.noise import from_grid, to_grid

T = TypeVar("T")


class Draw(Protocol):
    """Noise of one step: (clients, d) in steps of the grid, drawn afresh and independently for each client and step."""

    def __call__(self, step: int) -> IntArray:
        """Of step k, from 0."""


class NoisedQuery(Query):
    """A query whose messages hold their noise already: regime `local` only."""

    @property
    @abstractmethod
    def calls(self) -> int:
        """Calls of user code that a client's message takes."""

    @abstractmethod
    def noised(self, clients: HostedClients, grid: float, draw: Draw) -> IntArray:
        """(clients, dimension of the release) in steps of the grid, noise included."""

    def messages(self, clients: HostedClients) -> FloatArray:
        """Refused: there is no message of this query without noise."""
        raise CohortError(f"A {type(self).__name__} has noise in every step, and no messages without.")

    def refuse_regime(self, regime: Regime) -> None:
        """Refuse regimes in which clients' messages are not private by themselves (`CohortError`)."""
        if regime is not Regime.LOCAL:
            raise CohortError(
                f"A {type(self).__name__} makes several noised steps at every client, which is private in regime "
                f"`local` only; `{regime}` was given."
            )


@dataclass(frozen=True, eq=False)
class LocalDescent(NoisedQuery):
    """K noised local steps with control variates, unit record, `LocalSteps(C, K, d, n, N)`.

    Args:
        theta, clip, steps, rate, controls, control: see the table; arrays in float64.
        clients: names of all clients, in the order of `controls` and of the blocks.
    """

    theta: FloatArray
    clip: float
    steps: int
    rate: float
    controls: FloatArray
    control: FloatArray
    clients: tuple[str, ...]

    @property
    def calls(self) -> int:
        """K."""
        return self.steps

    def check(self, mechanism: Mechanism | VoteWinner, terms: Terms) -> None:
        """As `Query.check`: a LocalSteps with this C and K, for these clients and at least the cohort's records."""
        n, d = terms.clients, terms.dimension
        asked = self.clip, self.steps, d, n
        if not isinstance(mechanism, LocalSteps) or asked != (
            mechanism.clip,
            mechanism.steps,
            mechanism.width,
            mechanism.clients,
        ):
            raise CohortError(
                f"{self.steps} local steps with clip {self.clip} of {n} clients are released by LocalSteps("
                f"clip={self.clip}, steps={self.steps}, width={d}, clients={n}, …); {mechanism.describe()} was given."
            )
        GradientSum(self.theta, self.clip).check(mechanism.one_step, terms)
        if len(self.clients) != n or self.controls.shape != (n, d) or self.control.shape != (d,):
            raise CohortError(
                f"LocalDescent.controls has a row of {d} numbers for each of {n} clients, and control one."
            )
        if not (np.isfinite(self.controls).all() and np.isfinite(self.control).all()):
            raise CohortError("LocalDescent.controls has values that are not finite: the training has diverged.")

    def noised(self, clients: HostedClients, grid: float, draw: Draw) -> IntArray:
        """(clients, n·d) int64: each client's message in its own block."""
        places = self._places(clients)
        counts = clients.shards.counts[:, None]
        correction = self.control - self.controls[places]
        y = np.repeat(self.theta[None], len(places), axis=0)
        sums = np.zeros(y.shape, dtype=np.int64)
        for k in range(self.steps):
            noised = to_grid(self.sums(clients, y), grid) + draw(k)
            sums += noised
            with np.errstate(over="ignore", invalid="ignore"):
                y = y - self.rate * (from_grid(noised, grid) / counts + correction)
        blocks = np.zeros((len(places), len(self.clients), len(self.theta)), dtype=np.int64)
        blocks[np.arange(len(places)), places] = sums
        return blocks.reshape(len(places), -1)

    def sums(self, clients: HostedClients, y: FloatArray) -> FloatArray:
        """Clipped sums of each client at its own parameters, (clients, d), without noise; 0 where they have diverged.

        Args:
            clients: some of them.
            y: (clients, d).
        """
        rows = [self._sum(clients, index, point) for index, point in enumerate(y)]
        return np.stack(rows)

    def largest(self, terms: Terms) -> float:
        """K·N·C."""
        return self.steps * terms.records * self.clip

    def _sum(self, clients: HostedClients, index: int, y: FloatArray) -> FloatArray:
        """One client's, as a `GradientSum` would be answered by it."""
        if not np.isfinite(y).all():
            return np.zeros_like(y)
        return np.asarray(GradientSum(y, self.clip).messages(_One(clients, index))[0])

    def _places(self, clients: HostedClients) -> list[int]:
        known = {client: place for place, client in enumerate(self.clients)}
        strangers = [client for client in clients.names if client not in known]
        if strangers:
            raise CohortError(f"LocalDescent.clients does not name {strangers[0]!r}, who is asked.")
        return [known[client] for client in clients.names]


class _One:
    """One client of several, as a query sees it; its code is run for it alone, once a step."""

    def __init__(self, clients: HostedClients, index: int) -> None:
        self._clients, self.task, self.shards = clients, clients.task, clients.shards[index : index + 1]
        self.names: Sequence[str] = (clients.names[index],)
        self.confinement: Confinement = _Alone(clients.confinement)

    def scores(self, run: str, candidates: int) -> FloatArray:
        return self._clients.scores(run, candidates)

    def generator(self, client: str, *key: str | int) -> np.random.Generator:
        return self._clients.generator(client, *key)

    def coins(self, client: str) -> np.random.Generator:
        return self._clients.coins(client)


class _Alone(Confinement):
    """Runs no pass over all clients at once: at parameters of its own each client has a call of its own."""

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement

    def skips(self, client: str) -> bool:
        return client == EVERYONE or self._confinement.skips(client)

    def run(self, client: str, call: Callable[[], T]) -> T | None:
        return None if client == EVERYONE else self._confinement.run(client, call)
