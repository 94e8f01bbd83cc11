"""The federated kind of experiment: a cohort of clients, their vote if the recipe has a search, then training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpray.experiments import at_sites, engine, material, places, report_plan, standing
from dpray.experiments.job import Job
from dpray.experiments.kinds import Begun, Experiment
from dpray.experiments.live import Live
from dpray.experiments.material import Material
from dpray.experiments.outcome import Outcome
from dpray.experiments.plan import Forecast, forecast
from dpray.experiments.spec import Recipe
from dpray.experiments.standing import Standing

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dpray.platform.cohort import Cohort
    from dpray.platform.privacy.ledger import Plan


@dataclass
class Federated(Experiment):
    """A cohort's recipe with its data; with its clients, while `running`."""

    recipe: Recipe
    material: Material
    expected: Forecast
    cohort: Cohort | None = None

    @property
    def size(self) -> str:
        """Clients, records, parameters."""
        scale = self.material.scale
        return f"{scale.clients} clients, {scale.records} records, {scale.dimension} parameters"

    def planned(self) -> Plan:
        """Votes or their winner, gradients, and what an algorithm releases before them."""
        from dpray.searchers.hype import MECHANISM as VOTES
        from dpray.searchers.hype import WINNER
        from dpray.trainers.base import MECHANISM as GRADIENTS
        from dpray.trainers.fedfc import COVARIANCE

        alone = self.recipe.search is not None and self.recipe.search.release == "winner"
        votes = WINNER if alone else VOTES
        return self.expected.ledger_plan(search=votes, training=GRADIENTS, covariance=COVARIANCE)

    def forecast(self, before: Standing) -> RenderableType:
        """See `Experiment.forecast`."""
        return report_plan.forecast(self.recipe, self.expected, self.material.scale, before)

    @contextmanager
    def running(self, workspace: Path, address: str | None, live: Live) -> Iterator[None]:
        """Ray and the clients, who know which ledger they have seen."""
        # On a cluster clients live on other machines, each with journals of its own.
        sites = Path("~/dpray-sites") if address is not None else workspace / "dpray-sites"
        self.cohort = self.material.cohort(sites, self.expected)
        live.say("Starting Ray and the clients …", "dim")
        with ExitStack() as stack:
            labels = at_sites.labels(self.recipe)
            stack.enter_context(engine.ray_running(address, self.recipe.cohort.actors, labels=labels, say=live.say))
            if address is not None:
                places.check_driver(self.recipe)
            with engine.hushed():
                stack.enter_context(self.cohort)
            standing.check_anchors(self.recipe, workspace, self.cohort.anchors())
            yield

    def carry_out(self, begun: Begun) -> Outcome:
        """Vote, then train."""
        if self.cohort is None:
            raise RuntimeError("The clients are not running: call this within `running`.")
        job = Job(self.recipe, self.material, self.expected, self.cohort, begun)
        return job.train(job.search())


def load(recipe: Recipe, workspace: Path) -> Federated:
    """Read the data, deal it out, and compute what a run would do. Errors: as `material.load`, `plan.forecast`."""
    found = material.load(recipe, workspace)
    return Federated(recipe, found, forecast(recipe, found.scale))
