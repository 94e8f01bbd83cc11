"""DP-FedAdam and DP-FedYogi against Algorithm 2 of their paper, coordinate by coordinate in plain Python."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.trainers.fedadam import FedAdamSettings, FedYogiSettings

BASICS = {"rounds": 10, "learning_rate": 0.3, "clip": 1.0}


def by_hand(gradients, beta1, beta2, tau, *, yogi):
    """One coordinate: Reddi et al. 2021, Algorithm 2, with Δ_t = −G_t and v_{−1} = τ²."""
    x = m = 0.0
    v = tau**2
    for G in gradients:
        delta = -G
        m = beta1 * m + (1 - beta1) * delta
        squared = delta**2
        v = v - (1 - beta2) * squared * np.sign(v - squared) if yogi else beta2 * v + (1 - beta2) * squared
        x = x + 0.3 * m / (math.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("kind", [FedAdamSettings, FedYogiSettings])
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-4, 1e3),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.999),
    tau=st.floats(1e-6, 1.0),
)
def test_the_step_is_the_papers(kind, seed, scale, beta1, beta2, tau):
    gradients = scale * np.random.default_rng(seed).standard_normal((6, 4))
    settings = kind(**BASICS, momentum=beta1, second_momentum=beta2, adaptivity=tau)
    state = settings.initial_state(np.zeros(4))
    for t, G in enumerate(gradients, start=1):
        state = settings.server_step(state, G, t, 0.0)
    expected = [by_hand(column, beta1, beta2, tau, yogi=kind is FedYogiSettings) for column in gradients.T]
    np.testing.assert_allclose(state.theta, expected, rtol=1e-9, atol=1e-12)


def test_the_two_differ():
    gradients = np.array([[3.0], [0.1], [0.1]])
    thetas = []
    for kind in (FedAdamSettings, FedYogiSettings):
        state = kind(**BASICS).initial_state(np.zeros(1))
        for t, G in enumerate(gradients, start=1):
            state = kind(**BASICS).server_step(state, G, t, 0.0)
        thetas.append(state.theta[0])
    assert abs(thetas[0] - thetas[1]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"momentum": -0.1}, "`momentum` of DP-FedAdam must be at least 0 and below 1"),
        ({"second_momentum": 1.0}, "`second_momentum` of DP-FedAdam must be at least 0 and below 1"),
        ({"adaptivity": 0.0}, "`adaptivity` of DP-FedAdam must be a finite number above 0"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedAdamSettings(**BASICS, **changes)
