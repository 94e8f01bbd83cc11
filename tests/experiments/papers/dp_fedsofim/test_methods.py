"""The paper's settings, and boxes that give every method the same chances."""

import numpy as np
import pytest

from dpray.experiments.papers.dp_fedsofim import methods
from dpray.experiments.papers.dp_fedsofim.data import TASKS
from dpray.experiments.papers.dp_fedsofim.methods import BOXES, MATCHED, REFERENCE

TASK = TASKS["cifar10"]


def test_the_papers_settings_are_one_for_all_methods():
    known = methods.paper(TASK)
    for name, settings in known.items():
        assert (settings.rounds, settings.clip) == (70, 10.0)
        assert settings.learning_rate == (0.2 if "η/ρ" in name else 0.1)
        if "SOFIM" in name:
            assert (settings.momentum, settings.rho) == (0.9, 0.5)
            assert settings.learning_rate / settings.rho == known[MATCHED].learning_rate
    assert methods.scaffold().local_steps > 1


def test_every_method_is_tried_at_the_same_points_with_the_same_first_step_and_clip():
    points = methods.points(16)
    assert points.shape == (16, 3)
    np.testing.assert_array_equal(points, methods.points(16))
    for box in BOXES.values():
        assert box.bounds["clip"] == BOXES[REFERENCE].bounds["clip"]
    tried = [BOXES[REFERENCE].at(point) for point in points]
    for name in ("SOFIM gradient", "SOFIM gradient, debiased", "SOFIM momentum"):
        for point, plain in zip(points, tried, strict=True):
            settings = BOXES[name].make(TASK, BOXES[name].at(point))
            assert settings.learning_rate / settings.rho == pytest.approx(plain["step"])
            assert settings.clip == plain["clip"]


def test_points_fill_their_boxes():
    """A Sobol sequence has one of 16 points in every sixteenth of a coordinate."""
    for column in methods.points(16).T:
        assert sorted(np.floor(16 * column)) == list(range(16))
    low, high = BOXES[REFERENCE].bounds["step"]
    assert BOXES[REFERENCE].at(np.full(3, 1e-12))["step"] == pytest.approx(low)
    assert BOXES[REFERENCE].at(np.full(3, 1 - 1e-12))["step"] == pytest.approx(high)
    assert BOXES[REFERENCE].at(np.full(3, 0.5))["step"] == pytest.approx((low * high) ** 0.5, rel=1e-3)


def test_local_steps_move_as_far_together_as_one():
    config = {"step": 0.6, "clip": 2.0}
    for number in (2, 4):
        settings = methods.local_steps(config, number)
        assert settings.local_steps * settings.local_rate * settings.learning_rate == pytest.approx(0.6)
