"""What a population's name is bound to at its first use: data, public part, number of clients, how records are dealt.

Every fact is public: it is written in the recipe, or is a count, which is public by declaration. The ledger keeps them
(`Ledger.population(declaration=…)`) and refuses another recipe that would make protected records public, or put other
people behind a client's name.
"""

from __future__ import annotations

from typing import Any

from dpray.experiments.plan import Scale
from dpray.experiments.spec import Recipe
from dpray.platform.privacy.ledger import LARGEST_CLIENT


def declaration(recipe: Recipe, scale: Scale) -> dict[str, Any]:
    """The facts by the recipe's own names; what has no effect (the seed of no drawing) is left out."""
    data, cohort = recipe.data, recipe.cohort
    drawn = {"data.evaluation.fraction": data.evaluation.fraction, "data.evaluation.seed": data.evaluation.seed}
    own = {"data.evaluation": "the data set's own test part"}
    return {
        "data.dataset": data.dataset,
        **(own if data.evaluation.fraction is None else drawn),
        "data.protected_records": scale.records,
        "cohort.clients": cohort.clients,
        "cohort.partition.kind": cohort.partition.kind,
        **{f"cohort.partition.{key}": value for key, value in cohort.partition.parameters.items()},
        "cohort.partition.seed": cohort.partition.seed,
        LARGEST_CLIENT: scale.largest_client,
    }
