"""The private trainings as text and as a plot: the vote beside what else the same budget could have been spent on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dpray.experiments.papers.dp_hype.private import GRID, SHARE, Trained
from dpray.experiments.papers.dp_hype.shown import NOTE, cell
from dpray.experiments.papers.intervals import plain

Accuracies = dict[int, float]
"""By seed."""


def compared(rows: Iterable[Trained]) -> dict[tuple[str, float], dict[str, Accuracies]]:
    """Accuracies by (partition, ε), by what was done, by seed.

    Done: `vote`; `default`; `at random`, the mean over the grid, that is, the expectation of a candidate drawn without
    looking; `OPT`, the best of the grid, which nobody can know.
    """
    found: dict[tuple[str, float], dict[str, Accuracies]] = {}
    grids: dict[tuple[str, float, int], list[float]] = {}
    for row in rows:
        done = found.setdefault((row.partition, row.budget), {"vote": {}, "at random": {}, "default": {}, "OPT": {}})
        if row.method in ("vote", "default"):
            done[row.method][row.seed] = row.accuracy
        else:
            grids.setdefault((row.partition, row.budget, row.seed), []).append(row.accuracy)
    for (partition, budget, seed), accuracies in grids.items():
        if len(accuracies) == len(GRID):
            found[partition, budget]["at random"][seed] = float(np.mean(accuracies))
            found[partition, budget]["OPT"][seed] = max(accuracies)
    return found


def written(rows: Sequence[Trained]) -> str:
    """Markdown: accuracies, and differences to the vote in pairs."""
    about = (
        "Accuracy of the final private model on public test records: mean and 95 % interval over seeds (population, "
        "rehearsals, vote and training anew for each). Differences are paired by seed; above 0: the vote is better."
    )
    columns = ("vote", "at random", "default", "OPT", "vote − at random", "vote − default", "vote − OPT")
    table = [f"| partition | ε | seeds | {' | '.join(columns)} |", "|---" * 10 + "|"]
    for (partition, budget), done in sorted(compared(rows).items(), key=lambda item: (item[0][0] != "iid", item[0])):
        means = [cell(plain(list(values.values()))) if values else "" for values in done.values()]
        against = [_difference(done["vote"], done[name]) for name in ("at random", "default", "OPT")]
        table.append(f"| {partition} | {budget:g} | {len(done['vote'])} | {' | '.join([*means, *against])} |")
    spent = max((row.spent / row.budget for row in rows), default=0.0)
    share = f"The vote has {SHARE:.0%} of μ². No account spent more than {spent:.4g} times its ε."
    title = "### Vote and private training under one budget, Adult"
    return "\n\n".join([title, f"{NOTE}.", about, "\n".join(table), share, _winners(rows)]) + "\n"


def _difference(vote: Mapping[int, float], other: Mapping[int, float]) -> str:
    shared = sorted(set(vote) & set(other))
    return cell(plain([vote[seed] - other[seed] for seed in shared]), signed=True) if shared else ""


def _winners(rows: Sequence[Trained]) -> str:
    lines = ["| partition | ε | seed | winner: η, C | accuracy |", "|---" * 5 + "|"]
    lines += [
        f"| {row.partition} | {row.budget:g} | {row.seed} | {row.learning_rate:g}, {row.clip:g} | {row.accuracy:.3f} |"
        for row in rows
        if row.method == "vote"
    ]
    return "\n".join(lines)


_STYLES = {
    "vote": ("tab:blue", "o-"),
    "at random": ("grey", "s--"),
    "default": ("tab:orange", "^:"),
    "OPT": ("k", "-"),
}


def draw(rows: Sequence[Trained], place: Path) -> None:
    """Accuracy against ε, a panel a partition."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = compared(rows)
    partitions = sorted({partition for partition, _ in found}, key=lambda name: (name != "iid", name))
    figure = Figure(figsize=(1 + 4.2 * len(partitions), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(partitions), squeeze=False, sharey=True)[0]
    for axes, partition in zip(panels, partitions, strict=True):
        budgets = sorted(budget for name, budget in found if name == partition)
        for shift, (method, (colour, style)) in enumerate(_STYLES.items()):
            intervals = [plain(list(found[partition, budget][method].values())) for budget in budgets]
            places = np.arange(len(budgets)) + 0.05 * (shift - 1.5)
            means = np.array([each.mean for each in intervals])
            half = np.nan_to_num([each.high - each.mean for each in intervals])
            axes.errorbar(places, means, half, fmt=style, color=colour, markersize=4, linewidth=1, label=method)
        axes.set_xticks(range(len(budgets)), [f"{budget:g}" for budget in budgets])
        axes.set_xlabel("total ε")
        axes.set_title(f"{partition}, n = 100", fontsize=9)
    panels[0].set_ylabel("accuracy of the private model", fontsize=8)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=4)
    figure.suptitle(f"Vote and private training, Adult\n{NOTE}", fontsize=8)
    figure.savefig(place, dpi=85)
