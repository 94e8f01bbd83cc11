"""The round loop of federated training: broadcast θ, release the noised sum, step at the server, keep, show, stop.

| symbol | meaning | shape |
|---|---|---|
| θ_t | parameters at the server | (d,) |
| u_i | client i's message: clipped gradient sum (unit `record`) or clipped update (unit `client`) | (d,) |
| N | what the sum is divided by, public; see `FederatedTrainer` | scalar |
| G_t | Σ u_i / N, noised; −Σ u_i / N under unit `client` | (d,) |
| σ | std of the noise on the sum of those who answered | scalar |
| s | σ / N: std of the noise on each coordinate of G_t | scalar |
| T | rounds | scalar |

    θ_{t+1} = server_step(θ_t, G_t)            t = 1 … T

An algorithm is a `Settings` class with a `server_step`; its trainer is three lines (`fedgd.py`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpray.platform.cohort.client import Records
from dpray.platform.cohort.queries import ClientUpdate, GradientSum, Query
from dpray.platform.cohort.sums import ClientSum
from dpray.platform.privacy.budget import Budget, split, to_mu
from dpray.platform.privacy.ledger import BudgetExceeded, Plan, PlannedRelease, ReleaseKey, ReleaseLost
from dpray.platform.privacy.mechanisms import ClippedSum, Mechanism, Regime, Unit
from dpray.platform.privacy.noise import GridNoise
from dpray.platform.privacy.sampling import PoissonSampling
from dpray.platform.tracking.progress import Composed, Row, Spent, show
from dpray.platform.tracking.progress import spent as spent_by
from dpray.trainers.checkpoints import Checkpoints
from dpray.trainers.models import FloatArray, Model, take
from dpray.trainers.progress import PUBLIC, Answer, measure
from dpray.trainers.sampled import asked_of_a_sample, quanta_of, refuse_sampling
from dpray.trainers.settings import ServerState, Settings

if TYPE_CHECKING:
    from ray.tune import Result

    from dpray.platform.cohort import Cohort
    from dpray.platform.privacy.ledger import Attempt, Run
    from dpray.platform.tracking import RunView

MECHANISM = "gradients"
"""Name of the releases in the ledger: (label, "gradients", step t) for round t = 1 … T."""

_LARGE = 2**20  # the ledger keeps values beyond this many bytes as files, worth dropping once a checkpoint stands


class FederatedTrainer:
    """Trains a model over a cohort's clients on one privacy account; `fit()` as of Ray's own trainers.

    Args:
        cohort: the clients; its task is `model`, or a `TrainingTask` around it.
        run: the ledger's run that is charged.
        model: what is trained; here for its start, its dimension and its public evaluation.
        settings: of the algorithm.
        budget: what the training may spend, as (ε, δ); or
        quanta: the same as μ² in quanta of 2⁻⁶⁰ (a share of a larger plan), split over the rounds to the last quantum.
            None: no noise, NOT PRIVATE, which only a `non_private` account admits.
        regime: who adds the noise. `distributed` and `central` as the cohort's sum provides them.
        unit: None: the algorithm's first. `record`: clipped sums of record gradients, N = Σ|D_i| over those who
            answered; with `settings.weighting="clients"` N is |D|_min times their number, and large clients' sums are
            scaled down (a mean of client means, in which small clients' records weigh more). `client`: whole updates
            of local descent, N = clients that answered.
        label: phase of the run in the ledger.
        reserve: set the spend aside before the first round. False where the run's plan has the line `planned` already.
        storage: folder for checkpoints; without one, a resumed training replays all its releases from the ledger.
        checkpoint_every: rounds between checkpoints; the last round always has one.
        evaluation: records declared PUBLIC, scored after every round without noise.
        tracker: where rounds are shown, such as `tracker.child("training")`.
        on_round: called with each round's row as it ends; inside Tune, `tune.report` will do.
        sampling: a Poisson sample of records or clients for every round, of the unit that is protected; for accounts of
            kind `pld`. `budget` is then spent by composition, and `quanta` are μ² without sampling. G_t is divided by
            the expected q·N, which is public; the sample is not, and stays with the clients.

    Resuming: build the trainer again with the same arguments (`run` opened anew) and call `fit()`. It goes on from the
    last whole checkpoint; rounds released after it are read from the ledger, never released twice.

    Guarantee: the parameters of all rounds, and everything shown, are together μ-GDP for `unit` under replace-one with
    μ² = `quanta` (with sampling: as `sampling.epsilon` says), however often rounds are repeated or lost. Not protected:
    who answered, how many records they hold, timing, and the evaluation records.

    Raises:
        ValueError: settings, model and cohort do not fit; before anything is charged.
        BudgetExceeded, PlanConflict: the spend does not fit the account or the run's plan; before the first round.
    """

    settings_type: ClassVar[type[Settings]] = Settings  # type: ignore[type-abstract]
    units: ClassVar[tuple[Unit, ...]] = (Unit.RECORD, Unit.CLIENT)
    """Whom the algorithm can protect; the first is the default."""
    local_steps_on_records: ClassVar[bool] = False
    """Whether it noises every local step, so that several of them still protect records."""
    sampled: ClassVar[bool] = True
    """Whether its rounds can be over samples: it builds on nothing but their sums of gradients or updates."""

    def __init__(
        self,
        cohort: Cohort,
        run: Run,
        model: Model,
        settings: Settings,
        *,
        budget: Budget | None = None,
        quanta: int | Literal["budget"] | None = "budget",
        regime: Regime | str = Regime.DISTRIBUTED,
        unit: Unit | str | None = None,
        label: str = "training",
        reserve: bool = True,
        storage: Path | str | None = None,
        checkpoint_every: int = 1,
        evaluation: Records | None = None,
        tracker: RunView | None = None,
        on_round: Callable[[Row], object] | None = None,
        sampling: PoissonSampling | None = None,
    ) -> None:
        self.cohort, self.run, self.model, self.settings = cohort, run, model, settings
        self.unit = self.units[0] if unit is None else Unit(unit)
        self.regime, self.label, self.reserve = Regime(regime), label, reserve
        self.sampling = sampling
        refuse_sampling(type(self), sampling, self.unit, run.population)
        self.quanta = quanta_of(budget, quanta, settings.rounds, sampling)
        self.evaluation, self.tracker, self.on_round = evaluation, tracker, on_round
        self.checkpoint_every = checkpoint_every
        self._refuse_misfits()
        self._floor = min(cohort.counts.values()) if self._alike else None
        self.mechanism = self._sampled_mechanism()
        T = settings.rounds
        rounds = None if self.quanta is None else self._rounds_quanta(self.quanta)
        self.spends: tuple[int | None, ...] = (None,) * T if rounds is None else split(rounds, T)
        self.planned = PlannedRelease(label, MECHANISM, self.unit, rounds, T, self._rate)
        self.storage = None if storage is None else Path(storage)
        self._checkpoints = None if storage is None else Checkpoints(Path(storage), self._identity())
        self._path: Path | None = None
        self.state = settings.initial_state(model.initial())
        self.rows: tuple[Row, ...] = ()
        self._sampled_query()  # refused here, if at all

    @property
    def plan(self) -> Plan:
        """Everything that training releases, as lines of the run's plan; an algorithm may add lines to `planned`."""
        return Plan((self.planned,))

    @property
    def theta(self) -> FloatArray:
        """θ as it is now, (d,); released."""
        return self.state.theta

    def fit(self) -> Result:
        """Train all rounds, or the rest of them.

        Returns:
            Ray's `Result`: `metrics` of the last round with `rounds_lost` and `stopped` (why training ended),
            `metrics_dataframe` with a row a round, `checkpoint` (see `load_parameters`), `path` the storage folder.

        Raises:
            QuorumLost: too few clients answered. Charged, nothing revealed: `fit()` again goes on with this round.
        """
        from threadpoolctl import threadpool_limits

        with threadpool_limits(limits=1):  # inner products add up in one order, so that a replay meets the same θ
            return self._result(self._train())

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """The algorithm; by default `settings.server_step`. Pure, and of released values only."""
        return self.settings.server_step(state, gradient, t, noise)

    def _train(self) -> str:
        """All rounds that are left; returns why training ended."""
        self._restore()
        self._try_in_public()
        if len(self.rows) < self.settings.rounds:
            self.cohort.start()  # what its clients are refused for, they are refused for now
            for sentence in self.settings.warnings(self._expected_noise(), self.state.theta.shape[-1]):
                warnings.warn(sentence, stacklevel=4)  # where `fit` was called
        if self.reserve:
            self.run.reserve(self.plan)
        self._begin()
        spent = spent_by(self.run, self.planned, self.spends)
        T = self.settings.rounds
        for t in range(len(self.rows) + 1, T + 1):
            try:
                answer = self._ask(t)
            except BudgetExceeded as error:
                if not self.rows:
                    raise
                return f"over budget before round {t}: {error}"
            after = self._after(answer)
            if not np.isfinite(after.theta).all():
                self._keep(t - 1)
                return (
                    f"diverged in round {t}: the step from finite parameters is not finite; use a smaller learning rate"
                )
            self._record(t, answer, after, spent)
            if t % self.checkpoint_every == 0 or t == T:
                self._keep(t)
        return f"all {T} rounds done"

    def _rounds_quanta(self, quanta: int) -> int:
        """What the rounds together spend of the training's quanta; all of them, unless an algorithm releases more."""
        return quanta

    def _begin(self) -> None:
        """Once everything is set aside, before the first round of this process: releases that rounds build on."""

    def _ask(self, t: int) -> Answer | None:
        """Broadcast θ and release the noised sum of round t; None if the release is lost (its charge stands)."""
        query, quanta = self._sampled_query(), self.spends[t - 1]

        def compute(attempt: Attempt) -> FloatArray:
            return self.cohort.sum(attempt, query, self.mechanism, self.regime).pack()

        key = ReleaseKey(self.label, MECHANISM, t)
        trust = self.cohort.trust(self.regime)
        try:
            release = self.run.release(key, self._request(query), self.mechanism, quanta, compute, trust=trust)
        except ReleaseLost:
            return None
        return self._answer(release.value, self._noise(quanta))

    def _noise(self, quanta: int | None) -> GridNoise:
        return self.cohort.noise_for(self.mechanism, np.inf if quanta is None else to_mu(quanta), self.regime)

    def _answer(self, released: FloatArray, noise: GridNoise) -> Answer:
        """What a stored sum says, with the noise that is in it."""
        total, records, clients = ClientSum.unpack(released)
        sigma, N = self._sigma(noise, clients), self._summands(records, clients)
        sign = -1.0 if self.unit is Unit.CLIENT else 1.0
        return Answer(total * (sign / N), sigma / N, sigma, clients, records)

    def _sigma(self, noise: GridNoise, clients: int) -> float:
        return noise.std(1 if self.regime is Regime.CENTRAL else clients)

    def _summands(self, records: int, clients: int) -> float:
        """N."""
        counted = records if self._floor is None and self.unit is Unit.RECORD else clients * (self._floor or 1)
        return self._rate * counted

    def _expected_noise(self) -> float:
        """s of the first round, if all clients answer."""
        clients, records = len(self.cohort.clients), sum(self.cohort.counts.values())
        return self._sigma(self._noise(self.spends[0]), clients) / self._summands(records, clients)

    def _after(self, answer: Answer | None) -> ServerState:
        if answer is None:
            return self.state
        with np.errstate(over="ignore", invalid="ignore"):
            after = self.server_step(self.state, answer.gradient, self.state.steps + 1, answer.noise)
            after = self._remember(after, answer)
        return replace(after, steps=self.state.steps + 1)

    def _remember(self, after: ServerState, answer: Answer) -> ServerState:
        """The state after the step, with what else of the answer the next round needs: released values only."""
        return after

    def _record(self, t: int, answer: Answer | None, after: ServerState, spent: Spent | Composed) -> None:
        row: Row = {"training_iteration": t, **measure(answer, self.state.theta, after.theta)}
        if answer is not None:
            row |= self.settings.diagnostics(after, after.steps)
        if self.evaluation is not None:
            row |= self.model.evaluate(after.theta, self.evaluation)
        row |= spent.row(t)
        self.state, self.rows = after, (*self.rows, row)
        if self.tracker is not None:
            show(self.tracker, row, t, PUBLIC)
            spent.show(self.tracker, t)
        if self.on_round is not None:
            self.on_round(row)

    def _keep(self, t: int) -> None:
        if self._checkpoints is None or t < 1:
            return
        self._path = self._checkpoints.save(t, self.state, self.rows)
        if 8 * self.mechanism.dimension > _LARGE:
            self.run.prune(self.label, MECHANISM, before_step=self._checkpoints.oldest_round + 1)

    def _restore(self) -> None:
        found = self._checkpoints.newest() if self._checkpoints is not None else None
        if found is not None and found.round >= len(self.rows):
            self.state, self.rows, self._path = found.state, found.rows, found.path

    def _try_in_public(self) -> None:
        """Run the model once on public records, here, so that its errors are seen: inside a client they must not be."""
        if self.evaluation is None or len(self.evaluation) == 0:
            return
        self.model.evaluate(self.state.theta, self.evaluation)
        few = take(self.evaluation, np.arange(min(2, len(self.evaluation))))
        if self.unit is Unit.RECORD:
            self.model.clipped_sum(self.state.theta, few, self.settings.clip)
        else:
            self.model.update(self.state.theta, few, self._local)

    def _query(self) -> Query:
        if self.unit is Unit.RECORD:
            return GradientSum(self.state.theta, self.settings.clip, self._floor)
        return ClientUpdate(self.state.theta, self.settings.clip, self._local)

    def _sampled_query(self) -> Query:
        return asked_of_a_sample(self._query(), self.sampling, self.settings.algorithm)

    def _sampled_mechanism(self) -> Mechanism:
        mechanism = self._mechanism()
        return mechanism if self.sampling is None else self.sampling.mechanism(mechanism)

    @property
    def _rate(self) -> float:
        """q; 1 without sampling."""
        return 1.0 if self.sampling is None else self.sampling.rate

    def _request(self, query: Query) -> Mapping[str, Any]:
        return {**query.describe(), "algorithm": self.settings.algorithm, "regime": str(self.regime)}

    def _mechanism(self) -> Mechanism:
        clip, d = self.settings.clip, self.model.dimension
        if self.unit is Unit.RECORD:
            return ClippedSum(clip, self.unit, d, sum(self.cohort.counts.values()), self.model.relative_error)
        return ClippedSum(clip, self.unit, d, len(self.cohort.clients))

    @property
    def _alike(self) -> bool:
        """Whether the mean is over clients of their record means."""
        return self.unit is Unit.RECORD and self.settings.weighting == "clients"

    @property
    def _local(self) -> dict[str, Any]:
        return {"local_steps": self.settings.local_steps, "local_rate": self.settings.local_rate}

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be this training's."""
        return {
            "population": self.run.population.name,
            "run": self.run.name,
            "label": self.label,
            "algorithm": self.settings.algorithm,
            "settings": self.settings.as_dict(),
            "dimension": self.model.dimension,
            "unit": str(self.unit),
            "regime": str(self.regime),
            "quanta": None if self.quanta is None else str(self.quanta),
            **({} if self.sampling is None else self.sampling.describe()),
        }

    def _refuse_misfits(self) -> None:
        name, settings = type(self).__name__, self.settings
        if not isinstance(settings, self.settings_type):
            raise ValueError(f"{name} takes {self.settings_type.__name__}, and {type(settings).__name__} was given.")
        if self.unit is Unit.USER:
            raise ValueError(
                "Training protects a `record` or a `client`; the unit `user` belongs to searches with a curator."
            )
        if self.unit not in self.units:
            raise ValueError(
                f"{settings.algorithm} protects the unit `{self.units[0]}` only, and `{self.unit}` was given."
            )
        local = (settings.local_steps, settings.local_rate) != (1, 1.0)
        if self.unit is Unit.RECORD and local and not self.local_steps_on_records:
            raise ValueError(
                "Local steps are for unit `client`: how far a record reaches through several of them is not bounded by "
                "the clip. Leave out `local_steps` and `local_rate`, or train with unit `client`."
            )
        if self.unit is Unit.CLIENT and settings.weighting == "records":
            raise ValueError(
                "Under unit `client` every clipped update weighs the same: weights by records would stretch what one "
                "client can move. Leave out `weighting`, or train with unit `record`."
            )
        if self.unit is Unit.RECORD:
            self.model.refuse_clip(settings.clip)
        if self.cohort.terms.dimension != self.model.dimension:
            raise ValueError(
                f"The cohort's task has {self.cohort.terms.dimension} parameters and the model {self.model.dimension}: "
                "give the trainer the model that the clients hold."
            )
        if self.checkpoint_every < 1:
            raise ValueError(f"`checkpoint_every` must be at least 1, and {self.checkpoint_every} was given.")

    def _result(self, stopped: str) -> Result:
        import pandas as pd
        from ray.air.result import Result
        from ray.tune import Checkpoint

        lost = sum(int(row["round/lost"]) for row in self.rows)
        last: Row = dict(self.rows[-1]) if self.rows else {"training_iteration": 0}
        last |= {"rounds_lost": lost, "stopped": stopped, "config": self.settings.as_dict()}
        frame = pd.DataFrame(list(self.rows))
        return Result(
            metrics=last,
            checkpoint=None if self._path is None else Checkpoint.from_directory(str(self._path)),
            error=None,
            path=os.fspath(self.storage or Path.cwd()),
            metrics_dataframe=frame.set_index("training_iteration", drop=False) if len(frame) else frame,
        )
