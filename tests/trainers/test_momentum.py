"""Momentum and normalised momentum against sums written out, and what they tell of the noise in them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.trainers.momentum import (
    MomentumSettings,
    NormalisedMomentumSettings,
    momentum_noise_energy,
    momentum_over_noise,
)

BASICS = {"rounds": 10, "learning_rate": 0.3, "clip": 1.0}
GRADIENTS = st.integers(0, 10**6).map(lambda seed: np.random.default_rng(seed).standard_normal((6, 5)))
BETA = st.floats(0, 0.999)


def last_state(settings, gradients, noise=0.0):
    state = settings.initial_state(np.zeros(gradients.shape[1:]))
    for t, G in enumerate(gradients, start=1):
        state = settings.server_step(state, G, t, noise)
    return state


def weighted_sum(gradients, beta, t):
    """M_t = (1−β) Σ_i β^(t−i) G_i, without the recursion."""
    return (1 - beta) * sum(beta ** (t - 1 - i) * gradients[i] for i in range(t))


@given(gradients=GRADIENTS, beta=BETA, correction=st.booleans())
def test_momentum_is_the_weighted_sum_of_all_gradients(gradients, beta, correction):
    settings = MomentumSettings(**BASICS, momentum=beta, bias_correction=correction)
    steps = [weighted_sum(gradients, beta, t) / (1 - beta**t if correction else 1) for t in range(1, 7)]
    np.testing.assert_allclose(last_state(settings, gradients).theta, -0.3 * sum(steps), rtol=1e-9, atol=1e-12)


@given(gradients=GRADIENTS, beta=BETA)
def test_every_normalised_step_has_the_length_of_the_rate_along_the_momentum(gradients, beta):
    settings = NormalisedMomentumSettings(**BASICS, momentum=beta)
    steps = [weighted_sum(gradients, beta, t) for t in range(1, 7)]
    expected = -0.3 * sum(step / np.linalg.norm(step) for step in steps)
    np.testing.assert_allclose(last_state(settings, gradients).theta, expected, rtol=1e-9, atol=1e-12)


def test_no_momentum_is_no_step_and_no_division_by_zero():
    settings = NormalisedMomentumSettings(**BASICS)
    gradients = np.zeros((1, 2, 3))
    gradients[0, 1] = 1.0
    np.testing.assert_allclose(np.linalg.norm(last_state(settings, gradients).theta, axis=-1), [0.0, 0.3])


def test_the_signal_over_the_noise_is_that_of_the_closed_form():
    gradients = np.random.default_rng(0).standard_normal((6, 50))
    for kind in (MomentumSettings, NormalisedMomentumSettings):
        settings = kind(**BASICS, momentum=0.8)
        state = last_state(settings, gradients, noise=0.4)
        energy = momentum_noise_energy(50, 0.4, 0.8, 6)
        M = weighted_sum(gradients, 0.8, 6)
        expected = math.sqrt((M @ M - energy) / energy)
        assert settings.diagnostics(state, 6) == {"round/momentum_signal_to_noise": pytest.approx(expected)}
    assert momentum_over_noise(np.ones(3), 0.0) == {"round/momentum_signal_to_noise": math.inf}
    assert momentum_over_noise(np.ones(3), 100.0) == {"round/momentum_signal_to_noise": 0.0}


@pytest.mark.parametrize("kind", [MomentumSettings, NormalisedMomentumSettings])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"momentum": 1.0}, "`momentum` .* must be at least 0 and below 1, and 1.0"),
        ({"momentum": math.nan}, "and nan was given"),
        ({"momentum": True}, "and True was given"),
        ({"bias_correction": 0}, "must be true or false"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(kind, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        kind(**BASICS, **changes)
