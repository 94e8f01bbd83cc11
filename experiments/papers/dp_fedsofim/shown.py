"""Table (a) as text and as plots: accuracy against ε, and learning curves at ε = 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpray.experiments.papers.dp_fedsofim.compared import (
    NOTE,
    Cells,
    Place,
    accuracies,
    accuracy,
    cells,
    difference,
    earlier,
    epsilon_name,
    names,
    pairs,
    points,
    rounds_earlier,
    table,
)
from dpray.experiments.papers.dp_fedsofim.data import TASKS, WIDTH
from dpray.experiments.papers.dp_fedsofim.methods import MATCHED, REFERENCE, paper
from dpray.experiments.papers.dp_fedsofim.noise import Condition, gradient_std, reversal
from dpray.experiments.papers.dp_fedsofim.tables import EPSILONS, Row
from dpray.platform.privacy.mechanisms import Regime
from dpray.trainers.sofim import SOFIMSettings

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Panel = Callable[["Axes", Cells], None]
"""Draws a place."""

PAIRS = (
    ("SOFIM gradient", REFERENCE),
    ("SOFIM gradient, debiased", REFERENCE),
    ("SOFIM momentum", REFERENCE),
    ("SOFIM momentum, corrected", REFERENCE),
    (MATCHED, REFERENCE),
    ("SOFIM gradient", MATCHED),
    ("SOFIM gradient, debiased", MATCHED),
    ("SOFIM momentum", MATCHED),
    ("SOFIM momentum", "momentum, η/ρ"),
    ("SOFIM gradient", "FedFC"),
    ("SOFIM momentum", "FedFC"),
    ("SOFIM momentum", "SOFIM gradient"),
    ("SOFIM momentum", "SCAFFOLD, iid"),
    ("SOFIM momentum", "SCAFFOLD, dirichlet"),
)
STYLES: Mapping[str, tuple[str, str]] = {
    REFERENCE: ("black", "o-"),
    MATCHED: ("black", "o:"),
    "momentum, η/ρ": ("grey", "s:"),
    "SOFIM gradient": ("tab:blue", "^-"),
    "SOFIM gradient, debiased": ("tab:cyan", "^--"),
    "SOFIM momentum": ("tab:orange", "v-"),
    "SOFIM momentum, corrected": ("tab:brown", "v--"),
    "FedFC": ("tab:green", "D-"),
    "SCAFFOLD, iid": ("tab:purple", "x-"),
    "SCAFFOLD, dirichlet": ("tab:purple", "x:"),
}


def written(rows: Sequence[Row]) -> str:
    """Markdown: a section a place."""
    found = cells(rows)
    parts = [
        "### The paper's own settings: η = .1, C = 10, β = .9, ρ = .5, T = 70",
        f"{NOTE}.",
        "Test accuracy in per cent after 70 rounds, mean ± half of the 95 % interval over seeds. Differences are in "
        "points, paired by seed; bold: the interval leaves out 0. Rounds: how much earlier than DP-FedGD a method has "
        "DP-FedGD's final accuracy. Methods without a partition are the same for iid and Dirichlet(.5).",
        f"{len(rows)} trainings, {sum(row.seconds for row in rows):.0f} s of processor time.",
    ]
    for place, cell in found.items():
        parts.append(f"#### {TASKS[place.task].title}, {place.title}")
        parts += [*sections(cell), table("noise", {"βf/ρ of SOFIM gradient, uphill above 1": _reversals(place)})]
    return "\n\n".join(parts) + "\n"


def sections(cell: Cells) -> list[str]:
    """Accuracies, differences and rounds of a place."""
    differences = {f"{one} − {other}": [points(each) for each in pairs(cell, one, other)] for one, other in PAIRS}
    rounds = {}
    for name in names(cell):
        if name != REFERENCE and "means" not in name:
            found = [(cell.get((name, each), {}), cell.get((REFERENCE, each), {})) for each in EPSILONS]
            rounds[name] = [earlier(rounds_earlier(*each)) for each in found]
    return [table("accuracy", accuracies(cell)), table("difference", differences), table("rounds earlier", rounds)]


def _reversals(place: Place) -> list[str]:
    task = TASKS[place.task]
    settings, condition = paper(task)["SOFIM gradient"], Condition(1.0, Regime(place.regime), place.clients)
    assert isinstance(settings, SOFIMSettings)
    d, N = (WIDTH + 1) * task.classes, task.records
    conditions = [replace(condition, epsilon=epsilon) for epsilon in EPSILONS]
    stds = [float(gradient_std(settings, each, d, N, 0.0)[0]) / N for each in conditions]
    return [f"{reversal(settings, s, d):.2g}" for s in stds]


def draw(rows: Sequence[Row], place: Path) -> None:
    """Accuracy against ε, a panel a place."""
    panels(cells(rows), place, against_epsilon(STYLES), f"Test accuracy (%), the paper's settings ({NOTE})")


def draw_differences(rows: Sequence[Row], place: Path) -> None:
    """Accuracy beside DP-FedGD's, paired by seed; what is far below is cut off."""

    def panel(axes: Axes, cell: Cells) -> None:
        axes.axhline(0, color="black", linewidth=1)
        against_epsilon({name: style for name, style in STYLES.items() if name != REFERENCE}, REFERENCE)(axes, cell)
        axes.set_ylim(-8, 5)

    title = f"Points above DP-FedGD, the paper's settings; below −8 cut off ({NOTE})"
    panels(cells(rows), place, panel, title)


def against_epsilon(styles: Mapping[str, tuple[str, str]], reference: str | None = None) -> Panel:
    """Draws accuracies, or with a reference the differences to it, with their intervals."""

    def panel(axes: Axes, cell: Cells) -> None:
        for shift, (name, (colour, style)) in enumerate(styles.items()):
            shown = {}
            for index, each in enumerate(EPSILONS):
                own = cell.get((name, each), {})
                interval = accuracy(own) if own else None
                if own and reference is not None:
                    interval = difference(own, cell.get((reference, each), {}))
                if interval is not None:
                    shown[index] = interval
            if not shown:
                continue
            places = np.array(list(shown)) + 0.04 * (shift - len(styles) / 2)
            half = np.nan_to_num([each.high - each.mean for each in shown.values()])
            means = [each.mean for each in shown.values()]
            axes.errorbar(places, means, half, fmt=style, color=colour, markersize=3, linewidth=1, label=name)
        axes.set_xticks(range(len(EPSILONS)), [epsilon_name(each) for each in EPSILONS], fontsize=7)
        axes.set_xlabel("ε", fontsize=7)

    return panel


def draw_curves(rows: Sequence[Row], place: Path, epsilon: float = 1.0) -> None:
    """Accuracy by round, mean over seeds with its interval, a panel a place."""

    def panel(axes: Axes, cell: Cells) -> None:
        for name, (colour, style) in STYLES.items():
            by_seed = cell.get((name, epsilon))
            if not by_seed:
                continue
            curves = 100 * np.stack([row.rounds for row in by_seed.values()])
            t = np.arange(1, curves.shape[1] + 1)
            line = style.lstrip("os^vDx")
            axes.plot(t, curves.mean(axis=0), line, color=colour, linewidth=1, label=name)
            if name in (REFERENCE, "SOFIM gradient", "SOFIM momentum"):
                axes.fill_between(t, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel("round", fontsize=7)

    title = f"Test accuracy (%) by round at ε = {epsilon:g}; bands: from the worst to the best seed ({NOTE})"
    panels(cells(rows), place, panel, title)


def panels(found: Mapping[Place, Cells], place: Path, panel: Panel, title: str) -> None:
    """A PNG with a row a task and a panel a place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(each.task for each in found))
    columns = max(sum(each.task == task for each in found) for task in tasks)
    figure = Figure(figsize=(1 + 3.8 * columns, 0.9 + 3.0 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(tasks), columns, squeeze=False)
    entries: dict[str, Artist] = {}
    for line, task in zip(grid, tasks, strict=True):
        here = sorted((each for each in found if each.task == task), key=lambda each: (each.regime, each.clients))
        for axes in line[len(here) :]:
            axes.axis("off")
        for axes, each in zip(line, here, strict=False):
            panel(axes, found[each])
            axes.tick_params(labelsize=7)
            axes.set_title(f"{TASKS[task].title}\n{each.regime}, n = {each.clients}", fontsize=7)
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
    figure.legend(list(entries.values()), list(entries), fontsize=7, loc="outside right upper")
    figure.suptitle(title, fontsize=8)
    figure.savefig(place, dpi=90)
