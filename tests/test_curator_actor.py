"""The curator as an actor: it dies and comes back, and says nothing."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import types
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dpray.platform.curator import CuratorLost, RowsMissing
from dpray.platform.curator_actor import open_curator
from dpray.platform.curator_asks import CuratorError, GradientAsk, ScoreAsk, WinnerAsk, score_mechanism
from dpray.platform.privacy.mechanisms import ClippedMean, NoisyMax
from dpray.platform.user_losses import UserLosses, evaluated

from .test_no_leak import Canaries

FREE = types.SimpleNamespace(quanta=None, hand_out=lambda: None)  # an attempt of an account that is not private
USERS, ROWS = 40, ("first", "second", "third")
MECHANISM = ClippedMean(0.5, USERS, 2)
WEIGHTS = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])
CANARIES = np.random.default_rng(7141).uniform(0.1, 0.9, (3, USERS))


@pytest.fixture
def ray(ray_local: ModuleType) -> ModuleType:
    """Workers cannot import the tests: this module travels by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray_local


def ask(step=0, mu=0.5):
    return GradientAsk(ROWS, WEIGHTS, MECHANISM, mu, ("run", step))


def end(owner, ray, how):
    """End the curator, and wait until its process is gone."""
    process = owner.process
    if how == "kill":
        os.kill(process, signal.SIGKILL)
    elif how == "ray":
        ray.kill(owner._curator, no_restart=False)
    else:
        owner.close()
    while Path(f"/proc/{process}").exists():
        time.sleep(0.05)


def fill(owner):
    for row in owner.expect(ROWS):
        assert owner.handle().submit(row, CANARIES[ROWS.index(row)])


@pytest.mark.parametrize("how", ["ray", "kill"])
def test_a_curator_that_dies_loses_its_rows_and_is_filled_again(ray, how):
    with open_curator(USERS) as owner:
        fill(owner)
        before = owner.gradient(ask(), FREE)
        assert np.array_equal(owner.gradient(ask(), FREE), before), "one life, one value"
        process = owner.process
        end(owner, ray, how)
        with pytest.raises((CuratorLost, RowsMissing)):
            owner.gradient(ask(1), FREE)
        assert owner.expect(ROWS) == list(ROWS)
        assert owner.process != process
        fill(owner)
        assert owner.expect(ROWS) == []
        again = owner.gradient(ask(1, math.inf), FREE)
        with open_curator(USERS, actor=False) as other:
            fill(other)
            assert np.array_equal(other.gradient(ask(1, math.inf), FREE), again)


def test_a_late_submission_after_a_death_waits_and_is_dropped(ray):
    with open_curator(USERS) as owner:
        fill(owner)
        end(owner, ray, "ray")
        assert owner.handle().submit(ROWS[0], CANARIES[0]) is False
        assert owner.expect(ROWS) == list(ROWS)


def test_a_closed_curator_is_lost_at_once(ray):
    owner = open_curator(USERS)
    end(owner, ray, "close")
    owner.close()
    began = time.monotonic()
    with pytest.raises(CuratorLost, match="gone"):
        owner.handle().submit(ROWS[0], CANARIES[0])
    with pytest.raises(CuratorLost, match="expected"):
        owner.expect(ROWS)
    assert time.monotonic() - began < 30


def test_a_curator_takes_no_cpu_and_is_placed_where_it_is_told(ray):
    free = ray.available_resources().get("CPU", 0)
    with open_curator(USERS), open_curator(USERS, resources={"node:__internal_head__": 0.001}):
        assert ray.available_resources().get("CPU", 0) == free


class Telling(UserLosses):
    """Tries every way out, on whatever it knows of its users."""

    users = USERS

    def __init__(self, losses, how):
        self.private, self.how = losses, how

    def fit(self, config):
        return np.asarray(self.private[config["row"]])

    def losses(self, model):
        import logging

        print(model)
        print(repr(model.tolist()), file=sys.stderr, flush=True)
        os.write(1, model.tobytes())
        os.system(f"echo {model[0]!r}")
        warnings.warn(f"{model.tolist()}", stacklevel=1)
        logging.getLogger("ray").error("%r", model.tolist())
        logging.getLogger("mine").critical("%r", model.tolist())
        if self.how == "raises":
            raise ValueError(f"user 3 has {model[3]!r}", model.tolist())
        if self.how == "exits":
            raise SystemExit(repr(model.tolist()))
        return [model.tolist()] if self.how == "shape" else model


def tried(task, handle, row, strict):
    """What a trial does."""
    return handle.submit(ROWS[row], evaluated(task, {"row": row}, strict=strict))


class Trial:
    def speak(self, word):
        print(word, flush=True)

    def step(self, task, handle, row, strict):
        return tried(task, handle, row, strict)


def session(ray):
    return Path(ray._private.worker._global_node.get_session_dir_path())


def test_trials_and_curator_leave_no_loss_behind(ray, capfd):
    said = []
    before = {path: path.stat().st_size for path in (session(ray) / "logs").rglob("*") if path.is_file()}
    with open_curator(USERS) as owner:
        actor, handle = ray.remote(num_cpus=0)(Trial).remote(), owner.handle()
        bare = ray.remote(num_cpus=0)(tried)
        for step, how in enumerate(("returns", "raises", "exits", "shape")):
            task = ray.put(Telling(CANARIES, how))
            owner.expect(())
            owner.expect(ROWS)
            try:
                ray.get(actor.step.remote(task, handle, 0, True))
                ray.get(bare.remote(task, handle, 1, True))
            except Exception as error:
                said.append(f"{error!r} {error}")
            for row in range(3):
                assert ray.get(actor.step.remote(task, handle, row, False))
            owner.gradient(ask(step), FREE)
            owner.score(ScoreAsk(ROWS[0], score_mechanism(1.0, USERS), 1.0, ("run", "score", step)), FREE)
            owner.winner(WinnerAsk(ROWS, NoisyMax(1.0, USERS, 3), 1.0, ("run", "winner", step)), FREE)
            for bad in (lambda: owner.submit("x", CANARIES[0][:-1]), lambda: owner.gradient(ask(0, mu=0.1), FREE)):
                with pytest.raises((ValueError, CuratorError)) as refused:
                    bad()
                said.append(f"{refused.value!r} {refused.getrepr(showlocals=False)}")
        ray.get(actor.speak.remote("spoken afterwards"))
        ray.kill(actor)
    time.sleep(1.0)  # the log monitor's turn
    canaries = Canaries(CANARIES.ravel())
    out = capfd.readouterr()
    assert "ShapeRefused" in "".join(said), "the wrong shape was to be seen while strict"
    for text in (*said, out.out, out.err):
        assert not canaries.in_bytes(text.encode())
    for path in (session(ray) / "logs").rglob("*"):
        if path.is_file():  # what was there before this test is other tests' matter, and long
            assert not canaries.in_bytes(path.read_bytes()[before.get(path, 0) :]), path
    spoken = [path.read_text(errors="replace") for path in (session(ray) / "logs").glob("worker-*.out")]
    assert any("spoken afterwards" in text for text in spoken), "a trial's process is silent on its users only"


def test_the_same_task_without_confinement_is_caught(ray):
    """Negative control."""
    private = np.random.default_rng(7142).uniform(0.1, 0.9, (3, USERS))

    @ray.remote(num_cpus=0)
    def bare(task):
        task.losses(task.fit({"row": 0}))

    ray.get(bare.remote(Telling(private, "returns")))
    time.sleep(1.0)
    canaries = Canaries(private.ravel())
    spoken = [path for path in (session(ray) / "logs").glob("worker-*") if path.stat().st_size]
    assert any(canaries.in_bytes(path.read_bytes()) for path in spoken)
