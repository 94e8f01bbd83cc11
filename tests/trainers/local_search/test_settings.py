"""Settings of a client's own training: what is refused, and by which words."""

import pytest

from dpray.trainers.local_search.settings import EarlyStopping, LocalTraining, Validation


@pytest.mark.parametrize(
    "bad",
    [
        {"learning_rate": -0.1},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"learning_rate": "0.1"},
        {"momentum": 1.0},
        {"momentum": True},
        {"gamma": 1.5},
        {"gamma": -0.1},
        {"step_epochs": 0},
        {"batch_size": 64.0},
        {"epochs": 0},
        {"dropout": 1.0},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"`{next(iter(bad))}` must be"):
        LocalTraining(**{"learning_rate": 0.1, **bad})


def test_a_candidate_is_laid_over_the_defaults():
    found = LocalTraining.from_config({"gamma": 0, "momentum": 0.9}, {"learning_rate": 0.5, "momentum": 0.1})
    assert (found.learning_rate, found.gamma, found.momentum) == (0.5, 0, 0.9)
    assert LocalTraining.from_config(found.as_dict()) == found


def test_a_name_that_is_no_setting_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean `learning_rate`"):
        LocalTraining.from_config({"learning_rat": 0.1})


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="needs `learning_rate`"):
        LocalTraining.from_config({"gamma": 0.5})


@pytest.mark.parametrize(
    "bad",
    [
        {"score": "f1"},
        {"fraction": 0},
        {"fraction": 1.0},
        {"folds": 1},
        {"folds_below": 10},
        {"folds_below": 0, "folds": 3},
    ],
    ids=str,
)
def test_validation_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=f"`{next(iter(bad))}` must be"):
        Validation(**bad)


def test_small_clients_use_folds_and_others_hold_out():
    validation = Validation(folds=5, folds_below=50)
    assert [validation.folds_of(records) for records in (49, 50)] == [5, None]
    assert Validation(folds=3).folds_of(10**6) == 3
    assert Validation().folds_of(2) is None


@pytest.mark.parametrize("bad", [{"keep": 0}, {"after": 0}, {"margin": -1.0}], ids=str)
def test_stopping_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=f"`{next(iter(bad))}` must be"):
        EarlyStopping(**{"keep": 1, **bad})
