"""DP-FedSOFIM's server step: golden trajectories, a dense inverse, and what noise alone puts into the momentum."""

import json
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from dpray.trainers import sofim
from dpray.trainers.curvature import curved
from dpray.trainers.fedgd import FedGDSettings
from dpray.trainers.momentum import momentum, momentum_noise_energy
from dpray.trainers.settings import ServerState
from dpray.trainers.sofim import SOFIMSettings, precondition

GOLDEN = Path(__file__).parents[1] / "golden"
FALSE_ALARM = 1e-6


def vectors(d=7, number=3, seed=0):
    return np.random.default_rng(seed).standard_normal((number, d))


def some_settings(**changes):
    return SOFIMSettings(**{"rounds": 10, "learning_rate": 0.1, "clip": 1.0, **changes})


def trajectory(settings, gradients, noise=0.0):
    state = settings.initial_state(np.zeros(np.shape(gradients)[1:]))
    thetas = []
    for t, gradient in enumerate(gradients, start=1):
        state = settings.server_step(state, np.asarray(gradient), t, noise)
        thetas.append(state.theta)
    return np.array(thetas)


def test_precondition_golden():
    golden = json.loads((GOLDEN / "sofim_step.json").read_text())
    M, G = np.array(golden["M"]), np.array(golden["G"])
    np.testing.assert_allclose(precondition(G, M, golden["rho"]), golden["H_times_G"], rtol=1e-13)
    np.testing.assert_allclose(precondition(M, M, golden["rho"]), golden["H_times_M"], rtol=1e-13)


@pytest.mark.parametrize(
    ("mode", "correction", "name"),
    [
        ("gradient", False, "precondition_gradient_no_bias_correction"),
        ("momentum", True, "precondition_momentum_bias_corrected"),
    ],
)
def test_trajectory_golden(mode, correction, name):
    golden = json.loads((GOLDEN / "sofim_trajectory.json").read_text())
    settings = some_settings(
        learning_rate=golden["eta"],
        momentum=golden["beta"],
        rho=golden["rho"],
        precondition=mode,
        bias_correction=correction,
    )
    np.testing.assert_allclose(trajectory(settings, golden["gradients"]), golden[name], rtol=1e-12)


@given(seed=st.integers(0, 10**6), d=st.integers(1, 40), rho=st.floats(1e-3, 1e3), scale=st.floats(1e-3, 1e3))
def test_precondition_is_the_dense_inverse(seed, d, rho, scale):
    M, v, _ = scale * vectors(d, seed=seed)
    expected = np.linalg.solve(rho * np.eye(d) + np.outer(M, M), v)
    tolerance = 1e-9 * (1 + scale**2 * d / rho) * np.linalg.norm(v) / rho
    np.testing.assert_allclose(precondition(v, M, rho), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", ["gradient", "momentum"])
@pytest.mark.parametrize("correction", [False, True])
def test_the_fused_step_is_the_formula(mode, correction, monkeypatch):
    monkeypatch.setattr(sofim, "_BLOCK", 3)  # several blocks, the last one short
    settings = some_settings(precondition=mode, bias_correction=correction, momentum=0.8, rho=0.3)
    state = settings.initial_state(vectors()[0])
    M = np.zeros(7)
    for t in range(1, 5):
        G = vectors(seed=t)[1]
        M = momentum(M, G, 0.8)
        M_hat = M / (1 - 0.8**t) if correction else M
        expected = state.theta - 0.1 * precondition(G if mode == "gradient" else M_hat, M_hat, 0.3)
        state = settings.server_step(state, G, t, 0.0)
        np.testing.assert_allclose(state.theta, expected, rtol=1e-12)
        np.testing.assert_allclose(state.slots["momentum"], M, rtol=1e-13)


def test_a_step_changes_none_of_its_arguments():
    settings = some_settings()
    theta, M, G = vectors()
    state = ServerState(theta.copy(), {"momentum": M.copy(), "noise_variance": np.zeros(())}, 3)
    settings.server_step(state, G, 4, 0.1)
    np.testing.assert_array_equal(state.theta, theta)
    np.testing.assert_array_equal(state.slots["momentum"], M)


@pytest.mark.parametrize("mode", ["gradient", "momentum"])
def test_leading_axes_are_independent_runs(mode):
    settings = some_settings(precondition=mode, bias_correction=True)
    gradients = np.random.default_rng(5).standard_normal((4, 3, 2, 6))
    together = trajectory(settings, gradients)
    for i in range(3):
        for j in range(2):
            np.testing.assert_allclose(together[:, i, j], trajectory(settings, gradients[:, i, j]), rtol=1e-12)


@pytest.mark.parametrize("mode", ["gradient", "momentum"])
def test_in_place_it_needs_no_array_of_size_d(mode):
    d = 1_000_000
    theta, M, G = vectors(d)
    expected = sofim.step(theta, M, G, learning_rate=0.1, beta=0.9, rho=0.5, mode=mode)
    tracemalloc.start()
    got = sofim.step(theta, M, G, learning_rate=0.1, beta=0.9, rho=0.5, mode=mode, out=(theta, M))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert got[0] is theta
    assert got[1] is M
    np.testing.assert_array_equal(theta, expected[0])
    np.testing.assert_array_equal(M, expected[1])
    assert peak < 0.1 * theta.nbytes


@given(seed=st.integers(0, 10**6), rho=st.floats(1e-4, 1e4), scale=st.floats(1e-4, 1e4))
def test_a_momentum_step_is_never_longer_than_eta_over_two_roots_of_rho(seed, rho, scale):
    settings = some_settings(precondition="momentum", rho=rho)
    thetas = trajectory(settings, scale * vectors(5, 4, seed))
    steps = np.linalg.norm(np.diff(thetas, axis=0, prepend=np.zeros((1, 5))), axis=1)
    assert np.all(steps <= 0.1 / (2 * np.sqrt(rho)) * (1 + 1e-12))


def test_with_much_damping_the_gradient_step_is_fedgd_at_rate_eta_over_rho():
    gradients = vectors(6, 5)
    rho = 1e9
    preconditioned = trajectory(some_settings(learning_rate=0.2 * rho, rho=rho), gradients)
    np.testing.assert_allclose(preconditioned, -0.2 * np.cumsum(gradients, axis=0), rtol=1e-6)


def test_fedgd_descends_the_gradient():
    settings = FedGDSettings(rounds=5, learning_rate=0.2, clip=1.0)
    gradients = np.random.default_rng(0).standard_normal((5, 2, 4))
    np.testing.assert_allclose(trajectory(settings, gradients), -0.2 * np.cumsum(gradients, axis=0), rtol=1e-12)


def simulated_energy_lies_within(expected, d, noise, beta, t):
    """Whether ‖M_t‖² of simulated noise agrees with an expected value, false-alarm rate 1e-6.

    The coordinates of M_t are independent normals of equal variance, so runs · d of them give a χ² exactly.
    """
    runs = 400
    rng = np.random.default_rng(7)
    M = np.zeros((runs, d))
    for _ in range(t):
        M = momentum(M, noise * rng.standard_normal((runs, d)), beta)
    total = float(np.sum(M**2)) / (expected / d)
    low, high = chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], runs * d)
    return low < total < high


@pytest.mark.parametrize(("beta", "t"), [(0.9, 1), (0.9, 3), (0.9, 40), (0.5, 2), (0.0, 4)])
def test_momentum_noise_energy_by_simulation(beta, t):
    d, noise = 300, 0.7
    assert simulated_energy_lies_within(momentum_noise_energy(d, noise, beta, t), d, noise, beta, t)


def test_the_simulation_would_see_a_wrong_energy():
    """Negative control: the limit t → ∞ is not yet right at t = 3, nor is 5 % too much at any t."""
    d, noise = 300, 0.7
    limit = momentum_noise_energy(d, noise, 0.9, 10**6)
    assert not simulated_energy_lies_within(limit, d, noise, 0.9, 3)
    assert not simulated_energy_lies_within(1.05 * momentum_noise_energy(d, noise, 0.9, 3), d, noise, 0.9, 3)


@pytest.mark.parametrize("correction", [False, True])
def test_relative_damping_is_a_multiple_of_the_noise_floor(correction):
    relative = some_settings(rho=2.0, rho_relative=True, bias_correction=correction)
    state = absolute_state = relative.initial_state(np.zeros(7))
    for t in range(1, 6):
        G = vectors(seed=t)[0]
        floor = momentum_noise_energy(7, 0.3, 0.9, t, bias_correction=correction)
        state = relative.server_step(state, G, t, 0.3)
        absolute = some_settings(rho=2.0 * floor, bias_correction=correction)
        absolute_state = absolute.server_step(absolute_state, G, t, 0.3)
        np.testing.assert_allclose(state.theta, absolute_state.theta, rtol=1e-12)
        assert relative.diagnostics(state, t) == pytest.approx(absolute.diagnostics(absolute_state, t))


def test_relative_damping_needs_noise():
    settings = some_settings(rho_relative=True)
    with pytest.raises(ValueError, match="this run has none"):
        settings.server_step(settings.initial_state(np.zeros(3)), np.ones(3), 1, 0.0)


@pytest.mark.parametrize(("turned", "uphill"), [(0.3, False), (3.0, True)])
def test_it_warns_of_noise_that_turns_its_steps_around(turned, uphill):
    """Progress along a constant gradient, 3 000 rounds: a mean with a std of .02 steps that have no noise."""
    d, beta, noise = 2000, 0.9, 0.05
    rho = beta * d * noise**2 * (1 - beta) / (1 + beta) / turned
    settings = SOFIMSettings(rounds=3000, momentum=beta, rho=rho)
    assert bool(settings.warnings(noise, d)) == uphill
    rng, gradient = np.random.default_rng(7), np.full(d, 1e-3)
    state = settings.initial_state(np.zeros(d))
    for t in range(1, 3001):
        state = settings.server_step(state, gradient + noise * rng.standard_normal(d), t, noise)
    progress = -(state.theta @ gradient) / (3000 * settings.learning_rate / rho * (gradient @ gradient))
    f = rho * turned / beta
    assert progress == pytest.approx(1 - (1 + beta) * f / (rho + f), abs=0.1)
    assert (progress < 0) == uphill


@pytest.mark.parametrize("cure", [{"precondition": "momentum"}, {"debias": True}, {"rho": 1e3}])
def test_what_it_proposes_against_that_ends_the_warning(cure):
    (sentence,) = SOFIMSettings(rounds=1).warnings(1.0, 1000)
    assert "uphill" in sentence
    assert SOFIMSettings(**{"rounds": 1, **cure}).warnings(1.0, 1000) == ()
    assert SOFIMSettings(rounds=1).warnings(0.0, 1000) == ()


def test_the_ratio_of_momentum_to_damping_is_reported():
    settings = some_settings(momentum=0.5, rho=0.25)
    state = settings.server_step(settings.initial_state(np.zeros(2)), np.array([3.0, 4.0]), 1, 0.0)
    assert settings.diagnostics(state, 1)["round/momentum_over_rho"] == pytest.approx(2.5**2 / 0.25)
    assert settings.diagnostics(state, 1)["round/momentum_signal_to_noise"] == np.inf


@given(seed=st.integers(0, 10**6), d=st.integers(1, 40), rho=st.floats(1e-2, 1e2), part=st.floats(0, 2))
def test_without_its_noise_the_curvature_is_a_dense_inverse_too(seed, d, rho, part):
    """floor = part · ‖M‖²: the outer product keeps max(1 − part, 0) of its energy."""
    M, v, _ = vectors(d, seed=seed)
    dense = rho * np.eye(d) + max(1 - part, 0) * np.outer(M, M)
    np.testing.assert_allclose(precondition(v, M, rho, part * (M @ M)), np.linalg.solve(dense, v), rtol=0, atol=1e-8)


@pytest.mark.parametrize("mode", ["gradient", "momentum"])
@pytest.mark.parametrize("correction", [False, True])
def test_the_fused_debiased_step_is_the_formula_with_the_known_noise(mode, correction):
    settings = some_settings(precondition=mode, bias_correction=correction, momentum=0.8, rho=0.3, debias=True)
    state = settings.initial_state(vectors()[0])
    M = np.zeros(7)
    for t in range(1, 6):
        G = vectors(seed=t)[1]
        M = momentum(M, G, 0.8)
        M_hat = M / (1 - 0.8**t) if correction else M
        floor = momentum_noise_energy(7, 0.5, 0.8, t, bias_correction=correction)
        expected = state.theta - 0.1 * precondition(G if mode == "gradient" else M_hat, M_hat, 0.3, floor)
        state = settings.server_step(state, G, t, 0.5)
        np.testing.assert_allclose(state.theta, expected, rtol=1e-12)


def test_momentum_that_is_all_noise_has_no_curvature():
    """Then the step is DP-FedGD's at rate η/ρ, and never uphill."""
    settings = some_settings(debias=True, rho=0.5)
    state = settings.server_step(settings.initial_state(np.zeros(7)), vectors()[0], 1, noise=1e3)
    np.testing.assert_allclose(state.theta, -0.1 / 0.5 * vectors()[0], rtol=1e-12)


@pytest.mark.parametrize("mode", ["gradient", "momentum"])
@pytest.mark.parametrize("debias", [False, True])
def test_of_rank_r_it_is_the_dense_inverse_of_the_last_r_gradients(mode, debias):
    r, d, s, rho = 3, 6, 0.4, 0.7
    settings = some_settings(rank=r, precondition=mode, momentum=0.6, rho=rho, debias=debias)
    state, M, past = settings.initial_state(vectors(d)[0]), np.zeros(d), []
    for t in range(1, 8):
        G = vectors(d, seed=t)[1]
        M, past = 0.6 * M + 0.4 * G, [*past, G][-r:]
        found, U = np.linalg.eigh(np.mean([np.outer(g, g) for g in past], axis=0))
        # d s²/m taken out of each of the eigenvalues that are not zero
        kept = np.maximum(found - d * s**2 / len(past), 0) if debias else found
        dense = rho * np.eye(d) + U @ np.diag(kept) @ U.T
        expected = state.theta - 0.1 * np.linalg.solve(dense, G if mode == "gradient" else M)
        state = settings.server_step(state, G, t, s)
        np.testing.assert_allclose(state.theta, expected, rtol=0, atol=1e-10)


@given(seed=st.integers(0, 10**6), d=st.integers(1, 50), r=st.integers(1, 12), rho=st.floats(0.01, 100))
def test_woodbury_is_the_dense_inverse(seed, d, r, rho):
    rng = np.random.default_rng(seed)
    W, v = rng.standard_normal((r, d)) / np.sqrt(d), rng.standard_normal(d)
    expected = np.linalg.solve(rho * np.eye(d) + W.T @ W, v)
    np.testing.assert_allclose(curved(v, W, rho), expected, rtol=0, atol=1e-10 * max(1.0, 1 / rho))


def test_relative_damping_of_rank_r_is_a_multiple_of_what_noise_adds_to_an_eigenvalue():
    """Noise alone: W has rows of d independent normals of variance s²/m, and WWᵀ is d s²/m on its diagonal."""
    d, m, s = 4000, 4, 0.3
    settings = some_settings(rank=m, rho=2.0, rho_relative=True)
    state = settings.initial_state(np.zeros(d))
    rng = np.random.default_rng(0)
    for t in range(1, 8):
        state = settings.server_step(state, s * rng.standard_normal(d), t, s)
    W, floor = settings._curvature(state.slots, 7)
    assert floor == pytest.approx(d * s**2 / m)
    np.testing.assert_allclose(np.linalg.eigvalsh(W @ W.T), floor, rtol=0.25)  # 2√(m/d) = 0.06 is its spread
    ratio = settings.diagnostics(state, 7)["round/curvature_over_rho"]
    assert ratio == pytest.approx(np.linalg.norm(W, 2) ** 2 / (2 * floor))


def test_rank_r_takes_memory_of_r_gradients_only():
    d, r = 200_000, 4
    W, v = np.random.default_rng(0).standard_normal((r, d)), np.ones(d)
    tracemalloc.start()
    curved(v, W, 1.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * v.nbytes


def test_a_candidate_is_laid_over_the_defaults():
    make = partial(SOFIMSettings.from_config, defaults={"rounds": 40, "learning_rate": 1.0, "rho": 2.0})
    settings = make({"learning_rate": 4.0, "clip": 0.25})
    assert (settings.rounds, settings.learning_rate, settings.clip, settings.rho) == (40, 4.0, 0.25, 2.0)
    assert SOFIMSettings.from_config(settings.as_dict()) == settings


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"learning_rat": 1.0}, "`learning_rat` is not a setting of DP-FedSOFIM; did you mean `learning_rate`"),
        ({"lr": 1.0}, "`lr` is not a setting"),
        ({}, "needs `rounds`"),
        ({"rounds": 0}, "`rounds` of DP-FedSOFIM must be a whole number of at least 1, and 0"),
        ({"rounds": 2.0}, "whole number of at least 1, and 2.0"),
        ({"rounds": True}, "and True was given"),
        ({"rounds": 5, "learning_rate": 0.0}, "`learning_rate` of DP-FedSOFIM must be a finite number above 0"),
        ({"rounds": 5, "clip": float("nan")}, "`clip` of DP-FedSOFIM must be a finite number above 0, and nan"),
        ({"rounds": 5, "clip": float("inf")}, "and inf was given"),
        ({"rounds": 5, "clip": -1.0}, "and -1.0 was given"),
        ({"rounds": 5, "momentum": 1.0}, "`momentum` of DP-FedSOFIM must be at least 0 and below 1"),
        ({"rounds": 5, "momentum": -0.1}, "and -0.1 was given"),
        ({"rounds": 5, "rho": 0}, "`rho` of DP-FedSOFIM must be a finite number above 0"),
        ({"rounds": 5, "precondition": "hessian"}, "must be `gradient` or `momentum`, and 'hessian'"),
        ({"rounds": 5, "bias_correction": 1}, "must be true or false, and 1"),
        ({"rounds": 5, "debias": 1}, "`debias` of DP-FedSOFIM must be true or false"),
        ({"rounds": 5, "rank": 0}, "`rank` of DP-FedSOFIM must be a whole number of at least 1"),
        ({"rounds": 5, "rank": 2.0}, "`rank` of DP-FedSOFIM must be a whole number of at least 1"),
        ({"rounds": 5, "rank": True}, "and True was given"),
        ({"rounds": 5, "local_steps": 0}, "`local_steps` of DP-FedSOFIM"),
        ({"rounds": 5, "weighting": "size"}, "must be `records` or `clients`, and 'size'"),
    ],
)
def test_settings_refuse_with_a_sentence(config, sentence):
    with pytest.raises(ValueError, match=r"was given|did you mean|needs") as refusal:
        SOFIMSettings.from_config(config)
    assert sentence in str(refusal.value)
