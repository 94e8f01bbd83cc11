"""What the driver asks hosts, what they answer, and how a request is digested: public, frozen, picklable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpray.platform.cohort.client import IntArray
from dpray.platform.cohort.queries import Query
from dpray.platform.privacy.budget import ceil_quanta, to_mu
from dpray.platform.privacy.ledger import Head, ReleaseKey
from dpray.platform.privacy.ledger.plan import request_digest
from dpray.platform.privacy.mechanisms import Mechanism, Regime
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
    mechanism: Mechanism
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
    """A host that is up: its process, and the schema of its records."""

    process: int
    features: tuple[int, ...]


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
    if request.quanta is None:
        return None
    return max(request.quanta, ceil_quanta(request.mechanism.mu(noise.sigma)))


def digest_of(request: Request, noise: GridNoise) -> str:
    """SHA-256 of the public request, its noise included."""
    quanta, regime = charged(request, noise), request.regime
    public = {"request": request_digest(request.query.describe(), request.mechanism, quanta, str(regime))}
    share = 0.0 if regime is Regime.CENTRAL else noise.share
    return hashlib.sha256(json.dumps([public, share.hex(), noise.grid.hex()]).encode()).hexdigest()


def noisers(regime: Regime, n_min: int) -> int:
    """How many parties' noise a release counts on: one server, one client, or n_min shares."""
    return n_min if regime is Regime.DISTRIBUTED else 1
