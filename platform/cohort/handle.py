"""The part of a cohort that travels: what a Tune trial holds to have every client score a candidate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.layout import checked_search
from dpray.platform.cohort.request import Refusal


@dataclass(frozen=True)
class CohortHandle:
    """The part of a cohort that a Tune trial uses, from its own process."""

    dispatch: Dispatch
    sizes: tuple[int, ...]

    def evaluate(self, run: tuple[str, str], candidate: int, config: Mapping[str, Any]) -> int:
        """As `Cohort.evaluate`."""
        return self.evaluate_all(run, {candidate: config})

    def evaluate_all(self, run: tuple[str, str], candidates: Mapping[int, Mapping[str, Any]]) -> int:
        """As `Cohort.evaluate_all`."""
        asked = checked_search(run), {int(number): dict(config) for number, config in candidates.items()}
        every: Iterable[int] = range(len(self.sizes))
        answers = self.dispatch.call(
            "evaluate_all", dict.fromkeys(every, asked), patient=True, candidates=len(candidates)
        )
        for answer in answers.values():
            if isinstance(answer, Refusal):
                raise CohortError(answer.sentence)
        return sum(int(answer) for answer in answers.values())
