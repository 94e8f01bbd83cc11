"""A small recipe of a search in the central model, and how to change one thing in it."""

import copy

import pytest

from dpray.experiments import kinds
from dpray.experiments.central.spec import CentralRecipe
from dpray.experiments.reading import write_yaml

SMALL = {
    "name": "small",
    "population": {"name": "people", "unit": "user"},
    "budget": {"epsilon": 5, "delta": 1e-5},
    "objective": {"name": "paraboloid", "dimension": 3, "public": True},
    "search": {"algorithm": "dp_gibo", "iterations": 6, "clip": 1.0},
    "noise": {"seed": 1},
}
REMOVE = "(removed)"  # a word, so that tests have the same names in every process


def changed(*changes) -> dict:
    """The small recipe with (path, value) changed; REMOVE takes a key out."""
    document = copy.deepcopy(SMALL)
    for path, value in changes:
        *parents, last = path.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        if value == REMOVE:
            del place[last]
        else:
            place[last] = value
    return document


def read(document: dict) -> CentralRecipe:
    recipe = kinds.read(write_yaml(document))
    assert isinstance(recipe, CentralRecipe)
    return recipe


@pytest.fixture(scope="session")
def small():
    """Makes the text of the small recipe, changed."""
    return lambda *changes: write_yaml(changed(*changes))


@pytest.fixture(scope="session")
def recipe():
    """Makes the small recipe, changed."""
    return lambda *changes: read(changed(*changes))
