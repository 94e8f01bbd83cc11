"""Search, then train, on one account: what `dpray run` and `dpray resume` both do.

    read the data ─▶ look at the ledger ─▶ start the cohort ─▶ reserve ─▶ vote ─▶ train ─▶ statement

Everything that can be refused is refused before the ledger is touched. From then on every step is named by a key of the
ledger, so that running the same run again goes on where it stopped: what was released is read, never released twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dpray.experiments import engine, report, report_plan, standing
from dpray.experiments.binding import declaration
from dpray.experiments.job import Job
from dpray.experiments.live import Live
from dpray.experiments.material import Material, load
from dpray.experiments.outcome import Outcome
from dpray.experiments.plan import Forecast, forecast
from dpray.experiments.runs import RunDirectory
from dpray.experiments.showing import Showing, checked_uri, send_rest
from dpray.experiments.spec import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from dpray.platform.privacy.ledger import Account, Ledger, Run


def foresee(recipe: Recipe, workspace: Path, *, console: Console) -> Forecast:
    """Print what a run of the recipe would do, and where its account stands. Touches nothing but the data it reads.

    Raises:
        RecipeError, LedgerError and their like: what a run would be refused for; a plan that does not fit is printed
            before it is refused.
    """
    material = load(recipe, workspace)
    expected = forecast(recipe, material.scale)
    before = standing.look(recipe, workspace, expected, fits=False)
    console.print(report_plan.forecast(recipe, expected, material.scale, before))
    standing.look(recipe, workspace, expected)
    return expected


def run(
    recipe: Recipe,
    name: str,
    workspace: Path,
    *,
    console: Console,
    address: str | None = None,
    on_begin: Callable[[str], object] = lambda name: None,
) -> Outcome:
    """Search and train, or go on with it, or show again what came out.

    Args:
        recipe: what to do; the same one if the run had begun before.
        name: of the run.
        workspace: folder for the run's files, and of the ledger and MLflow's store where their paths are relative.
        console: where progress and report go.
        address: of a Ray cluster; None starts Ray on this machine.
        on_begin: called with the name once the plan is set aside and the run can be resumed.

    Raises:
        RecipeError, LedgerError and their like: before `on_begin` nothing was spent or written.
    """
    engine.prepare(address)
    files = RunDirectory(workspace, name)
    if files.exists:
        files.require_same(recipe)
        done = files.outcome()
        if done is not None:
            console.print(f"The run {name} is finished; this is what came out. Nothing was spent now.")
            uri = checked_uri(recipe, workspace, cluster=address is not None)
            console.print(report.outcome(done))
            console.print(report.where_to_look(recipe, files, uri, send_rest(files, uri)))
            return done
    material = load(recipe, workspace)
    expected = forecast(recipe, material.scale)
    standing.look(recipe, workspace, expected, run=name)
    uri = checked_uri(recipe, workspace, cluster=address is not None)
    stamps = report_plan.stamped(recipe)
    live = Live(console)
    _announce(live, recipe, name, material, expected, stamps)
    with ExitStack() as stack:
        cohort = material.cohort(workspace, expected)
        live.say("Starting Ray and the clients …", "dim")
        stack.enter_context(engine.ray_running(address, recipe.cohort.actors))
        with engine.hushed():
            stack.enter_context(cohort)
        standing.check_anchors(recipe, workspace, cohort.anchors())
        resumed = files.exists
        account, ledger_run, ledger = _open(stack, recipe, workspace, name, expected, stamps)
        files.begin(recipe)
        on_begin(name)
        showing = stack.enter_context(Showing(recipe, files, uri, resumed=resumed, stamps=stamps))
        showing.root.anchor(ledger.head())
        job = Job(recipe, files, material, expected, cohort, account, ledger_run, ledger, showing, live)
        outcome = job.train(job.search())
        files.save(outcome)
        delivered = showing.finish()
    console.print(report.outcome(outcome))
    console.print(report.where_to_look(recipe, files, uri, delivered))
    return outcome


def _announce(
    live: Live, recipe: Recipe, name: str, material: Material, expected: Forecast, stamps: tuple[str, ...]
) -> None:
    scale = material.scale
    live.say(f"Run {name}: {scale.clients} clients, {scale.records} records, {scale.dimension} parameters", "bold")
    for stamp in stamps:
        live.say(stamp, "bold red")
    for warning in expected.warnings:
        live.say(f"Warning: {warning}", "bold yellow")


def _open(
    stack: ExitStack, recipe: Recipe, workspace: Path, name: str, expected: Forecast, stamps: tuple[str, ...]
) -> tuple[Account, Run, Ledger]:
    """The account, and the run with its whole plan set aside."""
    from dpray.platform.privacy.ledger import Ledger
    from dpray.searchers.hype import MECHANISM as VOTES
    from dpray.trainers.base import MECHANISM as GRADIENTS

    ledger = Ledger(standing.ledger_url(recipe, workspace))
    stack.callback(ledger.close)
    population = ledger.population(
        recipe.population.name,
        records_per_client=recipe.population.records_per_client,
        declaration=declaration(recipe, expected.scale),
    )
    account = population.account(recipe.population.unit, expected.budget)
    run = population.run(name, stamps=stamps)
    if not run.closed:
        run.reserve(expected.ledger_plan(search=VOTES, training=GRADIENTS))
    return account, run, ledger
