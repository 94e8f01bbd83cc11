"""The command line: `dpray plan|run|resume|report|export|ui`, and the commands of `cli_jobs` and `cli_ledger`.

| exit code | meaning |
|---|---|
| 0 | done |
| 2 | refused: nothing was spent, nothing was written |
| 3 | stopped on the way: what was charged stands, `dpray resume RUN` goes on (not after a lost vote, which says so) |
| 130 | interrupted, as 3 |

A refusal is one sentence or a few on stderr, never a traceback. Everything slow is imported when a command needs it.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpray.experiments import cli_jobs
from dpray.experiments.cli_jobs import LedgerPlace, TrackingPlace
from dpray.experiments.cli_ledger import ledger_app

if TYPE_CHECKING:
    from rich.console import Console

REFUSED, STOPPED, INTERRUPTED = 2, 3, 130

app = typer.Typer(
    name="dpray",
    help="Private search and private federated training on Ray, charged to one privacy account, shown in MLflow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done; 2 refused, nothing spent; 3 stopped, `dpray resume RUN` goes on; 130 interrupted.",
)
app.add_typer(ledger_app, name="ledger")

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe file, or the name of a shipped one (digits_quickstart, group_lasso).")
]
RunArgument = Annotated[str, typer.Argument(help="Name of a run begun in this workspace.")]
Workspace = Annotated[
    Path, typer.Option(help="Folder of the runs, and of ledger and MLflow store where their paths are relative.")
]
Address = Annotated[
    str | None, typer.Option(help="A running Ray cluster to use; without one Ray is started on this machine alone.")
]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"dpray {version('dpray')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Private search and private federated training on Ray, charged to one privacy account, shown in MLflow."""


@app.command()
def plan(
    recipe: RecipeArgument,
    workspace: Workspace = Path(),
    ledger: LedgerPlace = None,
    tracking: TrackingPlace = None,
) -> None:
    """Say what a run would spend and how noisy it would be. Spends nothing, creates nothing; 2 if it does not fit."""
    with refusing():
        from dpray.experiments import pipeline, places
        from dpray.experiments.runs import find_recipe

        found = places.placed(find_recipe(recipe), ledger, tracking)
        pipeline.foresee(found, workspace.expanduser(), console=_console())


@app.command()
def run(
    recipe: RecipeArgument,
    name: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's.")] = None,
    workspace: Workspace = Path(),
    address: Address = None,
    ledger: LedgerPlace = None,
    tracking: TrackingPlace = None,
) -> None:
    """Carry a recipe out. The same name again goes on where it stopped, or shows what came out."""
    with refusing() as began:
        from dpray.experiments import engine, pipeline, places
        from dpray.experiments.runs import find_recipe

        found, folder = places.placed(find_recipe(recipe), ledger, tracking), workspace.expanduser()
        cluster = engine.cluster_of(address)
        if cluster is not None:
            found = places.of_cluster(found)
        pipeline.run(found, name or found.name, folder, console=_console(), address=cluster, on_begin=began)


@app.command()
def resume(run: RunArgument, workspace: Workspace = Path(), address: Address = None) -> None:
    """Go on with a run that stopped: what was released is read from the ledger, nothing is spent twice."""
    with refusing() as began:
        from dpray.experiments import pipeline
        from dpray.experiments.runs import RunDirectory

        recipe, folder = RunDirectory(workspace.expanduser(), run).recipe(), workspace.expanduser()
        pipeline.run(recipe, run, folder, console=_console(), address=address, on_begin=began)


@app.command()
def report(run: RunArgument, workspace: Workspace = Path()) -> None:
    """Print the result and the statement of a finished run again."""
    with refusing():
        from dpray.experiments import kinds
        from dpray.experiments.runs import RunDirectory

        _console().print(kinds.drawn(RunDirectory(workspace.expanduser(), run).finished()))


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="Folder to make: parameters in safetensors, and what they cost.")],
    workspace: Workspace = Path(),
) -> None:
    """Take the trained model of a finished run away, with its privacy statement."""
    with refusing():
        from dpray.experiments import exporting
        from dpray.experiments.runs import RunDirectory

        _console().print(
            exporting.export(RunDirectory(workspace.expanduser(), run), out.expanduser()), markup=False, soft_wrap=True
        )


@app.command()
def ui(
    uri: Annotated[str, typer.Option(help="MLflow's store.")] = "sqlite:///mlflow.db",
    host: Annotated[
        str, typer.Option(help="Address to listen on; anyone who reaches it can read and write.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 5000,
) -> None:
    """Look at runs in MLflow, until interrupted."""
    with refusing():
        from dpray.experiments import ui as pages

        pages.serve(uri, host, port)


cli_jobs.register(app)


def main() -> None:
    """Entry point of the `dpray` command."""
    app()


class Progress:
    """Whether a run has begun, and under which name: decides between a refusal and a stop."""

    run: str | None = None

    def __call__(self, run: str) -> None:
        """The run of this name begins now."""
        self.run = run


@contextmanager
def refusing() -> Iterator[Progress]:
    """Turn a refusal into sentences on stderr and exit code 2; after the run began, into a stop with exit code 3."""
    progress = Progress()
    try:
        yield progress
    except KeyboardInterrupt:
        say("Interrupted." + _advice(progress))
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if not _is_refusal(error) and not _is_no_room(error):
            raise
        if progress.run is None:
            say(_words(error))
            raise typer.Exit(REFUSED) from None
        say(f"The run stopped: {_words(error)}" + ("" if _is_one_of(error, _FINAL) else _advice(progress)))
        raise typer.Exit(STOPPED) from None


def say(text: str) -> None:
    """Print to stderr, each line after the program's name."""
    for line in text.splitlines():
        print(f"dpray: {line}", file=sys.stderr)


def _advice(progress: Progress) -> str:
    if progress.run is None:
        return ""
    return f"\nWhat was charged stands, and nothing is charged twice: `dpray resume {progress.run}` goes on."


def _is_refusal(error: Exception) -> bool:
    """Whether the error's own sentence is what the user should read: asked of the modules that are loaded already."""
    return _is_one_of(error, _REFUSALS)


def _is_no_room(error: Exception) -> bool:
    """Whether a disk is full, or cannot be written at all."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def _words(error: Exception) -> str:
    return f"A file could not be written: {error}. Make room on its disk." if _is_no_room(error) else str(error)


def _is_one_of(error: Exception, named: tuple[tuple[str, str], ...]) -> bool:
    known = [getattr(sys.modules[module], name) for module, name in named if module in sys.modules]
    return isinstance(error, tuple(known))


_FINAL = (("dpray.platform.privacy.ledger.errors", "ReleaseLost"),)
"""After these a run does not go on."""
_REFUSALS = (
    ("dpray.experiments.reading", "RecipeError"),
    ("dpray.platform.privacy.ledger.errors", "LedgerError"),
    ("dpray.platform.cohort.errors", "CohortError"),
    ("dpray.platform.datasets", "DatasetError"),
    ("dpray.platform.tracking.address", "TrackingAddressError"),
    ("dpray.searchers.errors", "SearchError"),
    ("dpray.searchers.errors", "SpaceError"),
    ("dpray.trainers.checkpoints", "CheckpointConflict"),
    ("dpray.trainers.export", "ModelRefused"),
    ("dpray.experiments.ui", "UiError"),
    ("dpray.experiments.engine", "ClusterUnreachable"),
    ("dpray.experiments.nodes", "NodesDiffer"),
    ("dpray.experiments.submit", "SubmitError"),
)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
