"""DP-HYPE with real clients on Ray, through the conformance suite and a plain Tuner, watched for leaks."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from ray import cloudpickle, tune

from dpray.platform.cohort import ClientTask, Cohort, Records
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, ReleaseKey
from dpray.platform.privacy.noise import NoiseSource
from dpray.searchers import DPHypeSearch
from dpray.searchers.base import PrivateSearcher
from dpray.searchers.driving import drive, within
from dpray.searchers.testing import SearcherConformance

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files

CLIENTS = 12
CANARY = 0.83152469071  # in every score
SPACE = {"lr": tune.grid_search([0.1, 0.2, 0.3]), "model": {"width": tune.choice([1, 2])}}


class LikesPointTwo(ClientTask):
    """Every client prefers lr = 0.2 and width = 2, and says so in its score only."""

    dimension = 1

    def clipped_sum(self, theta, records, clip):
        return np.zeros(1)

    def fit_and_score(self, config, records, rng):
        if config["lr"] == 0.3:
            raise RuntimeError(f"user code fails with a private value: {CANARY}")
        return CANARY - abs(config["lr"] - 0.2) + config["model"]["width"]


def search_with_clients(
    directory: Path, space: Mapping[str, Any] | None, task: ClientTask | None = None, **options: Any
) -> DPHypeSearch:
    ledger = Ledger(f"sqlite:///{directory / 'ledger.db'}")
    people = ledger.population("people", records_per_client=5)
    people.account("client", Budget(8.0, 1e-5))
    shards = {
        f"c{index:02d}": Records(np.full((5, 1), CANARY), np.zeros(5, dtype=np.int64)) for index in range(CLIENTS)
    }
    cohort = Cohort(task or LikesPointTwo(), shards, actors=1, state_dir=directory / "sites", noise=NoiseSource(7))
    return DPHypeSearch(cohort, people.run("first"), budget=Budget(7.0, 1e-5), votes=1, space=space, **options)


class TestDPHypeSearch(SearcherConformance):
    @pytest.fixture(autouse=True)
    def cluster(self, ray_local):
        """The session's own Ray."""

    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        return search_with_clients(directory, space)

    def close(self, search: PrivateSearcher) -> None:
        assert isinstance(search, DPHypeSearch)
        search.cohort.close()


@pytest.mark.slow
class TestSeveralCandidatesATrial(TestDPHypeSearch):
    space: ClassVar[dict[str, Any]] = {"lr": tune.choice([0.1, 0.15, 0.2, 0.25, 0.3]), "model": SPACE["model"]}

    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        return search_with_clients(directory, space, candidates_per_trial=2)


@pytest.fixture
def search(tmp_path, ray_local):
    search = search_with_clients(tmp_path, SPACE)
    yield search
    search.cohort.close()


def test_a_plain_tuner_finds_what_the_clients_prefer_and_its_files_hold_no_score(search, tmp_path, leaks):
    tuner = tune.Tuner(
        search.trainable(),
        param_space=SPACE,
        tune_config=tune.TuneConfig(search_alg=search, num_samples=search.num_samples, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = within(120, tuner.fit)

    assert search.best_config == {"lr": 0.2, "model": {"width": 2}}
    assert [result.metrics["clients_answered"] for result in results] == [CLIENTS] * 6
    assert leaks(tmp_path / "tune", CANARY) == []
    assert [name for name in leaks(tmp_path, CANARY) if name.startswith("ledger")] == []


class LikesPointTwoTogether(LikesPointTwo):
    """Scores several candidates at once; a third of them makes that fail, and clients fall back."""

    def fit_and_scores(self, configs, records, rng):
        return np.array([self.fit_and_score(config, records, rng) for config in configs])


def test_several_candidates_a_trial_leak_nothing_either_and_prefer_the_same(tmp_path, ray_local, leaks):
    search = search_with_clients(tmp_path, SPACE, task=LikesPointTwoTogether())
    within(
        120,
        lambda: tune.Tuner(
            search.trainable(),
            tune_config=search.tune_config(),
            run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
        ).fit(),
    )
    search.cohort.close()

    assert (search.candidates_per_trial, search.evaluations) == (6, 1)
    assert search.best_config == {"lr": 0.2, "model": {"width": 2}}
    assert leaks(tmp_path / "tune", CANARY) == []
    assert [name for name in leaks(tmp_path, CANARY) if name.startswith("ledger")] == []


def test_the_leak_check_finds_a_planted_score(tmp_path, leaks, encodings):
    """Negative control of the check above."""
    for index, code in enumerate(encodings(CANARY)):
        (tmp_path / str(index)).write_bytes(b"before" + code + b"after")

    assert len(leaks(tmp_path, CANARY)) == len(encodings(CANARY))


def test_a_second_search_of_the_same_run_trains_nothing_again(tmp_path, ray_local):
    """Scores stay at the clients: after a restart the vote is the same without a state file."""
    first = search_with_clients(tmp_path, SPACE)
    drive(first, stop_after=5)
    first.cohort.close()
    second = search_with_clients(tmp_path, SPACE)
    drive(second)
    second.cohort.close()

    assert second.best_config == {"lr": 0.2, "model": {"width": 2}}


def test_with_a_trusted_aggregator_the_clients_may_name_the_winner_alone(tmp_path, ray_local, leaks):
    search = search_with_clients(tmp_path, SPACE, release="winner")
    drive(search)
    search.cohort.close()

    assert search.best_config == {"lr": 0.2, "model": {"width": 2}}
    assert search.run.stored(ReleaseKey("search", "winner", 0)).tolist() == [search.best_candidate]
    assert [name for name in leaks(tmp_path, CANARY) if name.startswith("ledger")] == []
