"""One loss per user: what counts as an answer, what is confined, and the check of one's own task."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import traceback
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from dpray.platform.user_losses import ShapeRefused, UserLosses, check_losses_alone, check_task, evaluated

N = 4
CANARY = "canary-7141"
GOOD = np.array([0.5, 1.5, -2.0, 4.0])


class Made(UserLosses):
    """Answers with what a function makes of its configuration."""

    def __init__(self, make, users=N):
        self.make, self.users = make, users

    def fit(self, config):
        return config

    def losses(self, model):
        return self.make(model)


class Whole(UserLosses):
    """The same in one step."""

    def __init__(self, make, users=N):
        self.make, self.users = make, users

    def evaluate(self, config):
        return self.make(config)


def answer(value, **options):
    return evaluated(Made(lambda model: value), {}, **options)


def tensors():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.tensor(GOOD))
    return [parameter * 1, parameter.to(torch.bfloat16), list(parameter), list(parameter.detach().float())]


# --- what counts as a vector ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [
    GOOD, list(GOOD), tuple(GOOD), GOOD.astype(np.float32), GOOD.astype(np.longdouble), GOOD.astype(object),
    pd.Series(GOOD, index=[3, 1, 2, 0]), pd.Series(GOOD).astype("Float64"), [np.float32(each) for each in GOOD],
    [Decimal(str(each)) for each in GOOD], np.ma.masked_array(GOOD), np.repeat(GOOD, 2)[::2],
    [np.array(each) for each in GOOD],
])  # fmt: skip
def test_what_is_a_real_vector_is_taken_in_order_and_as_a_copy(value):
    found = answer(value)
    assert found.dtype == np.float64
    assert np.array_equal(found, GOOD)
    assert not (isinstance(value, np.ndarray) and np.shares_memory(found, value))


def test_tensors_are_detached():
    for value in tensors():
        assert np.array_equal(answer(value), GOOD)


class Stubborn:
    """Somebody's element that raises what nobody expects."""

    def __float__(self):
        raise RuntimeError("a value: 0.7316")


@pytest.mark.parametrize(("value", "expected"), [
    ([1, 0, 1, 1], [1, 0, 1, 1]),
    (np.array([True, False, True, True]), [1, 0, 1, 1]),
    ([0.5, None, "0.7", 4.0], [0.5, np.nan, np.nan, 4.0]),
    ([0.5, [1.0, 2.0], 1j, 10**400], [0.5, np.nan, np.nan, np.nan]),
    (pd.Series([0.5, None, pd.NA, 4.0], dtype="Float64"), [0.5, np.nan, np.nan, 4.0]),
    (np.ma.masked_array(GOOD, mask=[0, 1, 0, 1]), [0.5, np.nan, -2.0, np.nan]),
    (np.ma.masked_array([1, 2, 3, 4], mask=[0, 1, 0, 1]), [1, np.nan, 3, np.nan]),
    ([np.inf, -np.inf, np.nan, 1e308], [np.inf, -np.inf, np.nan, 1e308]),
    (np.array([1e4000, 1, 2, 3], dtype=np.longdouble), [np.inf, 1, 2, 3]),
    ([None, None, None, None], [np.nan] * 4),
    (["0.7316"] * 4, [np.nan] * 4),
    ([[0.7316], [1, 2], [3], [4]], [np.nan] * 4),
    ([1.0, Stubborn(), 2.0, np.ones(1)], [1.0, np.nan, 2.0, np.nan]),
])  # fmt: skip
def test_one_users_bad_answer_is_its_own(value, expected):
    assert np.array_equal(answer(value), expected, equal_nan=True)


WRONG = [
    (0.7316, "one number"),
    (np.float64(0.7316), "one number"),
    (np.array(0.7316), "one number"),
    (True, "one number"),
    (GOOD[:3], r"shape \(3,\).*nobody is left out"),
    ([], r"shape \(0,\)"),
    (np.zeros((N, 1)), r"shape \(4, 1\).*other axes"),
    (pd.DataFrame(GOOD), r"shape \(4, 1\)"),
    ([np.zeros((2, 2)), np.zeros((2, 3)), 1, 2], None),
    (np.array(["0.7316"] * N), "not a vector of real numbers"),
    (GOOD + 1j, "not a vector of real numbers"),
    (pd.Series(pd.to_datetime(["2020-01-01"] * N)), "not a vector of real numbers"),
    (None, "not a vector of real numbers"),
    ({"loss": 0.7316}, "not a vector of real numbers"),
    ((each for each in GOOD), "not a vector of real numbers"),
    (CANARY, "not a vector of real numbers"),
]


@pytest.mark.parametrize(("value", "sentence"), [case for case in WRONG if case[1]])
def test_another_shape_is_refused_in_words_without_values_while_that_may_be_seen(value, sentence):
    with pytest.raises(ShapeRefused, match=sentence) as refused:
        answer(value)
    assert "Made.losses returned" in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None
    said = "".join(traceback.format_exception(refused.value))
    assert "0.7316" not in said
    assert CANARY not in said


@pytest.mark.parametrize("value", [case[0] for case in WRONG])
def test_later_it_counts_as_no_answer(value):
    found = answer(value, strict=False)
    assert found.shape == (N,)
    assert np.isnan(found).all() or isinstance(value, list)


def test_torch_is_not_imported_for_it():
    code = """
import sys
from dpray.platform.user_losses import UserLosses, evaluated
class Task(UserLosses):
    users = 2
    def evaluate(self, config): return [1.0, 2.0]
assert evaluated(Task(), {}).tolist() == [1.0, 2.0]
assert not {"torch", "pandas", "ray.tune"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- confinement ------------------------------------------------------------------------------------------------------


class UnreadError(Exception):
    """An exception that notices when somebody reads it."""

    read = 0

    def __str__(self):
        UnreadError.read += 1
        return CANARY

    __repr__ = __str__


class Nasty:
    """An answer whose conversion fails."""

    def __array__(self, *arguments, **options):
        raise UnreadError


def raising(error):
    def make(model):
        raise error

    return make


@pytest.mark.parametrize("kind", [Made, Whole])
@pytest.mark.parametrize(
    "error", [ValueError(CANARY), SystemExit(CANARY), KeyboardInterrupt(), MemoryError(), UnreadError()]
)
def test_what_is_raised_on_users_is_nan_for_all_and_is_not_read(kind, error):
    for strict in (True, False):
        assert np.isnan(evaluated(kind(raising(error)), {}, strict=strict)).all()
    assert UnreadError.read == 0


def test_a_conversion_that_fails_is_an_answer_too():
    assert np.isnan(answer(Nasty())).all()
    assert UnreadError.read == 0


def test_fit_fails_in_the_open_and_evaluate_does_not():
    class Failing(Made):
        def fit(self, config):
            raise ArithmeticError("a singular matrix")

    class All(Failing):
        def evaluate(self, config):
            return self.losses(self.fit(config))

    with pytest.raises(ArithmeticError, match="singular"):
        evaluated(Failing(lambda model: GOOD), {})
    assert np.isnan(evaluated(All(lambda model: GOOD), {})).all()


def noisy(model):
    print(CANARY)
    print(CANARY, file=sys.stderr)
    sys.__stdout__.write(CANARY)
    os.write(1, CANARY.encode())
    os.system(f"echo {CANARY}")
    warnings.warn(CANARY, stacklevel=1)
    logging.getLogger("ray").critical(CANARY)
    logging.getLogger().error(CANARY)
    return GOOD


@pytest.mark.parametrize("kind", [Made, Whole])
def test_what_is_printed_warned_or_logged_is_heard_by_nobody(kind, capfd, caplog, recwarn):
    assert np.array_equal(evaluated(kind(noisy), {}), GOOD)
    print("afterwards", flush=True)
    logging.getLogger("mine").error("afterwards")
    warnings.warn("afterwards", stacklevel=1)
    said = capfd.readouterr()
    assert CANARY not in said.out + said.err + caplog.text
    assert "afterwards" in said.out
    assert "afterwards" in caplog.text
    assert [str(each.message) for each in recwarn] == ["afterwards"]


def test_the_same_code_is_heard_outside(capfd, caplog):
    """Negative control."""
    with warnings.catch_warnings(record=True) as caught:
        noisy(None)
    said = capfd.readouterr()
    assert CANARY in said.out
    assert CANARY in said.err
    assert CANARY in caplog.text
    assert caught


def test_what_fit_prints_is_heard(capfd):
    class Loud(Made):
        def fit(self, config):
            print("training")

    evaluated(Loud(lambda model: GOOD), {})
    assert "training" in capfd.readouterr().out


@pytest.mark.parametrize(("change", "read"), [
    (lambda: np.random.seed(1), lambda: list(np.random.get_state()[1])),  # noqa: NPY002
    (lambda: random.seed(1), random.getstate),
    (lambda: np.seterr(all="raise"), np.geterr),
    (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    (lambda: os.environ.update(CANARY="1"), lambda: dict(os.environ)),
    (lambda: logging.disable(10), lambda: logging.root.manager.disable),
    (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
])  # fmt: skip
def test_what_the_process_was_before_it_is_again(change, read):
    before = read()
    answer_ = evaluated(Made(lambda model: (change(), GOOD)[1]), {})
    assert np.array_equal(answer_, GOOD)
    assert read() == before


def test_nothing_travels_back_in_the_configuration():
    def telling(model):
        model["nested"]["loss"] = CANARY
        return GOOD

    config = {"nested": {"x": 1.0}}
    for kind in (Made, Whole):
        evaluated(kind(telling), config)
    assert config == {"nested": {"x": 1.0}}


def test_threads_take_turns_and_the_streams_are_back_afterwards(capfd):
    found = []
    threads = [threading.Thread(target=lambda: found.append(evaluated(Made(noisy), {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(each, GOOD) for each in found)
    assert len(found) == 8
    print("afterwards", flush=True)
    said = capfd.readouterr()
    assert said.out == "afterwards\n"
    assert said.err == ""


# --- tasks ------------------------------------------------------------------------------------------------------------


class Half(UserLosses):
    users = 3

    def fit(self, config):
        return None


@pytest.mark.parametrize(("task", "sentence"), [
    (lambda config: 0.5, "must be a UserLosses, but a function"),
    (Half(), "write losses, or evaluate alone"),
    (UserLosses(), "write fit and losses"),
    (Made(None, users=0), "at least 1"),
    (Made(None, users=2.0), "whole number"),
    (Made(None, users=None), "users of Made"),
])  # fmt: skip
def test_a_task_that_cannot_be_evaluated_is_refused_in_words(task, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_task(task)


def test_a_good_task_has_its_users_counted():
    assert check_task(Made(None)) == N
    assert check_task(Whole(None, users=9)) == 9


# --- the check --------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
TRAIN = RNG.standard_normal((20, 3)), RNG.standard_normal(20)
PEOPLE = RNG.standard_normal((8, 3)), RNG.standard_normal(8)
CONFIG = {"penalty": 0.1}


class Ridge(UserLosses):
    def __init__(self, people, *, look=lambda losses: losses, peek=False):
        self.x, self.y = people
        self.users, self.look, self.peek = len(self.y), look, peek

    def fit(self, config):
        x, y = TRAIN
        with np.errstate(all="ignore"):
            scale = min(np.nanstd(self.x), 9.0) if self.peek else 1.0
        return np.linalg.solve(x.T @ x + config["penalty"] * scale * np.eye(3), x.T @ y)

    def losses(self, model):
        return self.look((self.x @ model - self.y) ** 2)


def raises_on_bad(losses):
    if not np.all(np.isfinite(losses)):
        raise ValueError("a bad loss")
    return losses


def test_a_task_that_scores_each_user_alone_passes():
    check_losses_alone(Ridge, PEOPLE, CONFIG)
    check_losses_alone(Ridge, PEOPLE, CONFIG, refit=False, rows=[2])
    check_losses_alone(lambda people: Ridge((people["x"], people["y"])), dict(zip("xy", PEOPLE, strict=True)), CONFIG)
    check_losses_alone(lambda x: Whole(lambda config: np.abs(x).sum(axis=1), users=len(x)), PEOPLE[0], CONFIG)
    labels = np.arange(8) % 2
    check_losses_alone(lambda people: Ridge((people[0], people[1] > 0)), (PEOPLE[0], labels), CONFIG)


@pytest.mark.parametrize(("look", "sentence"), [
    (lambda losses: losses / losses.mean(), "mixes users: with .* for user 0, the loss of user 1 moved, .* 7 of 7"),
    (lambda losses: losses - np.median(losses), "mixes users"),
    (lambda losses: pd.Series(losses).dropna().to_numpy(), r"another shape if user 0 has .*shape \(7,\)"),
    (lambda losses: losses[losses < 1e6], "another shape"),
    (raises_on_bad, "mixes users.*it raised ValueError: a bad loss"),
    (np.sort, "mixes users"),
    (lambda losses: losses * np.nan, "no loss for any"),
    (lambda losses: losses + np.random.default_rng().random(len(losses)), "evaluated again"),
])  # fmt: skip
def test_a_task_that_mixes_users_is_caught(look, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_losses_alone(lambda people: Ridge(people, look=look), PEOPLE, CONFIG)


def test_a_fit_that_peeks_at_users_is_caught_where_it_is_repeated():
    with pytest.raises(ValueError, match="mixes users"):
        check_losses_alone(lambda people: Ridge(people, peek=True), PEOPLE, CONFIG)
    check_losses_alone(lambda people: Ridge(people, peek=True), PEOPLE, CONFIG, refit=False)


def test_users_who_disappear_with_their_record_are_missed():
    def whole(people):
        keep = np.isfinite(people[0]).all(axis=1)
        return Ridge((people[0][keep], people[1][keep]))

    with pytest.raises(ValueError, match="7 users instead of 8 if user 0 has NaN"):
        check_losses_alone(whole, PEOPLE, CONFIG)


def test_a_fit_that_is_not_seeded_is_told_apart():
    class Random(Ridge):
        def fit(self, config):
            return np.random.default_rng().standard_normal(3)

    with pytest.raises(ValueError, match="refit=False"):
        check_losses_alone(Random, PEOPLE, CONFIG)
    check_losses_alone(Random, PEOPLE, CONFIG, refit=False)


def test_the_records_given_are_left_as_they_are():
    def greedy(people):
        people[0][:] = 0
        return Ridge(people)

    before = PEOPLE[0].copy()
    check_losses_alone(greedy, PEOPLE, CONFIG)
    assert np.array_equal(PEOPLE[0], before)
