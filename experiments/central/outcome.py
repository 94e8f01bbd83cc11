"""What a finished search in the central model leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CentralOutcome:
    """Released values, public facts and the statement.

    Attributes:
        run, recipe, population: names.
        objective, search: what was tuned and how, in words.
        public: whether the objective's data are declared public; only then there are losses here.
        best_config: the result.
        path: configurations as released: the start and every iterate, or what was best after every step.
        reason: why the search ended.
        losses: exact mean loss at every configuration of the path; empty where data are protected.
        result_loss: exact mean loss of the result; None where data are protected.
        score, score_sigma: noised mean loss of the result and the std of its noise; None where none was released.
        statement: of the account, as a dictionary.
        stamps: what a reader must know first.
    """

    run: str
    recipe: str
    population: str
    objective: str
    search: str
    public: bool
    best_config: Mapping[str, Any]
    path: Sequence[Mapping[str, Any]]
    reason: str
    losses: Sequence[float]
    result_loss: float | None
    statement: Mapping[str, Any]
    stamps: Sequence[str]
    score: float | None = None
    score_sigma: float | None = None
