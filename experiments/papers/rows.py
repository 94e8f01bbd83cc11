"""Rows of a table in a CSV that grows job by job: a job that is in it is not run again.

A job writes all its rows in one go when it is done, so an interrupted table loses the jobs under way and nothing else.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

Key = tuple[Any, ...]
R = TypeVar("R")


class Job(Protocol):
    """What `fill` needs to know of a job."""

    @property
    def key(self) -> Key:
        """What its rows have in common, and no other job's."""


J = TypeVar("J", bound=Job)


def fill(
    todo: Sequence[J],
    place: Path,
    kind: type[R],
    key_of: Callable[[R], Key],
    run: Callable[[J], list[R]],
    *,
    workers: int = 1,
    every: int = 10,
    told: Callable[[str], object] = print,
) -> int:
    """Run the jobs whose rows `place` does not have, and write each one's rows when it is done.

    Args:
        todo: the jobs.
        place: the CSV.
        kind: dataclass of a row; its fields are text, whole numbers or floats.
        key_of: key of the job a row belongs to.
        run: a job to its rows; pickles where there are several workers.
        workers: processes.
        every: after so many jobs one is told of.
        told: where progress goes.

    Returns:
        How many jobs were run.
    """
    have = {key_of(row) for row in read(place, kind)}
    fresh = [job for job in todo if job.key not in have]
    told(f"{len(todo)} jobs, {len(todo) - len(fresh)} of them are in {place.name}")
    with _mapper(workers) as imap:
        for count, rows in enumerate(imap(run, fresh), 1):
            append(place, rows)
            if count % every == 0 or count == len(fresh):
                told(f"{count} of {len(fresh)}: {', '.join(str(part) for part in key_of(rows[-1]) if part != '')}")
    return len(fresh)


def read(place: Path, kind: type[R]) -> list[R]:
    """The rows of a CSV; none where there is no file. A last line that was not written whole is left out."""
    if not place.is_file():
        return []
    types = get_type_hints(kind)
    with place.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if None not in line.values()]
    return [kind(**{name: types[name](text) for name, text in line.items()}) for line in lines]


def append(place: Path, rows: Sequence[Any]) -> None:
    """All rows of a job in one write, so that none of them is there without the others."""
    place.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, [each.name for each in dataclasses.fields(rows[0])], lineterminator="\n")
    if not place.is_file():
        writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    with place.open("a", newline="", encoding="utf-8") as file:
        file.write(text.getvalue())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map` in this process, or `imap_unordered` over several; one BLAS thread each."""
    if workers == 1:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(limits=1):
            yield map
        return
    import multiprocessing

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield pool.imap_unordered
