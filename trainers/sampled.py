"""Rounds over Poisson samples: who can train on them, what a round asks, and what a budget buys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dpray.platform.cohort.queries import ClientUpdate, GradientSum, Query
from dpray.platform.cohort.sampled import Sampled
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger.composing import PLD
from dpray.platform.privacy.sampling import PoissonSampling
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Population
    from dpray.trainers.base import FederatedTrainer


def refuse_sampling(
    trainer: type[FederatedTrainer], sampling: PoissonSampling | None, unit: Unit, population: Population
) -> None:
    """Refuse a sampler that does not go with a training; before a budget is calibrated, which takes a while.

    Raises:
        ValueError: the algorithm, its unit, or the kind of the accounts.
    """
    if sampling is None:
        return
    if not trainer.sampled:
        raise ValueError(
            f"{trainer.settings_type.algorithm} cannot be trained on samples: it builds on more than its rounds' sums "
            "of gradients, and the cost of that is not known. Leave out `sampling`, or take another algorithm."
        )
    if sampling.unit is not unit:
        raise ValueError(
            f"Training protects the unit `{unit}`, and `{sampling.unit}`s were to be sampled: give "
            f"PoissonSampling(rate, {str(unit)!r})."
        )
    if any(account.kind != PLD for account in population.accounts()):
        raise ValueError(
            f"A sampled round has no finite μ, and the accounts of population {population.name!r} are of kind 'gdp', "
            "which add μ² up: train without sampling, or on a population whose accounts are of kind 'pld' from the "
            "start (`population.account(unit, budget, kind='pld')`)."
        )


def asked_of_a_sample(query: Query, sampling: PoissonSampling | None, algorithm: str) -> Query:
    """What a round asks, of a sample; the query itself without sampling.

    Raises:
        ValueError: it is no sum of gradients or updates.
    """
    if sampling is None:
        return query
    if not isinstance(query, GradientSum | ClientUpdate):
        raise ValueError(
            f"{algorithm} asks clients for a {type(query).__name__}, which cannot be sampled: train without sampling, "
            "or with an algorithm that sums gradients."
        )
    return Sampled(query, sampling)


def quanta_of(
    budget: Budget | None, quanta: int | Literal["budget"] | None, rounds: int, sampling: PoissonSampling | None
) -> int | None:
    """What a training may spend, in quanta; with sampling, μ² without it of rounds whose composed ε is the budget's.

    Raises:
        ValueError: given twice, or not at all.
    """
    if quanta != "budget":
        if budget is not None:
            raise ValueError("Say what training may spend once: `budget` or `quanta`, not both.")
        return quanta
    if budget is None:
        raise ValueError("Say what training may spend: `budget=Budget(epsilon, delta)`, or `quanta` of a larger plan.")
    return budget.quanta if sampling is None else sampling.calibrate(budget, rounds)
