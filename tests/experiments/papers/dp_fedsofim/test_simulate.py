"""Stacked trainings against the product's trainers, one by one, with the same normals and without noise."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dpray.experiments.papers.dp_fedsofim import methods
from dpray.experiments.papers.dp_fedsofim.data import TASKS
from dpray.experiments.papers.dp_fedsofim.methods import BOXES
from dpray.experiments.papers.dp_fedsofim.noise import Condition, Normals
from dpray.experiments.papers.dp_fedsofim.simulate import Arm, Luck, by_local_steps, by_sums, scores, started
from dpray.platform.cohort.client import Records
from dpray.platform.privacy.mechanisms import Regime
from dpray.trainers.fedadam import DPFedAdamTrainer, FedAdamSettings
from dpray.trainers.fedfc import DPFedFCTrainer, FedFCSettings
from dpray.trainers.fedgd import DPFedGDTrainer, FedGDSettings
from dpray.trainers.models import LinearHead
from dpray.trainers.momentum import (
    DPMomentumTrainer,
    DPNormalisedMomentumTrainer,
    MomentumSettings,
    NormalisedMomentumSettings,
)
from dpray.trainers.scaffold import DPScaffoldTrainer
from dpray.trainers.sofim import DPFedSOFIMTrainer, SOFIMSettings

from .conftest import F, GivenNoise, K, Started

T, EPSILON, SEED = 6, 20.0, 5
TRAINERS = {
    FedGDSettings: DPFedGDTrainer,
    MomentumSettings: DPMomentumTrainer,
    NormalisedMomentumSettings: DPNormalisedMomentumTrainer,
    FedAdamSettings: DPFedAdamTrainer,
    FedFCSettings: DPFedFCTrainer,
    SOFIMSettings: DPFedSOFIMTrainer,
}
START = started(F, SEED, K)
MODEL = LinearHead(F, K)
LUCK = Luck(START, Normals(SEED, MODEL.dimension))
TASK = replace(TASKS["pneumonia"], covariance_clip=3.0)


def all_settings():
    """Every method of both tables, with a clip that many records exceed."""
    known = {f"paper: {name}": settings for name, settings in methods.paper(TASK, T).items()}
    known |= {f"tuned: {name}": box.make(TASK, box.at(np.full(3, 0.4))) for name, box in BOXES.items()}
    return {name: replace(settings, rounds=T, clip=0.8) for name, settings in known.items()}


def pooled(clients):
    return Records(np.concatenate([each.x for each in clients]), np.concatenate([each.y for each in clients]))


def by_its_trainer(settings, people, clients, scored, condition, kind=None):
    """θ at the end and accuracies by round, of the product's own trainer."""
    model = Started(START)
    trainer = (kind or TRAINERS[type(settings)])(
        GivenNoise(model, clients, LUCK.noise),
        people.run("run"),
        model,
        settings,
        quanta=condition.quanta,
        regime=condition.regime,
        evaluation=scored,
    )
    trainer.fit()
    return trainer.theta, [row["accuracy"] for row in trainer.rows]


@pytest.mark.parametrize("regime", [Regime.LOCAL, Regime.DISTRIBUTED])
@pytest.mark.parametrize("name", all_settings())
def test_a_stacked_training_is_its_trainers(people, clients, scored, name, regime):
    """Up to rounding to the release's grid: 2⁻²⁰ of its noise, or 2⁻¹⁰ of a client's share of it."""
    settings, condition = all_settings()[name], Condition(EPSILON, regime, len(clients))
    others = [
        Arm(replace(settings, clip=2.0), condition, LUCK),
        Arm(settings, Condition(1.0, regime, len(clients)), LUCK),
        Arm(settings, condition, Luck(-START, Normals(SEED + 1, MODEL.dimension))),
    ]
    stacked = by_sums(MODEL, [Arm(settings, condition, LUCK), *others], pooled(clients), scored)
    theta, accuracies = by_its_trainer(settings, people, clients, scored, condition)
    tolerance = 1e-5 if regime is Regime.LOCAL else 2e-3
    np.testing.assert_allclose(stacked.thetas[0], theta, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(stacked.accuracies[0], accuracies, atol=1.5 / len(scored))
    assert np.abs(stacked.thetas[1:] - theta).max(axis=1).min() > 0.02  # the others are other trainings


@pytest.mark.parametrize("name", all_settings())
def test_so_it_is_without_noise(open_people, clients, scored, name):
    settings, condition = all_settings()[name], Condition(math.inf, Regime.LOCAL, len(clients))
    stacked = by_sums(MODEL, [Arm(settings, condition, LUCK)], pooled(clients), scored)
    theta, accuracies = by_its_trainer(settings, open_people, clients, scored, condition)
    np.testing.assert_allclose(stacked.thetas[0], theta, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(stacked.accuracies[0], accuracies)


@pytest.mark.parametrize("name", [f"paper: {name}" for name in methods.MEANS])
def test_so_it_is_for_the_mean_of_client_means(people, clients, scored, name):
    settings = replace(all_settings()[name], weighting="clients")
    condition = Condition(EPSILON, Regime.LOCAL, len(clients))
    stacked = by_sums(MODEL, [Arm(settings, condition, LUCK)], clients, scored)
    theta, _ = by_its_trainer(settings, people, clients, scored, condition)
    np.testing.assert_allclose(stacked.thetas[0], theta, rtol=1e-6, atol=1e-6)
    records = by_sums(MODEL, [Arm(settings, condition, LUCK)], pooled(clients))
    assert np.abs(records.thetas[0] - theta).max() > 0.01


@pytest.mark.parametrize("epsilon", [EPSILON, math.inf])
def test_so_it_is_for_local_steps(people, open_people, clients, scored, epsilon):
    condition = Condition(epsilon, Regime.LOCAL, len(clients))
    settings = replace(methods.scaffold(T), clip=0.8, local_rate=0.4)
    arms = [Arm(settings, condition, LUCK), Arm(replace(settings, local_rate=0.8, clip=2.0), condition, LUCK)]
    stacked = by_local_steps(MODEL, arms, clients, scored)
    account = open_people if math.isinf(epsilon) else people
    theta, accuracies = by_its_trainer(settings, account, clients, scored, condition, DPScaffoldTrainer)
    np.testing.assert_allclose(stacked.thetas[0], theta, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stacked.accuracies[0], accuracies)
    assert np.abs(stacked.thetas[1] - theta).max() > 0.01


def test_float32_changes_parameters_in_their_last_digits_only(clients, scored):
    for name, settings in all_settings().items():
        arms = [Arm(settings, Condition(EPSILON, Regime.LOCAL, len(clients)), LUCK)]
        exact = by_sums(MODEL, arms, pooled(clients), scored)
        single = by_sums(MODEL, arms, pooled(clients), scored, single=True)
        np.testing.assert_allclose(single.thetas, exact.thetas, rtol=1e-4, atol=1e-4, err_msg=name)
        assert np.any(single.thetas != exact.thetas), name


@dataclass(frozen=True, kw_only=True)
class Breaking(FedGDSettings):
    """DP-FedGD, but its third step is not finite."""

    def server_step(self, state, gradient, t, noise):
        after = super().server_step(state, gradient, t, noise)
        return replace(after, theta=after.theta * np.nan) if t == 3 else after


def test_a_training_that_diverges_stops_before_the_round_and_leaves_the_others_alone(open_people, clients, scored):
    plain = FedGDSettings(rounds=T, learning_rate=0.5, clip=10.0)
    arms = [Arm(settings, Condition(math.inf), LUCK) for settings in (Breaking(**plain.as_dict()), plain)]
    found = by_sums(MODEL, arms, pooled(clients), scored)
    assert set(found.accuracies[0][1:]) == {found.accuracies[1][1]}
    assert found.accuracies[1][-1] > found.accuracies[1][1]
    theta, accuracies = by_its_trainer(
        arms[0].settings, open_people, clients, scored, arms[0].condition, DPFedGDTrainer
    )
    np.testing.assert_allclose(found.thetas[0], theta, rtol=1e-6, atol=1e-6)
    assert len(accuracies) == 2


def test_scores_are_the_models_accuracies(scored):
    thetas = np.random.default_rng(0).standard_normal((7, MODEL.dimension))
    np.testing.assert_allclose(scores(MODEL, thetas, scored), [MODEL.accuracy(theta, scored) for theta in thetas])
