"""A sum over a Poisson sample, drawn by each client for itself, inside its message.

| symbol | code             | meaning                                                       |
|--------|------------------|---------------------------------------------------------------|
| q      | `sampling.rate`  | probability with which a record, or a client, is in a sample   |
| u_i    |                  | message of client i: its sampled records' sum; or its whole update, or zero |

Nobody but the client learns the sample: records are taken out of the sum before it leaves; a client that is not in the
sample does the same work and sends a zero that its noise hides. Every client answers, so who takes part says nothing.
The coins come from the source of the noise. A sum that is prepared again before anything was seen draws a new sample;
a revealed message is repeated byte for byte from the journal, its sample within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.client import ClientTask, FloatArray, Stack
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.queries import ClientUpdate, GradientSum, HostedClients, Query, Terms
from dpray.platform.confine import Confinement
from dpray.platform.privacy.mechanisms import Mechanism, VoteWinner
from dpray.platform.privacy.pld import PoissonSampled
from dpray.platform.privacy.sampling import PoissonSampling


@dataclass(frozen=True, eq=False)
class Sampled(Query):
    """A gradient sum over sampled records, or client updates of sampled clients.

    *Guarantee.* With the noise of `sampling.mechanism(…)`, one release is dominated by the event that is charged for
    it: a record (client) that is replaced changes the message only where the coin has it in the sample, and the coin
    does not depend on data.

    Args:
        query: what a sum without sampling would ask; of the unit that is sampled.
        sampling: rate and unit.
    """

    query: GradientSum | ClientUpdate
    sampling: PoissonSampling

    @property
    def theta(self) -> FloatArray:
        """Parameters the server sends out."""
        return self.query.theta

    def check(self, mechanism: Mechanism | VoteWinner, terms: Terms) -> None:
        """As `Query.check`: the sum's own mechanism, sampled at this rate."""
        if not isinstance(self.query, GradientSum | ClientUpdate):
            raise CohortError(f"Gradient sums and client updates can be sampled, not a {type(self.query).__name__}.")
        if not isinstance(mechanism, PoissonSampled) or mechanism.sampling_probability != self.sampling.rate:
            raise CohortError(
                f"A sum over a sample of rate {self.sampling.rate:g} is released by its own mechanism, sampled at that "
                f"rate (`PoissonSampling.mechanism`); {mechanism.describe()} was given."
            )
        if mechanism.unit is not self.sampling.unit:
            raise CohortError(f"{self.sampling.unit}s are sampled, and the mechanism protects a {mechanism.unit}.")
        self.query.check(mechanism.mechanism, terms)

    def messages(self, clients: HostedClients) -> FloatArray:
        """(clients, d) float64; see `GradientSum` and `ClientUpdate`."""
        if isinstance(self.query, GradientSum):
            counts = clients.shards.counts
            rows = replace(self.query, floor=None).messages(self._some_records(clients))
            return self.query.weighted(rows, counts)
        rows = self.query.messages(clients)
        taken = [bool(self.sampling.draw(1, clients.coins(client))[0]) for client in clients.names]
        rows[~np.array(taken)] = 0.0
        return rows

    def largest(self, terms: Terms) -> float:
        """That of the sum without sampling: all may be in the sample."""
        return self.query.largest(terms)

    def describe(self) -> dict[str, Any]:
        """The public request: what is asked, and of what part."""
        inner = self.query.describe()
        return {**inner, "query": f"{type(self).__name__} {inner['query']}", **self.sampling.describe()}

    def _some_records(self, clients: HostedClients) -> HostedClients:
        """The same clients, each with a sample of its records."""
        shards = clients.shards
        taken = [
            self.sampling.draw(int(n), clients.coins(name))
            for n, name in zip(shards.counts, clients.names, strict=True)
        ]
        return _Sample(clients, _part(shards, taken))


class _Sample:
    """A host's clients with a part of their records: a `HostedClients`."""

    def __init__(self, clients: HostedClients, shards: Stack) -> None:
        self._clients, self.shards = clients, shards
        self.task: ClientTask = clients.task
        self.names: Sequence[str] = clients.names
        self.confinement: Confinement = clients.confinement

    def scores(self, run: str, candidates: int) -> FloatArray:
        return self._clients.scores(run, candidates)

    def generator(self, client: str, *key: str | int) -> np.random.Generator:
        return self._clients.generator(client, *key)

    def coins(self, client: str) -> np.random.Generator:
        return self._clients.coins(client)


def _part(shards: Stack, taken: Sequence[NDArray[np.bool_]]) -> Stack:
    """Some rows of each client, in their order; a copy, read-only like the whole."""
    mask = np.concatenate(taken)
    offsets = np.concatenate([[0], np.cumsum([int(each.sum()) for each in taken])]).astype(np.int64)
    x, y = shards.x[mask], shards.y[mask]
    x.flags.writeable = y.flags.writeable = False
    return Stack(x, y, offsets)
