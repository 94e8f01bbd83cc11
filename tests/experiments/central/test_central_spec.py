"""A recipe of a search in the central model is told from a cohort's, read as written, and refused in sentences."""

import pytest

from dpray.experiments import kinds
from dpray.experiments.central.spec import ALGORITHMS, CentralRecipe
from dpray.experiments.domains import Domain
from dpray.experiments.reading import RecipeError
from dpray.experiments.runs import find_recipe
from dpray.experiments.spec import Recipe

REMOVE = "(removed)"

SEARCHES = {
    "dp_gibo": {"iterations": 3, "clip": 1.0, "batch": "adaptive", "bias": 0.5, "lengthscale": {"x_0": 1, "x_1": 2}},
    "gibo": {"iterations": 3, "noise": 0.1},
    "finite_differences": {"iterations": 3, "clip": 1, "two_sided": True, "distance": 0.25},
    "spsa": {"iterations": 3, "clip": 1.0, "directions": 2, "step": "sgd", "rate": 0.5},
    "private_random": {"candidates": 8, "bound": 4.0},
    "global_bo": {"iterations": 3, "first": 4},
}
NOT_PRIVATE = [("budget", {"delta": 1e-5, "non_private": True})]


def test_the_kind_follows_from_what_the_recipe_holds(recipe):
    assert isinstance(recipe(), CentralRecipe)
    assert isinstance(find_recipe("digits_quickstart"), Recipe)
    assert isinstance(find_recipe("group_lasso"), CentralRecipe)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_search_reads_back(recipe, algorithm):
    privacy = NOT_PRIVATE if algorithm in ("gibo", "global_bo") else []
    found = recipe(("search", {"algorithm": algorithm, **SEARCHES[algorithm]}), *privacy)
    assert {key: found.search.own[key] for key in SEARCHES[algorithm] if key != "clip"} == {
        key: value for key, value in SEARCHES[algorithm].items() if key != "clip"
    }
    again = kinds.read(found.write())
    assert again == found
    assert list(again.write()) == list(found.write())


def test_what_names_a_section_is_written_first(recipe):
    text = recipe().write()
    assert "search:\n  algorithm: dp_gibo\n" in text
    assert "objective:\n  name: paraboloid\n" in text


def test_a_space_of_its_own(recipe):
    found = recipe(("search.space", {"x_1": {"loguniform": [0.1, 1]}, "x_2": 0.5}))
    assert found.search.space == {"x_1": Domain("loguniform", (0.1, 1)), "x_2": 0.5}


REFUSED = [
    ("objective.name", "parabloid", ["parabloid", "did you mean `paraboloid`", "group_lasso"]),
    ("objective.name", REMOVE, ["`objective.name`", "missing"]),
    ("objective.dimensions", 3, ["`objective.dimensions`", "did you mean `dimension`"]),
    ("objective.train", 3, ["`objective.train`"]),
    ("objective.public", "yes", ["`objective.public`", "true or false", "'yes' (text)"]),
    ("objective", REMOVE, ["`objective`", "missing"]),
    ("objectiv", {}, ["`objectiv`", "did you mean `objective`"]),
    ("search.algorithm", "dp_gipo", ["dp_gipo", "did you mean `dp_gibo`", "private_random"]),
    ("search.algorithm", REMOVE, ["`search.algorithm`", "missing"]),
    ("search.iteration", 3, ["`search.iteration`", "did you mean `iterations`"]),
    ("search.iterations", 0, ["`search.iterations`", "at least 1", "0"]),
    ("search.iterations", 2.5, ["`search.iterations`", "whole number", "2.5"]),
    ("search.clip", 0, ["`search.clip`", "above 0"]),
    ("search.clip", -1.0, ["`search.clip`", "above 0", "-1"]),
    ("search.clip", REMOVE, ["`search.clip`", "missing"]),
    ("search.bound", 3.0, ["`search.bound`", "means nothing to the chosen algorithm"]),
    ("search.votes", 1, ["`search.votes`", "not a key"]),
    ("search.step", "newton", ["`search.step`", "newton", "noise_aware"]),
    ("search.step", "sgd", ["`search.step`", "rate"]),
    ("search.start", "left", ["`search.start`", "`center`", "'left' (text)"]),
    ("search.lengthscale", -1, ["`search.lengthscale`", "above 0", "-1"]),
    ("search.space", {"x_0": {"randint": [1, 4]}}, ["`search.space.x_0`", "randint", "range of floats"]),
    ("search.space", {"x_0": {"choice": [1.0, 4.0]}}, ["`search.space.x_0`", "choice", "private_random"]),
    ("search.space", {"x_0": {"uniform": [3, 1]}}, ["`search.space.x_0", "low < high"]),
    ("population.unit", "record", ["`population.unit`", "`user`", "`record`"]),
    ("population.unit", REMOVE, ["`population.unit`", "`user`"]),
    ("budget.epsilon", REMOVE, ["`budget.epsilon`", "missing", "non_private"]),
    ("spend", {}, ["`spend`", "none of them"]),
    ("spend", {"mu": 1.0, "share": 0.5}, ["`spend`", "`share` and `mu`"]),
    ("spend", {"mu": 0}, ["`spend.mu`", "above 0"]),
    ("spend", {"share": 1.5}, ["`spend.share`", "at most 1"]),
    ("spend", {"shares": 0.5}, ["`spend.shares`", "did you mean `share`"]),
    ("cohort", {"clients": 4}, ["`cohort`", "cannot stand beside an `objective`"]),
    ("shares", {"search": 1}, ["`shares`", "`objective`"]),
]


@pytest.mark.parametrize(("path", "value", "facts"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(recipe, path, value, facts):
    with pytest.raises(RecipeError) as refusal:
        recipe((path, value))
    assert [fact for fact in facts if fact not in str(refusal.value)] == []


@pytest.mark.parametrize("algorithm", ["gibo", "global_bo"])
def test_a_search_without_noise_has_to_be_asked_for_in_words(recipe, algorithm):
    search = ("search", {"algorithm": algorithm, "iterations": 3})
    with pytest.raises(RecipeError, match=r"NOT PRIVATE.*non_private: true"):
        recipe(search)
    assert recipe(search, *NOT_PRIVATE).budget.non_private


def test_a_bound_that_binds_nobody_is_refused(recipe):
    with pytest.raises(RecipeError, match=r"`search\.clip` has no effect"):
        recipe(*NOT_PRIVATE)
    with pytest.raises(RecipeError, match="`spend` has no meaning"):
        recipe(*NOT_PRIVATE, ("search.clip", REMOVE), ("spend", {"share": 0.5}))
    assert recipe(*NOT_PRIVATE, ("search.clip", REMOVE)).search.clip is None


def test_private_random_search_takes_whole_numbers_and_choices(recipe):
    search = {"algorithm": "private_random", "candidates": 4, "bound": 1.0, "space": {"x_0": {"randint": [1, 4]}}}
    assert recipe(("search", search)).search.space["x_0"] == Domain("randint", (1, 4))
