"""The trusted sum: exact, and silent before the commit."""

import numpy as np
import pytest

from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.secure_sum import Trusted, add


def test_nothing_is_sent_before_the_commit_and_the_sum_is_exact():
    protocol, messages = Trusted(), [np.array([2**53 + 1, -5]), np.array([1, 2])]
    sealed = [protocol.prepare(message) for message in messages]
    assert [each.sent for each in sealed] == [None, None]
    revealed = [protocol.reveal(each.kept, ("a", "b")) for each in sealed]
    np.testing.assert_array_equal(protocol.total([None, None], revealed, 2), [2**53 + 2, -3])


def test_a_sum_that_might_wrap_is_refused():
    with pytest.raises(CohortError, match="coarser grid"):
        add([np.array([2**61 + 1]), np.array([2**61])], 1)


def test_no_messages_add_up_to_zero():
    np.testing.assert_array_equal(add([], 3), [0, 0, 0])
