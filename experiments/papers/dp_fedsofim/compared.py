"""Methods beside each other: accuracies by cell and seed, differences in pairs, rounds until the baseline is reached.

Accuracies are in per cent and differences in points here. Intervals are Student's t, 95 %, over seeds (start, noise and
partition anew for each), never over clients or records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dpray.experiments.papers.dp_fedsofim.methods import REFERENCE
from dpray.experiments.papers.dp_fedsofim.tables import ANY, EPSILONS, NONE, Row
from dpray.experiments.papers.intervals import Interval, plain

NOTE = "data: public, accuracies shown; seeded noise, NOT PRIVATE"


@dataclass(frozen=True)
class Place:
    """Who adds the noise, and how many clients: a panel of a plot, a table in text."""

    task: str
    regime: str
    clients: int

    @property
    def title(self) -> str:
        """As a heading."""
        return f"regime `{self.regime}`, n = {self.clients}"


Cells = dict[tuple[str, float], dict[int, Row]]
"""Of one place: rows by seed, by method as shown and ε."""


def cells(rows: Iterable[Row]) -> dict[Place, Cells]:
    """Rows by place; those without noise and without clients belong to every place of their task."""
    found: dict[Place, Cells] = {}
    everywhere: list[Row] = []
    for row in rows:
        if row.regime == NONE:
            everywhere.append(row)
            continue
        cell = found.setdefault(Place(row.task, row.regime, row.clients), {})
        cell.setdefault((shown_name(row), row.epsilon), {})[row.seed] = row
    for row in everywhere:
        for place, cell in found.items():
            if place.task == row.task:
                cell.setdefault((shown_name(row), row.epsilon), {})[row.seed] = row
    return found


def shown_name(row: Row) -> str:
    """The method, with the partition where it depends on one."""
    if row.partition == ANY:
        return row.method
    means = ", client means" if row.part == "means" else ""
    return f"{row.method}{means}, {row.partition}"


def names(cell: Cells) -> list[str]:
    """Methods of a place, as they first come."""
    return list(dict.fromkeys(name for name, _ in cell))


def accuracy(by_seed: Mapping[int, Row]) -> Interval:
    """Mean and interval over seeds, per cent."""
    return plain([100 * row.accuracy for row in by_seed.values()])


def difference(by_seed: Mapping[int, Row], reference: Mapping[int, Row]) -> Interval | None:
    """Mean and interval of the differences with the same seed, points; None where no seed is shared."""
    shared = sorted(set(by_seed) & set(reference))
    if not shared:
        return None
    return plain([100 * (by_seed[seed].accuracy - reference[seed].accuracy) for seed in shared])


def first_at(curve: ArrayLike, target: float) -> int | None:
    """First round, from 1, after which the accuracy is at least `target`."""
    there = np.flatnonzero(np.asarray(curve) >= target)
    return int(there[0]) + 1 if there.size else None


def rounds_earlier(by_seed: Mapping[int, Row], reference: Mapping[int, Row]) -> list[int | None]:
    """By seed: how many rounds before the reference the method has the reference's final accuracy; None: never."""
    found: list[int | None] = []
    for seed in sorted(set(by_seed) & set(reference)):
        target = reference[seed].rounds[-1]
        own, theirs = first_at(by_seed[seed].rounds, target), first_at(reference[seed].rounds, target)
        found.append(None if own is None or theirs is None else theirs - own)
    return found


def accuracies(cell: Cells) -> dict[str, list[str]]:
    """Every method at every ε, `61.2 ± 0.4`; with the number of seeds where others of the place have more."""
    most = max(len(by_seed) for by_seed in cell.values())
    return {name: [_percent(cell.get((name, each), {}), most) for each in EPSILONS] for name in names(cell)}


def _percent(by_seed: Mapping[int, Row], most: int) -> str:
    if not by_seed:
        return ""
    interval, few = accuracy(by_seed), f" ({len(by_seed)} of {most} seeds)" if len(by_seed) < most else ""
    half = "" if math.isnan(interval.low) else f" ± {interval.high - interval.mean:.1f}"
    return f"{interval.mean:.1f}{half}{few}"


def points(interval: Interval | None) -> str:
    """`+1.23 ± 0.40`, in bold where the interval leaves out 0."""
    if interval is None:
        return ""
    if math.isnan(interval.low):
        return f"{interval.mean:+.2f}"
    text = f"{interval.mean:+.2f} ± {interval.high - interval.mean:.2f}"
    return f"**{text}**" if interval.low > 0 or interval.high < 0 else text


def earlier(found: Sequence[int | None]) -> str:
    """Mean over the seeds that get there, and how many do if not all."""
    there = [rounds for rounds in found if rounds is not None]
    if not there:
        return "never" if found else ""
    text = f"{np.mean(there):+.0f}"
    return text if len(there) == len(found) else f"{text} ({len(there)} of {len(found)})"


def epsilon_name(epsilon: float) -> str:
    """`∞` or the number."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def table(head: str, lines: Mapping[str, Sequence[str]]) -> str:
    """Markdown with a column for every ε; lines without content are left out."""
    text = [f"| {head} |" + "".join(f" ε = {epsilon_name(epsilon)} |" for epsilon in EPSILONS)]
    text.append("|---" * (1 + len(EPSILONS)) + "|")
    text += [f"| {name} | {' | '.join(entries)} |" for name, entries in lines.items() if any(entries)]
    return "\n".join(text)


def pairs(cell: Cells, method: str, reference: str = REFERENCE) -> list[Interval | None]:
    """Differences at every ε."""
    return [difference(cell.get((method, each), {}), cell.get((reference, each), {})) for each in EPSILONS]
