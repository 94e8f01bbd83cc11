"""Processes that die: clients' hosts in and between calls, and drivers between commit and reveal."""

import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dpray.platform import confine
from dpray.platform.cohort import Cohort, GradientSum, Records, Site, dispatch
from dpray.platform.privacy.ledger import ReleaseLost
from dpray.platform.privacy.mechanisms import Regime
from dpray.platform.privacy.noise import NoiseSource

from .conftest import CLIP, DIMENSION, SEARCH, RowSum, end_for_good, gradient_mechanism, records, shards_of

THETA = np.zeros(DIMENSION)
QUERY = GradientSum(THETA, CLIP)


@pytest.fixture
def build(by_value, tmp_path):
    built = []

    def make(shards, task=None, **settings):
        cohort = Cohort(task or RowSum(), shards, **{"state_dir": tmp_path / "state", "timeout": 60.0, **settings})
        built.append(cohort)
        return cohort

    yield make
    for cohort in built:
        cohort.close()


def kill_hosts(cohort, number=1):
    for process in list(cohort.processes())[:number]:
        os.kill(process, signal.SIGKILL)


def kill_hosts_of(cohort, client):
    for process, clients in cohort.processes().items():
        if client in clients:
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("regime", [Regime.CENTRAL, Regime.DISTRIBUTED])
def test_a_host_killed_between_calls_is_rebuilt_and_asked_again(build, attempt, regime):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2)
    cohort.sum(attempt(QUERY, mechanism, regime=regime), QUERY, mechanism, regime)
    before = set(cohort.processes())
    kill_hosts(cohort)
    result = cohort.sum(attempt(QUERY, mechanism, 1, regime=regime), QUERY, mechanism, regime)
    assert len(result.participants) == 4
    assert set(cohort.processes()) != before


class Slow(RowSum):
    """Says that it is running, and waits a little, once."""

    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def clipped_sum(self, theta, records, clip):
        if not Path(self.flag).exists():
            Path(self.flag).write_text(str(os.getpid()))
            time.sleep(30)
        return super().clipped_sum(theta, records, clip)

    def fit_and_score(self, config, records, rng):
        return float(self.clipped_sum(THETA, records, 1.0).sum())


def kill_once_running(flag):
    def wait():
        while not flag.exists() or not flag.read_text():
            time.sleep(0.01)
        os.kill(int(flag.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("regime", [Regime.CENTRAL, Regime.DISTRIBUTED])
def test_a_host_killed_during_a_call_is_rebuilt_and_asked_again(build, attempt, tmp_path, regime):
    flag = tmp_path / "running"
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), Slow(str(flag)), actors=1)
    cohort.start()
    thread = kill_once_running(flag)
    result = cohort.sum(attempt(QUERY, mechanism, regime=regime), QUERY, mechanism, regime)
    thread.join()
    assert len(result.participants) == 4


def test_a_host_killed_while_it_rehearses_goes_on_with_the_clients_that_are_left(build, tmp_path):
    flag = tmp_path / "running"
    cohort = build(shards_of(4), Slow(str(flag)), actors=1)
    handle = cohort.handle()
    thread = kill_once_running(flag)
    assert handle.evaluate(SEARCH, 0, {}) == 4
    thread.join()


class DriverError(Exception):
    """The driver's death, as far as the ledger and the clients can tell."""


def interrupt(monkeypatch, charged, *, after):
    """Let the attempt's commit go through, do `after`, and end the driver unless `after` returns something."""
    commit = charged.commit

    def committed(participants, **options):
        head = commit(participants, **options)
        if not after():
            raise DriverError
        return head

    monkeypatch.setattr(charged, "commit", committed)


def test_a_host_killed_between_commit_and_reveal_prepares_again_for_the_same_set(build, attempt, monkeypatch):
    regime = Regime.DISTRIBUTED
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2)
    charged = attempt(QUERY, mechanism)
    cohort.start()
    interrupt(monkeypatch, charged, after=lambda: kill_hosts(cohort) or True)
    result = cohort.sum(charged, QUERY, mechanism, regime)
    assert result.participants == tuple(shards_of(4))


@pytest.mark.parametrize(("regime", "actors"), [(Regime.DISTRIBUTED, 2), (Regime.LOCAL, 1)])
def test_a_driver_that_died_after_the_reveal_gets_the_same_bytes_in_any_layout(build, attempt, regime, actors):
    mechanism, cohort = gradient_mechanism(5), build(shards_of(5), actors=2)
    first = cohort.sum(attempt(QUERY, mechanism, regime=regime), QUERY, mechanism, regime)
    cohort.close()  # not stored: the driver dies here
    resumed = attempt(QUERY, mechanism, regime=regime)
    assert resumed.participants == frozenset(first.participants)
    second = build(shards_of(5), actors=actors).sum(resumed, QUERY, mechanism, regime)
    assert second.total.tobytes() == first.total.tobytes()
    assert set(second.participants) == set(first.participants)


def test_a_committed_set_is_repeated_even_when_more_clients_are_back(build, by_value, attempt):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2, quorum=2)
    cohort.start()
    end_for_good(by_value, [cohort._running.handles[1]])
    first = cohort.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    cohort.close()
    again = build(shards_of(4), actors=1, quorum=2)
    second = again.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    assert second.participants == first.participants == ("client-000", "client-001")
    assert second.total.tobytes() == first.total.tobytes()


def test_a_driver_that_died_between_commit_and_reveal_finishes_over_the_same_set(build, attempt, monkeypatch):
    regime = Regime.LOCAL
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2)
    charged = attempt(QUERY, mechanism, regime=regime)
    interrupt(monkeypatch, charged, after=lambda: False)
    with pytest.raises(DriverError):
        cohort.sum(charged, QUERY, mechanism, regime)
    cohort.close()
    again = build(shards_of(4), actors=1)
    assert len(again.sum(attempt(QUERY, mechanism, regime=regime), QUERY, mechanism, regime).participants) == 4


def test_a_committed_release_whose_journal_is_gone_is_lost_and_the_next_one_is_not(build, attempt, tmp_path):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2)
    cohort.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    cohort.close()
    shutil.rmtree(tmp_path / "state")
    again = build(shards_of(4), actors=2)
    with pytest.raises(ReleaseLost, match="knows nothing of it"):
        again.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    assert len(again.sum(attempt(QUERY, mechanism, 1), QUERY, mechanism, Regime.DISTRIBUTED).participants) == 4


def test_a_committed_release_is_lost_when_a_host_cannot_be_had_any_more(build, by_value, attempt, monkeypatch):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2, quorum=2)
    cohort.start()
    charged = attempt(QUERY, mechanism)
    interrupt(monkeypatch, charged, after=lambda: end_for_good(by_value, [cohort._running.handles[0]]) or True)
    with pytest.raises(ReleaseLost, match="its charge stands"):
        cohort.sum(charged, QUERY, mechanism, Regime.DISTRIBUTED)


def test_a_committed_release_is_lost_when_another_number_of_clients_is_counted_on(build, attempt, monkeypatch):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=1)
    charged = attempt(QUERY, mechanism)
    interrupt(monkeypatch, charged, after=lambda: False)
    with pytest.raises(DriverError):
        cohort.sum(charged, QUERY, mechanism, Regime.DISTRIBUTED)
    cohort.close()
    again = build(shards_of(4), actors=1, quorum=2)
    with pytest.raises(ReleaseLost):
        again.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)


def kills(kind, records):
    if kind == 1:
        os._exit(1)
    if kind == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == 4:
        time.sleep(0.5)
    if kind == 3:
        time.sleep(600)


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_a_client_whose_code_kills_or_hangs_its_process_is_no_dropout(build, attempt, kind):
    """Exit, crash and endless wait all answer as if nothing had happened."""
    shards = {**shards_of(4), "client-001": records(1, label=kind)}
    mechanism = gradient_mechanism(4)
    cohort = build(shards, RowSum(kills), actors=1, limit=1.0)
    result = cohort.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    assert result.participants == tuple(shards)
    assert cohort.evaluate(SEARCH, 0, {"target": 0.0}) == 4


@pytest.mark.parametrize("dying", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_clients_that_kill_their_process_silence_nobody_else(build, attempt, dying):
    """However many die, the others' messages are in the sum, and nobody drops out."""
    healthy = shards_of(4)
    shards = {name: records(index, label=int(index < dying)) for index, name in enumerate(healthy)}
    mechanism = gradient_mechanism(4)
    cohort = build(shards, RowSum(kills), actors=1, noise=NoiseSource(3))
    charged = attempt(QUERY, mechanism)
    result = cohort.sum(charged, QUERY, mechanism, Regime.DISTRIBUTED)
    assert result.participants == tuple(shards)
    key = charged.key
    names = (charged.run.population.name, charged.run.name, key.label, key.mechanism, key.step)
    noise = sum(NoiseSource(3).draw(result.noise, DIMENSION, *names, client) for client in shards)
    spared = [RowSum().clipped_sum(THETA, healthy[name], CLIP) for name in list(shards)[dying:]]
    expected = np.sum(spared, axis=0) if spared else np.zeros(DIMENSION)
    assert (result.total - noise) * result.grid == pytest.approx(expected, abs=1e-2)


def test_slow_user_code_is_waited_for(build, attempt):
    """Who drops out does not depend on data: more slow clients than the timeout has room for are no dropouts."""
    shards = {name: records(index, label=4) for index, name in enumerate(shards_of(8))}
    mechanism = gradient_mechanism(8)
    cohort = build(shards, RowSum(kills), actors=1, quorum=2, timeout=6.0, limit=1.5)
    result = cohort.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    assert result.participants == tuple(shards)


def slowly_loaded(seed):
    time.sleep(3.0)
    return records(seed)


def test_a_new_host_is_waited_for_longer_than_an_answer(build):
    sites = {name: Site(partial(slowly_loaded, seed), 5) for seed, name in enumerate(("one", "other"))}
    assert len(build(sites, quorum=2, timeout=0.5).processes()) == 2


def of_width(file, seed):
    """Records as wide as the file says."""
    wide = records(seed)
    return Records(wide.x[:, : int(file.read_text())], wide.y)


@pytest.mark.parametrize(("width", "there"), [(DIMENSION, True), (DIMENSION - 1, False)])
def test_a_site_that_comes_back_with_records_of_another_shape_stays_a_dropout(build, attempt, tmp_path, width, there):
    file = tmp_path / "width"
    sites = {"here": Site(partial(records, 0), 5), "back": Site(partial(of_width, file, 1), 5)}
    file.write_text(str(DIMENSION))
    cohort = build(sites, quorum=1)
    cohort.start()
    file.write_text(str(width))
    kill_hosts_of(cohort, "back")
    mechanism = gradient_mechanism(2)
    charged = attempt(QUERY, mechanism, trust="central (aggregator trusted, shares simulated)")
    answered = cohort.sum(charged, QUERY, mechanism, Regime.DISTRIBUTED).participants
    assert answered == (("here", "back") if there else ("here",))


def test_a_host_that_does_not_answer_in_time_is_a_dropout(build, attempt, monkeypatch):
    monkeypatch.setattr(confine, "RESTART", 0.1)
    mechanism = gradient_mechanism(4)
    cohort = build(shards_of(4), actors=2, quorum=2, timeout=6.0, limit=0.5)
    stopped = next(process for process, clients in cohort.processes().items() if "client-003" in clients)
    os.kill(stopped, signal.SIGSTOP)
    try:
        result = cohort.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert result.participants == ("client-000", "client-001")


def test_a_site_whose_node_is_gone_is_a_dropout_soon_and_holds_up_no_later_round(build, attempt, monkeypatch):
    """Long before its time limit, and without a question to the actor: it would wait for a node."""
    monkeypatch.setattr(dispatch, "REPLACED", 1.5)
    sites = {name: Site(partial(records, seed), 5) for seed, name in enumerate(("here", "gone"))}
    mechanism, cohort = gradient_mechanism(2), build(sites, quorum=1, timeout=600.0)
    stopped = next(process for process, clients in cohort.processes().items() if "gone" in clients)
    os.kill(stopped, signal.SIGSTOP)
    cohort._running.dispatch.needs = ({}, {"site:gone": 1})
    seconds = []
    try:
        for step in range(2):
            began = time.monotonic()
            charged = attempt(QUERY, mechanism, step, trust="central (aggregator trusted, shares simulated)")
            assert cohort.sum(charged, QUERY, mechanism, Regime.DISTRIBUTED).participants == ("here",)
            seconds.append(time.monotonic() - began)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert seconds[0] < 30
    assert seconds[1] < 3
    cohort._running.dispatch.needs = ({}, {})  # the node is there again
    charged = attempt(QUERY, mechanism, 2, trust="central (aggregator trusted, shares simulated)")
    assert cohort.sum(charged, QUERY, mechanism, Regime.DISTRIBUTED).participants == ("here", "gone")
