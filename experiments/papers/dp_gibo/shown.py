"""A table as text and as a plot. Losses are exact: only public data comes here, and both say so."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpray.experiments.papers.dp_gibo.tables import Row, Table
from dpray.experiments.papers.intervals import geometric, paired

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCE = "DP-GIBO noise_aware"
NOTE = "data: public, exact losses shown; seeded noise, NOT PRIVATE"
Losses = dict[str, dict[int, float]]
"""Loss by method and seed."""


def written(table: Table, rows: Sequence[Row], missing: Sequence[str] = ()) -> str:
    """Markdown: a table for each task (and variant) and μ, methods from best to worst."""
    parts = [f"### {table.title}", f"{NOTE}.", *missing]
    if any(row.variant for row in rows):
        parts.append(_ablations(rows))
    else:
        parts += [f"Ratio of losses to {REFERENCE}, above 1: DP-GIBO is better.", _summary(rows)]
        for task in dict.fromkeys(_in_order(row.task for row in rows)):
            own = [row for row in rows if row.task == task]
            parts += [_comparison(task, mu, own) for mu in _mus(own)]
    return "\n\n".join(parts) + "\n"


_SHORT = {
    "DP-GIBO adagrad": "adagrad",
    "DP-GIBO sgd": "sgd",
    "finite differences noise_aware": "finite differences",
    "SPSA noise_aware": "SPSA",
    "private random c=0.5": "private random",
    "private random c=0.5, whole box": "same, whole box",
    "GIBO noise_aware": "*GIBO*",
    "random": "*random*",
    "global BO": "*global BO*",
}
"""Columns of the summary; those in italics are not private."""


def _summary(rows: Sequence[Row]) -> str:
    lines = [f"| task | μ | seeds | {' | '.join(_SHORT.values())} |", "|---" * (len(_SHORT) + 3) + "|"]
    for task in dict.fromkeys(_in_order(row.task for row in rows)):
        own = [row for row in rows if row.task == task]
        for mu in _mus(own):
            losses = by_method(own, mu)
            reference = losses.get(REFERENCE, {})
            cells = [
                _cell(losses[method], reference) if set(losses.get(method, {})) & set(reference) else ""
                for method in _SHORT
            ]
            lines.append(f"| {task} | {mu:g} | {len(reference)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(losses: dict[int, float], reference: dict[int, float]) -> str:
    pairing = paired(losses, reference)
    return f"{pairing.ratio}" + ("" if pairing.seeds == len(reference) else f" ({pairing.seeds} of the seeds)")


def _comparison(task: str, mu: float, rows: Sequence[Row]) -> str:
    losses = by_method(rows, mu)
    reference = losses.get(REFERENCE, {})
    lines = [
        f"**{task}, μ = {mu:g}**",
        "",
        "| method | private | loss | ratio to DP-GIBO noise_aware | worse in | evaluations |",
        "|---|---|---|---|---|---|",
    ]
    private = {row.method: math.isfinite(row.mu) for row in rows}
    evaluations = {row.method: row.evaluations for row in rows}
    for method in sorted(losses, key=lambda name: _ratio(losses[name], reference)):
        ratio, worse = "", ""
        if set(losses[method]) & set(reference):
            pairing = paired(losses[method], reference)
            ratio, worse = str(pairing.ratio), f"{pairing.worse} of {pairing.seeds}"
        if method == REFERENCE:
            ratio, worse = "1", ""
        said = "yes" if private[method] else "" if method == "start" else "no"
        lines.append(
            f"| {method} | {said} | {geometric(list(losses[method].values()))} | {ratio} | {worse} | "
            f"{evaluations[method]} |"
        )
    return "\n".join(lines)


def _ablations(rows: Sequence[Row]) -> str:
    lines = ["| task | variant | method | loss | evaluations |", "|---|---|---|---|---|"]
    grouped: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.task, row.variant, row.method].append(row)
    for (task, variant, method), own in sorted(grouped.items(), key=lambda item: _variant_key(item[0])):
        count = f"{np.mean([row.evaluations for row in own]):.0f}"
        lines.append(f"| {task} | {variant} | {method} | {geometric([row.loss for row in own])} | {count} |")
    return "\n".join(lines)


def by_method(rows: Iterable[Row], mu: float) -> Losses:
    """Losses of the methods at μ, and of those without privacy."""
    found: Losses = defaultdict(dict)
    for row in rows:
        if row.mu == mu or math.isinf(row.mu):
            found[row.method][row.seed] = row.loss
    return dict(found)


def draw(table: Table, rows: Sequence[Row], place: Path) -> None:
    """The table as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(_in_order(row.task for row in rows)))
    if any(row.variant for row in rows):
        figure = Figure(figsize=(12, 3.4 * len(tasks)), layout="constrained")
        FigureCanvasAgg(figure)
        for line, task in zip(figure.subplots(len(tasks), 3, squeeze=False), tasks, strict=True):
            _draw_ablations(list(line), task, [row for row in rows if row.task == task])
    else:
        mus, shown = _mus(rows), [method for method in _ORDER if any(row.method == method for row in rows)]
        figure = Figure(figsize=(3 + 2.6 * len(tasks), 0.6 + 3.6 * len(mus)), layout="constrained")
        FigureCanvasAgg(figure)
        for line, mu in zip(figure.subplots(len(mus), len(tasks), squeeze=False, sharey=True), mus, strict=True):
            for axes, task in zip(line, tasks, strict=True):
                _draw_ratios(axes, task, mu, [row for row in rows if row.task == task], shown)
    figure.suptitle(f"{table.title} ({NOTE})", fontsize=10)
    figure.savefig(place, dpi=85)


_ORDER = (
    *("GIBO noise_aware", "GIBO adagrad", "random", "random, whole box", "global BO"),
    *("DP-GIBO noise_aware", "DP-GIBO adagrad", "DP-GIBO sgd"),
    *("finite differences noise_aware", "finite differences adagrad", "SPSA noise_aware"),
    *("private random c=0.5", "private random c=1"),
    *("private random c=0.5, whole box", "private random c=1, whole box", "start"),
)
_OPEN = 5
"""So many of them, the first ones, are not private."""


def _draw_ratios(axes: Axes, task: str, mu: float, rows: Sequence[Row], shown: Sequence[str]) -> None:
    losses = by_method(rows, mu)
    reference = losses.get(REFERENCE, {})
    axes.axvline(1.0, color="grey", linewidth=0.8)
    for place, method in enumerate(shown):
        if not set(losses.get(method, {})) & set(reference):
            continue
        ratio = paired(losses[method], reference).ratio
        color = "tab:grey" if method in (*_ORDER[:_OPEN], "start") else "tab:blue" if "GIBO" in method else "tab:orange"
        if not math.isnan(ratio.low):
            axes.plot([ratio.low, ratio.high], [place, place], color=color, linewidth=1.5)
        axes.plot(ratio.mean, place, "o", color=color, markersize=4)
    axes.set_xscale("log")
    _plain_ticks(axes)
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_title(f"{task}, μ = {mu:g}", fontsize=9)
    axes.set_xlabel("loss / loss of DP-GIBO noise_aware", fontsize=8)


def _plain_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, given in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if given == "log":
            low, high = axis.get_view_interval()
            fine = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 8.5) if high / low < 8 else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(base=10, subs=fine if high / low < 100 else (1.0,)))
            axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=7)


def _draw_ablations(line: Sequence[Axes], task: str, rows: Sequence[Row]) -> None:
    by_mu, by_bias, by_noise = line
    rows = _relative(rows, "GIBO noise_aware")
    for method in ("DP-GIBO noise_aware", "DP-GIBO adagrad", "private random c=0.5"):
        _curve(by_mu, method, [(row.mu, row) for row in rows if row.variant.startswith("mu=") and row.method == method])
    for method, style in (("GIBO noise_aware", ":"), ("start", "--")):
        found = [row.loss for row in rows if row.method == method]
        if found:
            by_mu.axhline(geometric(found).mean, color="grey", linestyle=style, linewidth=1, label=method)
    _curve(by_bias, REFERENCE, [(row.evaluations, row) for row in rows if row.variant.startswith("bias=")])
    for deviation in sorted({_setting(row, "tau=") for row in rows if row.variant.startswith("tau=")}):
        own = [row for row in rows if row.variant.startswith(f"tau={deviation:g} ")]
        _curve(by_noise, f"evaluations off by {deviation:g}", [(_setting(row, "sigma2="), row) for row in own])
    for axes, label in (
        (by_mu, "μ"),
        (by_bias, "evaluations (bias 6, 3, 1.5, .75, .5)"),
        (by_noise, "σ² of the prior"),
    ):
        axes.set(
            xscale="log",
            yscale="log",
            xlabel=label,
            ylabel="loss / loss of GIBO without noise" if axes is by_mu else "",
        )
        _plain_ticks(axes)
        axes.set_title(task, fontsize=9)
        axes.legend(fontsize=7)


def _relative(rows: Sequence[Row], reference: str) -> list[Row]:
    """Losses as ratios to a method's with the same seed, which takes the spread between seeds out of the intervals."""
    unit = {row.seed: row.loss for row in rows if row.method == reference}
    return [dataclasses.replace(row, loss=row.loss / unit[row.seed]) for row in rows if row.seed in unit]


def _curve(axes: Axes, label: str, points: Sequence[tuple[float, Row]]) -> None:
    grouped: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for x, row in points:
        grouped[row.variant].append((x, row.loss))
    found = sorted((float(np.mean([x for x, _ in own])), geometric([y for _, y in own])) for own in grouped.values())
    if found:
        places = [each for each, _ in found]
        (drawn,) = axes.plot(places, [y.mean for _, y in found], "o-", markersize=3, linewidth=1, label=label)
        axes.fill_between(
            places, [y.low for _, y in found], [y.high for _, y in found], color=drawn.get_color(), alpha=0.15
        )


def _setting(row: Row, name: str) -> float:
    return float(row.variant.split(name)[1].split(" ")[0])


def _mus(rows: Iterable[Row]) -> list[float]:
    return sorted({row.mu for row in rows if math.isfinite(row.mu)}, reverse=True)


def _in_order(tasks: Iterable[str]) -> list[str]:
    """lasso2 before lasso10."""
    return sorted(tasks, key=lambda name: (name.rstrip("0123456789"), int("".join(filter(str.isdigit, name)) or 0)))


def _ratio(losses: dict[int, float], reference: dict[int, float]) -> float:
    shared = set(losses) & set(reference)
    return paired(losses, reference).ratio.mean if shared else geometric(list(losses.values())).mean


def _variant_key(key: tuple[str, str, str]) -> tuple[str, list[float], str]:
    task, variant, method = key
    name = variant.split("=")[0]
    numbers = [float(part.split("=")[1]) for part in variant.split(" ")]
    return f"{task}{name}", numbers, method
