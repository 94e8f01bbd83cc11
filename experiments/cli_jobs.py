"""`dpray submit|status|logs|stop`: runs as jobs of a Ray cluster, asked over the network.

The exit code of `dpray submit` and of `dpray logs --follow` is that of the run: 0, 2, 3 as everywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")]
Job = Annotated[str, typer.Argument(help="Name of a job, as `dpray submit` printed it.")]
Server = Annotated[str, typer.Option(help="The cluster's job server: http://HEAD:8265.", envvar="DPRAY_ADDRESS")]
LedgerPlace = Annotated[
    str | None, typer.Option(help="Instead of the recipe's: sqlite:////PATH or postgresql://USER@HOST/NAME.")
]
TrackingPlace = Annotated[
    str | None, typer.Option(help="Instead of the recipe's: http://HOST:PORT of an MLflow server.")
]
_LOCAL = "http://127.0.0.1:8265"


def submit(
    recipe: Recipe,
    address: Server = _LOCAL,
    name: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's.")] = None,
    workspace: Annotated[str, typer.Option(help="Folder of the runs, on the head.")] = "~/dpray",
    ledger: LedgerPlace = None,
    tracking: TrackingPlace = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return once the job is accepted.")] = False,
) -> None:
    """Run a recipe on a cluster and follow it; the same name again goes on where it stopped. Exits as the run does."""
    with _refusing():
        from dpray.experiments import places
        from dpray.experiments import submit as jobs
        from dpray.experiments.runs import RunDirectory, find_recipe

        found = places.placed(find_recipe(recipe), ledger, tracking)
        where = jobs.Where(workspace, name or found.name)
        RunDirectory(Path(workspace), where.name)  # refuses a name that cannot be one
        job = jobs.submit(found, where, address)
        typer.echo(f"Job {job} at {address}.")
        if no_wait:
            return
        _follow(job, address)


def status(job: Job, address: Server = _LOCAL) -> None:
    """Print a job's state."""
    with _refusing():
        from dpray.experiments import submit as jobs

        state, message = jobs.status(job, address)
        typer.echo(f"{job}: {state}. {message}".rstrip())


def logs(
    job: Job,
    address: Server = _LOCAL,
    follow: Annotated[bool, typer.Option("--follow", help="Until it has ended; then exit as the run does.")] = False,
) -> None:
    """Print what a job has printed."""
    with _refusing():
        from dpray.experiments import submit as jobs

        if follow:
            _follow(job, address)
        else:
            typer.echo(jobs.logs(job, address), nl=False)


def stop(job: Job, address: Server = _LOCAL) -> None:
    """End a job. What was charged stands; submitting the same recipe and name goes on with its run."""
    with _refusing():
        from dpray.experiments import submit as jobs

        typer.echo(f"{job} is {'being stopped' if jobs.stop(job, address) else 'not running'}.")


def _follow(job: str, address: str) -> None:
    from dpray.experiments import cli
    from dpray.experiments import submit as jobs

    try:
        code = jobs.follow(job, address, lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        typer.echo(
            f"\nNo longer followed; the job goes on. `dpray logs {job} --follow --address {address}` follows it again, "
            f"`dpray stop {job} --address {address}` ends it."
        )
        raise typer.Exit(130) from None
    except jobs.JobLost as lost:
        cli.say(str(lost))
        raise typer.Exit(cli.STOPPED) from None
    raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (submit, status, logs, stop):
        app.command()(command)


def _refusing() -> AbstractContextManager[object]:
    from dpray.experiments.cli import refusing

    return refusing()
