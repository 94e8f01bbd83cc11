"""Every trainer can be named in a recipe, with its own settings, and is planned."""

import pytest

from dpray.experiments.plan import Scale, forecast
from dpray.experiments.reading import RecipeError, write_yaml
from dpray.experiments.spec import Recipe
from dpray.trainers.named import TRAINERS, trainer_named

SCALE = Scale(clients=20, records=1437, dimension=650, largest_client=200)
OWN = {
    "dp_fedsofim": {"momentum": 0.5, "rho": 2.0, "bias_correction": True, "rank": 4, "debias": True},
    "dp_fedgd": {},
    "dp_momentum": {"momentum": 0.5, "bias_correction": True},
    "dp_normalised_momentum": {"momentum": 0.5},
    "dp_fedadam": {"momentum": 0.5, "second_momentum": 0.9, "adaptivity": 0.1},
    "dp_fedyogi": {"momentum": 0.5, "second_momentum": 0.9, "adaptivity": 0.1},
    "dp_fedavg": {"local_steps": 5, "local_rate": 0.1},
}
"""Settings that are the algorithm's own."""


def recipe(algorithm, **training):
    document = {
        "name": "try",
        "population": {"name": "people"},
        "budget": {"epsilon": 6, "delta": 1e-5},
        "shares": {"training": 1.0},
        "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.2}},
        "cohort": {"clients": 20},
        "training": {"algorithm": algorithm, "rounds": 10, "learning_rate": 1.0, "clip": 1.0, **training},
    }
    return Recipe.read(write_yaml(document))


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_every_trainer_has_a_name_in_recipes_and_its_settings_reach_it(algorithm):
    read = recipe(algorithm, **OWN[algorithm])
    assert Recipe.read(read.write()) == read
    settings = trainer_named(algorithm).settings_type.from_config({"rounds": 10, **read.training.fixed()})
    for key, value in OWN[algorithm].items():
        assert getattr(settings, key) == value


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_every_trainer_is_planned_within_its_budget(algorithm):
    found = forecast(recipe(algorithm, **OWN[algorithm]), SCALE)
    assert 0 <= found.budget.quanta - found.charged <= 2
    assert found.noise_to_signal > 0


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_every_trainer_protects_what_its_recipe_says(algorithm):
    units = {str(unit) for unit in trainer_named(algorithm).units}
    assert recipe(algorithm).training.unit in units


def test_averages_of_updates_protect_clients_only():
    with pytest.raises(RecipeError, match=r"`training\.unit`.*`client`"):
        recipe("dp_fedavg", unit="record")


def test_an_unknown_trainer_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"dp_fedsofia.*dp_fedsofim"):
        trainer_named("dp_fedsofia")
