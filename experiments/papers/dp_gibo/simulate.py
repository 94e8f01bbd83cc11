"""Run a search in this process, without Tune: thousands of evaluations of a cheap, public objective in seconds.

The search is the product's own, with its curator, its noise, its ledger (a temporary SQLite file) and its step rule.
Only the way of the losses to the curator is another one: no trials, no confinement, many points at a time. What is
released is the same as through a `tune.Tuner` (a test compares the two).

*Guarantee.* None: noise is seeded so that a table can be made again, and exact losses are read. For public data only.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpray.platform.privacy.budget import Budget
from dpray.searchers.losses_trial import rows_of
from dpray.searchers.trial import MORE, RESERVED, SEARCH

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Ledger, Run
    from dpray.searchers.central import CentralSearch

AT_ONCE = 1 << 20
"""`points_per_trial` of a search that is played: a whole step is one suggestion."""

_AMPLE = Budget(1000.0, 1e-5)  # an account that no table exhausts; what a run may spend is the search's own mu


class ManyLosses(Protocol):
    """What a played search needs of an objective."""

    def theta(self, config: Mapping[str, float]) -> NDArray[np.float64]:
        """The point of a configuration, (d,)."""
        ...

    def losses_many(self, thetas: ArrayLike) -> NDArray[np.float64]:
        """Losses at many points, (B, d) → (B, n)."""
        ...


def play(search: CentralSearch, objective: ManyLosses) -> int:
    """Run a search to its end; `search.best_config` is its result.

    Args:
        search: not begun, built with `curator_actor=False`; quickest with `points_per_trial=AT_ONCE`.
        objective: gives the losses. The search's own task is not asked.

    Returns:
        How many points were evaluated.
    """
    trials = evaluated = 0
    while True:
        given: dict[str, dict[str, Any]] = {}
        while isinstance(suggestion := search.suggest(f"trial{trials}"), dict):
            given[f"trial{trials}"] = suggestion
            trials += 1
        if not given:
            return evaluated
        rows = [row for suggestion in given.values() for row in rows_of(suggestion[SEARCH])]
        points = [point for suggestion in given.values() for point in _points(suggestion)]
        evaluated += len(points)
        found = objective.losses_many(np.array([objective.theta(point) for point in points]))
        for row, losses in zip(rows, found, strict=True):
            search.curator.submit(row, losses)
        for name in given:
            search.on_trial_complete(trial_id=name, result={"evaluated": 1}, error=False)


def _points(suggestion: Mapping[str, Any]) -> list[dict[str, Any]]:
    first = {key: value for key, value in suggestion.items() if key not in RESERVED}
    return [first, *(suggestion.get(MORE) or ())]


class Accounts:
    """Runs to charge, each on a population of its own, in one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def run(self, name: str, *, private: bool) -> Run:
        """A run that may spend whatever its search says. Its noise is that of its name and the search's noise_seed."""
        people = self._ledger.population(f"users of {name}")
        people.account("user", _AMPLE if private else Budget(math.inf, 1e-5, non_private=True))
        return people.run(name)


@contextmanager
def accounts() -> Iterator[Accounts]:
    """Accounts in a temporary ledger."""
    from dpray.platform.privacy.ledger import Ledger

    with tempfile.TemporaryDirectory(prefix="dpray-") as folder:
        ledger = Ledger(f"sqlite:///{Path(folder) / 'ledger.db'}")
        try:
            yield Accounts(ledger)
        finally:
            ledger.close()
