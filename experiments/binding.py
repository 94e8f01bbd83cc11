"""What a cohort's population is bound to at its first use: data, public part, number of clients, how records are dealt.

Every fact is public: it is written in the recipe, or is a count, which is public by declaration. The ledger keeps them
(`Ledger.population(declaration=…)`) and refuses another recipe that would make protected records public, or put other
people behind a client's name.

`data.folder` and `data.path` are not bound. They are places on a machine: the same file is found elsewhere, and another
file may come to lie there. Nor can the records themselves be bound: a digest of them, kept with the public facts, would
tell whoever guesses a record whether the guess is right. So two files of one data set and size under one name are
charged as one population: for other people that is too much, never too little. Whoever reorders or edits the file of a
population, however, may move its people between the protected and the public part: keep the file as it was at the first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpray.experiments.spec import Recipe
from dpray.platform.privacy.ledger import LARGEST_CLIENT

if TYPE_CHECKING:
    from dpray.experiments.plan import Scale


def declaration(recipe: Recipe, scale: Scale) -> dict[str, Any]:
    """The facts by the recipe's own names; what has no effect (the seed of no drawing) is left out."""
    data, cohort = recipe.data, recipe.cohort
    if cohort.sites is not None:
        return {
            "data": "at its sites",
            "data.evaluation": "a file of its own",
            "data.features": data.features,
            "data.classes": data.classes,
            "data.protected_records": scale.records,
            **{f"cohort.sites.{site}": records for site, records in cohort.sites.items()},
            LARGEST_CLIENT: scale.largest_client,
        }
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
