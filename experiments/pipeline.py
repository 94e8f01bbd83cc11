"""A run from its recipe to its report, whatever its kind: what `dpray plan`, `run` and `resume` do.

    load the recipe ─▶ look at the ledger ─▶ start Ray ─▶ reserve ─▶ release … ─▶ statement

Everything that can be refused is refused before the ledger is touched. From then on every step is named by a key of the
ledger, so that running the same run again goes on where it stopped: what was released is read, never released twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dpray.experiments import engine, kinds, places, report, report_plan, standing
from dpray.experiments.kinds import AnyOutcome, AnyRecipe, Begun, Experiment
from dpray.experiments.live import Live
from dpray.experiments.runs import RunDirectory
from dpray.experiments.showing import Showing, checked_uri, send_rest

if TYPE_CHECKING:
    from rich.console import Console

    from dpray.platform.privacy.ledger import Account, Ledger, Run


def foresee(recipe: AnyRecipe, workspace: Path, *, console: Console) -> Experiment:
    """Print what a run of the recipe would do, and where its account stands. Touches nothing but the data it reads.

    Raises:
        RecipeError, LedgerError and their like: what a run would be refused for; a plan that does not fit is printed
            before it is refused.
    """
    places.check(recipe, cluster=False)
    experiment = kinds.load(recipe, workspace)
    before = standing.look(recipe, workspace, experiment.expected, fits=False)
    console.print(experiment.forecast(before))
    standing.look(recipe, workspace, experiment.expected)
    return experiment


def run(
    recipe: AnyRecipe,
    name: str,
    workspace: Path,
    *,
    console: Console,
    address: str | None = None,
    on_begin: Callable[[str], object] = lambda name: None,
) -> AnyOutcome:
    """Carry the recipe out, or go on with it, or show again what came out.

    Args:
        recipe: what to do; the same one if the run had begun before.
        name: of the run.
        workspace: folder for the run's files, and of the ledger and MLflow's store where their paths are relative.
        console: where progress and report go.
        address: of a Ray cluster; None: the one this process is a job of, else Ray is started on this machine.
        on_begin: called with the name once the plan is set aside and the run can be resumed.

    Raises:
        RecipeError, LedgerError and their like: before `on_begin` nothing was spent or written.
    """
    address = engine.cluster_of(address)
    engine.prepare(address)
    places.check(recipe, cluster=address is not None)
    places.check_password_files(recipe)
    files = RunDirectory(workspace, name)
    if files.exists:
        files.require_same(recipe)
        done = files.outcome()
        if done is not None:
            console.print(f"The run {name} is finished; this is what came out. Nothing was spent now.")
            uri = checked_uri(recipe, workspace, cluster=address is not None)
            console.print(kinds.drawn(done))
            console.print(report.where_to_look(recipe, files, uri, send_rest(files, uri)))
            return done
    experiment = kinds.load(recipe, workspace)
    standing.look(recipe, workspace, experiment.expected, run=name)
    uri = checked_uri(recipe, workspace, cluster=address is not None)
    standing.check_tracked(recipe, workspace, uri)
    stamps = report_plan.stamped(recipe)
    live = Live(console)
    _announce(live, name, experiment, stamps)
    with ExitStack() as stack:
        stack.enter_context(experiment.running(workspace, address, live))
        resumed = files.exists
        account, ledger_run, ledger = _open(stack, recipe, workspace, name, experiment, stamps)
        files.begin(recipe)
        on_begin(name)
        showing = stack.enter_context(Showing(recipe, files, uri, resumed=resumed, stamps=stamps))
        showing.root.anchor(ledger.head(), ledger.identity)
        outcome = experiment.carry_out(Begun(files, account, ledger_run, ledger, showing, live))
        files.save(outcome)
        delivered = showing.finish()
    console.print(kinds.drawn(outcome))
    console.print(report.where_to_look(recipe, files, uri, delivered))
    return outcome


def _announce(live: Live, name: str, experiment: Experiment, stamps: tuple[str, ...]) -> None:
    live.say(f"Run {name}: {experiment.size}", "bold")
    for stamp in stamps:
        live.say(stamp, "bold red")
    for warning in experiment.expected.warnings:
        live.say(f"Warning: {warning}", "bold yellow")


def _open(
    stack: ExitStack, recipe: AnyRecipe, workspace: Path, name: str, experiment: Experiment, stamps: tuple[str, ...]
) -> tuple[Account, Run, Ledger]:
    """The account, and the run with its whole plan set aside."""
    from dpray.platform.privacy.ledger import Ledger

    ledger = Ledger(standing.ledger_url(recipe, workspace))
    stack.callback(ledger.close)
    population = ledger.population(
        recipe.population.name,
        records_per_client=recipe.population.records_per_client,
        declaration=experiment.expected.declaration,
    )
    expected = experiment.expected
    account = population.account(recipe.population.unit, expected.budget, kind=expected.kind)
    run = population.run(name, stamps=stamps)
    if not run.closed:
        run.reserve(experiment.planned())
    return account, run, ledger
