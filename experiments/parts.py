"""What a run of either kind means to spend, part by part, before it spends anything.

| symbol | meaning |
|---|---|
| μ_B² | the account's budget |
| μ² | of a part |
| T | releases of a part; each spends μ²/T |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dpray.experiments.reading import RecipeError
from dpray.experiments.sections import Budget as Given
from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, upper_mu
from dpray.platform.privacy.mechanisms import Unit

SEARCH, TRAINING, SCORE = "search", "training", "score"
COVARIANCE = f"{TRAINING} covariance"
"""Names of the parts; all but the score's are labels in the ledger too (a score is a release of its search)."""


@dataclass(frozen=True)
class Part:
    """One part of a run: `steps` releases of one mechanism.

    Attributes:
        label, unit, steps: as in the ledger.
        quanta: μ² of all steps in the release's own unit, in quanta; None without noise.
        charged: what the account pays for them (m² times that where it is coarser).
        budget: the account's quanta; None without one.
        delta: at which ε is told.
    """

    label: str
    unit: Unit
    steps: int
    quanta: int | None
    charged: int | None
    budget: int | None
    delta: float

    @property
    def sampling_probability(self) -> float:
        """q of its releases; 1 without sampling."""
        return 1.0

    @property
    def share(self) -> float:
        """Of the account's μ²; NaN where that is infinite."""
        return math.nan if self.charged is None or self.budget is None else self.charged / self.budget

    @property
    def epsilon(self) -> float:
        """ε of the part alone, as the account sees it, rounded up."""
        return _epsilon(self.charged, self.delta)

    @property
    def epsilon_step(self) -> float:
        """ε of one release alone, as the account sees it, rounded up."""
        return _epsilon(None if self.charged is None else -(-self.charged // self.steps), self.delta)


@dataclass(frozen=True)
class NoisedPart(Part):
    """A part whose noise the clients of a cohort add.

    Attributes:
        sigma: noise std of one release if exactly the counted-on clients answer; 0 without noise.
        answered_sigma: the same if all clients answer.
    """

    sigma: float
    answered_sigma: float


@dataclass(frozen=True)
class WinnerPart(Part):
    """A vote of which the winner alone is released, by a trusted aggregator.

    Attributes:
        pure_epsilon: ε of the release by itself, without a δ; ∞ without noise.
        scale: b = 2/ε, in votes; 0 without noise.
        votes_lead: lead that noisy votes would need for the same spend, their noise shared by all clients.
    """

    pure_epsilon: float
    scale: float
    votes_lead: float


@dataclass(frozen=True)
class Foreseen(ABC):
    """What a run would do, whatever its kind.

    Attributes:
        budget: the account's.
        declaration: public facts the population's name is bound to.
        warnings: what makes the run hopeless, in sentences.
    """

    budget: Budget
    declaration: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they happen."""

    @property
    def kind(self) -> Literal["gdp", "pld"]:
        """Of the account that can pay for it."""
        return "gdp"

    @property
    def charged(self) -> int | None:
        """Quanta the account pays in all; None without noise."""
        total = 0
        for part in self.parts:
            if part.charged is None:
                return None
            total += part.charged
        return total


def budget_of(given: Given) -> Budget:
    """A recipe's budget as the ledger takes it.

    Raises:
        RecipeError: too small to spend anything.
    """
    epsilon = math.inf if given.non_private else float(given.epsilon or 0)
    try:
        return Budget(epsilon, given.delta, non_private=given.non_private)
    except ValueError as error:
        raise RecipeError(f"`budget`: {error}") from None


def _epsilon(quanta: int | None, delta: float) -> float:
    return math.inf if quanta is None else gdp.epsilon(upper_mu(quanta), delta)
