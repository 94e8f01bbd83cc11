"""What a finished run leaves behind: released values, public facts, and the statement of its account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run: released values, public facts and the statement.

    Attributes:
        run, recipe, population: names.
        winner: the settings that were trained with and had been searched for; empty without a search.
        settings: all settings of the training.
        candidates, noisy_votes: what was voted on and the released counts; empty without a search, and no counts where
            the winner alone was released.
        search, training: how the two were done, in words.
        accuracy, chance: on the evaluation set declared public, and the share of its most frequent class there.
        evaluation, records, clients: how many.
        statement: of the account, as a dictionary.
        stamps: what a reader must know first.
    """

    run: str
    recipe: str
    population: str
    winner: Mapping[str, Any]
    settings: Mapping[str, Any]
    candidates: Sequence[Mapping[str, Any]]
    noisy_votes: Sequence[float]
    search: str
    training: str
    accuracy: float
    chance: float
    evaluation: int
    records: int
    clients: int
    statement: Mapping[str, Any]
    stamps: Sequence[str]
