"""A run of a search in the central model once it may spend: the search in Ray Tune, then what is left to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpray.experiments.central import report
from dpray.experiments.central.building import build
from dpray.experiments.central.outcome import CentralOutcome
from dpray.experiments.central.plan import CentralForecast, GradientNoise
from dpray.experiments.central.spec import CentralRecipe
from dpray.experiments.kinds import Begun
from dpray.experiments.parts import SEARCH
from dpray.platform.privacy.units import Unit
from dpray.platform.tracking.progress import Spent

if TYPE_CHECKING:
    from dpray.experiments.central.walk import Walk
    from dpray.platform.tracking import RunView
    from dpray.platform.user_losses import UserLosses
    from dpray.searchers.central import CentralSearch


@dataclass(frozen=True)
class CentralJob:
    """A run under way."""

    recipe: CentralRecipe
    task: UserLosses
    expected: CentralForecast
    begun: Begun

    def search(self) -> CentralOutcome:
        """Run the search to its end: releases found in the ledger are taken up, the others are made.

        Raises:
            SearchUnfinished: an iteration could not be evaluated. What was charged stands; the run can be resumed.
        """
        search = build(self.recipe, self.task, self.expected.search.quanta, self.begun.run)
        try:
            walk = self._follow(search)
            return self._outcome(search, walk, self._score(search))
        finally:
            search.close()

    def _follow(self, search: CentralSearch) -> Walk:
        from dpray.experiments.central.path_plot import plot
        from dpray.experiments.central.walk import Walk
        from dpray.experiments.trials import tuned
        from dpray.searchers.errors import SearchUnfinished

        begun, T = self.begun, search.iterations
        with begun.showing.root.child("search") as view, begun.live.phase("search", T) as phase:
            self._constants(view)
            spent = Spent(begun.run, SEARCH, Unit.USER, search.spends)
            walk = Walk(search, view, spent, self.task if self.recipe.objective.public else None)
            released = 0

            def on_release(step: int) -> None:
                nonlocal released
                walk.released(step)
                released = step + 1
                phase(released, f"{search.progress['evaluated']} trials  {begun.spent()}")

            def on_trial(trial: Any) -> None:
                phase(released, f"{search.progress['evaluated']} trials  {begun.spent()}")

            search.on_release = on_release
            before, part = -1, 0
            # Tune counts evaluations that died with the curator as done: a search that gets on is run on.
            while before < released < T and not search.finished:
                before, part = released, part + 1
                tuned(search, begun.files.path, begun.run.epoch, on_trial, part)
            if released < T:
                why = search.reason or "more evaluations were lost, with their process, than a run has to spare."
                raise SearchUnfinished(f"The search ended after {released} of {T} releases: {why}")
            view.params(search.best_config, prefix="best")
            drawn = plot(walk, search, spent, begun.files.path / "path.png")
            if drawn is not None:
                view.artifact(drawn, "path.png")
        begun.showing.root.anchor(begun.ledger.head(), begun.ledger.identity)
        return walk

    def _score(self, search: CentralSearch) -> float | None:
        """The noised mean loss at the result; None where the recipe asks for none."""
        from dpray.searchers.score import release_score

        part, asked = self.expected.score, self.recipe.score
        if part is None or asked is None:
            return None
        self.begun.live.say("Releasing the score of the result …", "dim")
        score = release_score(search, asked.bound, quanta=part.quanta)
        self.begun.showing.root.released({"search/score": score})
        return score

    def _constants(self, view: RunView) -> None:
        """Public facts of the whole search."""
        view.public({"search/iterations": self.expected.search.steps, "search/points": self.expected.points})
        noise = self.expected.noise
        if isinstance(noise, GradientNoise):
            view.public({"search/sigma": noise.sigma, "search/clip": noise.clip})

    def _outcome(self, search: CentralSearch, walk: Walk, score: float | None) -> CentralOutcome:
        begun, loss = self.begun, walk.loss(search.best_config)
        if loss is not None:
            begun.showing.root.released({"loss": loss})
        statement = begun.settle()
        return CentralOutcome(
            run=begun.run.name,
            recipe=self.recipe.name,
            population=self.recipe.population.name,
            objective=report.objective(self.recipe, self.expected),
            search=report.search(self.recipe, self.expected),
            public=self.recipe.objective.public,
            best_config=search.best_config,
            path=walk.path,
            reason=str(search.reason),
            losses=walk.losses,
            result_loss=loss,
            score=score,
            score_sigma=None if score is None else self.expected.score_sigma,
            statement=statement.as_dict(),
            stamps=list(statement.stamps),
        )
