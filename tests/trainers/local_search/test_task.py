"""The client's task: one candidate or many, whatever the records are; early stopping; a training that follows."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

from dpray.platform.cohort.client import Records
from dpray.trainers.local_search import EarlyStopping, LocalSearchTask, StackedMLP, StackedModule, Validation
from dpray.trainers.local_search import task as tasks
from dpray.trainers.models import LinearHead

F = 6
CONFIGS = [
    {"learning_rate": eta, "momentum": beta, "gamma": gamma}
    for eta in (0.5, 0.05, 1e-6)
    for beta in (0.0, 0.9)
    for gamma in (0, 0.25, 1)
]


def clouds(n=120, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return Records(np.eye(classes, F)[y] * 2 + 0.7 * rng.standard_normal((n, F)), y)


def perceptron():
    return nn.Sequential(nn.Linear(F, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def scores(task, configs=CONFIGS, records=None, seed=3):
    return task.fit_and_scores(configs, records or clouds(), np.random.default_rng(seed))


def a_task(model=None, **changes):
    return LocalSearchTask(model or StackedMLP(F, 2, (8,)), **{"training": {"epochs": 3, "batch_size": 16}, **changes})


MODELS = {"perceptron": StackedMLP(F, 2, (8,)), "head": StackedMLP(F, 2, ()), "module": StackedModule(perceptron, 2)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_many_at_once_are_scored_as_one_by_one(model, score):
    task = a_task(model, validation=Validation(score=score))
    alone = [task.fit_and_score(config, clouds(), np.random.default_rng(3)) for config in CONFIGS]
    np.testing.assert_allclose(scores(task), alone, rtol=0, atol=1e-5 if score == "loss" else 0)
    assert len(set(alone)) >= 5


@pytest.mark.parametrize("stack", [1, 4, 100])
def test_how_many_are_stacked_changes_no_score(stack):
    task = a_task(training={"epochs": 3, "dropout": 0.3}, validation=Validation(score="loss"), stack=stack)
    whole = a_task(training={"epochs": 3, "dropout": 0.3}, validation=Validation(score="loss"))
    np.testing.assert_allclose(scores(task), scores(whole), rtol=0, atol=1e-5)


def test_candidates_may_differ_in_what_a_stack_must_share():
    task = a_task(validation=Validation(score="loss"))
    configs = [{**CONFIGS[2], "batch_size": size, "epochs": epochs} for size in (8, 64) for epochs in (1, 4)]
    alone = [task.fit_and_score(config, clouds(), np.random.default_rng(3)) for config in configs]
    np.testing.assert_allclose(scores(task, configs), alone, rtol=0, atol=1e-5)
    assert len(set(alone)) == 4


def test_a_good_rate_learns_and_a_tiny_one_does_not():
    best, worst = scores(a_task(validation=Validation(folds=4)), [{"learning_rate": 0.5}, {"learning_rate": 1e-8}])
    assert best > 0.9  # the Bayes rule is right for 98 % of these clouds: Φ(√2·2/2/.7)
    assert worst < 0.8


def test_folds_judge_every_record_once():
    """Rate 0 learns nothing: each fold judges one record by its own first model."""
    task = a_task(StackedMLP(F, 2, ()), validation=Validation(folds=31))
    (found,) = scores(task, [{"learning_rate": 0.0}], clouds(31))
    assert found * 31 == pytest.approx(round(found * 31))
    assert 0 < found < 1


def test_the_diverged_are_worst_and_take_nobody_along():
    wild = {"learning_rate": 1e30, "momentum": 0.9}
    task = a_task(StackedMLP(F, 3, (8,)))
    found = scores(task, [wild, *CONFIGS, wild], clouds(classes=3))
    assert np.isnan(found[[0, -1]]).all()
    np.testing.assert_array_equal(found[1:-1], scores(task, CONFIGS, clouds(classes=3)))


POISONS = [np.nan, np.inf, -np.inf, 1e39]


@pytest.mark.parametrize("value", [*POISONS, None], ids=str)
def test_a_bad_record_takes_no_part(value):
    """Whatever it holds: its row and its label are never looked at."""
    records = clouds()
    found = []
    for other in POISONS:
        x, y = records.x.copy(), records.y.copy()
        x[7, 2], y[7] = (x[7, 2], 5) if value is None else (value, y[7])
        x[7, 0] = other if value is not None else x[7, 0]
        found.append(scores(a_task(), records=Records(x, y)))
    assert np.isfinite(found).all()
    for each in found:
        np.testing.assert_array_equal(each, found[0])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_clients_answer(n):
    found = scores(a_task(), records=clouds(n))
    assert found.shape == (len(CONFIGS),)
    assert np.isfinite(found).all() == (n >= 2)


def test_the_clients_generator_decides_everything():
    task = a_task(training={"dropout": 0.5}, validation=Validation(score="loss"))
    before = torch.get_rng_state()
    first, again, other = (scores(task, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("bad", [{"rate": 0.1}, {"learning_rate": -1.0}], ids=str)
def test_a_candidate_with_bad_settings_is_refused_alone_and_among_others(bad):
    with pytest.raises(ValueError, match="learning_rate"):
        a_task().fit_and_score(bad, clouds(), np.random.default_rng(0))
    with pytest.raises(ValueError, match="learning_rate"):
        scores(a_task(), [CONFIGS[0], bad])


@pytest.mark.parametrize(
    ("options", "word"),
    [({"training": {"epoch": 3}}, "`epochs`"), ({"stack": 0}, "`stack`"), ({"training": {"dropout": 2}}, "`dropout`")],
)
def test_a_task_that_cannot_train_is_refused_when_it_is_made(options, word):
    with pytest.raises(ValueError, match=word):
        a_task(**options)


def test_a_module_takes_no_dropout_from_the_settings():
    with pytest.raises(ValueError, match="its own dropout"):
        LocalSearchTask(MODELS["module"], training={"dropout": 0.2})


class Counting(StackedMLP):
    """Counts the model steps that are made."""

    def __init__(self):
        super().__init__(F, 2, (8,))
        self.steps = 0

    def gradients(self, theta, x, y, dropout, seed):
        self.steps += len(theta[0])
        return super().gradients(theta, x, y, dropout, seed)


class TestEarlyStopping:
    STOPPING = EarlyStopping(keep=2, margin=0.1)

    def test_a_hopeless_candidate_is_trained_no_further(self):
        model, free = Counting(), Counting()
        configs = [{"learning_rate": eta} for eta in (0.5, 0.4, 1e-8, 1e-9)]
        options = {"training": {"epochs": 5, "batch_size": 16}}
        stopped = scores(a_task(model, stopping=self.STOPPING, **options), configs)
        whole = scores(a_task(free, **options), configs)
        assert free.steps == 4 * 5 * 6
        assert model.steps == 2 * 5 * 6 + 2 * 1 * 6
        np.testing.assert_array_equal(stopped[:2], whole[:2])
        assert stopped[2:].max() < stopped[:2].min()

    def test_a_candidate_whose_rate_has_become_zero_costs_nothing_more(self):
        model = Counting()
        scores(a_task(model), [{"learning_rate": 0.1, "gamma": 0}, {"learning_rate": 0.1}])
        assert model.steps == 6 + 3 * 6

    @pytest.mark.parametrize("keep", [1, 2, 3, 9])
    def test_at_least_keep_stay(self, keep):
        mine = torch.tensor([0.1, 0.9, 0.5])
        other = torch.tensor([0.7, float("nan")])
        left = np.full(5, np.nan)
        stopping = EarlyStopping(keep=keep, margin=0.0)
        gone = sum(int(tasks.hopeless(each, [mine, other], left, stopping).sum()) for each in (mine, other))
        assert 5 - gone >= min(keep, 4)

    def test_the_bar_counts_all_stacks_and_those_that_have_left(self):
        mine, other = torch.tensor([0.5, 0.79]), torch.tensor([0.9])
        stopping = EarlyStopping(keep=2, margin=0.02)
        assert tasks.hopeless(mine, [mine, other], np.array([0.8, np.nan]), stopping).tolist() == [True, False]


def test_the_task_travels_without_its_tensors():
    task = a_task(MODELS["module"])
    before = scores(task)
    np.testing.assert_array_equal(scores(pickle.loads(pickle.dumps(task))), before)


def test_a_training_that_follows_is_the_models():
    head, records = LinearHead(F, 2), clouds()
    task = a_task(gradients=head)
    theta = np.zeros(head.dimension)
    assert task.dimension == head.dimension
    np.testing.assert_array_equal(task.clipped_sum(theta, records, 1.0), head.clipped_sum(theta, records, 1.0))
    with pytest.raises(NotImplementedError, match="gradients="):
        a_task().clipped_sum(theta, records, 1.0)


class Remembering(nn.Module):
    """Shifts by a mean of what it was trained on, kept in an attribute or a buffer, and changes sign after 50 calls."""

    def __init__(self):
        super().__init__()
        self.head, self.mean, self.calls = nn.Linear(F, 2), torch.zeros(F), 0
        self.register_buffer("sum", torch.zeros(F))

    def forward(self, x):
        self.calls += 1
        if self.training:
            self.mean = 0.99 * self.mean + 0.01 * x.detach().mean(0)
            self.sum = self.sum + x.detach().mean(0)
        return self.head(x - self.mean - self.sum / 1000) * (1 if self.calls < 50 else -1)


@pytest.mark.parametrize("together", [True, False])
def test_what_a_module_keeps_of_one_client_reaches_no_other(together):
    task = a_task(StackedModule(Remembering, 2), validation=Validation(score="loss"))

    def answer(records):
        if together:
            return scores(task, records=records)
        return [task.fit_and_score(config, records, np.random.default_rng(3)) for config in CONFIGS[:3]]

    before = answer(clouds(seed=1))
    for scale in (1.0, 1e3):
        other = clouds(seed=2)
        answer(Records(scale * other.x, other.y))
        np.testing.assert_array_equal(answer(clouds(seed=1)), before)
    assert np.isfinite(before).all()


def test_what_a_module_draws_without_a_layer_of_dropout_follows_from_the_client():
    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x))

    task = a_task(StackedModule(lambda: Drawing(F, 2), 2), validation=Validation(score="loss"))
    before = scores(task)
    torch.rand(7)
    np.testing.assert_array_equal(scores(task), before)


def test_modules_that_mix_records_are_refused():
    with pytest.raises(ValueError, match="BatchNorm1d"):
        LocalSearchTask(StackedModule(lambda: nn.BatchNorm1d(F), 2))
