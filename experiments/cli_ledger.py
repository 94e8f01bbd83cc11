"""`dpray ledger create|show|amend|verify|backup|restore`: the account, outside of any run."""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpray.platform.privacy import Budget
    from dpray.platform.privacy.ledger import Head, Ledger

ledger_app = typer.Typer(help="The privacy accounts: create, show, amend, verify, back up.", no_args_is_help=True)

Population = Annotated[str, typer.Argument(help="Name of the population: the people whose data it is.")]
Url = Annotated[str, typer.Option("--ledger", help="sqlite:///PATH or postgresql://HOST/NAME.")]
Unit = Annotated[str, typer.Option(help="What the account protects: record, user or client.")]
Epsilon = Annotated[str, typer.Option(help="Lifetime ε; inf only together with --non-private.")]
Delta = Annotated[str, typer.Option(help="Lifetime δ, well below 1/records.")]
Kind = Annotated[
    str, typer.Option(help="gdp: exact μ²; pld: composed events, what recipes with training.sampling need.")
]
NonPrivate = Annotated[bool, typer.Option("--non-private", help="Admit releases without noise. Protects nobody.")]
_DEFAULT = "sqlite:///dpray-ledger.db"


@ledger_app.command()
def create(
    population: Population,
    epsilon: Epsilon,
    delta: Delta,
    unit: Unit = "record",
    records_per_client: Annotated[int | None, typer.Option(help="Declared public maximum.")] = None,
    records_per_user: Annotated[int | None, typer.Option(help="Declared public maximum.")] = None,
    non_private: NonPrivate = False,
    kind: Kind = "gdp",
    ledger: Url = _DEFAULT,
) -> None:
    """Open an account for a population with its lifetime budget."""
    with _refusing():
        budget = _budget(epsilon, delta, non_private)
        checked = _unit(unit)
        _check_kind(kind, budget)
        with _open(ledger, create=True) as book:
            people = book.population(
                population, records_per_client=records_per_client, records_per_user=records_per_user
            )
            account = people.account(checked, budget, kind=kind)
            typer.echo(f"Population {population}, unit {account.unit}: {account.budget}, kind {kind}, in {book.url}.")


@ledger_app.command()
def show(
    population: Annotated[str | None, typer.Argument(help="One population only.")] = None,
    run: Annotated[str | None, typer.Option(help="One run's lines only.")] = None,
    ledger: Url = _DEFAULT,
) -> None:
    """Print the statement of every account."""
    with _refusing():
        from rich.console import Console

        from dpray.experiments import report

        console = Console(highlight=False)
        with _open(ledger) as book:
            people = [each for each in book.populations() if population in (None, each.name)]
            if not people:
                named = f"population {population!r}" if population else "population"
                raise _refusal(f"There is no {named} in {book.url}. Open one with `dpray ledger create`.")
            for each in people:
                if each.declaration is not None:
                    bound = report.settings(each.declaration)
                    console.print(f"Population {each.name} is bound to {bound}\n", markup=False)
                for account in each.accounts():
                    console.print(report.statement(account.statement(run).as_dict()))
                    console.print()


@ledger_app.command()
def amend(
    population: Population,
    epsilon: Epsilon,
    delta: Delta,
    reason: Annotated[str, typer.Option(help="Why; readers of the statement will judge it.")],
    unit: Unit = "record",
    non_private: NonPrivate = False,
    ledger: Url = _DEFAULT,
) -> None:
    """Put another budget in force. It is recorded for ever, as a new claim."""
    with _refusing():
        budget, checked = _budget(epsilon, delta, non_private), _unit(unit)
        with _open(ledger) as book:
            account = book.population(population).account(checked).amend(budget, reason)
            claims = len(account.statement().claims)
            typer.echo(f"Population {population}, unit {account.unit}: {account.budget}, claim {claims}.")


Anchor = Annotated[list[str] | None, typer.Option(help="A head kept elsewhere, SEQUENCE:DIGEST; repeat for several.")]
Tracking = Annotated[str | None, typer.Option(help="MLflow's store, whose anchors are used too.")]
Experiment = Annotated[str, typer.Option(help="MLflow's experiment with this ledger's runs.")]


@ledger_app.command()
def verify(
    anchor: Anchor = None,
    tracking: Tracking = None,
    experiment: Experiment = "dpray",
    ledger: Url = _DEFAULT,
) -> None:
    """Check the whole ledger for damage, tampering and a restored old copy."""
    with _refusing():
        heads = [_head(text) for text in anchor or []]
        with _open(ledger) as book:
            heads += _anchors(tracking, experiment, book) if tracking else []
            problems = book.verify(heads)
            head = book.head()
        if problems:
            raise _refusal("\n".join(problems))
        checked = f"{len(heads)} anchor{'s' if len(heads) != 1 else ''}"
        typer.echo(f"The ledger is whole: {head.sequence} entries, {checked}, head {head.sequence}:{head.digest}.")
        if not heads:
            typer.echo("Whether it is an older copy was not checked: give --tracking, MLflow's store, or an --anchor.")


@ledger_app.command()
def backup(
    place: Annotated[Path, typer.Argument(help="File to make; it must not be there yet.")], ledger: Url = _DEFAULT
) -> None:
    """Copy the whole ledger into a file, while it may be in use."""
    with _refusing():
        from dpray.platform.privacy.ledger import back_up

        head = back_up(ledger, place)
        typer.echo(f"{place} is the ledger up to entry {head.sequence}. Keep it on another machine, with the clients'")
        typer.echo(f"journals untouched. Head {head.sequence}:{head.digest}.")


@ledger_app.command()
def restore(
    backup: Annotated[Path, typer.Argument(help="File that `dpray ledger backup` made.")],
    anchor: Anchor = None,
    tracking: Tracking = None,
    experiment: Experiment = "dpray",
    ledger: Url = _DEFAULT,
) -> None:
    """Make a ledger of a backup, where there is none; one older than its anchors is refused."""
    with _refusing():
        from dpray.platform.privacy.ledger import restore as put_back

        heads = [_head(text) for text in anchor or []]
        if tracking:
            with _open(f"sqlite:///{backup.expanduser().absolute()}") as book:
                heads += _anchors(tracking, experiment, book)
        head = put_back(backup, ledger, heads)
        typer.echo(f"The ledger ends at entry {head.sequence}; {len(heads)} anchors were asked.")
        if not heads:
            typer.echo("Whether it is an older copy was not checked: give --tracking, MLflow's store, or an --anchor.")
            typer.echo("If it is, what was spent since is missing from it: clients that know more refuse to answer.")


@contextmanager
def _open(url: str, *, create: bool = False) -> Iterator[Ledger]:
    from dpray.platform.privacy.ledger import Ledger

    book = Ledger(url, create=create)
    try:
        yield book
    finally:
        book.close()


def _budget(epsilon: str, delta: str, non_private: bool) -> Budget:
    from dpray.platform.privacy import Budget

    numbers = []
    for name, text in (("--epsilon", epsilon), ("--delta", delta)):
        try:
            numbers.append(float(text))
        except ValueError:
            raise _refusal(f"{name} must be a number, and {text!r} was given.") from None
    if math.isinf(numbers[0]) and numbers[0] > 0 and not non_private:
        raise _refusal("--epsilon inf protects nobody: say so with --non-private.")
    try:
        return Budget(numbers[0], numbers[1], non_private=non_private)
    except ValueError as error:
        raise _refusal(str(error)) from None


def _unit(unit: str) -> str:
    if unit not in ("record", "user", "client"):
        raise _refusal(f"--unit must be record, user or client, and {unit!r} was given.")
    return unit


def _check_kind(kind: str, budget: Budget) -> None:
    """Before a ledger is made: opening an account checks it again."""
    from dpray.platform.privacy.ledger import LedgerError
    from dpray.platform.privacy.ledger.composing import check_kind

    try:
        check_kind(kind, budget)
    except LedgerError as error:
        raise _refusal(f"--kind: {error}") from None


def _head(text: str) -> Head:
    from dpray.platform.privacy.ledger import Head

    sequence, _, digest = text.partition(":")
    if not sequence.isdigit() or not digest:
        raise _refusal(f"An anchor is SEQUENCE:DIGEST, as `dpray ledger verify` prints it, and {text!r} was given.")
    return Head(int(sequence), digest)


def _anchors(uri: str, experiment: str, book: Ledger) -> list[Head]:
    """Heads that this ledger's runs have left in MLflow."""
    from dpray.platform.privacy.ledger import Head
    from dpray.platform.tracking import Unreachable, anchors

    runs = [name for population in book.populations() for name in population.runs()]
    try:
        found = {*anchors(uri, experiment, runs), *anchors(uri, experiment, ledger=book.identity)}
    except Unreachable as error:
        raise _refusal(f"{error} Leave out --tracking to verify without its anchors.") from None
    return [Head(*each) for each in sorted(found)]


def _refusal(text: str) -> Exception:
    from dpray.experiments.reading import RecipeError

    return RecipeError(text)


@contextmanager
def _refusing() -> Iterator[None]:
    from dpray.experiments.cli import refusing

    with refusing():
        yield
