"""Several candidates at once at a host: the same scores, one by one where the joint pass fails, and nobody sees."""

import subprocess
import sys
import time

import numpy as np
import pytest

from dpray.platform.cohort.client import ClientTask
from dpray.platform.cohort.rehearsal import Rehearsal
from dpray.platform.confine import PATIENCE, Confinement, rehearsal_deaths

from .conftest import SEARCH, RowSum, client_names, records, shards_of

CONFIGS = {3: {"target": 0.0, "jitter": 1.0}, 5: {"target": 1.0}, 6: {"target": -2.0, "jitter": 0.5}}
EVERYONE = client_names(4)


class Together(RowSum):
    """Scores jointly what `RowSum` scores alone; clients with a label above zero do what `spoil` does instead."""

    def __init__(self, spoil=None):
        super().__init__()
        self.spoil, self.joint, self.single = spoil, 0, 0

    def fit_and_score(self, config, records, rng):
        self.single += 1
        return super().fit_and_score(config, records, rng)

    def fit_and_scores(self, configs, records, rng):
        self.joint += 1
        if self.spoil is not None and records.y[0] > 0:
            return self.spoil(configs)
        state = rng.bit_generator.state
        found = []
        for config in configs:
            rng.bit_generator.state = state
            found.append(super().fit_and_score(config, records, rng))
        return np.array(found)


def poisoned(label=1):
    return {**shards_of(3), EVERYONE[3]: records(3, label=label)}


def stored(host, clients=EVERYONE, candidates=7):
    return host.scores(SEARCH, candidates, clients)


def test_together_and_one_by_one_are_the_same_scores(make_host):
    task = Together()
    joint, alone = make_host(shards_of(4), task=task), make_host(shards_of(4), site="other")
    for client in EVERYONE:  # the same private generators
        alone._seeds[client] = joint._seeds[client]
    assert joint.evaluate_all(SEARCH, CONFIGS) == 4
    for number, config in CONFIGS.items():
        assert alone.evaluate(SEARCH, number, config) == 4
    np.testing.assert_array_equal(stored(joint), stored(alone))
    assert (task.joint, task.single) == (4, 0)
    assert np.isfinite(stored(joint)[:, list(CONFIGS)]).all()


def test_a_single_candidate_is_never_asked_for_jointly(make_host):
    task = Together()
    make_host(shards_of(4), task=task).evaluate(SEARCH, 3, CONFIGS[3])
    assert (task.joint, task.single) == (0, 4)


def test_a_task_without_a_joint_way_is_asked_one_by_one(make_host):
    host = make_host(shards_of(4))
    assert host.evaluate_all(SEARCH, CONFIGS) == 4
    assert np.isfinite(stored(host)[:, list(CONFIGS)]).all()


def raises(configs):
    raise ValueError("canary")


SPOILT = {
    "raises": raises,
    "exits": lambda configs: sys.exit(3),
    "interrupts": lambda configs: (_ for _ in ()).throw(KeyboardInterrupt),
    "one too few": lambda configs: np.zeros(len(configs) - 1),
    "a matrix": lambda configs: np.zeros((len(configs), 1)),
    "a number": lambda configs: 0.5,
    "words": lambda configs: ["a"] * len(configs),
    "complex": lambda configs: np.zeros(len(configs), dtype=complex),
    "nothing": lambda configs: None,
    "changes what it is given": lambda configs: configs.clear(),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_client_whose_joint_pass_fails_falls_back_alone_and_nobody_sees(make_host, spoil):
    """Same answer, same scores of everybody else, and its own scores are those of one by one."""
    plain = make_host(poisoned(), site="plain")
    task = Together(spoil)
    host = make_host(poisoned(), task=task)
    for client in EVERYONE:
        plain._seeds[client] = host._seeds[client]
    assert host.evaluate_all(SEARCH, CONFIGS) == plain.evaluate_all(SEARCH, CONFIGS) == 4
    np.testing.assert_array_equal(stored(host), stored(plain))
    assert (task.joint, task.single) == (4, len(CONFIGS))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_the_worst_of_its_candidate_only(make_host, bad):
    task = Together(lambda configs: np.array([0.25, bad, 1e30]))
    host = make_host(poisoned(), task=task)
    assert host.evaluate_all(SEARCH, CONFIGS) == 4
    np.testing.assert_array_equal(stored(host)[3, list(CONFIGS)], [0.25, np.nan, 1e30])
    assert np.isfinite(stored(host)[:3, list(CONFIGS)]).all()
    assert task.single == 0


def test_only_what_is_missing_is_computed_again(make_host):
    task = Together()
    host = make_host(shards_of(4), task=task)
    host.evaluate(SEARCH, 5, CONFIGS[5])
    before = stored(host)[:, 5]
    seen = []
    task.fit_and_scores = lambda configs, records, rng: seen.append(len(configs)) or np.zeros(len(configs))
    host.evaluate_all(SEARCH, CONFIGS)
    assert seen == [2] * 4
    np.testing.assert_array_equal(stored(host)[:, 5], before)
    host.evaluate_all(SEARCH, CONFIGS)
    assert len(seen) == 4


def test_scores_of_a_long_pass_are_kept_on_the_way(make_host, monkeypatch):
    """A host that dies has what its earlier clients scored."""
    monkeypatch.setattr("dpray.platform.cohort.host._FLUSH_SECONDS", 0.0)

    host = make_host(shards_of(4), task=Together())
    keep = host._journal.keep_scores
    kept = []

    def counted(run, digests, scores):
        keep(run, digests, scores)
        kept.append(tuple(scores))
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(host._journal, "keep_scores", counted)
    with pytest.raises(KeyboardInterrupt):
        host.evaluate_all(SEARCH, CONFIGS)
    assert kept == [EVERYONE[:1], EVERYONE[1:2]]
    task = Together()
    rebuilt = make_host(shards_of(4), name="rebuilt", task=task)
    rebuilt.evaluate_all(SEARCH, CONFIGS)
    assert task.joint == 2
    assert np.isfinite(stored(rebuilt)[:, list(CONFIGS)]).all()


KILLER = """
import os, sys, time
import numpy as np
from dpray.platform.cohort.client import ClientTask, Records, Stack
from dpray.platform.cohort.host import Host, HostSpec
from dpray.platform.cohort.queries import Terms
from dpray.platform.privacy.noise import NoiseSource

class Task(ClientTask):
    dimension = 2
    def clipped_sum(self, theta, records, clip):
        return np.zeros(2)
    def fit_and_score(self, config, records, rng):
        if records.y[0] and config["deadly"]:
            os._exit(7)
        return 1.0
    def fit_and_scores(self, configs, records, rng):
        if records.y[0]:
            time.sleep(60) if {slow} else os._exit(7)
        return np.full(len(configs), 2.0)

shards = [Records(np.full((1, 2), .5), np.array([bad])) for bad in (0, 1, 0)]
stack = Stack.of(shards)
spec = HostSpec("h", ("a", "b", "c"), Task(), lambda: stack, {folder!r}, Terms(2, 0.0, 3, 3), 3, 3,
    NoiseSource(), None, {limit})
host, run = Host(spec), ("p", "s")
print(host.evaluate_all(run, {{0: {{"deadly": False}}, 1: {{"deadly": True}}, 2: {{"deadly": False}}}}))
print(host.scores(run, 3, ("a", "b", "c")).tolist())
"""


@pytest.mark.parametrize(
    ("slow", "limit", "first"), [(False, None, 7), (True, 0.2, -14)], ids=["kills", "takes too long"]
)
def test_a_joint_pass_that_ends_the_process_is_made_one_by_one_and_only_the_deadly_candidate_is_worst(
    tmp_path, slow, limit, first
):
    """One death in the joint pass, two in the candidate's own: then everybody is answered for."""
    code = KILLER.format(folder=str(tmp_path / "site"), slow=slow, limit=limit)
    codes, said = [], []
    for _ in range(6):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        codes.append(done.returncode)
        said = done.stdout.split("\n")
        if done.returncode == 0:
            break
    assert codes == [first, 7, 7, 0]
    assert said[:2] == ["3", "[[2.0, 2.0, 2.0], [1.0, nan, 1.0], [2.0, 2.0, 2.0]]"]


def test_a_host_may_die_as_often_as_its_clients_can_kill_it():
    """The bound of the dispatcher, by hand: each client once jointly, then `PATIENCE` times for each candidate."""
    assert rehearsal_deaths(clients=3, candidates=4) == 3 + 3 * 4 * PATIENCE


def test_every_call_gets_the_generator_anew():
    draws = []

    class Draws(ClientTask):
        dimension = 1

        def clipped_sum(self, theta, records, clip):
            return np.zeros(1)

        def fit_and_score(self, config, records, rng):
            draws.append(rng.random())
            return 0.0

        def fit_and_scores(self, configs, records, rng):
            draws.append(rng.random())
            raise RuntimeError

    confinement = Confinement("test")
    rehearsal = Rehearsal(Draws(), CONFIGS, dict.fromkeys(CONFIGS, confinement), confinement)
    rehearsal.scores("a", records(), list(CONFIGS), lambda: np.random.default_rng(4))
    assert draws == [draws[0]] * 4


def test_a_joint_pass_may_take_as_long_as_its_candidates_may(make_host):
    """Limit .5 s a call: a joint pass over three candidates that takes .8 s is not cut off."""

    class Slow(Together):
        def fit_and_scores(self, configs, records, rng):
            time.sleep(0.8)
            return super().fit_and_scores(configs, records, rng)

    task = Slow()
    host = make_host({EVERYONE[0]: records(0)}, task=task, limit=0.5)
    assert host.evaluate_all(SEARCH, CONFIGS) == 1
    assert (task.joint, task.single) == (1, 0)
