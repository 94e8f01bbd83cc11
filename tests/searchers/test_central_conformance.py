"""The searches of the central model, with a curator on Ray, through the conformance suite and a plain Tuner."""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle, tune

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.user_losses import UserLosses
from dpray.searchers import (
    DPGIBOSearch,
    FiniteDifferenceSearch,
    GIBOSearch,
    GlobalBOSearch,
    PrivateRandomSearch,
    SPSASearch,
    release_score,
)
from dpray.searchers.base import PrivateSearcher
from dpray.searchers.driving import within
from dpray.searchers.testing import SearcherConformance

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files

SPACE = {"lr": tune.uniform(-2.0, 2.0), "model": {"width": tune.uniform(-2.0, 2.0)}}
CANARY = 0.83152469071


class Bowl(UserLosses):
    """One paraboloid per user; somebody's loss holds a canary."""

    users = 50

    def fit(self, config):
        return config

    def losses(self, model):
        lowest = np.linspace(0.5, 1.5, self.users)
        losses = (model["lr"] - lowest) ** 2 + (model["model"]["width"] + lowest) ** 2
        losses[7] = CANARY
        return losses


def opened(directory: Path, *, private: bool = True) -> Any:
    ledger = Ledger(f"sqlite:///{directory / 'ledger.db'}")
    people = ledger.population("people")
    people.account("user", Budget(8.0, 1e-5) if private else Budget(math.inf, 1e-5, non_private=True))
    return people.run("first")


class Central(SearcherConformance):
    space = SPACE

    @pytest.fixture(autouse=True)
    def cluster(self, ray_local):
        """The session's own Ray."""

    def close(self, search: PrivateSearcher) -> None:
        search.close()  # type: ignore[attr-defined]


class TestDPGIBOSearch(Central):
    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        run = opened(directory)
        return DPGIBOSearch(Bowl(), run, mu=1.0, clip=1.0, iterations=2, space=space, keep=1, batch_size=5)


@pytest.mark.slow
class TestGIBOSearch(Central):
    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        run = opened(directory, private=False)
        return GIBOSearch(Bowl(), run, iterations=2, space=space, points_per_trial=2, batch_size=8)


@pytest.mark.slow
class TestFiniteDifferenceSearch(Central):
    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        run = opened(directory)
        return FiniteDifferenceSearch(Bowl(), run, mu=1.0, clip=1.0, iterations=2, space=space, two_sided=True)


@pytest.mark.slow
class TestSPSASearch(Central):
    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        run = opened(directory)
        return SPSASearch(Bowl(), run, mu=1.0, clip=1.0, iterations=2, space=space, directions=3)


@pytest.mark.slow
class TestPrivateRandomSearch(Central):
    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        return PrivateRandomSearch(Bowl(), opened(directory), mu=1.0, bound=4.0, candidates=6, space=space)


@pytest.mark.slow
class TestGlobalBOSearch(Central):
    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        run = opened(directory, private=False)
        return GlobalBOSearch(Bowl(), run, iterations=2, batch_size=4, space=space)


def fitted(search: DPGIBOSearch, directory: Path, **tuned: Any) -> Any:
    tuner = tune.Tuner(
        search.trainable(),
        param_space=SPACE,
        tune_config=search.tune_config(**tuned),
        run_config=tune.RunConfig(storage_path=str(directory / "tune"), verbose=0),
    )
    return within(120, tuner.fit)


def test_a_plain_tuner_finds_the_optimum_and_its_files_hold_no_loss(tmp_path, ray_local, leaks):
    search = DPGIBOSearch(Bowl(), opened(tmp_path), mu=1.6, clip=2.0, iterations=8, space=SPACE, max_concurrent=2)
    results = fitted(search, tmp_path)
    session = Path(ray_local._private.worker._global_node.get_session_dir_path())
    assert len(results) == search.evaluations == 8 * 3
    assert np.linalg.norm(search.box.theta(search.best_config) - [1.0, -1.0]) < 1.0
    for folder in (tmp_path / "tune", tmp_path, session / "logs"):
        assert leaks(folder, CANARY) == []
    search.close()


def test_a_curator_that_is_killed_is_filled_again_and_nothing_is_charged_twice(tmp_path, ray_local):
    search = DPGIBOSearch(Bowl(), opened(tmp_path), mu=1.0, clip=1.0, iterations=4, space=SPACE, noise_seed=3)
    release, killed = search.run.release, []

    def dies_once(key, *rest, **options):
        if key.step == 1 and not killed:
            killed.append(search.curator.process)
            os.kill(search.curator.process, signal.SIGKILL)
        return release(key, *rest, **options)

    search.run.release = dies_once
    fitted(search, tmp_path)
    whole = DPGIBOSearch(Bowl(), opened(tmp_path), mu=1.0, clip=1.0, iterations=4, space=SPACE, noise_seed=3)
    whole.begin()
    account = search.run.population.account("user", Budget(8.0, 1e-5))
    assert killed
    assert search.finished
    assert account.spent == sum(search.spends)
    assert whole.best_config == search.best_config
    search.close()


def test_the_task_may_be_made_where_the_trial_runs(tmp_path, ray_local):
    search = DPGIBOSearch(Bowl, opened(tmp_path), users=50, mu=1.0, clip=1.0, iterations=1, space=SPACE)
    assert len(fitted(search, tmp_path)) == search.evaluations
    assert search.finished
    assert release_score(search, 4.0, mu=0.5) == release_score(search, 4.0, mu=0.5)
    search.close()


class Deadly(Bowl):
    """Losses kill or hang their process on one half of the box, if somebody's record says so."""

    def __init__(self, killer):
        self.killer = killer

    def losses(self, model):
        if self.killer and model["lr"] > 0.2:
            os._exit(1)
        if self.killer and model["model"]["width"] > 0.2:
            time.sleep(1000)
        return super().losses(model)


@pytest.mark.parametrize("per_trial", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_record_that_kills_or_hangs_its_process_shows_in_the_noised_gradient_only(tmp_path, ray_local, per_trial):
    seen = []
    for killer in (False, True):
        (tmp_path / str(killer)).mkdir()
        search = DPGIBOSearch(
            Deadly(killer), opened(tmp_path / str(killer)), mu=1.0, clip=1.0, iterations=1, space=SPACE, noise_seed=3,
            time_limit=2.0, rotate=False, batch_size=4, points_per_trial=per_trial,
        )  # fmt: skip
        results = fitted(search, tmp_path / str(killer))
        points = np.array([[c["lr"], c["model"]["width"]] for _, c in search.points(0)])
        assert (points > 0.2).any(axis=0).all()
        seen.append((search.reason, search.progress, len(results), len(results.errors), search.get_state()["own"]))
        search.close()
    assert seen[0] == seen[1]
    assert np.abs(search.history.gradients).max() < 6 * search.sigma  # every user has a bad point: noise alone


class Mortal(Bowl):
    def fit(self, config):
        os._exit(1)


def test_a_process_that_dies_in_fit_fails_its_trial_and_spends_nothing(tmp_path, ray_local):
    search = DPGIBOSearch(Mortal(), opened(tmp_path), mu=1.0, clip=1.0, iterations=1, space=SPACE, max_retries=0)
    results = fitted(search, tmp_path)
    assert "in `fit`" in str(results.errors[0])
    assert "0 of the 3 points of iteration 0 could be evaluated" in search.reason
    assert search.run.population.account("user", Budget(8.0, 1e-5)).spent == 0
    search.close()


@pytest.mark.parametrize("how", ["state", "users", "exit", "print"])
def test_making_the_task_where_the_trial_runs_quotes_no_record(tmp_path, ray_local, capfd, leaks, how):
    def made():
        if how == "print":
            print(f"late words {CANARY}", flush=True)
            return Bowl()
        raise SystemExit(f"cannot read people: {CANARY}")

    class Unreadable(Bowl):
        def __setstate__(self, state):
            raise ValueError(f"could not convert {CANARY}")

        def __reduce__(self):
            return object.__new__, (Unreadable,), {"a": 1}

    class Counting(Bowl):
        @property
        def users(self):
            raise ValueError(f"could not count {CANARY}")

    task = {"state": Unreadable(), "users": Counting(), "exit": made, "print": made}[how]
    search = DPGIBOSearch(task, opened(tmp_path), users=50, mu=1.0, clip=1.0, iterations=1, space=SPACE, max_retries=0)
    fitted(search, tmp_path)
    search.close()
    time.sleep(1.0)  # the log monitor's turn
    out = capfd.readouterr()
    assert str(CANARY)[:9] not in out.out + out.err
    session = Path(ray_local._private.worker._global_node.get_session_dir_path())
    assert leaks(tmp_path / "tune", CANARY) == leaks(session / "logs", CANARY) == []
