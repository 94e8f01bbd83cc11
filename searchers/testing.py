# ruff: noqa: D102 - the name of a check says what it checks
"""A conformance suite for searchers: inherit `SearcherConformance`, say how to build a search, run pytest.

    class TestMySearch(SearcherConformance):
        def make_search(self, directory, space):
            return MySearch(..., space=space)

Every search of this package passes it; searches of others can be run through it by the same class. It drives the search
by hand (`driving.drive`) and through a real Tuner, always under a time limit, because the commonest fault of a searcher
is that an experiment never ends.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ray import tune
from ray.tune.search import ConcurrencyLimiter, Searcher

from dpray.searchers.base import PrivateSearcher
from dpray.searchers.driving import drive, point, run_trial, within
from dpray.searchers.errors import SearchError, SearchUnfinished
from dpray.searchers.trial import BOOKKEEPING, RESERVED

AUTOFILLED = {
    *("config", "date", "done", "experiment_tag", "hostname", "iterations_since_restore", "node_ip", "pid"),
    *("time_since_restore", "time_this_iter_s", "time_total_s", "timestamp", "training_iteration", "trial_id"),
    *("should_checkpoint", "checkpoint_dir_name"),
}
"""What Tune adds to every result by itself."""


class SearcherConformance:
    """What Tune and its users may expect of a private search.

    Attributes:
        space: a small nested space whose points the search can evaluate, in four suggestions or more.
        seconds: limit for one experiment, generous: it only has to tell an end from a hang.
        needs_ray: whether `make_search` needs a running Ray.
    """

    space: ClassVar[dict[str, Any]] = {"lr": tune.choice([0.1, 0.2, 0.3]), "model": {"width": tune.choice([1, 2])}}
    seconds: ClassVar[float] = 90.0
    needs_ray: ClassVar[bool] = True

    def make_search(self, directory: Path, space: Mapping[str, Any] | None) -> PrivateSearcher:
        """Build the search under test.

        Args:
            directory: for whatever it keeps; the same directory means the same run, resumed.
            space: the space to search; None: it will be handed over as `param_space` only.
        """
        raise NotImplementedError

    def close(self, search: PrivateSearcher) -> None:
        """Release what `make_search` opened."""

    # Driven by hand ---------------------------------------------------------------------------------------------

    def test_it_ends_with_a_reason_and_a_result(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            drive(search, at_once=3)
            assert search.finished
            assert search.reason
            assert set(search.best_config) == set(self.space)
            assert not RESERVED & set(search.best_config)
            assert search.suggest("late") == Searcher.FINISHED

    def test_planned_numbers_are_real_numbers(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            assert 0 < search.evaluations <= search.num_samples < 2 * search.evaluations + 10
            drive(search)
            assert search.progress["evaluated"] == search.progress["planned"] == search.evaluations

    def test_no_more_than_max_concurrent_are_in_flight(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            search.set_max_concurrency(2)
            assert [search.suggest(f"t{i}") is None for i in range(4)] == [False, False, True, True]

    def test_failed_trials_are_suggested_again(self, tmp_path: Path) -> None:
        failed: list[Any] = []

        def fails_once(trial: str, config: dict[str, Any]) -> bool:
            if len(failed) < 2:
                failed.append(point(config))
                return True
            return False

        with self._search(tmp_path) as search:
            points = drive(search, at_once=2, fails=fails_once)
            assert search.progress["retried"] == 2
            assert search.progress["evaluated"] == search.evaluations
            assert all(points.count(point) >= 2 for point in failed)

    def test_when_every_trial_fails_it_still_ends(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            most = search.num_samples
            points = drive(search, fails=lambda trial, config: True)
            assert len(points) <= most
            assert search.reason
            assert search.progress["evaluated"] == 0
            with pytest.raises(SearchUnfinished, match="ended without a result"):
                _ = search.best_config

    def test_unknown_and_repeated_completions_change_nothing(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            search.on_trial_complete("never suggested", result={"evaluated": 1})
            first = search.suggest("a")
            assert isinstance(first, dict)
            run_trial(search.trainable(), first)
            search.on_trial_complete("a", result={"evaluated": 1})
            before = search.get_state()
            for _ in range(2):
                search.on_trial_complete("a", result={"evaluated": 1})
                search.on_trial_complete("a", error=True)
                search.on_trial_complete(trial_id="never suggested", result=None, error=True)
            assert search.get_state() == before
            assert search.progress["evaluated"] == 1

    def test_results_are_not_read(self, tmp_path: Path) -> None:
        odd: list[dict[Any, Any]] = [{"score": math.nan}, {None: math.nan}, {"loss": math.inf, "evaluated": -1}]
        with self._search(tmp_path) as search:
            drive(search, result=lambda index: odd[index % len(odd)])
            assert search.progress["evaluated"] == search.evaluations

    def test_a_trial_that_was_stopped_without_a_result_is_not_evaluated(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            search.suggest("a")
            search.on_trial_complete("a", result=None, error=False)
            assert search.progress["evaluated"] == 0

    def test_no_metric_is_needed_and_a_named_one_is_refused(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            assert search.metric is None
            assert search.set_search_properties(None, None, dict(self.space), num_samples=search.num_samples)
            with pytest.raises(ValueError, match="report no objective"):
                search.set_search_properties("accuracy", "max", dict(self.space))

    def test_too_few_samples_are_refused(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search, pytest.raises(ValueError, match=r"search\.num_samples"):
            search.set_search_properties(None, None, dict(self.space), num_samples=search.evaluations - 1)

    @pytest.mark.parametrize(
        ("bad", "names"),
        [
            ({"a": {"b": tune.sample_from(lambda config: 1)}, "c": tune.choice([1, 2, 3])}, "a/b"),
            ({"a": {"b": len}, "c": tune.choice([1, 2, 3])}, "a/b"),
            ({"a": {"b": tune.randn()}, "c": tune.choice([1, 2, 3])}, "a/b"),
            ({"lr": 0.1}, "nothing to search"),
            ({"__candidate__": tune.choice([1, 2, 3])}, "__candidate__"),
        ],
        ids=["sample_from", "callable", "unbounded", "constants", "reserved"],
    )
    def test_spaces_that_cannot_be_searched_are_refused_by_name(
        self, tmp_path: Path, bad: dict[str, Any], names: str
    ) -> None:
        with self._search(tmp_path, space=None) as search, pytest.raises(ValueError, match=names):
            search.set_search_properties(None, None, bad, num_samples=1000)

    def test_a_point_from_outside_is_refused(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search, pytest.raises(SearchError, match="ledger"):
            search.add_evaluated_point({"lr": 0.1}, 0.5)

    # Saved state ------------------------------------------------------------------------------------------------

    def test_saved_state_is_plain_and_holds_no_randomness_of_noise(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            drive(search, stop_after=3)
            search.save(str(tmp_path / "state.json"))
            state = json.loads((tmp_path / "state.json").read_text())
            assert state["version"] == 1
            assert state == json.loads(json.dumps(search.get_state(), allow_nan=False))
            assert not {"seed", "noise", "generator", "key"} & {key.lower() for key in _keys(state)}
            assert [path.name for path in tmp_path.glob("*.tmp")] == []

    def test_a_new_process_makes_the_same_next_suggestion(self, tmp_path: Path) -> None:
        state = tmp_path / "state.json"
        with self._search(tmp_path) as search:
            search.set_max_concurrency(4)
            drive(search, stop_after=2)
            search.suggest("in flight")
            search.save(str(state))
            expected = search.suggest("next")
        command = [sys.executable, "-m", "dpray.searchers.testing", inspect.getfile(type(self)), type(self).__name__]
        child = subprocess.run(
            [*command, str(tmp_path), str(state)], capture_output=True, text=True, timeout=self.seconds, check=False
        )
        assert child.returncode == 0, child.stderr[-2000:]
        assert json.loads(child.stdout.strip().splitlines()[-1]) == expected

    def test_a_restored_search_goes_on_to_the_end(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            drive(search, stop_after=2)
            search.suggest("lost with its process")
            search.save(str(tmp_path / "state.json"))
        with self._search(tmp_path) as again:
            again.restore(str(tmp_path / "state.json"))
            points = drive(again, prefix="second")
            assert again.finished
            assert len(points) == again.evaluations - 2
            assert again.progress["evaluated"] == again.evaluations

    def test_a_damaged_or_foreign_state_is_refused(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            good = search.get_state()
            for bad in ("{", "[]", "{}", json.dumps({**good, "version": 99}), json.dumps({**good, "search": "Other"})):
                (tmp_path / "bad.json").write_text(bad)
                with pytest.raises(SearchError):
                    search.restore(str(tmp_path / "bad.json"))

    def test_a_pickled_copy_says_that_it_cannot_go_on(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            drive(search, stop_after=1)
            copy = pickle.loads(pickle.dumps(search))
            with pytest.raises(SearchError, match="Build it again"):
                copy.suggest("a")

    # In a real Tuner --------------------------------------------------------------------------------------------

    def test_in_a_tuner_with_several_trials_in_flight(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            search.set_max_concurrency(3)
            results = self._fit(search, search, tmp_path)
            assert search.reason
            assert len(results) == search.evaluations
            assert not results.errors
            assert set(search.best_config) == set(self.space)
            for result in results:
                assert set(result.metrics) <= AUTOFILLED | BOOKKEEPING
                assert set(result.config) <= set(self.space) | RESERVED

    def test_in_a_tuner_under_a_concurrency_limiter_in_batches(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            results = self._fit(search, ConcurrencyLimiter(search, max_concurrent=2, batch=True), tmp_path)
            assert search.max_concurrent == 2
            assert search.reason
            assert len(results) == search.evaluations

    def test_in_a_tuner_a_failing_trial_is_replaced(self, tmp_path: Path) -> None:
        with self._search(tmp_path) as search:
            flaky = _failing_once(search.trainable(), tmp_path / "failed")
            results = self._fit(search, search, tmp_path, trainable=flaky)
            assert len(results.errors) == 1
            assert search.progress["retried"] == 1
            assert search.progress["evaluated"] == search.evaluations
            assert search.best_config

    # Internals --------------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def cluster(self) -> None:
        """A running Ray for every check; override it to use your own."""
        import ray

        if not ray.is_initialized():
            ray.init(address="local", num_cpus=2, include_dashboard=False)

    def _search(self, directory: Path, **space: Any) -> _Closing:
        (directory / "search").mkdir(exist_ok=True)
        return _Closing(self, self.make_search(directory / "search", space.get("space", self.space)))

    def _fit(self, search: PrivateSearcher, algorithm: Searcher, directory: Path, trainable: type | None = None) -> Any:
        tuner = tune.Tuner(
            trainable or search.trainable(),
            param_space=dict(self.space),
            tune_config=tune.TuneConfig(search_alg=algorithm, num_samples=search.num_samples, reuse_actors=True),
            run_config=tune.RunConfig(storage_path=str(directory / "tune"), verbose=0),
        )
        return within(self.seconds, tuner.fit)


class _Closing:
    """A search that its suite closes."""

    def __init__(self, suite: SearcherConformance, search: PrivateSearcher) -> None:
        self.suite, self.search = suite, search

    def __enter__(self) -> PrivateSearcher:
        return self.search

    def __exit__(self, *_: object) -> None:
        self.suite.close(self.search)


def _failing_once(trainable: type, marker: Path) -> type:
    """The same trials, of which the first to run fails."""

    def step(self: Any) -> dict[str, Any]:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            report: dict[str, Any] = trainable.step(self)  # type: ignore[attr-defined]
            return report
        raise RuntimeError("this trial fails for the test")

    return type("Flaky", (trainable,), {"step": step})


def _keys(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [str(key) for key in value] + [name for child in value.values() for name in _keys(child)]
    if isinstance(value, list):
        return [name for child in value for name in _keys(child)]
    return []


def main(file: str, suite: str, directory: str, state: str) -> None:
    """Second process of the restore test: build the suite's search, restore it, print its next suggestion."""
    import ray

    spec = importlib.util.spec_from_file_location("dpray_conformance", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dpray_conformance"] = module
    spec.loader.exec_module(module)
    checks: SearcherConformance = getattr(module, suite)()
    if checks.needs_ray:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    search = checks.make_search(Path(directory) / "search", checks.space)
    search.set_max_concurrency(4)
    search.restore(state)
    print(json.dumps(search.suggest("next")))
    checks.close(search)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
