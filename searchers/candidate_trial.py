"""A vote's candidates on their way through Tune: how many a trial asks for, and the trial that asks.

p candidates ─▶ suggestions of `size` each ─▶ trial ─▶ every client, one call per actor ─▶ "clients_answered"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dpray.searchers.batch import Config
from dpray.searchers.trial import CANDIDATE, MORE, NUMBERS, EvaluationTrial

if TYPE_CHECKING:
    from dpray.platform.cohort import CohortHandle

PerTrial = int | Literal["auto"]

_TRIALS = 10
"""Trials that `auto` splits many candidates into: enough to see a search go on."""
_FEWEST = 10
"""Candidates that `auto` gives a trial at least, where there are so many."""


class CandidateTrial(EvaluationTrial):
    """One candidate or several, trained and scored on every client; the scores stay there."""

    handle: ClassVar[CohortHandle]
    run: ClassVar[tuple[str, str]]

    def evaluate(self, candidate: int, config: Config, mark: str) -> dict[str, int]:
        """Ask every client; only how many candidates were asked for and how many clients answered comes back."""
        numbers = numbers_of(self.config)
        points = (config, *(self.config.get(MORE) or ()))
        asked = dict(zip(numbers, points, strict=True))
        answered = int(self.handle.evaluate_all(scores_of(self.run, mark), asked))
        return {"candidates": len(numbers), "clients_answered": answered}


def suggestions(candidates: Sequence[Config], size: int) -> list[Config]:
    """Configurations of trials that ask for `size` candidates each; the last one for what is left."""
    if size == 1:
        return list(candidates)
    chunks = [range(start, min(start + size, len(candidates))) for start in range(0, len(candidates), size)]
    return [
        {**candidates[chunk[0]], NUMBERS: list(chunk), MORE: [candidates[number] for number in chunk[1:]]}
        for chunk in chunks
    ]


def numbers_of(config: Mapping[str, Any]) -> list[int]:
    """Numbers of the candidates that a trial's configuration asks for."""
    return list(config.get(NUMBERS) or [config[CANDIDATE]])


def checked(asked: PerTrial) -> PerTrial:
    """A wanted size, or a sentence (`ValueError`)."""
    if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise ValueError(f'candidates_per_trial is {asked!r}; it is a whole number of at least 1, or "auto".')
    return asked


def size_of(asked: PerTrial, candidates: int, together: bool) -> int:
    """How many of p candidates a trial asks for; `together`: whether clients are quicker with several at once."""
    if asked != "auto":
        return min(asked, candidates)
    return min(max(_FEWEST, math.ceil(candidates / _TRIALS)), candidates) if together else 1


def scores_of(run: tuple[str, str], mark: str) -> tuple[str, str]:
    """(population, name) under which clients keep the scores of one list of candidates of a run."""
    population, name = run
    return population, f"{name}:{mark}"
