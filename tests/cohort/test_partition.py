"""Partitions: disjoint, complete, none empty, by a public seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.partition import partition

LABELS = np.random.default_rng(0).integers(0, 10, 1797)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "quantity"])
@given(clients=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_every_record_goes_to_exactly_one_client_and_no_client_is_empty(kind, clients, seed):
    parts = partition(LABELS, clients, kind, seed)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "quantity"])
def test_the_same_seed_gives_the_same_split_and_another_seed_another(kind):
    first, again, other = (partition(LABELS, 20, kind, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_parts_are_of_equal_size():
    assert {len(part) for part in partition(LABELS, 20)} == {89, 90}


def label_skew(parts):
    """Mean over clients of the largest label's share: .1 to .2 where labels are even, 1 where each has one."""
    return np.mean([np.bincount(LABELS[part], minlength=10).max() / len(part) for part in parts])


def test_a_small_alpha_skews_labels_and_a_large_one_does_not():
    skewed, even = (label_skew(partition(LABELS, 10, "dirichlet", 1, alpha=alpha)) for alpha in (0.1, 1000.0))
    assert skewed > 0.4
    assert even < 0.2


def test_shards_give_a_client_few_labels():
    parts = partition(LABELS, 20, "shards", 1, per_client=2)
    assert max(len(np.unique(LABELS[part])) for part in parts) <= 4


def test_quantity_skew_varies_sizes_and_not_labels():
    parts = partition(LABELS, 10, "quantity", 3, alpha=0.5)
    sizes = sorted(len(part) for part in parts)
    assert sizes[-1] > 5 * sizes[0]
    assert label_skew([part for part in parts if len(part) > 100]) < 0.25


def test_a_minimum_is_kept():
    assert min(len(part) for part in partition(LABELS, 20, "dirichlet", 1, alpha=0.5, minimum=10)) >= 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"clients": 2000}, "cannot give 2000 clients"),
        ({"clients": 0}, "at least 1"),
        ({"clients": 2, "kind": "random"}, "iid, dirichlet, shards or quantity"),
        ({"clients": 2, "kind": "dirichlet", "alpha": 0}, "alpha"),
        ({"clients": 2, "kind": "dirichlet", "alpha": float("nan")}, "alpha"),
        ({"clients": 2, "kind": "iid", "alpha": 1.0}, "'alpha' was given"),
        ({"clients": 2, "kind": "shards", "per_client": 0}, "per_client"),
        ({"clients": 500, "kind": "dirichlet", "alpha": 0.01}, "larger alpha"),
        ({"clients": 1000, "kind": "shards", "per_client": 3, "minimum": 2}, "at least 2"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(arguments, sentence):
    with pytest.raises(CohortError, match=sentence):
        partition(LABELS, **arguments)
