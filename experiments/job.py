"""The steps of a run once it may spend: the vote, then the training, then what is left to say."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpray.experiments import report
from dpray.experiments.figures import number
from dpray.experiments.live import Live, Phase
from dpray.experiments.material import Material
from dpray.experiments.outcome import Outcome
from dpray.experiments.plan import SEARCH, TRAINING, Forecast
from dpray.experiments.runs import RunDirectory
from dpray.experiments.showing import Showing, plot
from dpray.experiments.spec import Recipe
from dpray.platform.privacy.budget import remaining_epsilon
from dpray.platform.privacy.mechanisms import Regime, Unit

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort
    from dpray.platform.privacy.ledger import Account, Ledger, Run
    from dpray.searchers.hype import DPHypeSearch
    from dpray.trainers.base import FederatedTrainer
    from dpray.trainers.settings import Settings


@dataclass(frozen=True)
class Job:
    """A run under way: what it needs, and its three steps."""

    recipe: Recipe
    files: RunDirectory
    material: Material
    expected: Forecast
    cohort: Cohort
    account: Account
    run: Run
    ledger: Ledger
    showing: Showing
    live: Live

    def search(self) -> DPHypeSearch | None:
        """Let the clients vote."""
        given = self.recipe.search
        if given is None or self.expected.search is None:
            return None
        from dpray.searchers.hype import DPHypeSearch

        search = DPHypeSearch(
            self.cohort,
            self.run,
            quanta=self.expected.search.quanta,
            votes=given.votes,
            candidates=given.candidates,
            space=self.recipe.tune_space(),
            seed=given.seed,
            regime=Regime(given.regime),
            label=SEARCH,
            reserve=False,
            max_concurrent=given.max_concurrent,
        )
        with self.showing.root.child("search") as view, self.live.phase("search", search.evaluations) as phase:
            self._vote(search, functools.partial(self._trial_done, search, view, phase))
            self.showing.votes(view, search, self.expected)
            self.showing.spend(view, self.account, self.run, 0)
            phase(search.evaluations, self._spent())
        self.showing.root.anchor(self.ledger.head())
        self.live.say(f"Winner: {report.settings(search.best_config)}")
        return search

    def _vote(self, search: DPHypeSearch, on_trial: Callable[[Any], None]) -> None:
        """Run the search in Tune, on from its saved state if there is one."""
        from ray import tune

        from dpray.experiments.trials import Trials

        folder = self.files.path / "search"
        folder.mkdir(exist_ok=True)
        saved = folder / "searcher.json"
        if saved.is_file():
            search.restore(str(saved))

        def done(trial: Any) -> None:
            on_trial(trial)  # first: a trial that is saved as done is not run, and so not shown, again
            search.save(str(saved))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the forecast has warned already
            tune.Tuner(
                search.trainable(),
                param_space={},
                tune_config=search.tune_config(),
                run_config=tune.RunConfig(
                    name=f"search-{self.run.epoch}",
                    storage_path=str((self.files.path / "tune").absolute()),
                    callbacks=[Trials(done)],
                    verbose=0,
                ),
            ).fit()
        search.save(str(saved))

    def _trial_done(self, search: DPHypeSearch, view: Any, phase: Phase, trial: Any) -> None:
        candidate, answered = trial.last_result["candidate"], trial.last_result["clients_answered"]
        self.showing.trial(view, candidate, search.candidates[candidate], answered)
        phase(search.progress["evaluated"], f"candidate {candidate} on {answered} clients")

    def train(self, search: DPHypeSearch | None) -> Outcome:
        """Train with the winner, or with the settings given."""
        winner = {} if search is None else search.best_config
        trainer, settings = self._trainer(winner)
        with self.showing.root.child("training") as view, self.live.phase("training", settings.rounds) as phase:
            trainer.tracker = view
            trainer.on_round = lambda row: phase(
                row["training_iteration"], f"accuracy {row['accuracy']:.3f}  {self._spent()}"
            )
            result = trainer.fit()
            rounds = result.metrics_dataframe.to_dict("records")
            view.artifact(plot(rounds, self.material.chance, self.files.path / "rounds.png"), "rounds.png")
        lost, stopped = result.metrics["rounds_lost"], result.metrics["stopped"]
        how = f"{settings.algorithm}, {stopped}" + (f", {lost} lost" if lost else "")
        self.run.close()
        return self._outcome(search, winner, settings, how, float(result.metrics["accuracy"]))

    def _trainer(self, winner: dict[str, Any]) -> tuple[FederatedTrainer, Settings]:
        settings = self.material.settings(winner)
        trainer = self.material.trainer_type(
            self.cohort,
            self.run,
            self.material.model,
            settings,
            quanta=self.expected.training.quanta,
            regime=Regime(self.recipe.training.regime),
            unit=Unit(self.recipe.training.unit),
            label=TRAINING,
            reserve=False,
            storage=self.files.path / "training",
            evaluation=self.material.evaluation,
        )
        return trainer, settings

    def _outcome(
        self, search: DPHypeSearch | None, winner: dict[str, Any], settings: Settings, how: str, accuracy: float
    ) -> Outcome:
        statement = self.account.statement(self.run.name)
        self.showing.root.released({"accuracy": accuracy})
        self.showing.spend(self.showing.root, self.account, self.run, 0)
        self.showing.statement(statement, self.ledger)
        given, scale = self.recipe.search, self.material.scale
        return Outcome(
            run=self.run.name,
            recipe=self.recipe.name,
            population=self.recipe.population.name,
            winner=winner,
            settings=settings.as_dict(),
            candidates=[] if search is None else list(search.candidates),
            noisy_votes=[] if search is None else [float(votes) for votes in search.votes],
            search="" if given is None else f"DP-HYPE, {given.candidate_count} candidates, k = {given.votes}",
            training=how,
            accuracy=accuracy,
            chance=self.material.chance,
            evaluation=len(self.material.evaluation),
            records=scale.records,
            clients=scale.clients,
            statement=statement.as_dict(),
            stamps=list(statement.stamps),
        )

    def _spent(self) -> str:
        """ε of the account by now, and what is left of it."""
        budget = self.account.budget
        if budget.non_private or self.account.unbounded:
            return "ε = ∞, NOT PRIVATE"
        left = remaining_epsilon(budget, self.account.spent)
        return f"ε {number(self.account.spent_epsilon)} spent, {number(left, up=False)} left"
