"""Tune's callback that tells a run how its trials go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.tune import Callback


class Trials(Callback):  # type: ignore[misc]  # Ray has no types
    """Calls back with every trial that ended well; its result holds bookkeeping only."""

    def __init__(self, done: Callable[[Any], object]) -> None:
        self._done = done

    def __reduce__(self) -> tuple[Any, ...]:
        """Tune pickles its callbacks into its own files; the run's stays with the driver."""
        return Trials, (_nothing,)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Tune's hook."""
        self._done(trial)


def _nothing(trial: Any) -> None:
    """What a callback read back from Tune's files does."""
