"""A table as text and as a plot. Accuracies of public data are shown as they are, and both say so.

| column   | what is chosen                                                                          |
|----------|------------------------------------------------------------------------------------------|
| OPT      | the best candidate of the grid, by the very accuracies that are shown: nobody can know it |
| grid     | one of the grid at random (the paper's RANDGUESS): the mean                               |
| sane     | one of `grid.SANE` at random: the mean                                                    |
| ε        | what the vote chose                                                                       |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.dp_hype.grid import SANE
from dpray.experiments.papers.dp_hype.tables import EPSILONS, Choice, Table, Worth
from dpray.experiments.papers.intervals import Interval, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTE = "data: public, accuracies shown; seeded noise, NOT PRIVATE"
REFERENCE = "k=5"
PAPER: Mapping[tuple[str, str, int], tuple[float, float]] = {
    ("adult", "iid", 100): (0.851, 0.626),
    ("mnist", "iid", 100): (0.968, 0.322),
    ("mnist", "dir0.5", 100): (0.947, 0.241),
    ("cifar", "iid", 100): (0.603, 0.216),
}
"""OPT and RANDGUESS of the paper, on clients' hold-outs and at its full scale."""
NEAR = 0.01
"""A choice is called good whose accuracy is within this of OPT's."""

Population = tuple[str, str, int]


@dataclass(frozen=True)
class Shown:
    """A population's numbers: accuracies of candidates by seed, and of choices by method and ε, one a run."""

    worth: Mapping[int, NDArray[np.float64]]
    runs: Mapping[tuple[str, float], NDArray[np.float64]]
    short: Mapping[tuple[str, float], NDArray[np.float64]]

    @property
    def best(self) -> Interval:
        """OPT, over seeds."""
        return plain([worth.max() for worth in self.worth.values()])

    @property
    def grid(self) -> Interval:
        """Mean of the grid, over seeds."""
        return plain([worth.mean() for worth in self.worth.values()])

    @property
    def sane(self) -> Interval:
        """Mean of the sane candidates, over seeds."""
        return plain([worth[list(SANE)].mean() for worth in self.worth.values()])

    def good(self, method: str, epsilon: float) -> float:
        """Share of the runs whose choice is within `NEAR` of their seed's OPT."""
        return float((self.short[method, epsilon] <= NEAR).mean())


def gathered(worths: Iterable[Worth], choices: Iterable[Choice]) -> dict[Population, Shown]:
    """Both CSVs by population. A seed that was measured and has not voted yet is left out."""
    candidates: dict[Population, dict[int, dict[int, float]]] = {}
    for worth in worths:
        seeds = candidates.setdefault((worth.task, worth.partition, worth.clients), {})
        seeds.setdefault(worth.seed, {})[worth.candidate] = worth.accuracy
    own: dict[Population, list[Choice]] = {}
    for choice in choices:
        own.setdefault((choice.task, choice.partition, choice.clients), []).append(choice)
    found = {}
    for population, seeds in candidates.items():
        voted = {choice.seed for choice in own.get(population, [])}
        arrays = {seed: np.array([seeds[seed][i] for i in sorted(seeds[seed])]) for seed in seeds if seed in voted}
        if not arrays:
            continue
        runs: dict[tuple[str, float], list[float]] = {}
        short: dict[tuple[str, float], list[float]] = {}
        for choice in own[population]:
            accuracies = arrays[choice.seed][list(choice.chosen)]
            runs.setdefault((choice.method, choice.epsilon), []).extend(accuracies)
            short.setdefault((choice.method, choice.epsilon), []).extend(arrays[choice.seed].max() - accuracies)
        found[population] = Shown(
            arrays,
            {key: np.array(values) for key, values in runs.items()},
            {key: np.array(values) for key, values in short.items()},
        )
    return found


def written(table: Table, found: Mapping[Population, Shown]) -> str:
    """Markdown: the vote at every ε, then the other ways to choose."""
    parts = [f"### {table.title}", f"{NOTE}."]
    parts.append(
        "Accuracy of the chosen candidate's federated model on records that did not vote: mean and 95 % interval over "
        "runs (20 votes a seed); of OPT, grid and sane over seeds."
    )
    parts += [_summary(found), "**Ways to choose**, mean accuracy over runs; in brackets the share of good choices."]
    parts += [_methods(population, shown) for population, shown in found.items()]
    return "\n\n".join(parts) + "\n"


def _summary(found: Mapping[Population, Shown]) -> str:
    head = "| partition | n | seeds | OPT | grid | sane | paper's OPT, grid |"
    lines = [head + "".join(f" ε = {_named(epsilon)} |" for epsilon in EPSILONS), "|---" * (7 + len(EPSILONS)) + "|"]
    for (task, partition, clients), shown in found.items():
        paper = PAPER.get((task, partition, clients))
        cells = [
            partition,
            str(clients),
            str(len(shown.worth)),
            *(cell(interval) for interval in (shown.best, shown.grid, shown.sane)),
            "" if paper is None else f"{paper[0]:.3f}, {paper[1]:.3f}",
            *(_run_cell(shown, REFERENCE, epsilon) for epsilon in EPSILONS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _methods(population: Population, shown: Shown) -> str:
    _, partition, clients = population
    methods = list(dict.fromkeys(method for method, _ in shown.runs))
    lines = [
        f"*{partition}, n = {clients}*",
        "",
        "| method |" + "".join(f" ε = {_named(epsilon)} |" for epsilon in EPSILONS),
        "|---" * (1 + len(EPSILONS)) + "|",
    ]
    for method in methods:
        cells = [
            f"{shown.runs[method, epsilon].mean():.3f} ({shown.good(method, epsilon):.2f})" for epsilon in EPSILONS
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _run_cell(shown: Shown, method: str, epsilon: float) -> str:
    runs = shown.runs.get((method, epsilon))
    return "" if runs is None else cell(plain(runs))


def cell(interval: Interval, *, signed: bool = False) -> str:
    """A mean with its interval, if it has one; with its sign where it is a difference."""
    form = "+.3f" if signed else ".3f"
    if math.isnan(interval.low):
        return f"{interval.mean:{form}}"
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _named(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


_SHOWN = (
    ("k=5", "tab:blue", "o-"),
    ("k=1", "tab:cyan", "s--"),
    ("k=5, by loss", "tab:purple", "*-"),
    ("top scores", "tab:orange", "^:"),
)
_MORE = (("winner only, same μ", "tab:green", "x-."), ("all scores", "tab:red", "v:"), ("subsets", "tab:brown", "d:"))


def draw(table: Table, found: Mapping[Population, Shown], place: Path) -> None:
    """The table as a PNG: accuracy against ε, a panel a population."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(found))
    lines = math.ceil(len(found) / columns)
    figure = Figure(figsize=(1 + 3.6 * columns, 1.1 + 2.7 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes, (population, shown) in zip(panels, found.items(), strict=False):
        _panel(axes, population, shown)
    for axes in panels[::columns]:
        axes.set_ylabel("accuracy", fontsize=7)
    for axes in panels[len(found) :]:
        axes.axis("off")
    drawn = {line.get_label(): line for axes in panels for line in axes.get_lines()}  # not every panel has every method
    figure.legend(handles=list(drawn.values()), fontsize=7, loc="outside lower center", ncols=5)
    figure.suptitle(f"{table.title} ({NOTE})", fontsize=9)
    figure.savefig(place, dpi=80)


def _panel(axes: Axes, population: Population, shown: Shown) -> None:
    places = range(len(EPSILONS))
    levels = (("OPT", shown.best, "-"), ("sane, at random", shown.sane, "--"), ("grid, at random", shown.grid, ":"))
    for label, interval, style in levels:
        axes.axhline(interval.mean, color="grey", linestyle=style, linewidth=1, label=label)
    for method, colour, style in (*_SHOWN, *_MORE):
        if (method, math.inf) not in shown.runs:
            continue
        intervals = [plain(shown.runs[method, epsilon]) for epsilon in EPSILONS]
        axes.plot(
            places, [each.mean for each in intervals], style, color=colour, markersize=3, linewidth=1, label=method
        )
        if method == REFERENCE:
            low, high = [each.low for each in intervals], [each.high for each in intervals]
            axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set_xticks(places, [_named(epsilon) for epsilon in EPSILONS], fontsize=7)
    axes.tick_params(labelsize=7)
    axes.set_xlabel("ε", fontsize=7)
    _, partition, clients = population
    axes.set_title(f"{partition}, n = {clients}", fontsize=8)


def order(found: Mapping[Population, Shown]) -> dict[Population, Shown]:
    """iid first, then from weak to strong skew; few clients before many."""

    def place(population: Population) -> tuple[float, int]:
        _, partition, clients = population
        return (-math.inf if partition == "iid" else -float(partition.removeprefix("dir")), clients)

    return {population: found[population] for population in sorted(found, key=place)}
