"""One batch of points on its way through Tune trials: which wait, which run, which failed, which are settled.

Pure bookkeeping, no Ray. A *slot* is a point's position in its batch. Every slot ends either evaluated or given up
(it failed more often than is allowed); the batch is then settled, and the search makes its release.

A trial of an earlier process (this state was restored from it) is a *stray*: it may still report, if Tune was restored
with it, but it may also be gone. Its slot is handed out again when nothing fresher waits, so that nothing hangs.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Config = dict[str, Any]


class Batch:
    """Points evaluated together, in any order, several at a time.

    Args:
        points: configurations, one per slot; public, plain JSON.
    """

    def __init__(self, points: Sequence[Config]) -> None:
        self.points: tuple[Config, ...] = tuple(copy.deepcopy(point) for point in points)
        self.failures = [0] * len(self.points)
        self.evaluated: set[int] = set()
        self.given_up: set[int] = set()
        self._waiting: deque[int] = deque(range(len(self.points)))
        self._live: dict[str, int] = {}
        self._strays: dict[str, int] = {}

    @property
    def settled(self) -> bool:
        """Whether every point is evaluated or given up."""
        return len(self.evaluated) + len(self.given_up) == len(self.points)

    @property
    def in_flight(self) -> int:
        """Trials this process has started and not seen end."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Points that still need a trial, strays included."""
        return len(self._waiting) + len(set(self._strays.values()) - self._settled - set(self._live.values()))

    def slot_of(self, trial_id: str) -> int | None:
        """Slot a trial works on, None for a trial that is not known or has ended."""
        return self._live.get(trial_id, self._strays.get(trial_id))

    def take(self, trial_id: str) -> int | None:
        """Give the next waiting slot to a trial; None if all that is left is in flight."""
        while self._waiting:
            slot = self._waiting.popleft()
            if slot not in self._settled:
                self._live[trial_id] = slot
                return slot
        for stray, slot in list(self._strays.items()):
            del self._strays[stray]
            if slot not in self._settled and slot not in self._live.values():
                self._live[trial_id] = slot
                return slot
        return None

    def succeed(self, trial_id: str) -> None:
        """A trial has evaluated its point."""
        slot = self._drop(trial_id)
        if slot is not None:
            self.given_up.discard(slot)
            self.evaluated.add(slot)

    def fail(self, trial_id: str, *, again: bool) -> None:
        """A trial ended without evaluating its point: wait for another one (`again`), or give the point up."""
        slot = self._drop(trial_id)
        if slot is None or slot in self._settled:
            return
        self.failures[slot] += 1
        if again:
            self._waiting.append(slot)
        elif slot not in self._live.values() and slot not in self._waiting:
            self.given_up.add(slot)

    def state(self) -> dict[str, Any]:
        """Plain JSON; running trials are written down as such."""
        return {
            "points": copy.deepcopy(list(self.points)),
            "failures": list(self.failures),
            "evaluated": sorted(self.evaluated),
            "given_up": sorted(self.given_up),
            "waiting": list(self._waiting),
            "running": {**self._strays, **self._live},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Batch:
        """Inverse of `state`: what ran then is a stray now."""
        batch = cls(state["points"])
        batch.failures = [int(count) for count in state["failures"]]
        batch.evaluated, batch.given_up = set(state["evaluated"]), set(state["given_up"])
        batch._waiting = deque(int(slot) for slot in state["waiting"])
        batch._strays = {str(trial): int(slot) for trial, slot in state["running"].items()}
        return batch

    @property
    def _settled(self) -> set[int]:
        return self.evaluated | self.given_up

    def _drop(self, trial_id: str) -> int | None:
        slot = self._live.pop(trial_id, None)
        return self._strays.pop(trial_id, None) if slot is None else slot
