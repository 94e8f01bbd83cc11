"""A client's rehearsal of the training that will follow: how it scores a candidate before it votes (DP-HYPE).

| symbol | meaning |
|---|---|
| D_i | the client's own records |
| C, T | clip and rounds of the candidate |
| μ | what the real training may spend |
| Δ | 2C |
| s₀ | Δ√T/μ: noise std on the sum of one round |
| n, n_min | clients; clients whose noise is counted on |
| N | what the real run divides its sum by: all records (unit `record`), or n (unit `client`) |
| s | noise std on each coordinate of the real run's mean gradient |

| regime | s |
|---|---|
| `central` | s₀ / N |
| `distributed` | s₀ √(n/n_min) / N |
| `local` | s₀ √n / N |

The client trains on its own records with the server's own step, adding noise of std s to its *mean* gradient: noise
meant for a sum over N records would be far too much for a mean over its few. The noise here is simulation, drawn from
the client's own generator; it protects nothing and need not, because scores never leave the client. The vote does, and
has noise of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpray.platform.cohort.client import ClientTask, Records
from dpray.platform.privacy.budget import to_mu
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.trainers.models import BoolArray, FloatArray, IntArray, Model, class_labels, take
from dpray.trainers.settings import Settings

Score = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class Rehearsal:
    """Local k-fold cross-validation of a training.

    Args:
        model: what is trained.
        settings_from_config: a candidate to settings; a function that pickles, such as
            `functools.partial(SOFIMSettings.from_config, defaults={"rounds": 40})`.
        quanta: μ² that the real training may spend; None without noise.
        regime, unit: of the real training.
        clients: n.
        records: N.
        n_min: clients whose noise is counted on.
        smallest: records of the smallest client, public; only for candidates with `weighting="clients"`.
        folds: k; a client with fewer records leaves one out at a time.
        score: `accuracy` in [0, 1] on held-out records, or minus the mean `loss` in nats.

    Raises:
        ValueError: the algorithm cannot be rehearsed; from `fit_and_score` if the function does not show which one it
            is (a `from_config` does, and a partial of it).
    """

    model: Model
    settings_from_config: Callable[[Mapping[str, Any]], Settings]
    quanta: int | None
    regime: Regime
    clients: int
    records: int
    n_min: int
    unit: Unit = Unit.RECORD
    smallest: int | None = None
    folds: int = 5
    score: Score = "accuracy"

    def __post_init__(self) -> None:
        make = self.settings_from_config
        algorithm = getattr(getattr(make, "func", make), "__self__", None)
        if objection := getattr(algorithm, "no_rehearsal", ""):
            raise ValueError(objection)

    def noise_std(self, settings: Settings) -> float:
        """s: std of the noise on each coordinate of the real run's mean gradient (or mean update)."""
        if self.quanta is None:
            return 0.0
        s0 = 2 * settings.clip * math.sqrt(settings.rounds) / to_mu(self.quanta)
        shares = {Regime.CENTRAL: 1.0, Regime.DISTRIBUTED: self.clients / self.n_min, Regime.LOCAL: float(self.clients)}
        return s0 * math.sqrt(shares[Regime(self.regime)]) / self._divisor(settings)

    def _divisor(self, settings: Settings) -> int:
        """N: what the real run divides its sum by."""
        if self.unit is Unit.CLIENT:
            return self.clients
        if settings.weighting != "clients":
            return self.records
        if self.smallest is None:
            raise ValueError('Rehearsing `weighting="clients"` needs `smallest`, the records of the smallest client.')
        return self.clients * self.smallest

    def fit_and_score(self, config: Mapping[str, Any], records: Records, rng: np.random.Generator) -> float:
        """Score of a candidate on one client; higher is better, NaN with fewer than two usable records.

        Bad records take no part: one of them must not cost the client its vote.

        Args:
            config: the candidate.
            records: D_i.
            rng: the client's own and private. The same stream for every candidate gives all of them the same folds and
                the same noise, so that their scores differ by what they are.
        """
        settings = self.settings_from_config(config)
        if settings.no_rehearsal:
            raise ValueError(settings.no_rehearsal)
        labels, _ = class_labels(np.asarray(records.y).reshape(-1), self.model.classes)
        usable = self.model.usable(records)
        held_out = held_out_rows(labels, usable, self.folds, rng)
        if len(held_out) == 0:
            return math.nan
        thetas = self._train(settings, records, usable & ~held_out, rng)
        scores = np.concatenate(
            [self._scores(theta, take(records, rows)) for theta, rows in zip(thetas, held_out, strict=True)]
        )
        return float(scores.mean())

    def _train(self, settings: Settings, records: Records, members: BoolArray, rng: np.random.Generator) -> FloatArray:
        """θ of each fold after T rounds, (k, d); members (k, n) are the records each fold trains on."""
        noise = self.noise_std(settings)
        start = self.model.initial()
        state = settings.initial_state(np.repeat(start[None], len(members), axis=0))
        gradients = self._gradients(settings, records, members)
        for t in range(1, settings.rounds + 1):
            G = gradients(state.theta)
            if noise:
                G += noise * rng.standard_normal(G.shape)
            state = settings.server_step(state, G, t, noise)
        return state.theta

    def _gradients(
        self, settings: Settings, records: Records, members: BoolArray
    ) -> Callable[[FloatArray], FloatArray]:
        """The function from θ of each fold, (k, d), to its noiseless G, (k, d)."""
        if self.unit is Unit.RECORD:
            prepared, size = self.model.prepare(records), members.sum(axis=1, keepdims=True)
            return lambda thetas: self.model.fold_sums(thetas, prepared, members, settings.clip) / size
        parts = [take(records, rows) for rows in members]
        local = {"local_steps": settings.local_steps, "local_rate": settings.local_rate}

        def updates(thetas: FloatArray) -> FloatArray:
            G = -np.stack([self.model.update(theta, part, local) for theta, part in zip(thetas, parts, strict=True)])
            return np.asarray(G * (settings.clip / np.maximum(np.linalg.norm(G, axis=1, keepdims=True), settings.clip)))

        return updates

    def _scores(self, theta: FloatArray, records: Records) -> FloatArray:
        if self.score == "loss":
            return -self.model.losses(theta, records)
        return np.asarray(self.model.predict(theta, records.x) == records.y, dtype=np.float64)


def held_out_rows(labels: IntArray, usable: BoolArray, folds: int, rng: np.random.Generator) -> BoolArray:
    """Which records each fold holds out, (k, n): every usable one once, classes dealt evenly; k = 0 for fewer than two.

    Args:
        labels: (n,) class numbers.
        usable: (n,) records that take part.
        folds: wanted k; at most one fold for each usable record.
        rng: for the order within a class.
    """
    order = np.lexsort((rng.random(len(labels)), labels))
    order = order[usable[order]]
    k = min(folds, len(order))
    held_out = np.zeros((k if k >= 2 else 0, len(labels)), dtype=np.bool_)
    if k >= 2:
        held_out[np.arange(len(order)) % k, order] = True
    return held_out


class TrainingTask(ClientTask):
    """What clients do in a run that searches and then trains: a model's gradients, and a rehearsal to score by."""

    def __init__(self, model: Model, rehearsal: Rehearsal) -> None:
        self.model = model
        self.rehearsal = rehearsal
        self.dimension = model.dimension
        self.relative_error = model.relative_error

    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """As the model does it."""
        return self.model.clipped_sum(theta, records, clip)

    def clipped_sums(self, theta: FloatArray, shards: Sequence[Records], clip: float) -> FloatArray | None:
        """As the model does it."""
        return self.model.clipped_sums(theta, shards, clip)

    def update(self, theta: FloatArray, records: Records, settings: Mapping[str, Any]) -> FloatArray:
        """As the model does it."""
        return self.model.update(theta, records, settings)

    def fit_and_score(self, config: Mapping[str, Any], records: Records, rng: np.random.Generator) -> float:
        """The rehearsal's score."""
        return self.rehearsal.fit_and_score(config, records, rng)

    def check_records(self, shape: tuple[int, ...]) -> None:
        """As the model does it."""
        self.model.check_records(shape)

    def check_candidate(self, config: Mapping[str, Any]) -> None:
        """Refuse what are no settings of the algorithm that is rehearsed."""
        self.rehearsal.settings_from_config(config)
