"""What a run says at its end, and what an account says at any time: tables for a terminal and plain text for a file.

Everything is drawn from the statement's plain form (`Statement.as_dict`), so that a stored outcome prints the same as a
fresh one. ε does not add up: beside every ε stands the share of the budget's μ², which does.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpray.experiments.figures import number, percent
from dpray.experiments.kinds import AnyRecipe
from dpray.experiments.outcome import Outcome
from dpray.experiments.runs import RunDirectory
from dpray.experiments.sections import Tracking
from dpray.platform.privacy.figures import significant
from dpray.platform.tracking.address import check_uri, shown

NOT_PRIVATE = "NOT PRIVATE"
_WIDTH = 100
_NONE = "–"
_WHY_NONE = {
    "pld": "composed events have no μ and no share of μ², and what is left depends on what it is spent on.",
    "gdp": "there is no limit to have a share of.",
}
"""Why a statement has no number in a place, by the account's kind."""


def outcome(done: Outcome) -> RenderableType:
    """The final report of a cohort's run."""
    facts = pairs(
        ("Winner", settings(done.winner) if done.winner else "(no search: settings as given)"),
        ("Accuracy", f"{done.accuracy:.3f} on {done.evaluation} records declared public; chance {done.chance:.3f}"),
        ("Search", done.search) if done.search else None,
        ("Training", done.training),
        ("Cohort", f"{done.clients} clients, {done.records} records"),
    )
    return Group(stamps(done.stamps), facts, Text(), statement(done.statement))


def where_to_look(recipe: AnyRecipe, files: RunDirectory, uri: str | None, delivered: bool) -> RenderableType:
    """How to see more."""
    rows = [("Again", f"dpray report {files.name}"), ("Account", f"dpray ledger show {recipe.population.name}")]
    if uri is not None:
        store = "" if uri == check_uri(Tracking().uri or "") else f" --uri {shown(uri)}"
        waits = "" if delivered else f" (not all has reached MLflow; `dpray resume {files.name}` sends the rest)"
        rows.append(("Look", f"dpray ui{store}{waits}"))
    return pairs(*rows, ("Files", str(files.path)))


def stamps(found: Iterable[str]) -> RenderableType:
    """What must not be overlooked, in bold red; nothing where there is nothing."""
    return Text("\n".join(found), style="bold red")


def statement(said: Mapping[str, Any]) -> RenderableType:
    """The statement of an account: budget, spends, what is left, trust, claims, assumptions."""
    parts: list[RenderableType] = []
    if said["stamps"]:
        parts.append(stamps(said["stamps"]))
    parts += [
        Text(
            f"Account of population {said['population']}: unit {said['unit']}, {_budget(said)}, {said['relation']}",
            "bold",
        ),
        _spends(said),
        Text("ε does not add up over rows, shares of μ² do; each ε stands alone at the account's δ.", "dim"),
    ]
    if _without_shares(said):
        parts.append(Text(f"{_NONE}: {_WHY_NONE[said['kind']]}", "dim"))
    parts += [
        pairs(("Trust", "; ".join(said["trust"]) or "nothing released yet")),
    ]
    if len(said["claims"]) > 1 or any(claim["releases_before"] for claim in said["claims"]):
        parts.append(_claims(said["claims"]))
    parts.append(Text("Assumptions", "bold"))
    parts.append(pairs(*((" ·", text) for text in said["assumptions"])))
    return Group(*parts)


def statement_text(said: Mapping[str, Any]) -> str:
    """The statement as plain text, for a file."""
    return plain(statement(said))


def plain(renderable: RenderableType) -> str:
    """Draw without colours, 100 columns wide."""
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _spends(said: Mapping[str, Any]) -> Table:
    drawn = table("", "releases", "unit", "share of μ²", "ε alone", "μ")
    one_run = said["run"] is not None
    for line in _merged(said["lines"]):
        name = line["label"] if one_run else f"{line['run']}: {line['label']}"
        lost = f" ({line['lost']} lost)" if line["lost"] else ""
        drawn.add_row(name, f"{line['steps']}{lost}", line["unit"], *_amount(line["amount"]))
    if one_run:
        drawn.add_section()
        drawn.add_row("total", "", "", *_amount(said["run_spent"]))
        if said["run_spent"]["quanta"] != said["spent"]["quanta"]:
            drawn.add_row("total of all runs", "", "", *_amount(said["spent"]))
    else:
        drawn.add_section()
        drawn.add_row("total", "", "", *_amount(said["spent"]))
    if said["reserved"]["quanta"]:
        drawn.add_row("set aside by plans", "", "", *_amount(said["reserved"]))
    drawn.add_row("left", "", "", *_amount(said["remaining"], up=False), style="bold")
    share = _NONE if _without_shares(said) else "100.0 %"
    drawn.add_row("budget", "", "", share, number(said["epsilon"]), _or_none(said["mu"]))
    return drawn


def _merged(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Search before training, as they happened; other labels after them."""
    order = {"search": 0, "training": 1}
    return sorted(lines, key=lambda line: (line["run"], order.get(line["label"], 2), line["label"]))


def _claims(claims: Sequence[Mapping[str, Any]]) -> RenderableType:
    drawn = table("claim", "ε", "δ", "made after", "reason")
    for index, claim in enumerate(claims, 1):
        epsilon = "∞ NOT PRIVATE" if claim["non_private"] else number(claim["epsilon"])
        drawn.add_row(
            str(index), epsilon, significant(claim["delta"], 6), f"{claim['releases_before']} releases", claim["reason"]
        )
    return Group(Text("Claims (a budget raised after releases were seen is a new claim)", "bold"), drawn)


def table(*columns: str) -> Table:
    """An empty table, text to the left and numbers to the right."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index == 0 or column in ("unit", "reason") else "right")
    return drawn


def pairs(*rows: tuple[str, str] | None) -> Table:
    """Names in bold with what belongs to them; None is left out."""
    drawn = Table.grid(padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for row in rows:
        if row is not None:
            drawn.add_row(*row)
    return drawn


def _budget(said: Mapping[str, Any]) -> str:
    epsilon = "ε = ∞ (NOT PRIVATE)" if said["non_private"] else f"ε = {number(said['epsilon'])}"
    return f"{epsilon} at δ = {significant(float(said['delta']), 6)}"


def _without_shares(said: Mapping[str, Any]) -> bool:
    return bool(said["non_private"]) or said["kind"] == "pld"


def _amount(amount: Mapping[str, Any], *, up: bool = True) -> tuple[str, str, str]:
    share = float(amount["share"])
    shown = _NONE if math.isnan(share) else percent(share, up=up)
    return (shown, _or_none(amount["epsilon"], up=up), _or_none(amount["mu"], up=up))


def _or_none(value: Any, *, up: bool = True) -> str:
    return _NONE if math.isnan(float(value)) else number(value, up=up)


def settings(config: Mapping[str, Any]) -> str:
    """Settings in one line."""
    return ", ".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}" for key, value in config.items()
    )
