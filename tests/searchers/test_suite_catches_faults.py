"""Negative controls: every check of the conformance suite that matters must fail a searcher with that fault."""

import json
import time
from pathlib import Path

import pytest
from ray import tune

from dpray.searchers.base import PrivateSearcher
from dpray.searchers.driving import drive, within
from dpray.searchers.testing import SearcherConformance
from dpray.searchers.trial import EvaluationTrial

Failed = pytest.fail.Exception


class GoodSearch(PrivateSearcher):
    """Two points, nothing released."""

    evaluations = 2

    def define(self, space):
        pass

    def begin(self):
        pass

    def propose(self, step):
        return [{"lr": 0.1, "model": {"width": 1}}, {"lr": 0.2, "model": {"width": 2}}]

    def advance(self, step, batch):
        return "done" if batch.evaluated else "nothing was evaluated"

    @property
    def best_config(self):
        if self.reason != "done":
            raise self._result_missing()
        return {"lr": 0.1, "model": {"width": 1}}

    def trainable(self):
        return type("Trial", (EvaluationTrial,), {"evaluate": lambda self, candidate, config, mark: {}})


class Hangs(GoodSearch):
    def suggest(self, trial_id):
        suggestion = super().suggest(trial_id)
        return None if suggestion == "FINISHED" else suggestion


class NeverEnds(GoodSearch):
    def advance(self, step, batch):
        return None


class NoReason(GoodSearch):
    def advance(self, step, batch):
        return ""


class CountsTwice(GoodSearch):
    def on_trial_complete(self, trial_id, result=None, error=False):
        super().on_trial_complete(trial_id, result, error)
        self.step += 1


class ReadsResults(GoodSearch):
    def on_trial_complete(self, trial_id, result=None, error=False):
        super().on_trial_complete(trial_id, result, error or "evaluated" not in (result or {}))


class KeepsNoiseSeed(GoodSearch):
    def search_state(self):
        return {"noise": {"seed": 7}}


class TakesAnySpace(GoodSearch):
    pass


class ForgetsFailures(GoodSearch):
    def on_trial_complete(self, trial_id, result=None, error=False):
        super().on_trial_complete(trial_id, {"evaluated": 1}, False)


class AbsurdNumber(GoodSearch):
    @property
    def num_samples(self):
        return 2**63 - 1


class Pickles(GoodSearch):
    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__.update(state)


def check(search: type, name: str, directory: Path, *arguments: object) -> None:
    suite = type("Suite", (SearcherConformance,), {"make_search": lambda self, directory, space: search()})()
    getattr(suite, name)(directory, *arguments)


FAULTS = [
    (Hangs, "test_it_ends_with_a_reason_and_a_result"),
    (NeverEnds, "test_it_ends_with_a_reason_and_a_result"),
    (NoReason, "test_it_ends_with_a_reason_and_a_result"),
    (CountsTwice, "test_unknown_and_repeated_completions_change_nothing"),
    (ReadsResults, "test_results_are_not_read"),
    (KeepsNoiseSeed, "test_saved_state_is_plain_and_holds_no_randomness_of_noise"),
    (ForgetsFailures, "test_failed_trials_are_suggested_again"),
    (AbsurdNumber, "test_planned_numbers_are_real_numbers"),
    (Pickles, "test_a_pickled_copy_says_that_it_cannot_go_on"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_caught(fault, name, tmp_path):
    with pytest.raises((AssertionError, Failed)):
        check(fault, name, tmp_path)


@pytest.mark.parametrize("name", sorted({name for _, name in FAULTS}))
def test_a_good_search_passes_the_same_checks(name, tmp_path):
    check(GoodSearch, name, tmp_path)


def test_a_search_that_takes_any_space_is_caught(tmp_path):
    space = {"a": {"b": tune.sample_from(lambda config: 1)}}
    with pytest.raises((AssertionError, Failed)):
        check(TakesAnySpace, "test_spaces_that_cannot_be_searched_are_refused_by_name", tmp_path, space, "a/b")


def test_an_experiment_that_does_not_end_is_cut_off():
    with pytest.raises(Failed, match=r"did not end within 0\.1 s"):
        within(0.1, lambda: time.sleep(2))


def test_what_an_experiment_raises_reaches_the_test():
    with pytest.raises(json.JSONDecodeError):
        within(5, lambda: json.loads("{"))


def test_driving_says_what_would_hang():
    with pytest.raises(Failed, match="wait for ever"):
        drive(Hangs())
