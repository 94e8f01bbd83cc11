"""What a recipe is made of once its data is read: the public evaluation set, the clients' shards, the model.

The evaluation set is taken out by a public seed before anything else happens; the rest is dealt to the clients. The
number of records, of features and the set of classes are public by declaration.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.experiments.plan import Forecast, Scale
from dpray.experiments.reading import RecipeError
from dpray.experiments.sections import Evaluation
from dpray.experiments.spec import Recipe
from dpray.platform.privacy import Budget
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.noise import NoiseSource

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort, Records, Site
    from dpray.platform.datasets import Dataset
    from dpray.trainers.base import FederatedTrainer
    from dpray.trainers.models import LinearHead
    from dpray.trainers.settings import Settings


@dataclass(frozen=True)
class Material:
    """A recipe with its data.

    Attributes:
        recipe: what to do.
        shards: records by client; or, by client, the site that has them.
        evaluation: records declared public.
        model: what is trained.
        chance: share of the evaluation set's most frequent class.
        scale: public sizes.
    """

    recipe: Recipe
    shards: Mapping[str, Records] | Mapping[str, Site]
    evaluation: Records
    model: LinearHead
    chance: float
    scale: Scale

    def settings(self, winner: Mapping[str, Any]) -> Settings:
        """Settings of the training: what the recipe fixes, and the winner's."""
        return self._settings_from_config(winner)

    @property
    def trainer_type(self) -> type[FederatedTrainer]:
        """The algorithm's trainer."""
        from dpray.trainers import trainer_named

        return trainer_named(self.recipe.training.algorithm)

    def cohort(self, sites: Path, expected: Forecast) -> Cohort:
        """The clients; with a search, they rehearse the training that will really follow.

        Args:
            sites: folder of the clients' journals on every machine that hosts some; `~` is that machine's.
            expected: what the run was planned as.

        Raises:
            CohortError: clients without records, fewer than the quorum.
        """
        from dpray.platform.cohort import Cohort
        from dpray.platform.cohort.cohort import DEFAULT_TIMEOUT
        from dpray.trainers import Rehearsal, TrainingTask

        given, search, training = self.recipe.cohort, self.recipe.search, self.recipe.training
        task: Any = self.model
        if search is not None:
            rehearsal = Rehearsal(
                self.model,
                self._settings_from_config,
                quanta=expected.training_quanta,
                regime=Regime(training.regime),
                clients=self.scale.clients,
                records=self.scale.records,
                n_min=given.n_min,
                unit=Unit(training.unit),
                smallest=self.scale.smallest_client,
                folds=search.folds,
                score=search.score,
            )
            task = TrainingTask(self.model, rehearsal)
        return Cohort(
            task,
            self.shards,
            actors=given.actors if isinstance(given.actors, int) else "auto",
            state_dir=sites if given.sites else sites / self.recipe.population.name,
            noise=NoiseSource(self.recipe.noise.seed),
            quorum=given.quorum,
            colluders=given.colluders,
            cap=None if given.cap is None else Budget(given.cap.epsilon, given.cap.delta),
            timeout=DEFAULT_TIMEOUT if given.timeout is None else given.timeout,
            secure_sum=given.secure_sum,
        )

    @property
    def _settings_from_config(self) -> functools.partial[Settings]:
        training = self.recipe.training
        defaults = {"rounds": training.rounds, **training.fixed()}
        return functools.partial(self.trainer_type.settings_type.from_config, defaults=defaults)


def load(recipe: Recipe, workspace: Path) -> Material:
    """Read the recipe's data and deal it out.

    Raises:
        RecipeError, CohortError, DatasetError: data that is not there or is no classification, clients that would be
            left without records, a client with more records than declared.
    """
    from dpray.platform import datasets
    from dpray.platform.cohort import Records, partition
    from dpray.trainers import LinearHead

    if recipe.data.dataset is None:
        return _at_sites(recipe, workspace)
    folder = recipe.data.folder
    data = datasets.load(recipe.data.dataset, None if folder is None else workspace / Path(folder).expanduser())
    if not data.classes:
        raise RecipeError(f"`data.dataset`: {data.name} is a regression, and `{recipe.training.algorithm}` classifies.")
    protected, evaluation = _split(data, recipe.data.evaluation)
    if len(evaluation) == 0:
        raise RecipeError(f"`data.evaluation` leaves no public records of {len(protected)} to score on.")
    dealt = recipe.cohort.partition
    parts = partition(protected.y, recipe.cohort.clients, dealt.kind, dealt.seed, **dealt.parameters)
    width = len(str(recipe.cohort.clients - 1))
    shards = {
        f"client-{index:0{width}d}": Records(protected.x[part], protected.y[part]) for index, part in enumerate(parts)
    }
    counts = {client: len(shard) for client, shard in shards.items()}
    return _material(recipe, shards, counts, evaluation, LinearHead(data.features, len(data.classes)))


def _at_sites(recipe: Recipe, workspace: Path) -> Material:
    """The same of records that stay at their sites; no file of a site is opened."""
    from dpray.experiments import at_sites
    from dpray.trainers import LinearHead

    shards = at_sites.sites(recipe)
    counts = {client: site.records for client, site in shards.items()}
    model = LinearHead(int(recipe.data.features or 0), int(recipe.data.classes or 0))
    return _material(recipe, shards, counts, at_sites.evaluation(recipe, workspace), model)


def _material(
    recipe: Recipe,
    shards: Mapping[str, Records] | Mapping[str, Site],
    counts: Mapping[str, int],
    evaluation: Records,
    model: LinearHead,
) -> Material:
    _check_largest(recipe, counts)
    sizes = counts.values()
    scale = Scale(
        clients=len(counts),
        records=sum(sizes),
        dimension=model.dimension,
        largest_client=max(sizes),
        relative_error=model.relative_error,
        features=model.features,
        smallest_client=min(sizes),
    )
    chance = float(np.bincount(evaluation.y).max() / len(evaluation))
    return Material(recipe, shards, evaluation, model, chance, scale)


def _split(data: Dataset, evaluation: Evaluation) -> tuple[Records, Records]:
    """Protected and public records: the data set's own parts, or a random part of all records by a public seed."""
    from dpray.platform.cohort import Records

    if evaluation.fraction is None:
        return Records(data.x_train, data.y_train), Records(data.x_test, data.y_test)
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    order = np.random.default_rng([evaluation.seed, len(y)]).permutation(len(y))
    cut = round(len(y) * evaluation.fraction)
    public, protected = np.sort(order[:cut]), np.sort(order[cut:])
    return Records(x[protected], y[protected]), Records(x[public], y[public])


def _check_largest(recipe: Recipe, counts: Mapping[str, int]) -> None:
    declared = recipe.population.records_per_client
    if declared is None:
        return
    for client, records in counts.items():
        if records > declared:
            raise RecipeError(
                f"`population.records_per_client` declares at most {declared} records a client, and {client} would "
                f"hold {records}; declare more, or split the data otherwise."
            )
