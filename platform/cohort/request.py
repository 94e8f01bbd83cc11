"""What the driver asks hosts, what they answer, and how a request is digested: public, frozen, picklable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpray.platform.cohort.client import IntArray
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.queries import Query
from dpray.platform.privacy.budget import ceil_quanta, to_mu
from dpray.platform.privacy.ledger import Head, ReleaseKey
from dpray.platform.privacy.ledger.plan import request_digest
from dpray.platform.privacy.mechanisms import Mechanism, Regime, VoteWinner
from dpray.platform.privacy.noise import GridNoise


@dataclass(frozen=True)
class Request:
    """A sum, as the driver asks for it.

    `participants`: the committed set, if there is one already; `ledger`, `lineage`: as in `Ticket`;
    `records_per_client`: the population's declared public maximum m, or None; `nonce`: names one try of a masked sum.
    """

    population: str
    run: str
    key: ReleaseKey
    epoch: int
    head: Head
    quanta: int | None
    query: Query
    mechanism: Mechanism | VoteWinner
    regime: Regime
    participants: tuple[str, ...] | None = None
    ledger: str = ""
    lineage: Mapping[int, str] = field(default_factory=dict)
    records_per_client: int | None = None
    nonce: str = ""

    @property
    def mu(self) -> float:
        """μ of the release; ∞ without noise."""
        return float("inf") if self.quanta is None else to_mu(self.quanta)


@dataclass(frozen=True)
class Refusal:
    """A guard's answer: no private value in it. Kinds as `JournalRefused`, and `query`, `load`, `failed`."""

    kind: str
    sentence: str
    seen: int | None = None


@dataclass(frozen=True)
class Ready:
    """A host that is up: its process, and the shape of a record."""

    process: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """A host that can answer: what it sends before the commit, and the noise it counts with."""

    sent: Any
    noise: GridNoise


@dataclass(frozen=True)
class Message:
    """Integers on the grid, summed over `clients` clients."""

    steps: IntArray
    clients: int


def charged(request: Request, noise: GridNoise) -> int | None:
    """μ² in quanta that a request costs each client: what it says, and no less than its noise implies."""
    if request.quanta is None or isinstance(request.mechanism, VoteWinner):
        return request.quanta
    return max(request.quanta, ceil_quanta(request.mechanism.mu(noise.sigma)))


def digest_of(request: Request, noise: GridNoise) -> str:
    """SHA-256 of the public request, its noise included."""
    quanta, regime = charged(request, noise), request.regime
    public = {"request": request_digest(request.query.describe(), request.mechanism, quanta, str(regime))}
    share = 0.0 if regime is Regime.CENTRAL else noise.share
    return hashlib.sha256(json.dumps([public, share.hex(), noise.grid.hex()]).encode()).hexdigest()


def noise_of(mechanism: Mechanism | VoteWinner, mu: float, regime: Regime, n_min: int) -> GridNoise:
    """Noise in the sum of a μ-GDP release; none for a winner's counts, which are whole and stay with the server.

    Raises:
        CohortError: a winner in another regime than central.
        ValueError: as `noise.calibrate`.
    """
    if not isinstance(mechanism, VoteWinner):
        return mechanism.noise(mu, noisers=noisers(regime, n_min))
    if regime is not Regime.CENTRAL:
        raise CohortError(
            f"A vote's winner alone is released by a trusted aggregator that sees the counts: regime central, and "
            f"{str(regime)!r} was given. Release noisy votes (TopKVotes) where the aggregator must not see them."
        )
    return GridNoise(sigma=0.0, share=0.0, grid=1.0, noisers=1, residual_delta=0.0)


def noisers(regime: Regime, n_min: int) -> int:
    """How many parties' noise a release counts on: one server, one client, or n_min shares."""
    return n_min if regime is Regime.DISTRIBUTED else 1
