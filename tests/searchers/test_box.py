"""Between a Tune space of floats and the box a local search moves in."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import tune
from ray.tune.search.sample import Float

from dpray.searchers.box import Box
from dpray.searchers.errors import SpaceError

SPACE = {"lr": tune.loguniform(1e-4, 1.0), "model": {"width": tune.uniform(-2.0, 3.0), "kind": "mlp"}, "epochs": 5}


def test_coordinates_are_values_and_natural_logs():
    box = Box.of(SPACE)
    assert box.names == ("lr", "model/width")
    np.testing.assert_allclose(box.lower, [math.log(1e-4), -2.0])
    np.testing.assert_allclose(box.upper, [0.0, 3.0])
    assert box.config(box.center) == {
        "lr": pytest.approx(1e-2),
        "model": {"width": 0.5, "kind": "mlp"},
        "epochs": 5,
    }


@settings(max_examples=200, deadline=None)
@given(theta=st.tuples(st.floats(-20, 20), st.floats(-20, 20)))
def test_every_point_stands_for_a_configuration_within_the_bounds(theta):
    box = Box.of(SPACE)
    config = box.config(theta)
    assert 1e-4 * (1 - 1e-12) <= config["lr"] <= 1.0
    assert -2.0 <= config["model"]["width"] <= 3.0
    np.testing.assert_allclose(box.theta(config), box.project(theta), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"a": {"n": tune.randint(1, 9)}}, "a/n is a whole number"),
        ({"n": tune.qrandint(2, 8, 2)}, "n is a whole number"),
        ({"c": tune.choice([0.1, 0.2])}, "c is a choice"),
        ({"g": tune.grid_search([0.1, 0.2])}, "g is a grid_search"),
        ({"q": tune.quniform(0.0, 1.0, 0.1)}, "q is quantised"),
        ({"x": tune.randn()}, "x is unbounded"),
        ({"x": Float(0.0, math.inf)}, "x is unbounded"),
        ({"x": Float(1.0, 1.0)}, "leaves nothing to search"),
        ({"f": tune.sample_from(lambda config: 1)}, "f is drawn by a function"),
        ({"x": 1.0}, "nothing to search"),
    ],
)
def test_what_is_no_box_is_refused_by_name(space, says):
    with pytest.raises(SpaceError, match=says):
        Box.of(space)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lr": 0.1}, "no model/width"),
        ({"lr": 2.0, "model": {"width": 0.0}}, "outside its range"),
        ({"lr": -1.0, "model": {"width": 0.0}}, "outside its range"),
        ({"lr": math.nan, "model": {"width": 0.0}}, "finite number"),
        ({"lr": True, "model": {"width": 0.0}}, "finite number"),
        ({"lr": 0.1, "model": 3}, "no model/width"),
    ],
)
def test_a_starting_point_outside_the_box_is_refused(config, says):
    with pytest.raises(SpaceError, match=says):
        Box.of(SPACE).theta(config)


def test_numbers_per_dimension_are_given_once_or_by_name():
    box = Box.of(SPACE)
    np.testing.assert_array_equal(box.per_dimension("lengthscale", 2), [2.0, 2.0])
    np.testing.assert_array_equal(box.per_dimension("lengthscale", {"model/width": 3.0, "lr": 1.0}), [1.0, 3.0])
    for bad in ({"lr": 1.0}, {"lr": 1.0, "model/width": 1.0, "x": 1.0}, 0, -1.0, math.nan, math.inf, True, "1"):
        with pytest.raises(ValueError, match="lengthscale"):
            box.per_dimension("lengthscale", bad)
