"""What a run shows while it lasts: trials, rounds, ε spent and left. Bars in a terminal, a few lines in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LINES = 4
"""Lines per phase where there is no terminal."""


class Live:
    """Progress of one run. All that is shown is public or released.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str, style: str = "") -> None:
        """A line above the bars."""
        self._console.print(text, style=style, markup=False)

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Phase]:
        """A bar from 0 to `total` within the block."""
        if not self._console.is_terminal:
            yield Lines(self, name, total)
            return
        with Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
        ) as bars:
            yield Bar(bars, bars.add_task(name, total=total, note=""))


class Phase(Protocol):
    """Something that takes steps."""

    def __call__(self, done: int, note: str = "") -> None:
        """`done` of the total, and what to say beside it."""


class Bar:
    """A phase in a terminal."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def __call__(self, done: int, note: str = "") -> None:
        """Move the bar."""
        self._bars.update(self._task, completed=done, note=note)


class Lines:
    """A phase in a file: a line at the first step, and then now and then."""

    def __init__(self, live: Live, name: str, total: int) -> None:
        self._live, self._name, self._total = live, name, total
        self._told = -1

    def __call__(self, done: int, note: str = "") -> None:
        """Say it, if the last line is a while ago."""
        part = done * _LINES // max(self._total, 1)
        if part > self._told:
            self._told = part
            self._live.say(f"{self._name:<10} {done}/{self._total}  {note}".rstrip())
