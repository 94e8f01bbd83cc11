"""What every trainer must do: learn, resume, keep its sensitivity, step many runs at once, refuse bad settings."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpray.platform.cohort.client import Records
from dpray.platform.cohort.local_steps import NoisedQuery
from dpray.platform.cohort.partition import partition
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.privacy.local_steps import LocalSteps
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.trainers.fedfc import preconditioner
from dpray.trainers.models import LinearHead
from dpray.trainers.named import TRAINERS, trainer_named
from dpray.trainers.rehearsal import Rehearsal

from .conftest import BUDGET, F, K, Killed, PlayedCohort, blobs, killed_in_round

SETTINGS = {
    "dp_fedsofim": {"learning_rate": 2.0, "momentum": 0.5},
    "dp_fedsofim debiased": {"learning_rate": 2.0, "momentum": 0.5, "debias": True},
    "dp_fedsofim of rank 3": {"learning_rate": 2.0, "momentum": 0.5, "rank": 3},
    "dp_fedgd": {"learning_rate": 4.0},
    "dp_momentum": {"learning_rate": 4.0, "momentum": 0.5},
    "dp_normalised_momentum": {"learning_rate": 1.0, "momentum": 0.5},
    "dp_fedadam": {"learning_rate": 0.1, "momentum": 0.5},
    "dp_fedyogi": {"learning_rate": 0.1, "momentum": 0.5},
    "dp_fedavg": {"learning_rate": 1.0, "clip": 3.0, "local_steps": 3},
    "dp_fedfc": {"learning_rate": 1.0, "covariance_clip": 4.0, "gamma": 0.5},
    "dp_scaffold": {"learning_rate": 1.0, "local_rate": 4.0},
    "dp_scaffold of 3 steps": {"learning_rate": 1.0, "local_rate": 1.0, "local_steps": 3},
}
"""Settings of a short training on digits, by the trainer's name and, behind it, what is special about them."""

LOCAL_ONLY = {"dp_scaffold of 3 steps"}
"""Trainers whose noise is the clients' own."""


def kind_of(case):
    return trainer_named(case.split()[0])


def settings(case, T=6, **changes):
    return kind_of(case).settings_type(**{"rounds": T, "clip": 1.0, **SETTINGS[case], **changes})


def regimes(case):
    return [Regime.LOCAL] if case in LOCAL_ONLY else list(Regime)


def trainer(case, people, cohort=None, *, run="run", **changes):
    cohort = cohort or PlayedCohort()
    given = {"quanta": BUDGET.quanta, "evaluation": blobs(90, seed=99), "regime": regimes(case)[0], **changes}
    chosen = given.pop("settings", None) or settings(case)
    return kind_of(case)(cohort, people.run(run), cohort.task, chosen, **given)


def started(case, theta):
    """The state before the first round, with what the algorithm has released by then."""
    state = settings(case).initial_state(theta)
    if case == "dp_fedfc":
        S = np.cov(np.random.default_rng(3).standard_normal((F + 1, 40)))
        state = replace(state, slots={**state.slots, "preconditioner": preconditioner(S, 1, 0.5)})
    return state


def test_every_trainer_is_tried():
    assert {case.split()[0] for case in SETTINGS} == TRAINERS.keys()


@pytest.fixture(scope="module")
def digits():
    """Eight clients with the pixels of digits, and 300 other digits."""
    x, y = load_digits(return_X_y=True)
    x = x / 16
    parts = partition(y[300:], 8, "dirichlet", seed=0, alpha=1.0)
    return {f"client-{i}": Records(x[300:][rows], y[300:][rows]) for i, rows in enumerate(parts)}, Records(
        x[:300], y[:300]
    )


def on_digits(digits):
    shards, _ = digits
    cohort = PlayedCohort(LinearHead(64, 10), sizes=[len(shard) for shard in shards.values()])
    cohort.shards = shards
    return cohort


@pytest.mark.parametrize("case", SETTINGS)
def test_it_learns_digits_and_spends_what_was_planned(case, tmp_path, digits):
    # Eight clients cannot hide one of them: what protects whole clients is given a budget that protects nobody.
    unit = kind_of(case).units[0]
    budget = BUDGET if unit is Unit.RECORD else Budget(2000.0, 1e-5)
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        account = ledger.population("people").account(unit, budget)
        training = trainer(
            case, ledger.population("people"), on_digits(digits), evaluation=digits[1], quanta=budget.quanta
        )
        result = training.fit()
        assert (account.spent, account.reserved) == (budget.quanta, 0)
    assert result.metrics["accuracy"] > 0.5  # chance is 0.1


@pytest.mark.parametrize("stored", [True, False], ids=["checkpoints", "replayed from the ledger"])
@pytest.mark.parametrize("case", SETTINGS)
def test_killed_and_resumed_it_is_the_uninterrupted_run(case, stored, people, tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/whole.db") as other:
        others = other.population("people", records_per_client=60)
        others.account(Unit.RECORD, BUDGET)
        whole = trainer(case, others)
        whole.fit()
    storage = {"storage": tmp_path / "training"} if stored else {}
    cohort = PlayedCohort()
    with pytest.raises(Killed):
        trainer(case, people, cohort, on_round=killed_in_round(4), **storage).fit()
    resumed = trainer(case, people, cohort, **storage)
    resumed.fit()
    np.testing.assert_array_equal(resumed.theta, whole.theta)
    assert people.account(Unit.RECORD).spent == BUDGET.quanta


class Overheard(PlayedCohort):
    """Remembers what it was asked, and by which mechanism it is released."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.queries = []

    def sum(self, attempt, query, mechanism, regime):
        self.queries.append((query, mechanism))
        return super().sum(attempt, query, mechanism, regime)


def replaced(cohort, unit, poison):
    """The cohort's shards with one record of client-1, or all of them, replaced by anything."""
    shard = cohort.shards["client-1"]
    x, y = shard.x.astype(np.float64), shard.y.astype(np.float64)
    where = slice(3, 4) if unit is Unit.RECORD else slice(None)
    x[where], y[where] = poison
    return {**cohort.shards, "client-1": Records(x, y)}


def unnoised(query, clients):
    """What noise is added to; of several local steps one, wherever the noise of earlier ones has led each client."""
    if not isinstance(query, NoisedQuery):
        return query.messages(clients)
    points = np.random.default_rng(0).standard_normal(query.controls.shape)
    return query.sums(clients, points)


POISONS = [
    (np.nan, 0.0),
    (np.inf, 1.0),
    (-np.inf, 1.0),
    (1e30, 2.0),
    (-1e300, 0.0),
    (1e-320, 1.0),
    (0.0, 0.0),
    (np.array([1.0, -50.0, 3.0, 0.0]), 2.0),
    (1.0, 17.0),
    (1.0, np.nan),
]


def moved_and_allowed(cohort, unit, query, mechanism):
    """How far a unit of client-1, replaced by anything, moves what a query adds up; and how far is stated."""
    before, totals = dict(cohort.shards), []
    for poison in [None, *POISONS]:
        cohort.shards = before if poison is None else replaced(cohort, unit, poison)
        totals.append(unnoised(query, cohort.view()).sum(axis=0))
        cohort.shards = before
    one = mechanism.one_step if isinstance(mechanism, LocalSteps) else mechanism
    return max(np.linalg.norm(a - b) for a in totals for b in totals), one.sensitivity + one.summation_error


@pytest.mark.parametrize(("case", "regime"), [(case, regime) for case in SETTINGS for regime in regimes(case)])
def test_one_unit_replaced_by_anything_moves_no_release_further_than_stated(case, regime, people):
    cohort = Overheard()
    trained = trainer(case, people, cohort, settings=settings(case, T=3), regime=regime)
    trained.fit()
    for query, mechanism in cohort.queries:
        moved, allowed = moved_and_allowed(cohort, trained.unit, query, mechanism)
        assert 0 < moved <= allowed


class ClipsAtTwice(LinearHead):
    """Negative control."""

    def clipped_sum(self, theta, records, clip):
        return super().clipped_sum(theta, records, 2 * clip)

    def clipped_sums(self, theta, shards, clip):
        return super().clipped_sums(theta, shards, 2 * clip)


@pytest.mark.parametrize("case", ["dp_fedgd", "dp_scaffold of 3 steps"])
def test_a_model_that_clips_at_twice_the_bound_would_be_found(case, people):
    cohort = Overheard(ClipsAtTwice(F, K))
    trained = trainer(case, people, cohort, settings=settings(case, T=1, clip=0.1))
    trained.fit()
    moved, allowed = moved_and_allowed(cohort, trained.unit, *cohort.queries[0])
    assert moved > allowed


@pytest.mark.parametrize("case", SETTINGS)
def test_runs_side_by_side_are_the_runs_one_by_one(case):
    """Leading axes (3, 2) are independent runs."""
    chosen = settings(case)
    gradients = np.random.default_rng(5).standard_normal((5, 3, 2, (F + 1) * K))

    def trajectory(steps):
        state = started(case, np.zeros(steps.shape[1:]))
        for t, G in enumerate(steps, start=1):
            state = chosen.server_step(state, G, t, 0.1)
        return state.theta

    together = trajectory(gradients)
    for i in range(3):
        for j in range(2):
            np.testing.assert_allclose(together[i, j], trajectory(gradients[:, i, j]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", SETTINGS)
def test_a_step_changes_none_of_its_arguments(case):
    chosen = settings(case)
    rng = np.random.default_rng(0)
    state = started(case, rng.standard_normal((F + 1) * K))
    for t in (1, 2):
        G = rng.standard_normal((F + 1) * K)
        kept = G.copy(), state.theta.copy(), {slot: value.copy() for slot, value in state.slots.items()}
        after = chosen.server_step(state, G, t, 0.1)
        np.testing.assert_array_equal(G, kept[0])
        np.testing.assert_array_equal(state.theta, kept[1])
        for slot, value in kept[2].items():
            np.testing.assert_array_equal(state.slots[slot], value)
        assert after.slots.keys() == state.slots.keys()
        state = after


@pytest.mark.parametrize("case", SETTINGS)
def test_it_can_be_rehearsed_by_a_client(case):
    kind = kind_of(case)
    if kind.settings_type.no_rehearsal:
        pytest.skip(kind.settings_type.no_rehearsal)
    make = partial(kind.settings_type.from_config, defaults={"rounds": 20, "clip": 1.0, **SETTINGS[case]})
    rehearsal = Rehearsal(
        LinearHead(F, K),
        make,
        floor_quanta(3.0),
        Regime.CENTRAL,
        clients=20,
        records=1000,
        n_min=19,
        unit=kind.units[0],
    )
    assert rehearsal.fit_and_score({}, blobs(60), np.random.default_rng(0)) > 0.6  # chance is 1/3


BAD = {"rounds": (0, -1, 2.5), "clip": (0.0, -1.0, math.nan, math.inf), "learning_rate": (0.0, -1.0, math.nan)}


@pytest.mark.parametrize("case", SETTINGS)
def test_bad_settings_are_refused_with_a_sentence(case):
    for setting, values in BAD.items():
        for value in values:
            with pytest.raises(ValueError, match=f"`{setting}` of .* was given"):
                settings(case, **{setting: value})


def test_spends_are_split_evenly(people):
    spends = trainer("dp_fedgd", people).spends
    assert all(0 <= a - b <= 1 for a, b in pairwise(spends))
