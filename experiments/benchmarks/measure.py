"""Timing on a machine that others use too, and what its processes occupy.

| term    | meaning                                                                                               |
|---------|-------------------------------------------------------------------------------------------------------|
| burst   | a few rounds of one contestant, timed one by one                                                       |
| cycle   | one burst of each contestant, one after the other: what is compared was measured within seconds        |
| others  | cores that other processes used during a burst; a burst with at most `QUIET` of them is *quiet*        |
| family  | this process and all its descendants: Ray's processes among them                                       |
| PSS     | proportional set size: memory of a process, pages shared with others divided among them                |

On systems without `/proc`, every burst counts as quiet, and memory is not measured (NaN).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

QUIET = 0.25
"""Cores others may use in a quiet burst."""
_PROC = Path("/proc")
_ENOUGH = 3
"""Quiet bursts below which all bursts are used instead."""
_GLANCE = 0.3
_BUSY = (1, 2, 3, 6, 7, 8)  # user, nice, system, irq, softirq, steal in /proc/stat


@dataclass(frozen=True)
class Round:
    """One round in seconds, and what of it was spent in calls of the ledger."""

    seconds: float
    ledger: float = 0.0


@dataclass
class Contestant:
    """Something that makes rounds. `rounds(k)` makes k of them after whatever warming up it needs."""

    name: str
    rounds: Callable[[int], Sequence[Round]]
    bursts: list[tuple[float, tuple[Round, ...]]] = field(default_factory=list)

    def timing(self) -> Timing:
        """What was measured so far: of the quiet bursts, if there are enough of them."""
        quiet = [made for others, made in self.bursts if others <= QUIET]
        used = [
            each for made in (quiet if len(quiet) >= _ENOUGH else [made for _, made in self.bursts]) for each in made
        ]
        seconds = np.array([each.seconds for each in used])
        share = np.array([each.ledger for each in used]) / seconds
        return Timing(
            float(np.median(seconds)), float(seconds.min()), float(np.median(share)), len(quiet), len(self.bursts)
        )


@dataclass(frozen=True)
class Timing:
    """Seconds of a round: median and best; median share of the ledger; quiet bursts of all."""

    seconds: float
    best: float
    ledger: float
    quiet: int
    bursts: int

    @property
    def disturbed(self) -> bool:
        """Whether there were too few quiet bursts to use those alone."""
        return self.quiet < min(_ENOUGH, self.bursts)


def race(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    wanted: int,
    cycles: int,
    patience: float = 0.0,
    limit: float = math.inf,
) -> None:
    """Run cycles until every contestant has `wanted` quiet bursts of `rounds` rounds, or `cycles` have been run.

    Args:
        patience: seconds to wait, before each burst and at most, for others to become quiet.
        limit: seconds after which no cycle begins but the first.
    """
    began = time.monotonic()
    for cycle in range(cycles):
        if cycle and time.monotonic() - began > limit:
            return
        for contestant in contestants:
            _await_quiet(patience)
            with Others() as others:
                made = tuple(contestant.rounds(rounds))
            contestant.bursts.append((others.cores, made))
        if all(sum(others <= QUIET for others, _ in each.bursts) >= wanted for each in contestants):
            return


def _await_quiet(patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with Others() as others:
            time.sleep(_GLANCE)
        if others.cores <= QUIET:
            return


class Others:
    """Cores that processes outside the family use while the `with` block runs."""

    cores: float = 0.0

    def __enter__(self) -> Others:
        self._began, self._busy, self._own = time.monotonic(), _machine_seconds(), _family_seconds()
        return self

    def __exit__(self, *error: object) -> None:
        busy, own = _machine_seconds() - self._busy, _family_seconds() - self._own
        self.cores = max(0.0, busy - own) / max(time.monotonic() - self._began, 1e-9)


def family(root: int | None = None) -> list[int]:
    """Process ids of `root` (this process) and all its descendants."""
    parents = {pid: int(cells[1]) for pid, cells in _processes()}
    found = [root or os.getpid()]
    for parent in found:
        found += [pid for pid, above in parents.items() if above == parent]
    return found


def pss() -> dict[str, float]:
    """Proportional set size in GB of the family's processes, by kind: driver, hosts, Ray."""
    sizes = {"driver": 0.0, "hosts": 0.0, "Ray": 0.0}
    for pid in family():
        try:
            rollup, command = (
                (_PROC / str(pid) / "smaps_rollup").read_text(),
                (_PROC / str(pid) / "cmdline").read_text(),
            )
        except OSError:
            continue  # it has ended
        kind = "driver" if pid == os.getpid() else "hosts" if command.startswith("ray::ClientHost") else "Ray"
        sizes[kind] += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1e6
    return sizes if _PROC.exists() else dict.fromkeys(sizes, float("nan"))


@contextmanager
def watched_pss(every: float = 0.2) -> Iterator[dict[str, float]]:
    """The largest PSS seen while the block runs, looked at from a thread; the dictionary is filled at its end."""
    largest: dict[str, float] = {}
    done = threading.Event()

    def look() -> None:
        while True:
            seen = pss()
            if sum(seen.values()) >= sum(largest.values()):
                largest.update(seen)
            if done.wait(every):
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield largest
    finally:
        done.set()
        watcher.join()


def _processes() -> Iterator[tuple[int, list[str]]]:
    """(pid, fields of its `stat` after the name, from the state on)."""
    for entry in _PROC.glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        yield int(entry.name), text.rpartition(")")[2].split()


def _family_seconds() -> float:
    """CPU seconds of the family so far, waited-for children of its members included."""
    cells = dict(_processes())
    members = [cells[pid] for pid in family() if pid in cells]
    return sum(int(each[place]) for each in members for place in (11, 12, 13, 14)) / _ticks()


def _machine_seconds() -> float:
    try:
        cells = (_PROC / "stat").read_text().split()
    except OSError:
        return 0.0
    return sum(int(cells[place]) for place in _BUSY) / _ticks()


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")
