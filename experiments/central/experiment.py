"""The seam to `pipeline`: a search in the central model as an `Experiment`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpray.experiments import engine, places
from dpray.experiments.central import report
from dpray.experiments.central.job import CentralJob
from dpray.experiments.central.outcome import CentralOutcome
from dpray.experiments.central.plan import CentralForecast, forecast
from dpray.experiments.central.spec import CentralRecipe
from dpray.experiments.kinds import Begun, Experiment
from dpray.experiments.live import Live
from dpray.experiments.reading import RecipeError
from dpray.experiments.standing import Standing
from dpray.platform.privacy.ledger import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dpray.platform.user_losses import UserLosses


@dataclass
class Central(Experiment):
    """A recipe with its objective."""

    recipe: CentralRecipe
    task: UserLosses
    expected: CentralForecast

    @property
    def size(self) -> str:
        """Users, settings, evaluations."""
        return report.size(self.expected)

    def planned(self) -> Plan:
        """The search's releases, and the score's."""
        return Plan(self.expected.planned)

    def forecast(self, before: Standing) -> RenderableType:
        """See `Experiment.forecast`."""
        return report.forecast(self.recipe, self.expected, before)

    @contextmanager
    def running(self, workspace: Path, address: str | None, live: Live) -> Iterator[None]:
        """Ray. The curator comes with the search."""
        live.say("Starting Ray …", "dim")
        with engine.ray_running(address, self.recipe.search.max_concurrent, say=live.say):
            if address is not None:
                places.check_driver(self.recipe)
            yield

    def carry_out(self, begun: Begun) -> CentralOutcome:
        """Search."""
        return CentralJob(self.recipe, self.task, self.expected, begun).search()


def load(recipe: CentralRecipe, workspace: Path) -> Central:
    """Make the objective, and compute what a run would do.

    Raises:
        RecipeError, DatasetError: options that do not fit the data, data that is not there, settings that the search
            refuses.
    """
    from dpray.platform.user_losses import check_task

    try:
        task = recipe.objective.make(workspace)
        check_task(task)
    except ValueError as error:
        raise RecipeError(f"`objective`: {error}") from None
    return Central(recipe, task, forecast(recipe, task))
