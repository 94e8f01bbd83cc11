"""DP-FedFC: a covariance of its own, composed with the gradients exactly, and a step against a naive Newton step."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.platform.cohort.queries import GradientSum
from dpray.platform.privacy.budget import split
from dpray.platform.privacy.ledger import Plan, PlanConflict, PlannedRelease, ReleaseKey, ReleaseLost
from dpray.platform.privacy.mechanisms import FeatureCovariance, Unit, unpack_symmetric
from dpray.trainers.base import MECHANISM
from dpray.trainers.fedfc import (
    COVARIANCE,
    DPFedFCTrainer,
    FedFCSettings,
    covariance_label,
    on_columns,
    preconditioner,
)
from dpray.trainers.models import LinearHead, Model
from dpray.trainers.rehearsal import Rehearsal

from .conftest import BUDGET, F, K, PlayedCohort, blobs

T = 4
SETTINGS = FedFCSettings(rounds=T, learning_rate=0.5, clip=1.0, covariance_clip=3.0, covariance_share=0.3, gamma=0.2)


def a_trainer(people, cohort=None, settings=SETTINGS, *, run="run", **changes):
    cohort = cohort or PlayedCohort()
    arguments = {"quanta": BUDGET.quanta, "evaluation": blobs(30, seed=99), "regime": "central", **changes}
    return DPFedFCTrainer(cohort, people.run(run), cohort.task, settings, **arguments)


@given(seed=st.integers(0, 10**6), f=st.integers(1, 12), gamma=st.floats(1e-3, 10))
def test_the_preconditioner_is_the_inverse_of_the_nearest_psd_matrix(seed, f, gamma):
    A = np.random.default_rng(seed).standard_normal((f, f))
    S = 20 * (A + A.T)  # as many eigenvalues below zero as above
    eigenvalues, U = np.linalg.eigh(S)
    nearest = sum(max(value, 0) * np.outer(u, u) for value, u in zip(eigenvalues, U.T, strict=True))
    expected = np.linalg.inv(nearest / 40 + gamma * np.eye(f))
    P = preconditioner(S, 40, gamma)
    np.testing.assert_allclose(P, expected, rtol=0, atol=1e-9 / gamma)
    np.testing.assert_array_equal(P, P.T)
    assert np.all(np.linalg.eigvalsh(P) > 0)


def test_each_class_has_its_column_preconditioned():
    rng = np.random.default_rng(0)
    P, G = rng.standard_normal((F + 1, F + 1)), rng.standard_normal((2, (F + 1) * K))
    for run in range(2):
        columns = G[run].reshape(F + 1, K)
        expected = np.stack([P @ columns[:, k] for k in range(K)], axis=1).reshape(-1)
        np.testing.assert_allclose(on_columns(P, G)[run], expected, rtol=1e-13)


def test_without_noise_it_is_the_algorithm_on_all_records(people):
    cohort = PlayedCohort()
    quiet = cohort.noise_for
    cohort.noise_for = lambda mechanism, mu, regime: quiet(mechanism, 1e7 * mu, regime)
    training = a_trainer(people, cohort)
    training.fit()
    S = np.zeros((F + 1, F + 1))
    for shard in cohort.shards.values():
        for x in shard.x:
            row = np.append(x, 1.0)
            row *= min(1, 3.0 / np.linalg.norm(row))
            S += np.outer(row, row)
    P, theta, head = np.linalg.inv(S / 160 + 0.2 * np.eye(F + 1)), np.zeros((F + 1) * K), LinearHead(F, K)
    for _ in range(T):
        G = head.clipped_sums(theta, list(cohort.shards.values()), 1.0).sum(axis=0) / 160
        theta = theta - 0.5 * (P @ G.reshape(F + 1, K)).reshape(-1)
    np.testing.assert_allclose(training.theta, theta, atol=1e-4)


def test_covariance_and_gradients_share_the_quanta_exactly_and_both_are_in_the_plan(people):
    training = a_trainer(people)
    apart = training.planned_covariance.quanta
    assert apart == pytest.approx(0.3 * BUDGET.quanta, rel=1e-12)
    assert apart + sum(training.spends) == BUDGET.quanta
    assert training.spends == split(BUDGET.quanta - apart, T)
    training.fit()
    lines = people.account(Unit.RECORD).statement("run").lines
    assert sorted((line.label, line.mechanism, line.steps, line.amount.quanta) for line in lines) == [
        ("training", MECHANISM, T, BUDGET.quanta - apart),
        ("training covariance", COVARIANCE, 1, apart),
    ]
    assert people.account(Unit.RECORD).spent == BUDGET.quanta


def test_the_noise_of_the_covariance_is_root_two_times_the_squared_clip_over_its_mu(people):
    training = a_trainer(people)
    assert training.covariance == FeatureCovariance(3.0, F + 1, 160)
    mu = math.sqrt(training.planned_covariance.quanta / 2**60)
    assert training.covariance.sigma(mu) == pytest.approx(math.sqrt(2) * 9.0 / mu)


def test_rows_count_the_covariance_among_what_was_spent(people):
    training = a_trainer(people)
    frame = training.fit().metrics_dataframe
    first = training.planned_covariance.quanta + training.spends[0]
    assert frame["privacy/mu_run"].iloc[0] == pytest.approx(math.sqrt(first / 2**60))
    assert frame["privacy/epsilon_run"].iloc[-1] == pytest.approx(8.0)


def test_a_plan_without_the_covariance_is_refused_before_anything_is_asked(people):
    cohort = PlayedCohort()
    training = a_trainer(people, cohort)
    training.run.reserve(Plan((PlannedRelease("training", MECHANISM, Unit.RECORD, BUDGET.quanta, T),)))
    with pytest.raises(PlanConflict):
        training.fit()
    assert cohort.asked == []


def test_a_lost_covariance_ends_the_training_and_its_charge_stands(people):
    cohort = PlayedCohort()
    cohort.script = {1: ReleaseLost("not all clients could reveal their message.")}
    training = a_trainer(people, cohort)
    with pytest.raises(ReleaseLost, match="cannot begin without its covariance"):
        training.fit()
    assert people.account(Unit.RECORD).spent == training.planned_covariance.quanta
    assert cohort.asked == [1]
    with pytest.raises(ReleaseLost, match="cannot begin without its covariance"):
        a_trainer(people, cohort).fit()
    assert cohort.asked == [1]


def test_resumed_it_takes_the_covariance_from_the_ledger(people):
    cohort = PlayedCohort()
    first = a_trainer(people, cohort)
    first.fit()
    assert cohort.asked == [1, *range(1, T + 1)]
    again = a_trainer(people, cohort)
    again.fit()
    assert cohort.asked == [1, *range(1, T + 1)]
    P = again.state.slots["preconditioner"]
    np.testing.assert_array_equal(P, first.state.slots["preconditioner"])
    stored = first.run.stored(ReleaseKey(covariance_label("training"), COVARIANCE, 1))
    np.testing.assert_array_equal(P, preconditioner(unpack_symmetric(stored[:-2], F + 1), 160, 0.2))


class Other(Model):
    """A model that is no linear head."""

    classes, dimension = K, (F + 1) * K

    def initial(self):
        return np.zeros(self.dimension)

    def logits(self, theta, x):
        return np.zeros((len(x), K))

    def clipped_sum(self, theta, records, clip):
        return np.zeros(self.dimension)

    def mean_gradient(self, theta, records):
        return np.zeros(self.dimension)


def test_other_models_and_units_are_refused_with_a_sentence(people):
    with pytest.raises(ValueError, match=r"preconditions a linear head .* Other was given"):
        a_trainer(people, PlayedCohort(Other()))
    with pytest.raises(ValueError, match="protects the unit `record` only, and `client` was given"):
        a_trainer(people, unit="client")
    assert people.account(Unit.RECORD).spent == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"covariance_clip": 0.0}, "`covariance_clip` of DP-FedFC must be a finite number above 0"),
        ({"gamma": math.nan}, "`gamma` of DP-FedFC must be a finite number above 0"),
        ({"covariance_share": 1.0}, "`covariance_share` of DP-FedFC must be a number above 0 and below 1"),
        ({"covariance_share": 0.0}, "`covariance_share` of DP-FedFC"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedFCSettings(**{**SETTINGS.as_dict(), **changes})


def test_a_share_that_leaves_nothing_is_refused_before_anything_is_spent(people):
    settings = FedFCSettings(**{**SETTINGS.as_dict(), "covariance_share": 1e-30})
    with pytest.raises(ValueError, match="is nothing"):
        a_trainer(people, settings=settings)


def test_a_step_without_a_covariance_and_a_rehearsal_are_refused():
    with pytest.raises(ValueError, match="release the covariance first"):
        SETTINGS.server_step(SETTINGS.initial_state(np.zeros(15)), np.ones(15), 1, 0.1)
    arguments = {"quanta": None, "regime": "central", "clients": 4, "records": 160, "n_min": 3}
    with pytest.raises(ValueError, match="DP-FedFC cannot be rehearsed"):
        Rehearsal(LinearHead(F, K), FedFCSettings.from_config, **arguments)
    hidden = Rehearsal(LinearHead(F, K), lambda config: SETTINGS, **arguments)
    with pytest.raises(ValueError, match="DP-FedFC cannot be rehearsed"):
        hidden.fit_and_score({}, blobs(20), np.random.default_rng(0))


def test_gradients_are_asked_as_of_any_other_trainer(people):
    asked = []

    class Listening(PlayedCohort):
        def sum(self, attempt, query, mechanism, regime):
            asked.append(type(query))
            return super().sum(attempt, query, mechanism, regime)

    a_trainer(people, Listening()).fit()
    assert asked[1:] == [GradientSum] * T
