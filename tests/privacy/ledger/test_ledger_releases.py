"""Releases: charged before they are computed, stored before they are handed out, one value per key for ever."""

import threading

import numpy as np
import pytest

from dpray.platform.privacy.budget import to_mu
from dpray.platform.privacy.ledger import (
    Attempt,
    KeyConflict,
    LeaseLost,
    LedgerError,
    ParticipantsChanged,
    Release,
    ReleaseKey,
    ReleaseLost,
    RunClosed,
    ValuePruned,
)

CLIENTS = frozenset({"a", "b", "c"})


def test_a_release_is_charged_before_it_is_computed_and_handed_out_as_stored(account, run, releases):
    seen = []

    def compute(attempt):
        seen.append((account.spent, attempt.quanta, attempt.mu, attempt.participants))
        return np.array([1.5, -2.0])

    release = run.release(releases.key(), {"theta": [0.0]}, releases.record, 1000, compute)
    assert seen == [(1000, 1000, to_mu(1000), None)]
    assert (release.key, release.quanta, release.first) == (releases.key(), 1000, True)
    assert np.array_equal(run.stored(releases.key()), release.value)


def test_the_same_key_again_is_the_stored_value_without_a_second_charge(account, run, releases):
    first = releases.make(run, 1000, value=np.array([1.0]))
    again = releases.make(run, 1000, value=np.array([2.0]))
    assert (again.first, again.quanta, account.spent) == (False, 1000, 1000)
    assert again.value.tolist() == first.value.tolist() == [1.0]


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1.5, np.nan], [-0.0, np.inf]]),
        np.arange(6, dtype=np.int64).reshape(1, 2, 3),
        np.array(3.25),
        np.empty((0, 4)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3.0).astype(">f8"),
    ],
)
def test_values_come_back_bit_for_bit_with_shape_and_type(place, population, run, releases, value):
    first = releases.make(run, value=value)
    assert not first.value.flags.writeable
    again = place.open().population("digits").run("first").stored(releases.key())
    for back in (first.value, again):
        assert (back.dtype, back.shape) == (value.dtype.newbyteorder("="), value.shape)
        assert back.tobytes() == np.ascontiguousarray(value).astype(back.dtype).tobytes()


@pytest.mark.parametrize("value", [np.zeros(2, np.float32), np.array(["x"]), [1.0, 2.0], 3.0, None])
def test_only_float64_and_int64_arrays_are_values(account, run, releases, value):
    with pytest.raises(LedgerError, match="A released value is a float64 or int64 array"):
        run.release(releases.key(), {}, releases.record, 10, lambda attempt: value)
    assert account.spent == 10
    assert run.stored(releases.key()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"query": {"theta": [1.0]}},
        {"mechanism": "user"},
        {"quanta": 1001},
        {"trust": "local"},
    ],
)
def test_the_same_key_for_another_request_is_refused(account, run, releases, change):
    def ask(query=None, mechanism="record", quanta=1000, trust="central"):
        made = getattr(releases, mechanism)
        return run.release(
            releases.key(), query or {"theta": [0.0]}, made, quanta, lambda attempt: np.zeros(1), trust=trust
        )

    ask()
    assert not ask().first
    with pytest.raises(KeyConflict, match="a key is used for one request only"):
        ask(**change)
    assert account.spent == 1000


def test_queries_are_digested_by_content(run, releases):
    def ask(theta):
        query = {"theta": theta, "nested": {"list": (1, None, True, "x", np.float64(2))}}
        return run.release(releases.key(), query, releases.record, 5, lambda attempt: np.zeros(1))

    ask(np.arange(6.0).reshape(2, 3))
    assert not ask(np.asfortranarray(np.arange(6.0).reshape(2, 3))).first
    for other in (np.arange(6.0), np.arange(6).reshape(2, 3), np.arange(6.0).reshape(2, 3) + 1e-300, np.array([])):
        if not np.array_equal(other, np.arange(6.0).reshape(2, 3)) or other.dtype != np.float64:
            with pytest.raises(KeyConflict):
                ask(other)


@pytest.mark.parametrize("query", [{"x": float("nan")}, {"x": object()}, {"x": np.array(["a"])}, {1: 2}, {"x": {1}}])
def test_a_query_that_is_not_plain_is_refused_before_it_costs(account, run, releases, query):
    with pytest.raises(LedgerError, match="The query of a release is public and plain"):
        releases.make(run, query=query)
    assert account.spent == 0


@pytest.mark.parametrize("cells", [("", "m", 0), ("l", "", 0), ("l", "m", -1), ("l", "m", 1.0), ("l", "m", True)])
def test_a_key_is_names_and_a_step(cells):
    with pytest.raises(LedgerError):
        ReleaseKey(*cells)


def test_an_unfinished_release_is_computed_again_without_a_second_charge(population, account, run, releases):
    with pytest.raises(ZeroDivisionError):
        run.release(releases.key(), {"step": 0}, releases.record, 1000, lambda attempt: 1 / 0)
    assert account.spent == 1000
    assert run.stored(releases.key()) is None
    resumed = population.run("first")
    assert releases.make(resumed, 1000).first
    assert account.spent == 1000


def test_a_lost_release_keeps_its_charge_and_never_has_a_value(ledger, population, account, run, releases):
    def lost(attempt):
        attempt.commit(CLIENTS)
        raise ReleaseLost("client b has lost its journal")

    with pytest.raises(ReleaseLost, match="client b"):
        run.release(releases.key(), {"step": 0}, releases.record, 1000, lost)
    for resume in (False, True):
        run = population.run("first") if resume else run
        with pytest.raises(ReleaseLost, match=r"client b has lost its journal.*its charge stands"):
            releases.make(run, 1000)
    assert account.spent == 1000
    assert run.stored(releases.key()) is None
    assert account.statement().lines[0].lost == 1
    assert ledger.verify() == ()


def test_losing_has_a_reason_and_is_final(run, releases):
    attempt = releases.charge(run)
    with pytest.raises(LedgerError, match="for a reason"):
        run.lose(attempt, " ")
    assert run.lose(attempt, "why") is None
    assert run.lose(attempt, "another why") is None
    for late in (lambda: run.store(attempt, releases.value), lambda: attempt.commit(CLIENTS)):
        with pytest.raises(ReleaseLost, match="why"):
            late()


def test_a_release_that_was_stored_cannot_be_lost(run, releases):
    attempt = releases.charge(run)
    run.store(attempt, np.array([1.0]))
    assert run.lose(attempt, "too late").value.tolist() == [1.0]

    def lost(attempt):
        raise ReleaseLost

    def stored_meanwhile(attempt):
        run.store(attempt, np.array([3.0]))
        lost(attempt)

    release = run.release(releases.key(1), {}, releases.record, 5, stored_meanwhile)
    assert (release.first, release.value.tolist()) == (False, [3.0])


def test_a_new_lease_ends_the_old_one(population, account, run, releases):
    attempt = releases.charge(run)
    resumed = population.run("first")
    assert resumed.epoch == run.epoch + 1
    for refused in (
        lambda: releases.charge(run),
        lambda: releases.charge(run, step=1),
        lambda: attempt.commit(CLIENTS),
        lambda: run.lose(attempt, "why"),
        lambda: run.prune("training", "sum", 5),
    ):
        with pytest.raises(LeaseLost, match=r"\(lease 2\); this process holds lease 1"):
            refused()
    assert account.spent == 1000


@pytest.mark.parametrize("zombie_first", [True, False])
def test_of_two_computations_of_one_key_the_first_stored_wins_and_both_return_it(
    population, account, run, releases, zombie_first
):
    zombie, resumed = releases.charge(run), population.run("first")
    alive = releases.charge(resumed)
    stores = [(run, zombie, 1.0), (resumed, alive, 2.0)]
    first, second = stores if zombie_first else stores[::-1]
    won = first[0].store(first[1], np.array([first[2]]))
    lost = second[0].store(second[1], np.array([second[2]]))
    assert (won.first, lost.first) == (True, False)
    assert won.value.tolist() == lost.value.tolist() == [first[2]]
    assert account.spent == 1000


def test_threads_of_one_run_agree_on_one_value_and_one_charge(account, run, releases):
    values, gate = [], threading.Barrier(4)

    def work(number):
        def compute(attempt):
            gate.wait(20)
            return np.array([float(number)])

        values.append(run.release(releases.key(), {}, releases.record, 70, compute).value.item())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == 4
    assert len(set(values)) == 1
    assert account.spent == 70


def test_a_committed_participant_set_is_durable_and_final(ledger, population, run, releases):
    attempt = releases.charge(run)
    before = ledger.head()
    head = attempt.commit(CLIENTS)
    assert head == ledger.head() == attempt.head
    assert head.sequence == before.sequence + 1
    assert attempt.commit(["c", "b", "a", "a"]) == head
    again = releases.charge(population.run("first"))
    assert again.participants == CLIENTS
    assert again.commit(CLIENTS) == ledger.head()
    with pytest.raises(ParticipantsChanged, match=r"3 participants, and another set .*without \['c'\], with \['d'\]"):
        again.commit({"a", "b", "d"})
    assert again.run.store(again, releases.value).first
    assert again.commit(CLIENTS) == ledger.head()
    assert ledger.verify() == ()


@pytest.mark.parametrize("members", [[], "abc", [""], [1]])
def test_participants_are_a_set_of_names(run, releases, members):
    with pytest.raises(LedgerError, match="Participants are a set of client names"):
        releases.charge(run).commit(members)


def test_a_stored_release_has_nothing_left_to_commit(run, releases):
    attempt = releases.charge(run)
    run.store(attempt, releases.value)
    with pytest.raises(LedgerError, match="stored already"):
        attempt.commit(CLIENTS)


def test_a_closed_run_reads_and_releases_nothing_new(population, account, run, releases):
    stored = releases.make(run, 10)
    pending, committed = releases.charge(run, 10, step=1), releases.charge(run, 10, step=2)
    run.close()
    reopened = population.run("first")
    assert releases.make(reopened, 10).value.tolist() == stored.value.tolist()
    for refused in (
        lambda: releases.make(reopened, 10, step=1),
        lambda: releases.make(reopened, 10, step=3),
        lambda: run.store(pending, releases.value),
    ):
        with pytest.raises(RunClosed, match="nothing new"):
            refused()
    with pytest.raises(LeaseLost):
        committed.commit(CLIENTS)
    committed.run = reopened
    with pytest.raises(RunClosed):
        committed.commit(CLIENTS)
    assert account.spent == 30


def test_an_attempt_belongs_to_its_charge(population, run, releases):
    attempt = releases.charge(run)
    other = population.run("other")
    with pytest.raises(LedgerError, match="was not charged for this attempt"):
        other.store(attempt, releases.value)
    releases.charge(other)
    with pytest.raises(LedgerError, match="was not charged for this attempt"):
        other.store(attempt, releases.value)


def test_two_runs_may_use_the_same_key(population, account, run, releases):
    releases.make(run, 10, value=np.array([1.0]))
    assert releases.make(population.run("other"), 10, value=np.array([2.0])).value.tolist() == [2.0]
    assert account.spent == 20
    assert population.runs() == ("first", "other")


def test_stamps_stay_with_every_release_a_stamped_lease_had_a_part_in(population, account, releases):
    seeded = "NOT PRIVATE (seeded noise)"
    plain = population.run("a")
    releases.make(plain, 10)
    releases.charge(plain, 10, step=1)
    assert account.statement().stamps == ()
    resumed = population.run("a", stamps=[seeded])
    releases.make(resumed, 10, step=1)  # charged by the plain lease, computed by the seeded one
    assert account.statement().stamps == (seeded,)
    assert population.run("a").stamps == ()
    assert account.statement(run="a").stamps == (seeded,)
    with pytest.raises(LedgerError, match="The stamp is a name"):
        population.run("b", stamps=[""])


def test_forms_read_well(population, run, releases):
    attempt = releases.charge(run)
    assert isinstance(attempt, Attempt)
    assert isinstance(run.store(attempt, releases.value), Release)
    assert str(attempt.key) == "training/sum step 0"
    assert repr(run) == "Run('digits', 'first', epoch=1)"
    assert repr(population) == "Population('digits')"
    assert run.prune("training", "sum", 10) == 0
    assert issubclass(ValuePruned, LedgerError)
