"""A client's rehearsal: its folds, the noise of the run that will follow, the server's own step, and hard cases."""

import json
import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from dpray.platform.cohort.client import Records
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.trainers.fedgd import FedGDSettings
from dpray.trainers.models import LinearHead, take
from dpray.trainers.rehearsal import Rehearsal, TrainingTask, held_out_rows
from dpray.trainers.sofim import SOFIMSettings

GOLDEN = Path(__file__).parents[1] / "golden"
F, K = 4, 3
MAKE = partial(SOFIMSettings.from_config, defaults={"rounds": 12, "learning_rate": 1.0, "clip": 1.0})
DESCENT = partial(FedGDSettings.from_config, defaults={"rounds": 12, "learning_rate": 1.0, "clip": 1.0})


def a_rehearsal(**changes):
    basics = {
        "model": LinearHead(F, K),
        "settings_from_config": MAKE,
        "quanta": floor_quanta(1.0),
        "regime": Regime.DISTRIBUTED,
        "clients": 20,
        "records": 1000,
        "n_min": 20,
    }
    return Rehearsal(**{**basics, **changes})


def blobs(n, seed=0, classes=K):
    """Records of well separated classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return Records(3 * np.eye(K, F)[y] + 0.3 * rng.standard_normal((n, F)), y)


@pytest.mark.parametrize("row", json.loads((GOLDEN / "sofim_client_noise.json").read_text())["rows"], ids=str)
def test_the_noise_is_that_of_the_real_runs_mean_gradient(row):
    quanta = Budget(row["epsilon"], row["delta"]).quanta
    rehearsal = a_rehearsal(quanta=quanta, n_min=15)
    settings = SOFIMSettings(rounds=row["T"], clip=float(row["C"]))
    s0, n, N = row["client_sum_std_local"], 20, 1000
    expected = {
        Regime.CENTRAL: s0 / N,
        Regime.DISTRIBUTED: s0 * math.sqrt(n / 15) / N,
        Regime.LOCAL: s0 * math.sqrt(n) / N,
    }
    for regime, std in expected.items():
        assert replace(rehearsal, regime=regime).noise_std(settings) == pytest.approx(std, rel=1e-9)
    assert replace(rehearsal, quanta=None).noise_std(settings) == 0
    by_client = replace(rehearsal, regime=Regime.CENTRAL, unit=Unit.CLIENT)
    assert by_client.noise_std(settings) == pytest.approx(s0 / n, rel=1e-9)


def test_a_mean_of_client_means_has_the_noise_of_the_smallest_client():
    settings = SOFIMSettings(rounds=4, clip=1.0, weighting="clients")
    rehearsal = a_rehearsal(smallest=10)
    plain = rehearsal.noise_std(SOFIMSettings(rounds=4, clip=1.0))
    assert rehearsal.noise_std(settings) == pytest.approx(plain * 1000 / (20 * 10))
    with pytest.raises(ValueError, match="`smallest`"):
        a_rehearsal().noise_std(settings)


class Flat(LinearHead):
    """A model without gradients: what remains of a rehearsal is its noise."""

    def fold_sums(self, thetas, prepared, members, clip):
        return np.zeros_like(thetas)


def simulated_noise_lies_within(std, false_alarm=1e-6):
    """Whether θ_T of a rehearsal without gradients at rate 1 is a sum of T draws of this std; χ², rate 1e-6."""
    rehearsal = a_rehearsal(model=Flat(400, K), settings_from_config=DESCENT)
    records = Records(np.zeros((10, 400)), np.arange(10) % K)
    members = ~held_out_rows(records.y, np.ones(10, dtype=bool), 5, np.random.default_rng(0))
    thetas = rehearsal._train(DESCENT({}), records, members, np.random.default_rng(1))
    low, high = chi2.ppf([false_alarm / 2, 1 - false_alarm / 2], thetas.size)
    return low < np.sum(thetas**2) / (12 * std**2) < high


def test_noise_of_that_size_enters_every_round_of_every_fold():
    std = a_rehearsal().noise_std(DESCENT({}))
    assert simulated_noise_lies_within(std)
    # Negative controls: noise for the sum of N records, and a tenth more than is right.
    assert not simulated_noise_lies_within(1000 * std)
    assert not simulated_noise_lies_within(1.1 * std)


@pytest.mark.parametrize("make", [MAKE, DESCENT], ids=["sofim", "fedgd"])
def test_folds_are_trained_as_the_server_would_train_each(make):
    rehearsal, records = a_rehearsal(quanta=None, settings_from_config=make), blobs(31)
    settings, model = make({"clip": 0.5}), rehearsal.model
    members = ~held_out_rows(records.y, np.ones(31, dtype=bool), 5, np.random.default_rng(0))
    thetas = rehearsal._train(settings, records, members, np.random.default_rng(0))
    for theta, rows in zip(thetas, members, strict=True):
        fold, state = take(records, rows), settings.initial_state(model.initial())
        for t in range(1, 13):
            G = model.clipped_sum(state.theta, fold, 0.5) / len(fold)
            state = settings.server_step(state, G, t, 0.0)
        np.testing.assert_allclose(theta, state.theta, rtol=1e-9, atol=1e-12)


def test_of_unit_client_rehearses_clipped_updates():
    rehearsal = a_rehearsal(quanta=None, unit=Unit.CLIENT, settings_from_config=DESCENT)
    settings, records = DESCENT({"clip": 0.05, "local_steps": 3, "rounds": 1}), blobs(30)
    members = ~held_out_rows(records.y, np.ones(30, dtype=bool), 3, np.random.default_rng(0))
    thetas = rehearsal._train(settings, records, members, np.random.default_rng(0))
    update = rehearsal.model.update(np.zeros(15), take(records, members[1]), {"local_steps": 3})
    np.testing.assert_allclose(thetas[1], update * 0.05 / np.linalg.norm(update), rtol=1e-12)


@given(
    labels=st.lists(st.integers(0, 3), min_size=0, max_size=40),
    missing=st.sets(st.integers(0, 39)),
    folds=st.integers(2, 8),
)
def test_every_usable_record_is_held_out_once_and_classes_are_dealt_evenly(labels, missing, folds):
    y = np.array(labels, dtype=np.int64)
    usable = np.array([i not in missing for i in range(len(y))], dtype=bool)
    held_out = held_out_rows(y, usable, folds, np.random.default_rng(0))
    n = int(usable.sum())
    assert len(held_out) == (min(folds, n) if n >= 2 else 0)
    if len(held_out):
        np.testing.assert_array_equal(held_out.sum(axis=0), usable.astype(int))
        for label in range(4):
            dealt = held_out[:, usable & (y == label)].sum(axis=1)
            assert dealt.max() - dealt.min() <= 1


def test_good_settings_score_above_timid_and_wild_ones():
    rehearsal, records = a_rehearsal(quanta=floor_quanta(2.0), score="loss"), blobs(60)
    candidates = {"learning_rate": 1e-9}, {"learning_rate": 2.0}, {"learning_rate": 3.0, "clip": 1e4}
    timid, good, wild = (rehearsal.fit_and_score(each, records, np.random.default_rng(3)) for each in candidates)
    assert good > timid
    assert good > wild
    assert replace(rehearsal, score="accuracy").fit_and_score(candidates[1], records, np.random.default_rng(3)) > 0.9


def test_the_same_generator_gives_the_same_score_and_another_one_does_not():
    rehearsal, records = a_rehearsal(quanta=floor_quanta(0.05), score="loss"), blobs(40)
    scores = [rehearsal.fit_and_score({}, records, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert scores[0] == scores[1] != scores[2]


def test_the_loss_is_an_option_and_lower_loss_is_a_higher_score():
    rehearsal = a_rehearsal(quanta=None, score="loss")
    scores = [rehearsal.fit_and_score({"rounds": T}, blobs(60), np.random.default_rng(0)) for T in (1, 30)]
    assert scores[0] < scores[1] < 0


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_records_cannot_be_scored(n):
    assert math.isnan(a_rehearsal().fit_and_score({}, blobs(n), np.random.default_rng(0)))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_few_records_leave_one_out(n):
    records = Records(3 * np.eye(K, F)[np.zeros(n, dtype=int)], np.zeros(n, dtype=int))
    assert a_rehearsal(quanta=None).fit_and_score({}, records, np.random.default_rng(0)) == 1.0


def test_a_class_that_a_fold_never_saw_is_simply_wrong():
    records = Records(3 * np.eye(K, F)[[0, 0, 0, 0, 1]], np.array([0, 0, 0, 0, 1]))
    assert a_rehearsal(quanta=None).fit_and_score({}, records, np.random.default_rng(0)) == pytest.approx(0.8)


def test_labels_that_are_no_class_take_no_part():
    records = blobs(30)
    spoilt = Records(np.vstack([records.x, records.x[:5]]), np.append(records.y, [9, -1, 9, 9, 9]))
    rehearsal = a_rehearsal(quanta=None, settings_from_config=DESCENT)
    assert rehearsal.fit_and_score({}, spoilt, np.random.default_rng(0)) > 0.9


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_a_bad_record_does_not_cost_the_client_its_score(value, score):
    records = blobs(30)
    spoilt = Records(np.vstack([records.x, np.full(F, value)]), np.append(records.y, 0))
    rehearsal = a_rehearsal(quanta=None, settings_from_config=DESCENT, score=score)
    assert rehearsal.fit_and_score({}, spoilt, np.random.default_rng(0)) == pytest.approx(
        rehearsal.fit_and_score({}, records, np.random.default_rng(0)), abs=0.05
    )


class Trusting(LinearHead):
    """Negative control: takes every record with a known label for usable."""

    def usable(self, records):
        return np.isin(records.y, np.arange(self.classes))


def test_a_bad_record_that_is_thought_usable_would_cost_it():
    spoilt = blobs(30)
    spoilt.x[3] = np.nan
    rehearsal = a_rehearsal(model=Trusting(F, K), quanta=None, settings_from_config=DESCENT, score="loss")
    assert math.isnan(rehearsal.fit_and_score({}, spoilt, np.random.default_rng(0)))


def test_a_record_that_a_module_raises_on_does_not_cost_the_client_its_score():
    torch = pytest.importorskip("torch")
    from dpray.trainers.torch_module import TorchModule

    def words():
        return torch.nn.Sequential(Whole(), torch.nn.Embedding(6, K), torch.nn.Flatten())

    class Whole(torch.nn.Module):
        def forward(self, x):
            return x.long()

    y = np.arange(24) % K
    x = y[:, None].astype(float)
    rehearsal = a_rehearsal(model=TorchModule(words, K), quanta=None, settings_from_config=DESCENT)
    good = rehearsal.fit_and_score({"rounds": 30}, Records(x, y), np.random.default_rng(0))
    assert good > 0.9
    x = np.vstack([x, [[6.0]]])
    with pytest.raises(IndexError):
        rehearsal.model.losses(rehearsal.model.initial(), Records(x, np.append(y, 0)))
    assert rehearsal.fit_and_score({"rounds": 30}, Records(x, np.append(y, 0)), np.random.default_rng(0)) > 0.9


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="did you mean `learning_rate`"):
        a_rehearsal().fit_and_score({"learning_rates": 1.0}, blobs(20), np.random.default_rng(0))


def test_a_training_task_does_what_its_model_and_rehearsal_do():
    rehearsal, records = a_rehearsal(), blobs(25)
    task = pickle.loads(pickle.dumps(TrainingTask(rehearsal.model, rehearsal)))
    theta = np.random.default_rng(0).standard_normal(task.dimension)
    model = rehearsal.model
    assert (task.dimension, task.relative_error) == (model.dimension, model.relative_error)
    np.testing.assert_array_equal(task.clipped_sum(theta, records, 1.0), model.clipped_sum(theta, records, 1.0))
    np.testing.assert_array_equal(task.clipped_sums(theta, [records], 1.0), model.clipped_sums(theta, [records], 1.0))
    np.testing.assert_array_equal(task.update(theta, records, {}), model.update(theta, records, {}))
    scores = [each.fit_and_score({}, records, np.random.default_rng(0)) for each in (task, rehearsal)]
    assert scores[0] == scores[1]
