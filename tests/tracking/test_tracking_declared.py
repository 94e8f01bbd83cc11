"""Only declared names and finite numbers are shown, and a refusal never repeats the value."""

import math

import numpy as np
import pytest

from dpray.platform.tracking import DECLARED, PUBLIC_METRICS, RELEASED_METRICS, NullTracker, UndeclaredMetric

SECRET = 0.123456789


def test_declared_names_pass_as_floats():
    assert DECLARED.check("public", {"privacy/epsilon": np.float64(1.5), "round/clients": 20}) == {
        "privacy/epsilon": 1.5,
        "round/clients": 20.0,
    }
    assert DECLARED.check("released", {"round/gradient_norm": np.float32(0.5)}) == {"round/gradient_norm": 0.5}


@pytest.mark.parametrize("name", ["validation/loss", "client/3/loss", "", "Privacy/epsilon", "privacy/epsilon "])
@pytest.mark.parametrize("kind", ["public", "released"])
def test_an_undeclared_name_is_refused_by_name_and_without_its_value(kind, name):
    with pytest.raises(UndeclaredMetric, match="not declared") as refusal:
        DECLARED.check(kind, {name: SECRET})
    assert repr(name) in str(refusal.value)
    assert "0.1234" not in str(refusal.value)


def test_the_other_kind_is_named():
    with pytest.raises(UndeclaredMetric, match="declared as released"):
        DECLARED.check("public", {"round/gradient_norm": SECRET})
    with pytest.raises(UndeclaredMetric, match="declared as public"):
        DECLARED.check("released", {"privacy/mu": SECRET})


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, "0.5", None, [SECRET], np.array([SECRET]), complex(SECRET)]
)
def test_what_is_not_one_finite_number_is_refused(value):
    with pytest.raises(UndeclaredMetric, match="round/gradient_norm") as refusal:
        DECLARED.check("released", {"round/gradient_norm": value})
    assert "0.1234" not in str(refusal.value)


def test_one_undeclared_name_keeps_the_rest_out():
    seen = []
    tracker = NullTracker()
    tracker._record = seen.append
    with pytest.raises(UndeclaredMetric):
        tracker.public({"round/clients": 3, "loss of client 3": SECRET})
    assert seen == []
    tracker.public({"round/clients": 3})
    assert [entry["values"] for entry in seen] == [{"round/clients": 3.0}]


def test_the_null_tracker_refuses_like_the_real_one():
    with pytest.raises(UndeclaredMetric):
        NullTracker().child("training").released({"raw/loss": SECRET})


def test_an_algorithm_can_declare_its_own_names():
    declared = DECLARED.extended(released={"tree/*": "noised counts"})
    assert declared.check("released", {"tree/depth": 3}) == {"tree/depth": 3.0}
    with pytest.raises(UndeclaredMetric):
        DECLARED.check("released", {"tree/depth": 3})


def test_no_wall_clock_measurement_is_declared():
    names = [*PUBLIC_METRICS, *RELEASED_METRICS]
    assert not [name for name in names if any(word in name for word in ("time", "second", "duration", "speed"))]
