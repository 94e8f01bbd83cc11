"""A client's rehearsal of candidates: all at once where its task can, one by one where that fails. Scores only.

| what the joint call does                        | what follows                                              |
|-------------------------------------------------|-----------------------------------------------------------|
| returns (m,) numbers                            | they are the scores; one that is not finite is the worst  |
| returns None                                    | one by one                                                |
| raises, or returns anything else                | one by one                                                |
| kills the process, or takes longer than m calls | one by one, in the rebuilt process                        |

One by one, a candidate that raises, is not finite, or kills the process twice has the worst score, and only that one.

*Guarantee.* What a client's code does in either call changes that client's scores and nothing else that leaves its
host: the answer to a rehearsal is the number of clients. Timing is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpray.platform.cohort.client import ClientTask, FloatArray, Records
from dpray.platform.confine import Confinement

WORST = math.nan


@dataclass(frozen=True)
class Rehearsal:
    """What the clients of a host are asked for.

    Attributes:
        task: theirs.
        candidates: configurations by number.
        alone: confines the call for one candidate.
        together: confines the call for all of them.
    """

    task: ClientTask
    candidates: Mapping[int, Mapping[str, Any]]
    alone: Mapping[int, Confinement]
    together: Confinement

    def scores(
        self, client: str, records: Records, numbers: Sequence[int], generator: Callable[[], np.random.Generator]
    ) -> dict[int, float]:
        """One client's scores by candidate; NaN is the worst. Every call of its code gets a generator of its own."""
        configs = [self.candidates[number] for number in numbers]
        found: FloatArray | None = None
        if len(numbers) > 1:
            found = self.together.run(
                client,
                lambda: _checked(self.task.fit_and_scores(deepcopy(configs), records, generator()), len(configs)),
            )
        if found is not None:
            return {number: _finite(score) for number, score in zip(numbers, found.tolist(), strict=True)}
        return {number: self._alone(client, number, records, generator) for number in numbers}

    def _alone(self, client: str, number: int, records: Records, generator: Callable[[], np.random.Generator]) -> float:
        config = deepcopy(self.candidates[number])
        score = self.alone[number].run(client, lambda: float(self.task.fit_and_score(config, records, generator())))
        return _finite(score)


def _checked(result: Any, candidates: int) -> FloatArray | None:
    """A joint result as numbers; None if it is none. Runs confined, like the code itself."""
    if result is None:
        return None
    array = np.asarray(result)
    fits = array.shape == (candidates,) and array.dtype.kind in "biuf"
    return array.astype(np.float64) if fits else None


def _finite(score: float | None) -> float:
    return score if score is not None and math.isfinite(score) else WORST
