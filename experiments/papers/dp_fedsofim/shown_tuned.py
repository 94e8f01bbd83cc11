"""Table (b) as text and as a plot: every method with settings of its own, found with the same number of trials."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from dpray.experiments.papers.dp_fedsofim.compared import (
    NOTE,
    Cells,
    accuracies,
    cells,
    epsilon_name,
    names,
    pairs,
    points,
    table,
)
from dpray.experiments.papers.dp_fedsofim.data import TASKS
from dpray.experiments.papers.dp_fedsofim.methods import REFERENCE
from dpray.experiments.papers.dp_fedsofim.noise import DELTA
from dpray.experiments.papers.dp_fedsofim.shown import STYLES, against_epsilon, panels
from dpray.experiments.papers.dp_fedsofim.tables import EPSILONS, NONE, TRIALS, Row, Tuned
from dpray.platform.privacy import gdp

_STYLES = {
    REFERENCE: STYLES[REFERENCE],
    "momentum": ("grey", "s:"),
    "normalised momentum": ("tab:pink", "s--"),
    "FedAdam": ("tab:red", "*-"),
    **{name: style for name, style in STYLES.items() if name.startswith(("SOFIM", "FedFC", "SCAFFOLD"))},
}


def finals(rows: Sequence[Tuned]) -> list[Row]:
    """The final trainings, as rows of table (a) without curves."""
    return [
        Row(row.task, "tuned", row.method, row.regime, row.clients, row.partition, row.epsilon, row.seed, row.accuracy)
        for row in rows
        if row.final
    ]


def written(rows: Sequence[Tuned]) -> str:
    """Markdown: a section a place, then the settings that were chosen."""
    parts = [
        f"### Every method tuned alike: {TRIALS} trials each, T = 70",
        f"{NOTE}.",
        "Test accuracy in per cent of the best trial's settings, trained on the whole training set: mean ± half of the "
        "95 % interval over seeds. Trials were scored on records held out of the training set, once each, with a seed "
        "of their own. Differences are in points, paired by seed; bold: the interval leaves out 0.",
        f"{len(rows)} trainings, {sum(row.seconds for row in rows):.0f} s of processor time.",
        cost(),
    ]
    for place, cell in cells(finals(rows)).items():
        parts.append(f"#### {TASKS[place.task].title}, {place.title}")
        parts += _sections(cell)
    parts += ["#### Chosen settings", _chosen(rows)]
    return "\n\n".join(parts) + "\n"


def cost() -> str:
    """What a search of this size would be charged, had its data been private."""
    trainings = TRIALS + 1
    charged = []
    for epsilon in EPSILONS:
        if not math.isinf(epsilon):
            mu = gdp.mu(epsilon, DELTA)
            whole = mu * math.sqrt(trainings)
            charged.append(f"ε = {epsilon:g} (μ = {mu:.3f}) → {gdp.epsilon(whole, DELTA):.1f} (μ = {whole:.3f})")
    return (
        f"**Tuning is on public data here, and not in the ε shown.** Charged, {TRIALS} trials and the final training "
        f"are {trainings} trainings, μ·√{trainings} in all: {'; '.join(charged)}."
    )


def _sections(cell: Cells) -> list[str]:
    shown = names(cell)
    differences = {
        f"{name} − {REFERENCE}": [points(each) for each in pairs(cell, name)] for name in shown if name != REFERENCE
    }
    for other in ("momentum", "FedAdam", "SOFIM gradient"):
        differences[f"SOFIM momentum − {other}"] = [points(each) for each in pairs(cell, "SOFIM momentum", other)]
    return [table("accuracy", accuracies(cell)), table("difference", differences)]


def _chosen(rows: Sequence[Tuned]) -> str:
    lines = ["| task | regime, n | partition | ε | method | settings | held-out accuracy |", "|---" * 7 + "|"]

    def key(row: Tuned) -> tuple[object, ...]:
        return row.task, row.regime, row.clients, row.partition, row.epsilon, row.method

    worth = {(*key(row), row.trial): row.accuracy for row in rows if not row.final}
    for row in {key(row): row for row in rows if row.final}.values():
        config = ", ".join(f"{name} {value:g}" for name, value in json.loads(row.config).items())
        where = "no noise" if row.regime == NONE else f"{row.regime}, {row.clients}"
        lines.append(
            f"| {row.task} | {where} | {row.partition} | {epsilon_name(row.epsilon)} | {row.method} | {config} | "
            f"{100 * worth[*key(row), row.trial]:.1f} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Tuned], place: Path) -> None:
    """Accuracy against ε, a panel a place."""
    panels(cells(finals(rows)), place, against_epsilon(_STYLES), f"Test accuracy (%), all methods tuned alike ({NOTE})")
