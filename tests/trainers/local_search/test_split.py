"""Hold-out and folds: classes alike, bad records nowhere, fixed by the client's generator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.trainers.local_search.split import judges


def split(labels, usable=None, fraction=0.2, folds=None, seed=0):
    labels = np.asarray(labels)
    usable = np.ones(len(labels), dtype=bool) if usable is None else np.asarray(usable)
    return judges(labels, usable, fraction, folds, np.random.default_rng(seed))


def test_a_fifth_of_each_class_is_held_out():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    (rows,) = split(labels)
    assert np.bincount(labels[rows]).tolist() == [20, 10, 2]


@given(st.lists(st.booleans(), min_size=0, max_size=30), st.sampled_from([0.01, 0.2, 0.5, 0.99]), st.integers(0, 9))
def test_a_hold_out_and_its_rest_are_never_empty_and_hold_usable_records_only(usable, fraction, seed):
    labels = np.random.default_rng(seed).integers(0, 3, len(usable))
    usable = np.asarray(usable, dtype=bool)
    rows = split(labels, usable, fraction, seed=seed)
    if usable.sum() < 2:
        assert rows.shape == (0, len(labels))
        return
    (held_out,) = rows
    assert held_out.any()
    assert (usable & ~held_out).any()
    assert not (held_out & ~usable).any()
    assert abs(held_out.sum() - fraction * usable.sum()) <= 1


def test_folds_hold_out_every_usable_record_once():
    usable = np.arange(23) % 7 > 0
    rows = split(np.arange(23) % 2, usable, folds=5)
    assert rows.shape == (5, 23)
    np.testing.assert_array_equal(rows.sum(axis=0), usable)


@pytest.mark.parametrize("folds", [None, 4])
def test_the_same_stream_gives_the_same_split_and_another_one_another(folds):
    labels = np.arange(60) % 3
    first, again, other = (split(labels, folds=folds, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
