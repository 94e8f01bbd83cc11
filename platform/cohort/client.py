"""What a client holds and what it can be asked: records, and the task that runs where they are.

| symbol | code       | meaning                                                          | shape  |
|--------|------------|------------------------------------------------------------------|--------|
| D_i    | `Records`  | the records of client i                                          | n_i    |
| θ      | `theta`    | flat parameter vector, float64, read-only                        | (d,)   |
| C      | `clip`     | clipping bound, L2                                               |        |
| g_x    |            | gradient of the loss at record x                                 | (d,)   |
| u_i    |            | Σ_x min(1, C/‖g_x‖) g_x over the records of client i             | (d,)   |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.errors import CohortError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Records:
    """One client's records: row j of `x` and entry j of `y` belong to record j.

    Args:
        x: (n, …) numbers, one record a row.
        y: (n, …) numbers, its label or target.

    Raises:
        CohortError: not NumPy arrays of numbers, or another number of labels than of rows.
    """

    x: NDArray[Any]
    y: NDArray[Any]

    def __post_init__(self) -> None:
        for name, array in (("x", self.x), ("y", self.y)):
            if not isinstance(array, np.ndarray) or array.ndim < 1 or array.dtype.kind not in "biuf":
                raise CohortError(f"Records.{name} is a NumPy array of numbers with one row a record.")
        if len(self.x) != len(self.y):
            raise CohortError("Records have one label a row: x and y are of different lengths.")

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Site:
    """A client whose records are loaded at its own site, by its own actor, and never pass through the driver.

    Args:
        load: reads the records; called on the site's machine, again after its actor was rebuilt.
        records: number of records it will give; public by declaration.
        resources: Ray resources that pin the actor, such as `{"site:hospital-a": 1}`.
    """

    load: Callable[[], Records]
    records: int
    resources: Mapping[str, float] = field(default_factory=dict)


class Stack(Sequence[Records]):
    """The records of several clients, one after the other in the same two arrays; each item is a view.

    Args:
        x, y: the stacked arrays; rows `offsets[i]` to `offsets[i + 1]` belong to client i.
        offsets: (clients + 1,) int64, from 0 to the number of rows.
    """

    def __init__(self, x: NDArray[Any], y: NDArray[Any], offsets: IntArray) -> None:
        self.x, self.y, self.offsets = x, y, offsets

    @classmethod
    def of(cls, shards: Iterable[Records]) -> Stack:
        """Copy shards into one stack of read-only arrays. A single shard is not copied."""
        parts = tuple(shards)
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        if len(parts) == 1:
            x, y = parts[0].x.view(), parts[0].y.view()
        else:
            x, y = np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
        x.flags.writeable = y.flags.writeable = False
        return cls(x, y, offsets)

    @property
    def counts(self) -> IntArray:
        """(clients,) number of records of each."""
        return np.asarray(np.diff(self.offsets), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Records: ...
    @overload
    def __getitem__(self, index: slice) -> Stack: ...
    def __getitem__(self, index: int | slice) -> Records | Stack:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.take(range(start, stop, step))
            first, last = self.offsets[start], self.offsets[max(stop, start)]
            return Stack(self.x[first:last], self.y[first:last], self.offsets[start : max(stop, start) + 1] - first)
        if not -len(self) <= index < len(self):
            raise IndexError(f"The stack holds {len(self)} clients; there is no number {index}.")
        first, last = self.offsets[index % len(self)], self.offsets[index % len(self) + 1]
        return Records(self.x[first:last], self.y[first:last])

    def take(self, indices: Sequence[int]) -> Stack:
        """The stack of some clients: a view where they are neighbours, else a copy."""
        if indices and list(indices) == list(range(indices[0], indices[0] + len(indices))):
            return self[indices[0] : indices[0] + len(indices)]
        return Stack.of([self[index] for index in indices]) if indices else self[0:0]


class ClientTask(ABC):
    """What a user implements: computations on one client's records. Runs only where the records are.

    Every method is a function of its arguments: no state is carried from one client to the next, or replacing one
    client would change another one's message. Arrays given to it are read-only. An exception, a result of the wrong
    shape or one that is not finite is an ordinary answer (a zero row, the worst score), and leaves no trace.
    """

    dimension: int
    """d, length of the flat parameter vector."""
    relative_error: float = 0.0
    """Margin for the arithmetic inside `clipped_sum`, in units of Δ (`ClippedSum.relative_error`); 1e-4 for float32."""

    @abstractmethod
    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """u_i = Σ_x min(1, C/‖g_x‖) g_x, (d,) float64, in units of the loss per parameter.

        *Guarantee asked for.* Each record moves the sum by a vector of norm ≤ C that depends on θ, C, the record and
        public constants only; records with bad values contribute zero. The cohort can enforce ‖u_i‖ ≤ n_i·C only.
        """

    def clipped_sums(self, theta: FloatArray, shards: Sequence[Records], clip: float) -> FloatArray | None:
        """All clients of a host at once, (clients, d); None where there is no faster way than one by one.

        `shards` is a `Stack`: `shards.x`, `shards.y` and `shards.offsets` are the whole of it without a copy. Row i
        must depend on shard i only.
        """
        return None

    def update(self, theta: FloatArray, records: Records, settings: Mapping[str, Any]) -> FloatArray:
        """A client's whole update, (d,) float64, not clipped: the cohort clips it to C (unit client)."""
        raise NotImplementedError(f"{type(self).__name__} has no `update`, which releases of unit client ask for.")

    def fit_and_score(self, config: Mapping[str, Any], records: Records, rng: np.random.Generator) -> float:
        """Train a fresh model of this configuration on the client's own records, and score it; higher is better.

        The score stays with the client. NaN, infinity and exceptions count as the worst score. `rng` is the client's
        own: the same one for every candidate of a run, and again after a crash.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `fit_and_score`, which a search asks for.")

    def check_candidate(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - most tasks try whatever they are given
        """Refuse a configuration that no client could train (`ValueError`); it depends on nothing but `config`.

        A search asks it before it spends: at the clients, such a candidate is the worst one, and nobody is told why.
        """

    def check_records(self, shape: tuple[int, ...]) -> None:  # noqa: B027 - most tasks take what they are given
        """Refuse records of a shape that the task cannot compute on (`ValueError`); it depends on nothing but `shape`.

        A cohort asks it before anything is spent: at the clients, such records answer nothing, and nobody is told why.
        """

    def fit_and_scores(
        self, configs: Sequence[Mapping[str, Any]], records: Records, rng: np.random.Generator
    ) -> FloatArray | None:
        """Scores of several configurations at once, (m,); None where there is no faster way than one by one.

        Entry j is what `fit_and_score(configs[j], records, rng)` gives, up to the rounding of its arithmetic and what
        the task says of candidates trained together. An entry that is not finite is that candidate's worst score. If
        the call raises, ends the process, takes longer than m calls may, or returns another shape, its client's
        candidates are scored one by one instead, and nobody else notices.
        """
        return None


def site_stack(load: Callable[[], Records], records: int) -> Stack:
    """The one shard of a site, checked against the declared number of records."""
    shard = load()
    if not isinstance(shard, Records) or len(shard) != records:
        raise CohortError("not as declared")
    return Stack.of([shard])


def refuse_larger(counts: Iterable[int], most: int | None, population: str) -> None:
    """Refuse clients that hold more records than the population declares: coarser accounts are charged by its m."""
    largest = max(counts)
    if most is not None and largest > most:
        raise CohortError(
            f"Population {population!r} declares at most {most} records a client, and a client holds {largest}: the "
            f"{most}² by which accounts of unit client are charged for records would be too little. Use a population "
            f"that declares records_per_client={largest} or more, or give its clients fewer records."
        )
