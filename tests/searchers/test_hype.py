"""DP-HYPE: candidates, trials, one release, winner; and what is refused before anything is spent."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from ray import tune

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import (
    BudgetExceeded,
    KeyConflict,
    Plan,
    PlanConflict,
    PlannedRelease,
    ReleaseLost,
)
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.searchers.driving import drive
from dpray.searchers.errors import SearchError, SearchUnfinished, SpaceError
from dpray.searchers.hype import DPHypeSearch
from dpray.trainers.local_search import LocalSearchTask, StackedMLP

SPACE = {"x": tune.grid_search([0, 1, 2, 3]), "fixed": "y"}
HALF = Budget(4.0, 1e-5)


@pytest.fixture
def run(population):
    return population.run("first")


@pytest.fixture
def cohort(local_cohort):
    return local_cohort()


@pytest.fixture
def search(cohort, run):
    return DPHypeSearch(cohort, run, budget=HALF, votes=1, space=SPACE)


class TestVote:
    def test_the_candidate_most_clients_prefer_wins(self, search):
        drive(search, at_once=2)

        assert search.best_config == {"x": 2, "fixed": "y"}
        assert search.best_candidate == 2
        assert search.votes.shape == (4,)
        assert "candidate 2 has the most votes" in search.reason

    def test_it_is_one_release_charged_once_whatever_p_is(self, search, population):
        drive(search)
        account = population.account("client")

        assert len(search.releases) == 1
        assert (account.spent, account.reserved) == (HALF.quanta, 0)
        assert search.cohort.sums == 1

    def test_without_noise_the_counts_are_exact(self, cohort, ledger):
        """k=2 of 4 candidates, everybody likes 2 best; 1 and 3 tie for the second place and share it."""
        people = ledger.population("open", records_per_client=1)
        people.account("client", Budget(math.inf, 1e-5, non_private=True))
        search = DPHypeSearch(cohort, people.run("r"), quanta=None, votes=2, space=SPACE)
        drive(search)

        assert search.sigma == 0
        assert search.votes[[0, 2]].tolist() == [0, 20]
        assert search.votes[1] + search.votes[3] == 20
        assert 0 < search.votes[1] < 20  # broken at random: one-sided with probability 2^-19

    @pytest.mark.parametrize("regime", list(Regime))
    def test_the_noise_stated_is_that_of_the_regime(self, cohort, run, regime):
        """sigma² is per release; every client of `local` adds all of it."""
        search = DPHypeSearch(cohort, run, budget=HALF, votes=1, space=SPACE, regime=regime)

        assert search.mechanism.sensitivity == math.sqrt(2)
        assert search.sigma == pytest.approx(math.sqrt(2) / search.mu, rel=1e-6)
        spread = math.sqrt(20) if regime is Regime.LOCAL else 1
        assert search.sigma_votes == pytest.approx(spread * search.sigma, rel=1e-6)

    def test_scores_do_not_pass_through_the_search(self, cohort, run):
        """A canary in every score: not in saved state, not in what trials report, not in the release's request."""
        canary = 0.8315246907
        cohort.judge = lambda client, config: canary
        search = DPHypeSearch(cohort, run, budget=HALF, votes=1, space=SPACE)
        drive(search)

        assert str(canary)[:8] not in json.dumps(search.get_state()) + repr(search.releases) + str(search.reason)

    def test_once_the_vote_is_released_clients_drop_their_scores(self, search):
        drive(search, stop_after=3)
        assert search.cohort.scores
        drive(search)

        assert search.cohort.scores == {}

    def test_candidates_whose_trials_failed_lose(self, cohort, run):
        cohort.judge = lambda client, config: config["x"]
        search = DPHypeSearch(cohort, run, budget=HALF, votes=1, space=SPACE, max_retries=0)
        drive(search, fails=lambda trial, config: config["x"] == 3)

        assert search.best_config["x"] == 2
        assert "1 were given up" in search.reason

    def test_if_no_candidate_was_evaluated_nothing_is_spent(self, search, population):
        drive(search, fails=lambda trial, config: True)

        assert population.account("client").spent == 0
        assert "nothing was spent" in search.reason
        with pytest.raises(SearchUnfinished):
            _ = search.best_config

    def test_a_vote_that_is_mostly_noise_warns(self, cohort, run):
        search = DPHypeSearch(cohort, run, budget=Budget(0.5, 1e-5), votes=2, space=SPACE)

        with pytest.warns(UserWarning, match="mostly noise"):
            search.suggest("t")


class TestCandidates:
    def test_one_that_no_client_can_train_is_refused_before_anything_is_spent(self, cohort, run, population):
        task = LocalSearchTask(StackedMLP(4, hidden=(), classes=2))
        cohort.check_candidate = task.check_candidate
        space = {"learning_rate": 0.1, "momentun": tune.grid_search([0.0, 0.9])}
        with pytest.raises(ValueError, match=r"candidate 0, .*momentun.*did you mean `momentum`.*Nothing was spent"):
            DPHypeSearch(cohort, run, budget=HALF, space=space)

        assert (population.account("client").spent, population.account("client").reserved) == (0, 0)

    def test_explicit_ones_with_constants_of_the_tuner(self, cohort, run):
        search = DPHypeSearch(cohort, run, budget=HALF, candidates=[{"x": 1}, {"x": 2}, {"x": 1}])
        search.set_search_properties(None, None, {"fixed": "y"}, num_samples=10)

        assert search.candidates == ({"fixed": "y", "x": 1}, {"fixed": "y", "x": 2})

    def test_a_number_of_draws_from_the_tuners_space(self, cohort, run):
        search = DPHypeSearch(cohort, run, budget=HALF, candidates=6, seed=3)
        assert search.evaluations == 6
        search.set_search_properties(None, None, {"x": tune.uniform(0, 4)}, num_samples=search.num_samples)

        assert len(search.candidates) == 6
        assert drive(search)
        assert search.best_config["x"] == min((c["x"] for c in search.candidates), key=lambda x: abs(x - 2))

    def test_the_same_space_in_both_places(self, search):
        assert search.set_search_properties(None, None, SPACE, num_samples=search.num_samples)

    def test_another_space_is_refused(self, search):
        with pytest.raises(SearchError, match="other keys or values"):
            search.set_search_properties(None, None, {"x": tune.choice([0, 1])}, num_samples=20)

    def test_candidates_do_not_change_once_the_search_has_begun(self, search):
        drive(search, stop_after=1)

        with pytest.raises(SearchError, match="has begun with"):
            search.set_search_properties(None, None, {**SPACE, "fixed": "z"}, num_samples=20)

    def test_a_space_beside_explicit_candidates_is_refused(self, cohort, run):
        search = DPHypeSearch(cohort, run, budget=HALF, candidates=[{"x": 1}, {"x": 2}])

        with pytest.raises(SearchError, match="constants only"):
            search.set_search_properties(None, None, SPACE, num_samples=20)

    def test_how_many_there_are_must_be_known_for_num_samples(self, cohort, run):
        search = DPHypeSearch(cohort, run, budget=HALF)

        with pytest.raises(SearchError, match="candidates=… to draw"):
            _ = search.num_samples
        with pytest.raises(SearchError, match="not known before"):
            _ = search.candidates
        with pytest.raises(SearchError, match="nothing to search"):
            search.suggest("t")


class TestRefusedBeforeAnythingIsSpent:
    @pytest.mark.parametrize("votes", [4, 5, 0, -1, True, 1.5])
    def test_k_outside_1_to_p_minus_1(self, cohort, run, votes):
        with pytest.raises(ValueError, match="votes"):
            DPHypeSearch(cohort, run, budget=HALF, votes=votes, space=SPACE)

    @pytest.mark.parametrize(
        "spend", [{}, {"budget": HALF, "quanta": 5}, {"quanta": 0}, {"quanta": -3}, {"quanta": 2.5}, {"quanta": True}]
    )
    def test_no_spend_or_two(self, cohort, run, spend):
        with pytest.raises(ValueError, match="quanta"):
            DPHypeSearch(cohort, run, space=SPACE, **spend)

    def test_a_space_with_nothing_to_search(self, cohort, run):
        with pytest.raises(SpaceError, match="nothing to search"):
            DPHypeSearch(cohort, run, budget=HALF, space={"x": 1})

    def test_more_than_is_left_with_both_numbers(self, cohort, run):
        search = DPHypeSearch(cohort, run, budget=Budget(9.0, 1e-5), space=SPACE)

        with pytest.raises(BudgetExceeded) as refused:
            search.set_search_properties(None, None, SPACE, num_samples=20)

        assert refused.value.asked > refused.value.remaining > 0
        assert cohort.evaluated == []

    def test_a_spend_is_set_aside_before_the_first_trial(self, search, population):
        search.suggest("t")

        assert population.account("client").reserved == HALF.quanta

    def test_a_run_with_another_plan(self, search, run):
        run.reserve(Plan((PlannedRelease("training", "sum", Unit.CLIENT, 1000, 10),)))

        with pytest.raises(PlanConflict):
            search.suggest("t")

    def test_a_plan_that_has_the_vote_already(self, cohort, run, population):
        lines = (
            PlannedRelease("search", "votes", Unit.CLIENT, HALF.quanta, 1),
            PlannedRelease("training", "sum", Unit.CLIENT, 1000, 10),
        )
        run.reserve(Plan(lines))
        search = DPHypeSearch(cohort, run, quanta=HALF.quanta, space=SPACE, reserve=False)
        drive(search)

        assert population.account("client").spent == HALF.quanta
        assert population.account("client").reserved == 1000


class TestResume:
    def again(self, cohort, population, **changes):
        return DPHypeSearch(cohort, population.run("first"), **{"budget": HALF, "space": SPACE, **changes})

    def test_a_vote_that_was_released_is_read_and_no_trial_runs(self, search, cohort, population):
        drive(search)
        cohort.evaluated.clear()
        again = self.again(cohort, population)

        assert drive(again) == []
        assert cohort.evaluated == []
        assert cohort.sums == 1
        assert np.array_equal(again.votes, search.votes)
        assert again.best_config == search.best_config
        assert "released before" in again.reason
        assert population.account("client").spent == HALF.quanta

    def test_the_result_of_a_finished_run_needs_no_tuner(self, search, cohort, population):
        drive(search)

        assert self.again(cohort, population).best_config == search.best_config

    def test_a_crash_between_charge_and_store_is_not_charged_again(self, search, cohort, population):
        def crash(attempt):
            raise KeyboardInterrupt

        cohort.before_sum = crash
        with pytest.raises(KeyboardInterrupt):
            drive(search)
        assert population.account("client").spent == HALF.quanta
        cohort.before_sum = lambda attempt: None
        again = self.again(cohort, population)
        drive(again)

        assert population.account("client").spent == HALF.quanta
        assert again.best_config["x"] == 2

    def test_an_interrupted_and_an_uninterrupted_search_release_the_same(
        self, search, cohort, population, local_cohort, ledger
    ):
        """Seeded noise derives from the release's key, so the path does not matter."""
        drive(search, stop_after=2)
        state = json.loads(json.dumps(search.get_state()))
        again = self.again(cohort, population)
        again.set_state(state)
        drive(again)
        other = ledger.population("others", records_per_client=100)
        other.account("client", Budget(8.0, 1e-5))
        straight = DPHypeSearch(local_cohort(), other.run("first"), budget=HALF, space=SPACE)
        drive(straight)

        assert np.array_equal(again.votes, straight.votes)

    def test_a_lost_vote_is_charged_and_never_repeated(self, search, cohort, population):
        def lose(attempt):
            raise ReleaseLost("a client lost its journal after the point of no return")

        cohort.before_sum = lose
        with pytest.raises(ReleaseLost, match="journal"):
            drive(search)
        cohort.before_sum = lambda attempt: None
        again = self.again(cohort, population)
        with pytest.raises(ReleaseLost):
            drive(again)
        assert population.account("client").spent == HALF.quanta
        assert cohort.sums == 0

    def test_other_candidates_under_the_same_run_are_refused(self, search, cohort, population):
        drive(search)
        again = self.again(cohort, population, space={"x": tune.choice([5, 6, 7])})

        with pytest.raises(KeyConflict):
            again.suggest("t")

    def test_scores_of_another_list_of_candidates_are_not_taken(self, cohort, search, population):
        drive(search, stop_after=2)
        again = self.again(cohort, population, space={"x": tune.choice([7, 6, 2])})
        drive(again)

        assert len({name for name, _, _ in cohort.evaluated}) == 2
        assert again.best_config["x"] == 2

    @pytest.mark.parametrize("changes", [{"votes": 2}, {"label": "other"}, {"regime": Regime.LOCAL}])
    def test_a_state_of_another_search_is_refused(self, search, cohort, population, changes):
        state = search.get_state()
        again = self.again(cohort, population, **changes)

        with pytest.raises(SearchError, match=next(iter(changes))):
            again.set_state(state)

    def test_a_state_with_other_candidates_is_refused(self, search, cohort, population):
        again = self.again(cohort, population, space={"x": tune.choice([5, 6, 7])})

        with pytest.raises(SearchError, match="other candidates"):
            again.set_state(search.get_state())

    def test_candidates_of_a_saved_search_need_no_space(self, search, cohort, population, tmp_path: Path):
        drive(search, stop_after=1)
        search.save(str(tmp_path / "s.json"))
        again = self.again(cohort, population, space=None)
        again.restore(str(tmp_path / "s.json"))
        drive(again)

        assert again.candidates == search.candidates
        assert again.best_config["x"] == 2
