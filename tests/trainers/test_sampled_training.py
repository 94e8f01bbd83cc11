"""Training on samples: what it divides by, what it costs, that it resumes, and which accounts can pay for it."""

from functools import partial

import numpy as np
import pytest

from dpray.platform.cohort.client import Records
from dpray.platform.privacy.budget import Budget, floor_quanta, to_mu
from dpray.platform.privacy.clipping import clip_rows
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.privacy.noise import NoiseSource
from dpray.platform.privacy.sampling import PoissonSampling
from dpray.platform.tracking import NullTracker
from dpray.trainers.fedgd import DPFedGDTrainer, FedGDSettings
from dpray.trainers.models import LinearHead
from dpray.trainers.named import TRAINERS, trainer_named

T, Q = 9, 0.3
BUDGET = Budget(2.0, 1e-5)
SETTINGS = FedGDSettings(rounds=T, learning_rate=1.0, clip=1.0)
SAMPLING = PoissonSampling(Q)
QUANTA = T * floor_quanta(0.25)


@pytest.fixture
def people(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        population = ledger.population("people")
        population.account(Unit.RECORD, BUDGET, kind="pld")
        yield population


@pytest.fixture
def cohort(alone_cohort, make_blobs):
    return alone_cohort(LinearHead(4, 3), {"a": make_blobs(300, 1), "b": make_blobs(500, 2)}, noise=4)


def trainer(people, cohort, settings=SETTINGS, name="run", **changes):
    options = {"quanta": QUANTA, "regime": "central", "sampling": SAMPLING, **changes}
    return DPFedGDTrainer(cohort, people.run(name), cohort.task, settings, **options)


def one_round(people, cohort, **changes):
    """θ after one step of rate 1 from 0, and how far the noise may have moved a coordinate (6σ)."""
    settings = FedGDSettings(rounds=1, learning_rate=1.0, clip=1.0)
    quanta = floor_quanta(1.2)
    training = trainer(people, cohort, settings, quanta=quanta, **changes)
    training.fit()
    return training.theta, 6 * training.mechanism.noise(to_mu(quanta)).sigma


def test_the_sum_is_over_the_sample_and_the_mean_over_the_expected_number(people, cohort):
    theta, width = one_round(people, cohort)
    total = np.zeros(15)
    for name, shard in cohort.shards.items():
        taken = SAMPLING.draw(len(shard), NoiseSource(4).generator("sample", "training/gradients step 1", name))
        assert 0 < taken.sum() < len(shard)
        total += cohort.task.clipped_sum(np.zeros(15), Records(shard.x[taken], shard.y[taken]), 1.0)
    expected = Q * 800
    np.testing.assert_allclose(-theta * expected, total, atol=width)
    everybody = sum(cohort.task.clipped_sum(np.zeros(15), shard, 1.0) for shard in cohort.shards.values())
    assert np.abs(-theta * expected - everybody).max() > width  # all records would have been another sum


def test_sampled_clients(people, alone_cohort, make_blobs):
    cohort = alone_cohort(LinearHead(4, 3), {f"c{i}": make_blobs(5, i) for i in range(200)}, noise=4)
    sampling = PoissonSampling(Q, "client")
    theta, width = one_round(people, cohort, unit="client", sampling=sampling)
    total, everybody = np.zeros((2, 15))
    for name, shard in cohort.shards.items():
        update = clip_rows(cohort.task.update(np.zeros(15), shard, {})[None], 1.0)[0]
        everybody += update
        if sampling.draw(1, NoiseSource(4).generator("sample", "training/gradients step 1", name))[0]:
            total += update
    np.testing.assert_allclose(theta * Q * 200, total, atol=width)
    assert np.abs(theta * Q * 200 - everybody).max() > width


def test_a_budget_is_spent_by_composition(people, cohort):
    training = trainer(people, cohort, quanta="budget", budget=BUDGET)
    assert training.quanta > BUDGET.quanta  # sampling lets more through
    result = training.fit()
    account = people.account(Unit.RECORD)
    assert 0.998 * 2.0 <= account.spent_epsilon <= 2.0
    assert result.metrics["privacy/epsilon_run"] == account.spent_epsilon
    (line,) = account.statement("run").lines
    assert (line.steps, line.sampling_probability) == (T, Q)


def test_rows_never_say_less_than_was_spent(people, cohort):
    spent = []
    training = trainer(people, cohort, on_round=lambda row: spent.append(people.account(Unit.RECORD).spent_epsilon))
    training.tracker = NullTracker()
    shown = list(training.fit().metrics_dataframe["privacy/epsilon_run"])
    assert all(s >= truth for s, truth in zip(shown, spent, strict=True))
    assert shown == sorted(shown)
    assert shown[-1] == spent[-1] == pytest.approx(SAMPLING.epsilon(-(-QUANTA // T), T, 1e-5), rel=1e-6)
    assert shown[1] == spent[1]  # nine rounds have a milestone every second one


class Killed(BaseException):
    """The end of the process, played."""


def test_killed_and_resumed_it_is_the_uninterrupted_training(people, cohort, tmp_path):
    def killed(row):
        if row["training_iteration"] == 4:
            raise Killed

    whole = trainer(people, cohort, name="whole", quanta=QUANTA // 4)
    whole.fit()
    with pytest.raises(Killed):
        trainer(people, cohort, quanta=QUANTA // 4, storage=tmp_path / "t", on_round=killed).fit()
    asked = len(cohort.asked)
    resumed = trainer(people, cohort, quanta=QUANTA // 4, storage=tmp_path / "t")
    resumed.fit()
    assert len(cohort.asked) - asked == T - 4
    assert people.account(Unit.RECORD).statement("run").lines[0].steps == T


def test_accounts_that_add_up_mu_cannot_pay(tmp_path, cohort):
    with Ledger(f"sqlite:///{tmp_path}/other.db") as ledger:
        population = ledger.population("people")
        population.account(Unit.RECORD, BUDGET)
        with pytest.raises(
            ValueError, match=r"has no finite μ, and the accounts of population 'people' are of kind 'gdp'"
        ):
            trainer(population, cohort)
    assert cohort.asked == []


def test_what_is_sampled_is_what_is_protected(people, cohort):
    with pytest.raises(ValueError, match="Training protects the unit `client`, and `record`s were to be sampled"):
        trainer(people, cohort, unit="client")


KINDS = {
    "dp_fedfc": {"covariance_clip": 4.0},
    "dp_scaffold": {},
    "dp_scaffold of 3 steps": {"local_steps": 3},
    **{name: {} for name in TRAINERS if name not in ("dp_fedfc", "dp_scaffold")},
}
UNSAMPLED = {"dp_fedfc", "dp_scaffold", "dp_scaffold of 3 steps"}


@pytest.mark.parametrize("case", KINDS)
def test_algorithms_that_build_on_more_than_sums_of_gradients_refuse_samples(people, cohort, case):
    kind = trainer_named(case.split()[0])
    settings = kind.settings_type(rounds=1, learning_rate=0.1, clip=1.0, **KINDS[case])
    sampling = PoissonSampling(Q, kind.units[0])
    make = partial(kind, cohort, people.run("run"), cohort.task, settings, quanta=floor_quanta(0.5), regime="central")
    if case not in UNSAMPLED:
        training = make(sampling=sampling)
        training.fit()
        assert training.theta.any()
        assert people.account(Unit.RECORD).statement("run").lines[0].sampling_probability == Q
        return
    with pytest.raises(ValueError, match=f"{kind.settings_type.algorithm} cannot be trained on samples"):
        make(sampling=sampling)
    assert people.account(Unit.RECORD).spent == 0


def test_without_sampling_a_pld_account_pays_for_gaussians(people, cohort):
    training = trainer(people, cohort, quanta="budget", budget=Budget(1.0, 1e-5), sampling=None)
    result = training.fit()
    assert people.account(Unit.RECORD).spent_epsilon == pytest.approx(1.0, rel=2e-3)
    assert result.metrics["privacy/epsilon_run"] >= people.account(Unit.RECORD).spent_epsilon
