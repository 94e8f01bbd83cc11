"""A check for tasks of one's own: does one record move a client's message by no more than a release counts with?

| symbol | meaning |
|---|---|
| C | clip bound of a record |
| Δ' | 2C(1 + `relative_error`) and the rounding of float64 sums: what `ClippedSum` is calibrated to |

The cohort cannot see inside a client: it bounds a message by n_i·C, not what one record does to it. A scaler fitted on
the client's records, a batch statistic, or an exception that one value sets off (the whole message becomes zero) breaks
the guarantee without a trace. This check shows such a mistake; it is no proof that there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.client import ClientTask, FloatArray, Records, Stack
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.queries import GradientSum
from dpray.platform.confine import Confinement
from dpray.platform.privacy.mechanisms import ClippedSum, Unit

_ITSELF = "its own values"


@dataclass
class _TwoClients:
    """A host of two clients with the same records at first, as a query sees it."""

    task: ClientTask
    shards: Stack
    names: Sequence[str] = ("poisoned", "other")
    confinement: Confinement = field(default_factory=lambda: Confinement("check"))

    def scores(self, run: str, candidates: int) -> FloatArray:
        return np.full((2, candidates), np.nan)

    def generator(self, client: str, *key: str | int) -> np.random.Generator:
        return np.random.default_rng(0)

    def coins(self, client: str) -> np.random.Generator:
        return np.random.default_rng(0)


def check_records_alone(task: ClientTask, records: Records, theta: FloatArray, clip: float) -> None:
    """Poison each record in turn, and check how far that moves what the cohort would send.

    Poisons: features NaN, infinite, huge, large or the smallest there are, in one place and everywhere; labels beyond
    the classes, NaN, infinite or halves: whatever the arrays' types can hold. Code that raises contributes a zero
    message, as in a cohort. A second client with the same records stands beside: its message must not follow.

    Args:
        task: whose `clipped_sum` (and `clipped_sums`) is checked.
        records: a few, public or made up, never a client's: what is wrong with them is told, with the text of the
            exceptions they set off.
        theta: (d,) float64, such as parameters after some training; zeros hide much.
        clip: C; small enough to clip some of the records.

    Raises:
        CohortError: naming the record and the poison that moved the sum by more than Δ'; or the message is zero from
            the start, so that nothing was checked.

    Example:
        `check_records_alone(task, Records(x[:8], y[:8]), theta, clip=1.0)` in the task's tests.
    """
    mechanism = ClippedSum(clip, Unit.RECORD, task.dimension, 2 * max(len(records), 1), task.relative_error)
    allowed = mechanism.sensitivity + mechanism.summation_error
    query, name = GradientSum(theta, clip), type(task).__name__
    whole = _sum(query, task, records, records)
    if not whole.any():
        raise CohortError(
            f"{name} sends zero for these records, so nothing was checked{_complaint(query, task, records)}. "
            "Give records and parameters that have a gradient."
        )
    for row in range(len(records)):
        seen = {_ITSELF: whole}
        for poison, poisoned in _poisons(records, row):
            found = _sum(query, task, poisoned, records)
            for other, before in seen.items():
                moved = float(np.linalg.norm(found - before))
                if not moved <= allowed:
                    raise CohortError(
                        f"{name} breaks the clip: record {row} with {poison} instead of {other} moved the sum by "
                        f"{moved / clip:.4g}·C, and a release counts with {allowed / clip:.4g}·C"
                        f"{_complaint(query, task, poisoned)}. Compute each record's clipped gradient from it, "
                        "θ and public constants alone, and let a bad record contribute zero."
                    )
            seen[poison] = found


def _sum(query: GradientSum, task: ClientTask, first: Records, second: Records) -> FloatArray:
    """What a host with two clients adds up, (d,)."""
    return np.asarray(query.messages(_TwoClients(task, Stack.of([first, second]))).sum(axis=0), dtype=np.float64)


def _complaint(query: GradientSum, task: ClientTask, records: Records) -> str:
    """What the task raises on these records, in words, which may hold their values: they are public or made up."""
    try:
        with np.errstate(all="ignore"):
            task.clipped_sum(query.theta, records, query.clip)
    except Exception as error:
        return f" (it raised {type(error).__name__}: {error})"
    return ""


def _poisons(records: Records, row: int) -> Iterator[tuple[str, Records]]:
    """The records with one of them poisoned, and how."""
    for what, value in _values(records.x.dtype):
        for place, where in (("all features", ...), ("one feature", 0)):
            if where is ... or records.x[row].size > 1:
                x = records.x.copy()
                x[row : row + 1].reshape(1, -1)[:, where] = value
                yield f"{place} {what}", Records(x, records.y)
    for what, value in _values(records.y.dtype):
        y = records.y.copy()
        y[row] = value
        yield f"the label {what}", Records(records.x, y)


def _values(dtype: np.dtype[Any]) -> list[tuple[str, Any]]:
    if dtype.kind == "b":
        return [("true", True), ("false", False)]
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    values = [("huge", info.max), ("huge and negative", info.min), ("zero", 0)]
    values += [(f"{size}", size) for size in (-1, 10**6) if info.min <= size <= info.max]
    if dtype.kind == "f":
        values += [("NaN", np.nan), ("infinite", np.inf), ("minus infinite", -np.inf), ("a half", 0.5)]
        values += [("the smallest subnormal number", _smallest(dtype))]
    return values


def _smallest(dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.asarray(np.finfo(dtype).smallest_subnormal)
