"""The base of all searches, run through its conformance suite with a search of two steps that releases nothing."""

import sys

import pytest
from ray import cloudpickle, tune
from ray.tune.search import Repeater, Searcher

from dpray.searchers.base import PrivateSearcher
from dpray.searchers.driving import drive
from dpray.searchers.errors import SearchError, SearchUnfinished
from dpray.searchers.space import candidates
from dpray.searchers.testing import SearcherConformance
from dpray.searchers.trial import CANDIDATE, SEARCH, EvaluationTrial, head_share

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files


class ToyTrial(EvaluationTrial):
    def evaluate(self, candidate, config, mark):
        return {"clients_answered": len(config)}


class TwoStepSearch(PrivateSearcher):
    """The grid in the first step, its first half in the second, the first point wins."""

    def __init__(self, space=None, **options):
        super().__init__(**options)
        self.points = None if space is None else candidates(space)
        self.log = []

    @property
    def evaluations(self):
        if self.points is None:
            raise SearchError("no space yet")
        return len(self.points) + len(self.points) // 2

    @property
    def mark(self):
        return f"step {self.step}"

    def define(self, space):
        if space is not None:
            self.points = candidates(space)

    def begin(self):
        self.log.append("begin")

    def propose(self, step):
        self.log.append(f"propose {step}")
        return self.points if step == 0 else self.points[: len(self.points) // 2]

    def advance(self, step, batch):
        self.log.append(f"advance {step}")
        if not batch.evaluated:
            return "nothing was evaluated"
        return "two steps were made" if step == 1 else None

    @property
    def best_config(self):
        if self.reason != "two steps were made":
            raise self._result_missing()
        return dict(self.points[0])

    def trainable(self):
        self.start_over()
        return type("Toy", (ToyTrial,), {"resources": head_share(self.max_concurrent)})


SPACE = {"a": tune.choice([1, 2, 3, 4])}


class TestConformance(SearcherConformance):
    needs_ray = False

    @pytest.fixture(autouse=True)
    def cluster(self, ray_local):
        """The session's own Ray."""

    def make_search(self, directory, space):
        return TwoStepSearch(space)


@pytest.fixture
def search():
    return TwoStepSearch(SPACE)


class TestOrder:
    def test_steps_follow_one_another(self, search):
        drive(search, at_once=3)

        assert search.log == ["begin", "propose 0", "advance 0", "propose 1", "advance 1"]
        assert search.step == 1

    def test_a_step_waits_for_all_its_points(self, search):
        search.set_max_concurrency(10)

        suggested = [search.suggest(f"t{i}") for i in range(6)]

        assert [s and s[CANDIDATE] for s in suggested] == [0, 1, 2, 3, None, None]
        search.on_trial_complete("t0", {"evaluated": 1})
        assert search.suggest("t6") is None

    def test_trials_know_point_number_and_mark(self, search):
        assert search.suggest("t") == {"a": 1, CANDIDATE: 0, SEARCH: "step 0"}

    def test_before_it_ran_there_is_no_result(self, search):
        with pytest.raises(SearchUnfinished, match="not started"):
            _ = search.best_config
        drive(search, stop_after=2)
        with pytest.raises(SearchUnfinished, match="2 of 6"):
            _ = search.best_config


class TestRetries:
    def test_a_point_is_given_up_after_max_retries(self):
        search = TwoStepSearch(SPACE, max_retries=2)
        points = drive(search, fails=lambda trial, config: config[CANDIDATE] == 0 and config[SEARCH] == "step 0")

        assert [candidate for candidate, _ in points] == [0, 1, 2, 3, 0, 0, 0, 1]
        assert search.progress == {"planned": 6, "evaluated": 5, "in_flight": 0, "retried": 2, "given_up": 1}

    def test_without_retries_each_point_has_one_trial(self):
        search = TwoStepSearch(SPACE, max_retries=0)

        assert search.num_samples == 6
        assert len(drive(search, fails=lambda trial, config: config[CANDIDATE] == 0)) == 6

    def test_retries_leave_enough_samples_for_the_points_to_come(self):
        """Tune asks num_samples times and no more: with one spare, one retry is granted, wherever it is needed."""
        search = TwoStepSearch(SPACE)
        search.set_search_properties(None, None, SPACE, num_samples=7)

        points = drive(search, fails=lambda trial, config: config[CANDIDATE] == 0)

        assert len(points) == 7
        assert search.progress["retried"] == 1
        assert search.reason == "two steps were made"

    @pytest.mark.parametrize("options", [{"max_retries": -1}, {"max_concurrent": 0}])
    def test_senseless_numbers_are_refused(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            TwoStepSearch(SPACE, **options)


class TestFailingRelease:
    def failing(self, search):
        def advance(step, batch):
            raise OSError("the ledger is away")

        search.advance = advance

    def test_the_error_reaches_the_user_and_not_tunes_bookkeeping(self, search):
        self.failing(search)
        for index in range(4):
            search.suggest(f"t{index}")
            search.on_trial_complete(f"t{index}", {"evaluated": 1})

        with pytest.raises(OSError, match="the ledger is away"):
            search.suggest("next")
        with pytest.raises(SearchUnfinished, match="the ledger is away"):
            _ = search.best_config

    def test_another_experiment_tries_the_release_again_without_new_trials(self, search):
        self.failing(search)
        with pytest.raises(OSError, match="away"):
            drive(search)
        del search.advance
        search.set_search_properties(None, None, SPACE, num_samples=100)

        assert search.step == 1
        assert search.progress["evaluated"] == 4

    def test_so_does_a_process_that_was_killed_between_last_trial_and_release(self, search):
        self.failing(search)
        with pytest.raises(OSError, match="away"):
            drive(search)
        again = TwoStepSearch(SPACE)
        again.set_state(search.get_state())
        drive(again)

        assert again.log == ["begin", "advance 0", "propose 1", "advance 1"]


class TestInterruptedExperiments:
    def test_trials_that_never_ended_are_suggested_again(self, search):
        search.set_max_concurrency(2)
        search.suggest("a")
        search.suggest("b")
        assert search.suggest("c") is None

        search.set_search_properties(None, None, SPACE, num_samples=100)

        assert [search.suggest(name)[CANDIDATE] for name in "cd"] == [2, 3]

    def test_begin_is_called_once_per_process(self, search):
        search.set_search_properties(None, None, SPACE, num_samples=100)
        search.set_search_properties(None, None, SPACE, num_samples=100)
        search.suggest("a")

        assert search.log.count("begin") == 1


class TestWrappers:
    @pytest.mark.filterwarnings("ignore:Mean of empty slice")
    def test_a_repeater_does_not_break_it(self, search):
        """Each suggestion is made twice; the second completion arrives as {None: nan}."""
        repeater = Repeater(search, repeat=2)
        for index in range(12):
            assert repeater.suggest(f"t{index}")["a"] == (1 + index // 2 if index < 8 else 1 + (index - 8) // 2)
            repeater.on_trial_complete(f"t{index}", {"evaluated": 1}, error=False)

        assert search.finished
        assert repeater.suggest("last") == Searcher.FINISHED

    def test_no_attribute_is_called_searcher(self, search):
        assert not hasattr(search, "searcher")

    def test_tune_config_reuses_actors_and_takes_options(self, search):
        config = search.tune_config(max_concurrent_trials=3)

        assert (config.search_alg, config.num_samples, config.reuse_actors) == (search, search.num_samples, True)
        assert config.max_concurrent_trials == 3
        assert config.metric is None


class TestTrial:
    @pytest.mark.parametrize("leak", [{"accuracy": 0.9}, {"clients_answered": 0.5}, {"loss": 1}])
    def test_it_reports_bookkeeping_only(self, leak):
        leaking = type("Leaking", (ToyTrial,), {"evaluate": lambda self, candidate, config, mark: leak})
        trial = leaking.__new__(leaking)
        trial.config = {CANDIDATE: 3, "a": 1}

        with pytest.raises(ValueError, match="bookkeeping only"):
            trial.step()

    def test_reserved_keys_do_not_reach_the_point(self):
        trial = ToyTrial.__new__(ToyTrial)
        trial.config = {CANDIDATE: 3, SEARCH: "x", "__trial_index__": 1, "a": 1}

        assert trial.step() == {"evaluated": 1, "candidate": 3, "clients_answered": 1, "done": True}

    def test_it_reserves_no_cpu(self):
        assert "CPU" not in ToyTrial.default_resource_request({}).required_resources
        assert "CPU" not in head_share(3)


def test_a_search_that_proposes_nothing_is_an_error(search):
    search.propose = lambda step: []

    with pytest.raises(SearchError, match="proposed no point"):
        search.suggest("a")
