"""Trainings as trials of Ray Tune: any searcher tunes any trainer, and every training it tries is paid for.

    searcher ──config──▶ trial ──▶ a training with a run of its own in the ledger ──▶ rows, released or public

| what | in the ledger |
|---|---|
| the search | runs `<name>/000` … `<name>/<trainings − 1>`, all set aside before the first trial |
| one configuration | one of these runs: the first time it is tried, it takes the next free one |
| the same again (a retried trial, a search begun anew) | the same run: what is there is read, never paid twice |

What Tune's searcher optimises is either a metric of the *public* evaluation set, or a `HoldOut` score: a noised and
charged release of every trial. A raw private metric is not on offer. There is no free tuning: ε of a trial alone
(`privacy/epsilon_run`) and of the whole search (`privacy/epsilon_search`) stand side by side in every result, and the
second is what the result cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpray.platform.cohort.client import Records
from dpray.platform.privacy import gdp, pld
from dpray.platform.privacy.budget import Budget, upper_mu
from dpray.platform.privacy.ledger import BudgetExceeded, Ledger, Plan
from dpray.platform.privacy.ledger.composing import PLD
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.sampling import PoissonSampling
from dpray.platform.tracking.progress import Row, events
from dpray.trainers.base import FederatedTrainer
from dpray.trainers.hold_out import HoldOut
from dpray.trainers.models import FloatArray, Model
from dpray.trainers.sampled import quanta_of, refuse_sampling
from dpray.trainers.settings import Settings
from dpray.trainers.slots import claim, close, open_slots

if TYPE_CHECKING:
    from ray.tune import TuneConfig

    from dpray.platform.cohort import Cohort
    from dpray.platform.privacy.ledger import Account, Population, Run
    from dpray.platform.tracking import RunView


@dataclass(frozen=True)
class Trained:
    """One training of a search: θ (d,), its rows as Tune gets them, and its run in the ledger."""

    theta: FloatArray
    rows: tuple[Row, ...]
    run: str

    @property
    def metrics(self) -> Row:
        """The last row."""
        return self.rows[-1]


@dataclass(frozen=True)
class Trainings:
    """What one trial needs; picklable. Made by `TrainerTuning`, which documents the fields."""

    ledger: str = field(repr=False)  # may hold a password
    population: str
    name: str
    trainer: type[FederatedTrainer]
    cohort: Cohort
    model: Model
    settings: Callable[[Mapping[str, Any]], Settings]
    quanta: int
    regime: Regime
    unit: Unit
    sampling: PoissonSampling | None
    evaluation: Records | None
    hold_out: HoldOut | None
    stamps: tuple[str, ...]
    slots: Any = field(repr=False)

    def train(self, config: Mapping[str, Any], on_row: Callable[[Row], object] = lambda row: None) -> Trained:
        """Train a configuration, or read from the ledger what it came to; a half-finished training goes on.

        Args:
            config: plain values.
            on_row: called with each row as Tune may see it: every round with a public evaluation set; once, with the
                score, under a `HoldOut`.

        Raises:
            SlotsTaken: more configurations than were set aside. Nothing was spent.
            ValueError: the configuration makes no settings; nothing was spent, and it takes up one of the trainings.
            PlanConflict: its trainer releases something else than was set aside.
        """
        slot = claim(self.slots, config)
        with Ledger(self.ledger, create=False) as ledger:
            run = ledger.population(self.population).run(self.run_name(slot), stamps=self.stamps)
            trainer, rows = self.made(run, config), list[Row]()

            def each(row: Row) -> None:
                rows.append({**row, **self._search_spend(run), "ledger_run": run.name})
                on_row(rows[-1])

            if self.hold_out is None:
                trainer.on_round = each
            run.reserve(self.plan(trainer))
            stopped = trainer.fit().metrics["stopped"]
            if self.hold_out is not None:
                score, sigma = self.hold_out.score(run, trainer.theta)
                each({**self._spend(run, trainer), "score": score, "score_sigma": sigma, "stopped": stopped})
            elif not rows:  # diverged at once: what came out is the start
                each({**self.model.evaluate(trainer.theta, self._public), **self._spend(run, trainer)})
            return Trained(trainer.theta, tuple(rows), run.name)

    def made(self, run: Run, config: Mapping[str, Any]) -> FederatedTrainer:
        """The trainer of a configuration."""
        return self.trainer(
            self.cohort,
            run,
            self.model,
            self.settings(config),
            quanta=self.quanta,
            regime=self.regime,
            unit=self.unit,
            sampling=self.sampling,
            reserve=False,
            evaluation=self.evaluation,
        )

    def plan(self, trainer: FederatedTrainer) -> Plan:
        """What one training, and its score, release."""
        score = () if self.hold_out is None else (self.hold_out.planned,)
        return Plan((*trainer.plan.releases, *score))

    def run_name(self, slot: int) -> str:
        """Name of a training's run in the ledger."""
        return f"{self.name}/{slot:03d}"

    @property
    def _public(self) -> Records:
        if self.evaluation is None:
            raise RuntimeError("This search looks at held-out records, not at public ones.")
        return self.evaluation

    def _spend(self, run: Run, trainer: FederatedTrainer) -> Row:
        """The training's last row, with the score in what the run has cost."""
        of_run = account_of(run.population, self.unit).statement(run.name).run_spent
        row = dict(trainer.rows[-1]) if trainer.rows else {}
        if of_run is None:
            return row
        composed = {} if math.isnan(of_run.mu) else {"privacy/mu_run": of_run.mu}  # events have no μ
        return row | {"privacy/epsilon_run": of_run.epsilon, **composed}

    def _search_spend(self, run: Run) -> Row:
        account = account_of(run.population, self.unit)
        return {"privacy/epsilon_search": search_epsilon(account, self.name), "privacy/epsilon": account.spent_epsilon}


class TrainerTuning:
    """Tunes a trainer with any of Ray Tune's searchers and schedulers, under a budget set aside beforehand.

    Args:
        trainer: the algorithm, such as `DPFedSOFIMTrainer`.
        cohort: of the training records.
        ledger: address of the ledger, `sqlite:///…` or `postgresql://…`; trials open it in their own processes.
        population: whose accounts pay.
        model: what is trained.
        settings: of a configuration, such as `partial(SOFIMSettings.from_config, defaults={"rounds": 20})`. Rounds are
            planned beforehand and cannot be searched.
        example: any configuration of the space; what its training releases is what is set aside for each.
        name: of the search; the names of its runs in the ledger begin with it.
        trainings: most different configurations that may be tried.
        budget, quanta: what *one* training may spend, as (ε, δ) or as μ² in quanta of 2⁻⁶⁰; exactly one. With
            `sampling`, as of the trainer: by composition, or μ² without sampling.
        evaluation: records declared PUBLIC: the searcher sees `accuracy` and `loss` on them after every round; or
        hold_out: the searcher sees `score`, once at a training's end, and each costs `hold_out.quanta` more.
        regime, unit, sampling: as of the trainer; sampled trainings are for accounts of kind `pld`.
        storage: folder on this machine that remembers which configuration has which run.

    Example:
        with TrainerTuning(DPFedSOFIMTrainer, cohort, "sqlite:///ledger.db", "people", model, settings,
                           example={"learning_rate": 1.0}, name="tuning", trainings=8, budget=Budget(1, 1e-5),
                           evaluation=public, storage="tuning") as tuning:
            results = tune.Tuner(tuning.trainable(), param_space={"learning_rate": tune.loguniform(0.1, 10)},
                                 tune_config=tuning.tune_config()).fit()
            best = tuning.train(results.get_best_result().config)   # read from the ledger: costs nothing more

    Early stopping (ASHA, `stop`) on what a trial reports is free; what its plan has not used comes back with `close`.

    *Guarantee.* All trainings and scores together are μ-GDP for `unit` with μ² = trainings · (quanta + those of a
    score, times m² where a score protects records and `unit` is the client of m of them), whatever the searcher does,
    crashes and retries included; each is charged before it is computed. With `sampling` they are (ε, δ)-DP as the
    account composes them: every training as a line of events of its own, whose sampler is the one that its clients draw
    from, and scores as Gaussians beside them. That composition is of plans fixed in advance: the ε of all trainings to
    their ends is guaranteed, the smaller one of a search that was stopped early is a report, and what such a search
    leaves must not be spent in another way that was chosen by what it released. Protected are the records of
    both cohorts; not protected is the evaluation set.

    Raises:
        ValueError: both or neither of evaluation and hold-out, or of budget and quanta; no whole number of trainings; a
            sampler that does not go with the algorithm, the unit or the kind of the accounts.
        BudgetExceeded: not all trainings fit the account; nothing stays set aside, and nothing was trained.
    """

    def __init__(
        self,
        trainer: type[FederatedTrainer],
        cohort: Cohort,
        ledger: str,
        population: str,
        model: Model,
        settings: Callable[[Mapping[str, Any]], Settings],
        *,
        example: Mapping[str, Any],
        name: str,
        trainings: int,
        budget: Budget | None = None,
        quanta: int | None = None,
        evaluation: Records | None = None,
        hold_out: HoldOut | None = None,
        regime: Regime | str = Regime.DISTRIBUTED,
        unit: Unit | str = Unit.RECORD,
        sampling: PoissonSampling | None = None,
        storage: Path | str,
        stamps: tuple[str, ...] = (),
    ) -> None:
        if (evaluation is None) == (hold_out is None):
            raise ValueError(
                "Say once what the search looks at: `evaluation`, records declared public, or `hold_out`, a score that "
                "is charged. A metric of private records is nothing a searcher may see."
            )
        if (budget is None) == (quanta is None):
            raise ValueError("Say once what one training may spend: `budget` or `quanta`.")
        if isinstance(trainings, bool) or not isinstance(trainings, int) or trainings < 1:
            raise ValueError(f"`trainings` is a whole number of at least 1, and {trainings!r} was given.")
        with Ledger(ledger, create=False) as opened:
            refuse_sampling(trainer, sampling, Unit(unit), opened.population(population))
        unlimited = budget is not None and budget.quanta is None
        rounds = settings(example).rounds
        spend = None if unlimited else quanta_of(budget, "budget" if quanta is None else quanta, rounds, sampling)
        if spend is None:
            raise ValueError("A training without noise is no private one: give `budget` a finite ε.")
        self.trainings, self.hold_out = trainings, hold_out
        self._ledger = Ledger(ledger, create=False)
        self._people = self._ledger.population(population)
        path = self._people.storage.path
        self._slots = open_slots(Path(storage), trainings)
        self._all = Trainings(
            ledger=ledger if path is None else f"sqlite:///{path}",
            population=population,
            name=name,
            trainer=trainer,
            cohort=cohort.attached(),
            model=model,
            settings=settings,
            quanta=spend,
            regime=Regime(regime),
            unit=Unit(unit),
            sampling=sampling,
            evaluation=evaluation,
            hold_out=None
            if hold_out is None
            else HoldOut(hold_out.cohort.attached(), hold_out.quanta, hold_out.regime),
            stamps=stamps,
            slots=self._slots,
        )
        self._reserve(example)

    def __enter__(self) -> TrainerTuning:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def metric(self) -> str:
        """What Tune maximises."""
        return "accuracy" if self.hold_out is None else "score"

    @property
    def handle(self) -> Trainings:
        """What a process of one's own needs to train (the `fit` of a `UserLosses`, say); picklable."""
        return self._all

    @property
    def epsilon(self) -> float:
        """ε of everything the search has spent so far, at the account's δ."""
        return search_epsilon(account_of(self._people, self._all.unit), self._all.name)

    def train(self, config: Mapping[str, Any]) -> Trained:
        """As `Trainings.train`, here; a configuration that was tried is read from the ledger."""
        return self._all.train(config)

    def trainable(self) -> Any:
        """What `tune.Tuner` takes. A trial reserves no CPU: the work is the clients'."""
        from ray import tune

        bound = tune.with_parameters(_trial, trainings=self._all)
        return tune.with_resources(bound, {"CPU": 0, "memory": 1 << 20})

    def tune_config(self, **options: Any) -> TuneConfig:
        """A `TuneConfig`: as many samples as there are trainings, one at a time unless `options` say otherwise."""
        from ray import tune

        return tune.TuneConfig(
            **{
                "metric": self.metric,
                "mode": "max",
                "num_samples": self.trainings,
                "max_concurrent_trials": 1,
                **options,
            }
        )

    def show(self, view: RunView, results: Iterable[Mapping[str, Any]]) -> None:
        """Show trials below `view`, and beside each what it cost and what the whole search did.

        Args:
            view: such as `tracker.child("search")`.
            results: last metrics of each trial, `[each.metrics for each in results]` of a Tuner.
        """
        for number, row in enumerate(results):
            with view.child("trial", key=number) as trial:
                trial.params(row.get("config", {}))
                trial.tags({"ledger_run": row["ledger_run"]})
                trial.released({_SHOWN.get(name, name): row[name] for name in (self.metric, "loss") if name in row})
                trial.public({_SHOWN.get(name, name): row[name] for name in _COSTS if name in row})
        spent = account_of(self._people, self._all.unit).spent_epsilon
        view.public({"privacy/epsilon_search": self.epsilon, "privacy/epsilon": spent})

    def close(self) -> None:
        """End the search: what its trainings have not used is free again. Nothing new can be trained under its name."""
        for slot in range(self.trainings):
            self._people.run(self._all.run_name(slot)).close()
        close(self._slots)
        self._ledger.close()

    def _reserve(self, example: Mapping[str, Any]) -> None:
        population = self._people
        opened: list[Run] = []
        known = set(population.runs())
        for slot in range(self.trainings):
            name = self._all.run_name(slot)
            run = population.run(name, stamps=self._all.stamps)
            if name not in known:
                opened.append(run)
            try:
                if not run.closed:
                    run.reserve(self._all.plan(self._all.made(run, example)))
            except BaseException as error:
                for each in opened:
                    each.close()
                if isinstance(error, BudgetExceeded):
                    raise BudgetExceeded(
                        f"Training {slot + 1} of the {self.trainings} of search {self._all.name!r} does not fit any "
                        f"more: {error} All of the search is given back, and its name is used up.",
                        population=error.population,
                        unit=error.unit,
                    ) from None
                raise


_SHOWN = {"score": "search/held_out", "score_sigma": "search/held_out_sigma"}
_COSTS = ("privacy/epsilon_run", "privacy/epsilon_search", "score_sigma")


def _trial(config: dict[str, Any], trainings: Trainings) -> None:
    """One trial of Tune; run again after a crash, it reads what it has released before and goes on."""
    from ray import tune

    trainings.train(config, tune.report)


def account_of(population: Population, unit: Unit) -> Account:
    """The account that pays for a unit by itself, or the finest there is."""
    accounts = population.accounts()
    return next((account for account in accounts if account.unit is unit), accounts[0])


def search_epsilon(account: Account, name: str) -> float:
    """ε of all runs of a search at the account's δ, rounded up; on an account of kind `pld`, composed."""
    statement = account.statement()
    lines = [line for line in statement.lines if line.run.startswith(f"{name}/")]
    quanta = [line.amount.quanta for line in lines]
    whole = [each for each in quanta if each is not None]
    if statement.kind == PLD:
        return pld.epsilon([event for line in lines for event in events(line)], statement.delta)
    if len(whole) < len(quanta):
        return float("inf")
    return gdp.epsilon(upper_mu(sum(whole)), statement.delta) if whole else 0.0
