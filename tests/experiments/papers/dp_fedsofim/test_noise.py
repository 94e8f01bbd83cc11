"""Noise scales against the formula, pairing of normals, and where preconditioning by noise turns a step around."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dpray.experiments.papers.dp_fedsofim import methods
from dpray.experiments.papers.dp_fedsofim.data import TASKS
from dpray.experiments.papers.dp_fedsofim.noise import Condition, Normals, covariance_std, gradient_std, reversal
from dpray.platform.privacy import gdp
from dpray.platform.privacy.mechanisms import Regime
from dpray.trainers.fedgd import FedGDSettings
from dpray.trainers.settings import ServerState
from dpray.trainers.sofim import SOFIMSettings

D, N, T = 2570, 50_000, 70
SETTINGS = methods.paper(TASKS["cifar10"])
MU = gdp.mu(1.0, 1e-5)
GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.mark.parametrize("row", json.loads((GOLDEN / "sofim_client_noise.json").read_text())["rows"])
def test_one_clients_noise_is_golden(row):
    settings = FedGDSettings(rounds=row["T"], clip=row["C"], learning_rate=1.0)
    sigma = gradient_std(settings, Condition(row["epsilon"], Regime.LOCAL, 100), D, N, 0.0)
    np.testing.assert_allclose(sigma / 10, row["client_sum_std_local"], rtol=1e-5)


def test_noise_is_once_a_client_or_shared():
    once = 2 * 10.0 * math.sqrt(T) / MU
    for regime, clients, times in [
        (Regime.LOCAL, 20, math.sqrt(20)),
        (Regime.LOCAL, 100, 10.0),
        (Regime.DISTRIBUTED, 100, math.sqrt(100 / 99)),
    ]:
        sigma = gradient_std(SETTINGS["FedGD"], Condition(1.0, regime, clients), D, N, 0.0)
        assert sigma.shape == (T,)
        np.testing.assert_allclose(sigma, once * times, rtol=1e-3)
    assert np.all(gradient_std(SETTINGS["FedGD"], Condition(math.inf), D, N, 0.0) == 0)


def test_the_covariance_has_its_share_and_the_gradients_the_rest():
    condition, fedfc = Condition(1.0, Regime.LOCAL, 100), SETTINGS["FedFC"]
    sigma = gradient_std(fedfc, condition, D, N, 0.0)
    np.testing.assert_allclose(sigma, 10 * 20.0 * math.sqrt(T) / (MU * math.sqrt(0.8)), rtol=1e-3)
    expected = 10 * math.sqrt(2) * fedfc.covariance_clip**2 / (MU * math.sqrt(0.2))
    assert covariance_std(fedfc, condition, 257, N) == pytest.approx(expected, rel=1e-3)
    assert covariance_std(fedfc, Condition(math.inf), 257, N) == 0


def test_local_steps_pay_for_every_step_at_every_client():
    sigma = gradient_std(methods.scaffold(), Condition(1.0, Regime.LOCAL, 100), D, N, 0.0)
    np.testing.assert_allclose(sigma, 20.0 * math.sqrt(T * methods.LOCAL_STEPS) / MU, rtol=1e-3)


def test_normals_follow_from_seed_and_round_alone():
    normals = Normals(3, 50)
    np.testing.assert_array_equal(normals.gradient(2), Normals(3, 50).gradient(2))
    steps = normals.step(2, 0, 4)
    others = [normals.gradient(3), Normals(4, 50).gradient(2), *steps, normals.step(2, 1, 4)[0], normals.covariance(50)]
    for other in others:
        assert abs(np.corrcoef(normals.gradient(2), other)[0, 1]) < 0.8


@pytest.mark.parametrize(("noise", "length", "changes", "uphill"), [
    (0.05, 1.0, {}, False),
    (0.3, 1.0, {}, True),
    (0.3, 0.3, {}, True),
    (0.3, 1.0, {"debias": True}, True),
    (0.3, 0.3, {"debias": True}, False),
    (0.3, 1.0, {"precondition": "momentum"}, False),
])  # fmt: skip
def test_noise_in_both_factors_turns_the_step_around(noise, length, changes, uphill):
    """A constant gradient g under noise: the mean part along g of 4000 steps, against the closed form.

    With s = .3 a step's part along g has a standard deviation of about .6, correlated over some ten rounds: the mean is
    off by about .04, and differs from 0 by more than .2 wherever its sign is claimed for v = G.
    """
    d, rng, begun = 2000, np.random.default_rng(0), 0.0
    settings = SOFIMSettings(rounds=1, learning_rate=1.0, rho=0.5, momentum=0.9, **changes)
    g = np.zeros(d)
    g[0] = length
    state = settings.initial_state(np.zeros(d))
    for t in range(1, 4051):
        G = g + noise * rng.standard_normal(d)
        state = settings.server_step(ServerState(state.theta, state.slots, t - 1), G, t, noise)
        if t == 50:
            begun = state.theta[0]
    moved = -(state.theta[0] - begun) / 4000
    assert (moved < 0) == uphill
    if not changes:
        f = d * noise**2 * 0.1 / 1.9
        assert reversal(settings, noise, d) == pytest.approx(0.9 * f / 0.5)
        assert (reversal(settings, noise, d) > 1) == uphill
        a = (1.9 * f + length**2) / (0.5 + f + length**2)  # with the signal, which M·G and ‖M‖² hold as well
        assert moved == pytest.approx((1 - a) * length / 0.5, abs=0.15)
