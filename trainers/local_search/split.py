"""Which of a client's records a candidate is trained on, and which judge it; classes dealt alike to both."""

from __future__ import annotations

import numpy as np

from dpray.trainers.models import BoolArray, IntArray
from dpray.trainers.rehearsal import held_out_rows


def judges(
    labels: IntArray, usable: BoolArray, fraction: float, folds: int | None, rng: np.random.Generator
) -> BoolArray:
    """Which records judge, (splits, n): one hold-out, or `folds` of them; no split at all for fewer than two records.

    Args:
        labels: (n,) class numbers.
        usable: (n,) records that take part.
        fraction: of them that a hold-out takes, at least one and never all.
        folds: k; None: hold-out.
        rng: the client's own: the same stream gives the same split.
    """
    if folds is not None:
        return held_out_rows(labels, usable, folds, rng)
    order = np.lexsort((rng.random(len(labels)), labels))
    order = order[usable[order]]
    n = len(order)
    rows = np.zeros((1 if n >= 2 else 0, len(labels)), dtype=np.bool_)
    if n >= 2:
        count = min(max(round(fraction * n), 1), n - 1)
        places = np.arange(n + 1) * count // n
        rows[0, order[np.diff(places) > 0]] = True
    return rows
