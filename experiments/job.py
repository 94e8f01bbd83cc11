"""The steps of a cohort's run once it may spend: the vote, then the training, then what is left to say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpray.experiments import report
from dpray.experiments.exporting import keep
from dpray.experiments.figures import number
from dpray.experiments.kinds import Begun
from dpray.experiments.live import Phase
from dpray.experiments.material import Material
from dpray.experiments.outcome import Outcome
from dpray.experiments.parts import SEARCH, TRAINING
from dpray.experiments.plan import Forecast
from dpray.experiments.showing import plot
from dpray.experiments.spec import Recipe, Search
from dpray.platform.privacy.ledger import ReleaseLost
from dpray.platform.privacy.mechanisms import Regime, Unit

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort
    from dpray.searchers.hype import DPHypeSearch
    from dpray.trainers.base import FederatedTrainer
    from dpray.trainers.settings import Settings


@dataclass(frozen=True)
class Job:
    """A run under way: what it needs, and its three steps."""

    recipe: Recipe
    material: Material
    expected: Forecast
    cohort: Cohort
    begun: Begun

    def search(self) -> DPHypeSearch | None:
        """Let the clients vote.

        Raises:
            ReleaseLost: the vote is lost, now or earlier. The run is closed: it cannot be finished any more.
        """
        given = self.recipe.search
        if given is None or self.expected.search is None:
            return None
        from dpray.searchers.hype import DPHypeSearch

        search = DPHypeSearch(
            self.cohort,
            self.begun.run,
            quanta=self.expected.search.quanta,
            votes=given.votes,
            candidates=given.candidates,
            space=self.recipe.tune_space(),
            seed=given.seed,
            release=given.release,
            regime=Regime(given.regime),
            label=SEARCH,
            reserve=False,
            candidates_per_trial=given.candidates_per_trial,
            max_concurrent=given.max_concurrent,
        )
        try:
            self._hold(search)
        except ReleaseLost as lost:
            run = self.begun.run
            run.close()
            raise ReleaseLost(
                f"{lost} The run {run.name} is over, and what its training had set aside is free again. To vote "
                "again, give the recipe to `dpray run` with another `--name`: that is charged anew."
            ) from None
        self._anchor()
        self.begun.live.say(f"Winner: {report.settings(search.best_config)}")
        return search

    def _anchor(self) -> None:
        """Show MLflow and the clients that the last release is stored: no copy of the ledger from before it passes."""
        self.cohort.anchor(self.begun.ledger)
        self.begun.showing.root.anchor(self.begun.ledger.head(), self.begun.ledger.identity)

    def _hold(self, search: DPHypeSearch) -> None:
        begun = self.begun
        with begun.showing.root.child("search") as view, begun.live.phase("search", search.evaluations) as phase:
            self._vote(search, functools.partial(self._trial_done, search, view, phase))
            begun.showing.votes(view, search, self.expected)
            begun.showing.spend(view, begun.account, begun.run, 0)
            phase(search.evaluations, begun.spent())

    def _vote(self, search: DPHypeSearch, on_trial: Callable[[Any], None]) -> None:
        """Run the search in Tune, on from its saved state if there is one."""
        from dpray.experiments.trials import tuned

        folder = self.begun.files.path / "search"
        folder.mkdir(exist_ok=True)
        saved = folder / "searcher.json"
        if saved.is_file():
            search.restore(str(saved))

        def done(trial: Any) -> None:
            on_trial(trial)  # first: a trial that is saved as done is not run, and so not shown, again
            search.save(str(saved))

        tuned(search, self.begun.files.path, self.begun.run.epoch, done)
        search.save(str(saved))

    def _trial_done(self, search: DPHypeSearch, view: Any, phase: Phase, trial: Any) -> None:
        from dpray.searchers.candidate_trial import numbers_of

        numbers, answered = numbers_of(trial.config), trial.last_result["clients_answered"]
        for each in numbers:
            self.begun.showing.trial(view, each, search.candidates[each], answered)
        words = f"candidate {numbers[0]}" if len(numbers) == 1 else f"candidates {numbers[0]}-{numbers[-1]}"
        phase(search.progress["evaluated"], f"{words} on {answered} clients")

    def train(self, search: DPHypeSearch | None) -> Outcome:
        """Train with the winner, or with the settings given."""
        winner = {} if search is None else search.best_config
        trainer, settings = self._trainer(winner)
        begun = self.begun
        with begun.showing.root.child("training") as view, begun.live.phase("training", settings.rounds) as phase:
            trainer.tracker = view
            trainer.on_round = lambda row: phase(
                row["training_iteration"], f"accuracy {row['accuracy']:.3f}  {self._spent(row)}"
            )
            result = trainer.fit()
            self._anchor()
            rounds = result.metrics_dataframe.to_dict("records")
            view.artifact(plot(rounds, self.material.chance, begun.files.path / "rounds.png"), "rounds.png")
        lost, stopped = result.metrics["rounds_lost"], result.metrics["stopped"]
        how = f"{settings.algorithm}, {stopped}" + (f", {lost} lost" if lost else "")
        outcome = self._outcome(search, winner, settings, how, float(result.metrics["accuracy"]))
        keep(trainer, begun.files, begun.showing.root)
        return outcome

    def _spent(self, row: Mapping[str, Any]) -> str:
        """What was spent by a round; composing a sampled run's events anew would take longer than the round."""
        if self.recipe.training.sampling is None:
            return self.begun.spent()
        return f"ε at most {number(row['privacy/epsilon_run'])} spent"

    def _trainer(self, winner: dict[str, Any]) -> tuple[FederatedTrainer, Settings]:
        settings = self.material.settings(winner)
        trainer = self.material.trainer_type(
            self.cohort,
            self.begun.run,
            self.material.model,
            settings,
            quanta=self.expected.training_quanta,
            regime=Regime(self.recipe.training.regime),
            unit=Unit(self.recipe.training.unit),
            label=TRAINING,
            reserve=False,
            storage=self.begun.files.path / "training",
            sampling=None if self.recipe.training.sampling is None else self.recipe.training.sampling.sampler(),
            evaluation=self.material.evaluation,
        )
        return trainer, settings

    def _outcome(
        self, search: DPHypeSearch | None, winner: dict[str, Any], settings: Settings, how: str, accuracy: float
    ) -> Outcome:
        self.begun.showing.root.released({"accuracy": accuracy})
        statement = self.begun.settle()
        given, scale = self.recipe.search, self.material.scale
        return Outcome(
            run=self.begun.run.name,
            recipe=self.recipe.name,
            population=self.recipe.population.name,
            winner=winner,
            settings=settings.as_dict(),
            candidates=[] if search is None else list(search.candidates),
            noisy_votes=[] if search is None or search.release == "winner" else list(map(float, search.votes)),
            search="" if given is None else _told(given),
            training=how,
            accuracy=accuracy,
            chance=self.material.chance,
            evaluation=len(self.material.evaluation),
            records=scale.records,
            clients=scale.clients,
            statement=statement.as_dict(),
            stamps=list(statement.stamps),
        )


def _told(given: Search) -> str:
    """The search, in words."""
    alone = "; the winner alone was released" if given.release == "winner" else ""
    return f"DP-HYPE, {given.candidate_count} candidates, k = {given.votes}{alone}"
