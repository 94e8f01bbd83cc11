"""Bookkeeping of one batch: every slot ends evaluated or given up, whatever the trials do."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.searchers.batch import Batch

POINTS = [{"x": index} for index in range(3)]


def test_slots_are_handed_out_in_order_and_once():
    batch = Batch(POINTS)

    assert [batch.take(name) for name in "abcd"] == [0, 1, 2, None]
    assert batch.in_flight == 3
    assert batch.waiting == 0


def test_a_failed_slot_waits_behind_the_others():
    batch = Batch(POINTS)
    batch.take("a")
    batch.fail("a", again=True)

    assert [batch.take(name) for name in "bcd"] == [1, 2, 0]
    assert batch.failures == [1, 0, 0]


def test_a_slot_is_given_up_and_the_batch_settles():
    batch = Batch(POINTS[:2])
    batch.take("a")
    batch.take("b")
    batch.fail("a", again=False)
    batch.succeed("b")

    assert (batch.evaluated, batch.given_up, batch.settled) == ({1}, {0}, True)


def test_unknown_and_repeated_ends_are_ignored():
    batch = Batch(POINTS)
    batch.take("a")
    batch.succeed("a")
    before = batch.state()
    batch.succeed("a")
    batch.fail("a", again=True)
    batch.fail("stranger", again=False)

    assert batch.state() == before


def test_what_ran_when_the_state_was_saved_is_suggested_last():
    batch = Batch(POINTS)
    batch.take("a")
    again = Batch.from_state(json.loads(json.dumps(batch.state())))

    assert again.waiting == 3
    assert [again.take(name) for name in "bcde"] == [1, 2, 0, None]


def test_a_stray_that_reports_after_all_counts_and_is_not_suggested_again():
    batch = Batch(POINTS[:1])
    batch.take("a")
    again = Batch.from_state(batch.state())
    again.succeed("a")

    assert again.settled
    assert again.take("b") is None


def test_a_stray_that_fails_while_its_slot_runs_again_gives_nothing_up():
    batch = Batch(POINTS[:1])
    batch.take("a")
    again = Batch.from_state(batch.state())
    again._strays["a2"] = 0
    again.take("b")
    again.fail("a2", again=False)
    again.succeed("b")

    assert again.evaluated == {0}
    assert not again.given_up


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "succeed", "fail", "give up", "reload"]), st.integers(0, 6))))
def test_nothing_is_ever_lost(actions):
    """While a batch is not settled, something waits or is in flight; slots are never settled twice over."""
    batch, names = Batch(POINTS), []
    for action, pick in actions:
        name = names[pick % len(names)] if names else "nobody"
        if action == "take":
            names.append(f"t{len(names)}")
            batch.take(names[-1])
        elif action == "succeed":
            batch.succeed(name)
        elif action == "reload":
            batch = Batch.from_state(batch.state())
        else:
            batch.fail(name, again=action == "fail")
        assert not batch.evaluated & batch.given_up
        assert batch.settled or batch.waiting + batch.in_flight > 0
    while not batch.settled:
        slot = batch.take("last")
        assert slot is not None or batch.in_flight
        for name in ["last", *names]:
            batch.succeed(name)
    assert len(batch.evaluated | batch.given_up) == len(POINTS)
