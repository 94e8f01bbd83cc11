"""Every trainer can be named in a recipe, with its own settings, and is planned."""

import math

import numpy as np
import pytest

from dpray.experiments import report_plan
from dpray.experiments.plan import Scale, forecast
from dpray.experiments.reading import RecipeError, write_yaml
from dpray.experiments.report import plain
from dpray.experiments.spec import Recipe
from dpray.experiments.standing import Standing
from dpray.platform.cohort import Cohort, Records
from dpray.platform.privacy import gdp
from dpray.platform.privacy.ledger import Ledger
from dpray.trainers.models import LinearHead
from dpray.trainers.named import TRAINERS, trainer_named

SCALE = Scale(clients=20, records=1437, dimension=650, largest_client=200, features=64)
OWN = {
    "dp_fedsofim": {"momentum": 0.5, "rho": 2.0, "bias_correction": True, "rank": 4, "debias": True},
    "dp_fedgd": {},
    "dp_momentum": {"momentum": 0.5, "bias_correction": True},
    "dp_normalised_momentum": {"momentum": 0.5},
    "dp_fedadam": {"momentum": 0.5, "second_momentum": 0.9, "adaptivity": 0.1},
    "dp_fedyogi": {"momentum": 0.5, "second_momentum": 0.9, "adaptivity": 0.1},
    "dp_fedavg": {"local_steps": 5, "local_rate": 0.1},
    "dp_fedfc": {"covariance_clip": 3.0, "covariance_share": 0.4, "gamma": 0.1},
    "dp_scaffold": {"local_steps": 4, "local_rate": 0.5},
}
"""Settings that are the algorithm's own."""


def recipe(algorithm, sections=(), **training):
    if training.get("local_steps", 1) > 1 and algorithm == "dp_scaffold":
        training = {"regime": "local", **training}
    document = {
        "name": "try",
        "population": {"name": "people"},
        "budget": {"epsilon": 6, "delta": 1e-5},
        "shares": {"training": 1.0},
        "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.2}},
        "cohort": {"clients": 20},
        "training": {"algorithm": algorithm, "rounds": 10, "learning_rate": 1.0, "clip": 1.0, **training},
        **dict(sections),
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
    assert recipe(algorithm, **OWN[algorithm]).training.unit in units


def test_a_covariance_is_a_part_of_its_own_and_shown():
    read = recipe("dp_fedfc", **OWN["dp_fedfc"])
    found = forecast(read, SCALE)
    assert [(part.label, part.steps) for part in found.parts] == [("training covariance", 1), ("training", 10)]
    assert [part.share for part in found.parts] == pytest.approx([0.4, 0.6])
    assert found.covariance.quanta + found.training.quanta == found.training_quanta == found.budget.quanta
    # s = √2·C²/μ, in every coordinate of the packed sum of 20 clients of whom 19 are counted on
    s = math.sqrt(2) * 9 / (gdp.mu(6, 1e-5) * math.sqrt(0.4)) * math.sqrt(20 / 19)
    assert found.covariance.answered_sigma == pytest.approx(s, rel=1e-2)
    text = plain(report_plan.forecast(read, found, SCALE, Standing(found.budget.quanta, 0, 0)))
    assert "of 65 features" in text
    assert f"s = {s / 9:.3g}·C²" in text


def test_the_plan_is_the_trainers_own(tmp_path):
    """What the recipe sets aside and what the trainer releases have the same names and the same quanta."""
    read = recipe("dp_fedfc", **OWN["dp_fedfc"])
    found = forecast(read, SCALE)
    settings = trainer_named("dp_fedfc").settings_type.from_config({"rounds": 10, **read.training.fixed()})
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        people = ledger.population("people")
        cohort = Cohort(LinearHead(64, 10), {"a": Records(np.zeros((3, 64)), np.zeros(3))}, state_dir=tmp_path)
        trainer = trainer_named("dp_fedfc")(
            cohort, people.run("run"), LinearHead(64, 10), settings, quanta=found.training_quanta
        )
        assert trainer.plan.text() == found.ledger_plan(search="votes", training="gradients").text()


def test_several_local_steps_have_the_noise_of_as_many_releases():
    """s₀ = 2C√(TK)/μ at every client and step; in the mean gradient over n clients and K steps s₀√(n/K)/N."""
    found = forecast(recipe("dp_scaffold", **OWN["dp_scaffold"]), SCALE)
    s0 = 2 * math.sqrt(10 * 4) / gdp.mu(6, 1e-5)
    assert found.noise_to_signal == pytest.approx(s0 * math.sqrt(20 / 4) / 1437 * math.sqrt(650), rel=1e-3)
    shown = plain(report_plan.forecast(recipe("dp_scaffold", **OWN["dp_scaffold"]), found, SCALE, Standing(None, 0, 0)))
    assert "4 local steps in a round, each noised" in shown
    alone = forecast(recipe("dp_scaffold", regime="local"), SCALE)
    assert alone.noise_to_signal == pytest.approx(found.noise_to_signal, rel=1e-3)  # √K more noise, K sums of it


@pytest.mark.parametrize(
    ("sections", "training", "sentence"),
    [
        ({}, {"regime": "distributed"}, r"`training\.regime` is `distributed`.*4 local steps are private in `local`"),
        ({}, {"weighting": "clients"}, r"`training\.weighting: clients` goes with one local step"),
        ({"cohort": {"clients": 20, "quorum": 15}}, {}, r"`cohort\.quorum` is 15 of 20.*asks every client"),
    ],
)
def test_several_local_steps_are_refused_where_they_are_not_private_or_not_right(sections, training, sentence):
    with pytest.raises(RecipeError, match=sentence):
        recipe("dp_scaffold", sections, **OWN["dp_scaffold"], **training)


@pytest.mark.parametrize("algorithm", ["dp_fedfc", "dp_scaffold"])
def test_what_one_client_cannot_rehearse_cannot_be_voted_on(algorithm):
    search = {"votes": 1, "space": {"learning_rate": {"grid": [0.1, 1.0, 10.0]}}}
    sections = {"search": search, "shares": {"search": 0.3, "training": 0.7}}
    with pytest.raises(RecipeError, match=r"`search` cannot stand before `dp_.*Delete `search`"):
        recipe(algorithm, sections, **OWN[algorithm])


def test_averages_of_updates_protect_clients_only():
    with pytest.raises(RecipeError, match=r"`training\.unit`.*`client`"):
        recipe("dp_fedavg", unit="record")


def test_an_unknown_trainer_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"dp_fedsofia.*dp_fedsofim"):
        trainer_named("dp_fedsofia")
