"""A search in Ray Tune, as a run drives it: quietly, its files in the run's folder, told of every trial that ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.tune import Callback

if TYPE_CHECKING:
    from dpray.searchers import PrivateSearcher


def tuned(search: PrivateSearcher, folder: Path, epoch: int, done: Callable[[Any], object], part: int = 1) -> None:
    """Run a search that knows its space to its end.

    Args:
        search: what to run.
        folder: of the run; Tune writes to `tune/search-EPOCH-PART` in it.
        epoch: number of the run's lease, so that a resumed run has files of its own.
        done: called with every trial that ended well.
        part: counts the experiments of one lease.
    """
    from ray import tune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the forecast has warned already
        tune.Tuner(
            search.trainable(),
            param_space={},
            tune_config=search.tune_config(),
            run_config=tune.RunConfig(
                name=f"search-{epoch}-{part}",
                storage_path=str((folder / "tune").absolute()),
                callbacks=[Trials(done)],
                verbose=0,
            ),
        ).fit()


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
