"""Trainings as trials: what each costs, what the search costs, and that a trial which is run again costs nothing."""

import math
import sys
from functools import partial

import numpy as np
import pytest

from dpray.platform.cohort.client import Records
from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, to_mu
from dpray.platform.privacy.ledger import BudgetExceeded, Ledger
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.tracking import NullTracker
from dpray.platform.user_losses import UserLosses
from dpray.trainers.fedgd import DPFedGDTrainer, FedGDSettings
from dpray.trainers.hold_out import Correct, HoldOut
from dpray.trainers.models import LinearHead
from dpray.trainers.slots import SlotsTaken
from dpray.trainers.torch_module import TorchModule
from dpray.trainers.trainable import TrainerTuning, search_epsilon

T, F, K = 3, 4, 3
ACCOUNT, EACH = Budget(8.0, 1e-5), Budget(2.0, 1e-5)
SETTINGS = partial(FedGDSettings.from_config, defaults={"rounds": T, "clip": 1.0})


@pytest.fixture
def url(tmp_path):
    address = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger(address) as ledger:
        ledger.population("people").account(Unit.RECORD, ACCOUNT)
    return address


@pytest.fixture
def account(url):
    with Ledger(url) as ledger:
        yield ledger.population("people").account(Unit.RECORD)


@pytest.fixture
def cohort(alone_cohort, make_blobs):
    return alone_cohort(LinearHead(F, K), {"a": make_blobs(60, 1), "b": make_blobs(80, 2)}, noise=3)


@pytest.fixture
def make(url, cohort, make_blobs, tmp_path):
    opened = []

    def made(trainings=2, **changes):
        options = {"budget": EACH, "regime": "central", "example": {"learning_rate": 1.0}, **changes}
        if "hold_out" not in options:
            options["evaluation"] = make_blobs(90, 9)
        options |= {"name": "tuning", "storage": tmp_path / "slots", "trainings": trainings}
        opened.append(TrainerTuning(DPFedGDTrainer, cohort, url, "people", LinearHead(F, K), SETTINGS, **options))
        return opened[-1]

    yield made
    for each in opened:
        each.close()


def test_every_training_is_set_aside_before_the_first_trial_and_charged_once(make, account, cohort):
    tuning = make(trainings=2)
    assert (account.spent, account.reserved) == (0, 2 * EACH.quanta)
    rows = []
    first = tuning.handle.train({"learning_rate": 1.0}, rows.append)
    assert [row["training_iteration"] for row in rows] == list(range(1, T + 1))
    assert (account.spent, account.reserved) == (EACH.quanta, EACH.quanta)
    again = tuning.train({"learning_rate": 1.0})
    np.testing.assert_array_equal(again.theta, first.theta)
    assert account.spent == EACH.quanta
    assert len(cohort.asked) == T
    second = tuning.train({"learning_rate": 2.0})
    assert {first.run, second.run} == {"tuning/000", "tuning/001"}
    assert account.spent == 2 * EACH.quanta


def test_results_say_what_this_training_cost_and_what_the_search_did(make, account):
    tuning = make(trainings=3)
    for rate in (0.5, 1.0, 2.0):
        metrics = tuning.train({"learning_rate": rate}).metrics
    assert metrics["privacy/epsilon_run"] == pytest.approx(2.0, rel=1e-9)
    three = math.sqrt(3) * to_mu(EACH.quanta)
    assert metrics["privacy/epsilon_search"] == pytest.approx(gdp.epsilon(three, 1e-5), rel=1e-9)
    assert tuning.epsilon == metrics["privacy/epsilon_search"] == account.spent_epsilon
    assert search_epsilon(account, "tun") == 0.0


def test_the_rest_comes_back_at_the_end(make, account):
    tuning = make(trainings=3)
    tuning.train({"learning_rate": 1.0})
    tuning.close()
    assert (account.spent, account.reserved) == (EACH.quanta, 0)


class Killed(BaseException):
    """The end of a trial's process, played."""


def test_a_trial_killed_on_the_way_goes_on_under_the_same_keys(make, account, cohort):
    tuning = make(trainings=2)

    def killed(row):
        if row["training_iteration"] == 2:
            raise Killed

    with pytest.raises(Killed):
        tuning.handle.train({"learning_rate": 1.0}, killed)
    trained = tuning.train({"learning_rate": 1.0})
    assert cohort.asked == [("tuning/000", f"training/gradients step {t}") for t in range(1, T + 1)]
    assert (trained.run, account.spent) == ("tuning/000", EACH.quanta)


def test_a_search_begun_anew_knows_its_trials(make, account, cohort):
    first = make(trainings=2)
    before = first.train({"learning_rate": 1.0})
    after = make(trainings=2).train({"learning_rate": np.float64(1.0)})
    np.testing.assert_array_equal(after.theta, before.theta)
    assert (len(cohort.asked), account.spent) == (T, EACH.quanta)


def test_more_configurations_than_were_set_aside_are_refused(make, account):
    tuning = make(trainings=1)
    tuning.train({"learning_rate": 1.0})
    with pytest.raises(SlotsTaken, match="nothing was trained or spent"):
        tuning.train({"learning_rate": 2.0})
    assert account.spent == EACH.quanta


def test_a_search_that_does_not_fit_sets_nothing_aside(make, account, cohort):
    with pytest.raises(BudgetExceeded, match=r"Training \d+ of the 20 of search 'tuning' does not fit"):
        make(trainings=20)
    assert (account.spent, account.reserved, cohort.asked) == (0, 0, [])


def test_what_the_searcher_looks_at_is_said_once(make, alone_cohort, make_blobs):
    kept = HoldOut(alone_cohort(Correct(LinearHead(F, K)), {"a": make_blobs(50)}), 1 << 50)
    with pytest.raises(ValueError, match="nothing a searcher may see"):
        make(hold_out=kept, evaluation=make_blobs(5))
    with pytest.raises(ValueError, match="nothing a searcher may see"):
        make(hold_out=None)


def test_a_training_that_diverges_has_a_result_all_the_same(make):
    metrics = make(trainings=1).train({"learning_rate": 1e308}).metrics
    assert 0 <= metrics["accuracy"] <= 1
    assert metrics["privacy/epsilon_run"] > 0


def test_a_held_out_score_is_a_release_of_its_own(make, alone_cohort, make_blobs, account):
    shards = {"a": make_blobs(300, 4), "b": make_blobs(200, 5)}
    kept = alone_cohort(Correct(LinearHead(F, K)), shards, noise=8)
    score = Budget(4.0, 1e-5).quanta
    tuning = make(trainings=1, hold_out=HoldOut(kept, score, "central"))
    assert account.reserved == EACH.quanta + score
    rows = []
    trained = tuning.handle.train({"learning_rate": 1.0}, rows.append)
    assert len(rows) == 1
    (row,) = rows
    right = [LinearHead(F, K).predict(trained.theta, shard.x) == shard.y for shard in shards.values()]
    truth = float(np.mean(np.concatenate(right)))
    assert row["score_sigma"] == pytest.approx(1 / to_mu(score) / 500, rel=1e-3)  # Δ = 1 over 500 records
    assert row["score"] != truth
    assert abs(row["score"] - truth) < 6 * row["score_sigma"]
    assert "accuracy" not in row
    assert account.spent == EACH.quanta + score
    assert row["privacy/epsilon_run"] == row["privacy/epsilon_search"] == account.spent_epsilon
    assert tuning.train({"learning_rate": 1.0}).metrics == row
    assert len(kept.asked) == 1


POISONS = [np.nan, np.inf, -np.inf, 1e30, 1e300, 0.0]


class Raises(LinearHead):
    """Raises on a record of sevens, at whatever parameters it is asked."""

    def predict(self, theta, x):
        if (x == 7).all(axis=1).any():
            raise ValueError("a seven")
        return super().predict(theta, x)


def centring():
    """A module that takes the mean of its batch away: alone, every record is its own mean."""
    torch = pytest.importorskip("torch")

    class Centring(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(F, K)

        def forward(self, x):
            return self.head(x - x.mean(0, keepdim=True))

    return TorchModule(Centring, K)


@pytest.mark.parametrize(("make_model", "value"), [(lambda: Raises(F, K), 7.0), (centring, 1e6)])
def test_no_model_lets_a_held_out_record_reach_the_others(make_blobs, make_model, value):
    model, records = make_model(), make_blobs(40, 3)
    theta = np.random.default_rng(0).normal(size=model.dimension)
    told = Records(records.x, model.predict(theta, records.x))  # all right: what else is predicted is seen
    x = records.x.copy()
    x[3] = value
    one, other = (Correct(model).clipped_sum(theta, each, 0.5) for each in (told, Records(x, told.y)))
    assert one[0] == 20
    assert other[0] >= 19


@pytest.mark.parametrize("label", [0, 2, 7, -1])
@pytest.mark.parametrize("value", POISONS)
def test_one_record_moves_a_score_by_at_most_one_and_nobody_elses_part(make_blobs, value, label):
    task, records = Correct(LinearHead(F, K)), make_blobs(40, 3)
    theta = np.random.default_rng(0).normal(size=task.dimension)
    before = task.clipped_sum(theta, records, 0.5)
    x, y = records.x.copy(), records.y.copy()
    x[7], y[7] = value, label
    after = task.clipped_sum(theta, type(records)(x, y), 0.5)
    assert np.linalg.norm(after - before) <= 1
    assert after[0] - before[0] in (-1.0, 0.0, 1.0)
    alone = [
        task.clipped_sum(theta, type(records)(each.x[7:8], each.y[7:8]), 0.5)[0]
        for each in (records, type(records)(x, y))
    ]
    assert after[0] - before[0] == alone[1] - alone[0]


class Tuned(UserLosses):
    """Validation users of a trainer: `fit` is a training that is charged, `losses` one loss per user."""

    def __init__(self, trainings, people):
        self.trainings, self.people, self.users = trainings, people, len(people)

    def fit(self, config):
        return self.trainings.train(config).theta

    def losses(self, theta):
        return LinearHead(F, K).losses(theta, self.people)


def test_dp_gibo_tunes_a_learning_rate(make, make_blobs, url, account):
    """Validation users are protected by the search's releases, training records by each training's own."""
    from ray import tune

    from dpray.searchers import DPGIBOSearch
    from dpray.searchers.driving import drive

    iterations, batch = 2, 2
    tuning = make(trainings=iterations * batch)
    with Ledger(url) as ledger:
        users = ledger.population("users")
        users.account("user", Budget(3.0, 1e-5))
        space = {"learning_rate": tune.loguniform(0.01, 10.0)}
        task = Tuned(tuning.handle, make_blobs(100, 12))
        search = DPGIBOSearch(
            task, users.run("rate"), mu=0.5, clip=0.5, iterations=iterations, space=space, curator_actor=False,
            noise_seed=1,
        )  # fmt: skip
        drive(search)
        assert search.finished
        assert 0.01 <= search.best_config["learning_rate"] <= 10.0
        assert users.account("user").spent_epsilon == pytest.approx(gdp.epsilon(0.5, 1e-5), rel=1e-9)
        search.close()
    assert account.spent == iterations * batch * EACH.quanta
    assert tuning.epsilon == account.spent_epsilon


class Mortal(LinearHead):
    """Ends its process in the second round of its first training, once."""

    def __init__(self, marker):
        super().__init__(64, 10)
        self.marker, self.calls = str(marker), 0

    def evaluate(self, theta, records):
        import os
        from pathlib import Path

        if theta.any() and not Path(self.marker).exists():
            self.calls += 1
            if self.calls == 2:
                Path(self.marker).touch()
                os._exit(1)
        return super().evaluate(theta, records)


@pytest.mark.slow
def test_any_searcher_tunes_it_on_ray_and_a_trial_that_dies_is_not_paid_for_twice(ray_local, url, account, tmp_path):
    from ray import cloudpickle, tune
    from sklearn.datasets import load_digits

    from dpray.platform.cohort import Cohort, Records

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    x, y = load_digits(return_X_y=True)
    x = x / 16
    shards = {f"c{i}": Records(x[300 + i :: 3], y[300 + i :: 3]) for i in range(3)}
    model = Mortal(tmp_path / "died")
    space = {"learning_rate": tune.grid_search([0.01, 4.0])}
    with (
        Cohort(model, shards, state_dir=tmp_path / "sites", actors=1) as cohort,
        TrainerTuning(
            DPFedGDTrainer, cohort, url, "people", model, SETTINGS, example={"learning_rate": 1.0}, name="tuning",
            trainings=2, budget=Budget(4, 1e-5), evaluation=Records(x[:300], y[:300]), storage=tmp_path / "slots",
        ) as tuning,
    ):  # fmt: skip
        results = tune.Tuner(
            tuning.trainable(),
            param_space=space,
            tune_config=tuning.tune_config(num_samples=1),
            run_config=tune.RunConfig(
                storage_path=str(tmp_path / "tune"), verbose=0, failure_config=tune.FailureConfig(max_failures=1)
            ),
        ).fit()
        assert (tmp_path / "died").exists()
        assert results.errors == []
        best = results.get_best_result()
        assert best.config["learning_rate"] == 4.0
        assert account.spent == 2 * Budget(4, 1e-5).quanta
        trained = tuning.train(best.config)
        assert trained.metrics["accuracy"] == best.metrics["accuracy"]
        assert account.spent == 2 * Budget(4, 1e-5).quanta
        tuning.show(NullTracker(), [each.metrics for each in results])
        spent = max(each.metrics["privacy/epsilon_search"] for each in results)
        assert spent == tuning.epsilon == account.spent_epsilon
