"""Records and stacks: what a client holds."""

import numpy as np
import pytest

from dpray.platform.cohort.client import Records, Stack
from dpray.platform.cohort.errors import CohortError


def shards():
    return [Records(np.full((n, 2), n, dtype=float), np.full(n, n)) for n in (3, 1, 4, 2)]


def test_records_refuse_what_is_not_one_label_a_row():
    with pytest.raises(CohortError, match="different lengths"):
        Records(np.zeros((3, 2)), np.zeros(2))
    with pytest.raises(CohortError, match="array of numbers"):
        Records(np.array([["a"], ["b"]]), np.zeros(2))


def test_a_stack_gives_every_client_its_own_rows_as_views():
    stack = Stack.of(shards())
    for index, shard in enumerate(shards()):
        np.testing.assert_array_equal(stack[index].x, shard.x)
        np.testing.assert_array_equal(stack[index].y, shard.y)
        assert stack[index].x.base is not None
    np.testing.assert_array_equal(stack.counts, [3, 1, 4, 2])
    np.testing.assert_array_equal(stack[-1].y, [2, 2])


def test_a_slice_of_a_stack_is_a_view_of_its_arrays():
    middle = Stack.of(shards())[1:3]
    np.testing.assert_array_equal(middle.counts, [1, 4])
    np.testing.assert_array_equal(middle.offsets, [0, 1, 5])
    stack = Stack.of(shards())
    assert np.shares_memory(stack.x, stack[1:3].x)


def test_taking_scattered_clients_copies_them_in_order():
    taken = Stack.of(shards()).take([3, 0])
    np.testing.assert_array_equal(taken.y, [2, 2, 3, 3, 3])


def test_a_stack_cannot_be_written_to():
    stack = Stack.of(shards())
    with pytest.raises(ValueError, match="read-only"):
        stack[0].x[0] = 9
    own = np.ones((2, 2))
    single = Stack.of([Records(own, np.zeros(2))])
    with pytest.raises(ValueError, match="read-only"):
        single[0].x[0] = 9
    own[0] = 5  # the caller's own array is left as it was


def test_there_is_no_client_beyond_the_end():
    with pytest.raises(IndexError, match="holds 4 clients"):
        Stack.of(shards())[4]
