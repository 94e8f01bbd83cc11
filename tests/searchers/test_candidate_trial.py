"""Several candidates a trial: the same vote, told to Tune in public numbers, retried and resumed together."""

import functools
import json
import operator

import numpy as np
import pytest
from ray import tune

from dpray.platform.privacy.budget import Budget
from dpray.searchers.candidate_trial import numbers_of, size_of, suggestions
from dpray.searchers.driving import drive, run_trial
from dpray.searchers.errors import SearchError
from dpray.searchers.hype import DPHypeSearch
from dpray.searchers.trial import BOOKKEEPING, CANDIDATE, RESERVED

SPACE = {"x": tune.grid_search([0, 1, 2, 3, 4]), "fixed": "y"}
HALF = Budget(4.0, 1e-5)


@pytest.fixture
def cohort(local_cohort):
    return local_cohort()


@pytest.fixture
def make(cohort, population):
    def make(per_trial, **options):
        return DPHypeSearch(
            cohort,
            population.run("first"),
            **{"budget": HALF, "votes": 1, "space": SPACE, "candidates_per_trial": per_trial, **options},
        )

    return make


@pytest.mark.parametrize(("per_trial", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (99, [5])])
def test_candidates_are_dealt_in_order_and_each_once(make, per_trial, sizes):
    search = make(per_trial)
    search.set_max_concurrency(10)
    asked = [numbers_of(search.suggest(f"t{trial}")) for trial in range(search.evaluations)]
    assert [len(each) for each in asked] == sizes
    assert functools.reduce(operator.iadd, asked, []) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("per_trial", [1, 2, 3, 5])
def test_the_vote_is_the_same_however_many_a_trial_asks_for(make, cohort, ledger, per_trial, local_cohort):
    """Seeded noise derives from the release's key: every bit of the counts is the same."""
    drive(search := make(per_trial), at_once=2)
    other = ledger.population("others", records_per_client=100)
    other.account("client", Budget(8.0, 1e-5))
    alone = DPHypeSearch(local_cohort(), other.run("first"), budget=HALF, votes=1, space=SPACE, candidates_per_trial=1)
    drive(alone)
    np.testing.assert_array_equal(search.votes, alone.votes)
    assert search.best_config == {"x": 2, "fixed": "y"}
    assert search.progress["evaluated"] == search.evaluations
    assert "5 of 5 candidates were evaluated" in search.reason


def test_a_trial_says_in_public_which_candidates_it_asks_for_and_reports_bookkeeping_only(make, cohort):
    search = make(2)
    trainable, config = search.trainable(), search.suggest("t0")
    assert json.loads(json.dumps(config)) == config
    assert {key: value for key, value in config.items() if key not in RESERVED} == {"x": 0, "fixed": "y"}
    report = run_trial(trainable, config)
    assert report == {"evaluated": 1, "candidate": 0, "candidates": 2, "clients_answered": 20, "done": True}
    assert set(report) <= BOOKKEEPING | {"done"}
    assert [(number, config["x"]) for _, number, config in cohort.evaluated] == [(0, 0), (1, 1)]
    assert all(not RESERVED & set(config) for _, _, config in cohort.evaluated)


def test_a_failed_trial_is_retried_with_all_its_candidates(make, cohort):
    failed = []

    def fails_once(trial, config):
        if len(failed) < 1:
            failed.append(numbers_of(config))
            return True
        return False

    search = make(2)
    drive(search, fails=fails_once)
    assert failed == [[0, 1]]
    assert sorted(number for _, number, _ in cohort.evaluated) == [0, 1, 2, 3, 4]


def test_candidates_given_up_are_counted_one_by_one_and_lose(make, cohort):
    cohort.judge = lambda client, config: config["x"]
    search = make(2, max_retries=0)
    drive(search, fails=lambda trial, config: 3 in numbers_of(config))
    assert "3 of 5 candidates were evaluated" in search.reason
    assert "2 were given up" in search.reason
    assert search.best_config["x"] == 4


@pytest.mark.parametrize(
    ("together", "candidates", "size"), [(False, 100, 1), (True, 100, 10), (True, 7, 7), (True, 990, 99)]
)
def test_auto_is_one_where_clients_score_one_by_one_and_a_tenth_where_they_can_do_more(together, candidates, size):
    assert size_of("auto", candidates, together) == size


def test_auto_asks_the_cohort(cohort, make):
    assert make("auto").candidates_per_trial == 1
    cohort.scores_together = True
    assert make("auto").candidates_per_trial == 5


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "all", None])
def test_sizes_out_of_range_are_refused(make, bad):
    with pytest.raises(ValueError, match="candidates_per_trial"):
        make(bad)


class TestResume:
    def state(self, search, trials):
        drive(search, stop_after=trials)
        return json.loads(json.dumps(search.get_state()))

    def test_scores_of_candidates_asked_for_otherwise_are_the_same_scores(self, make, cohort):
        """Kept by candidate, whatever trial asked: another size after a restart trains at the clients what is left."""
        drive(make(2), stop_after=1)
        again = make(3)
        drive(again)
        assert len({name for name, _, _ in cohort.evaluated}) == 1
        assert again.best_config["x"] == 2

    def test_a_saved_search_goes_on_with_what_is_left(self, make, cohort):
        state = self.state(make(2), 1)
        cohort.evaluated.clear()
        again = make(2)
        again.set_state(state)
        drive(again)
        assert sorted(number for _, number, _ in cohort.evaluated) == [2, 3, 4]

    def test_a_saved_search_of_another_size_is_refused_and_auto_takes_it_over(self, make):
        state = self.state(make(2), 1)
        with pytest.raises(SearchError, match="candidates_per_trial = 2"):
            make(3).set_state(state)
        again = make("auto")
        again.set_state(state)
        drive(again)
        assert again.progress == {"planned": 3, "evaluated": 3, "in_flight": 0, "retried": 0, "given_up": 0}

    def test_a_state_of_before_is_one_candidate_a_trial(self, make):
        state = self.state(make(1), 2)
        del state["own"]["candidates_per_trial"]
        again = make("auto")
        again.set_state(state)
        drive(again)
        assert again.progress["evaluated"] == 5


def test_a_suggestion_of_one_candidate_is_the_candidate(make):
    assert suggestions([{"x": 1}, {"x": 2}], 1) == [{"x": 1}, {"x": 2}]
    assert numbers_of({"x": 1, CANDIDATE: 7}) == [7]
