"""DP-HYPE with `release="winner"`: one index leaves, from a trusted aggregator only; else as for votes."""

import json
import math

import numpy as np
import pytest
from ray import tune

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, ceil_quanta, to_mu
from dpray.platform.privacy.ledger import (
    BudgetExceeded,
    KeyConflict,
    Plan,
    PlannedRelease,
    ReleaseKey,
    ReleaseLost,
)
from dpray.platform.privacy.mechanisms import Regime, TopKVotes, Unit, VoteWinner
from dpray.platform.privacy.noise import from_grid, to_grid
from dpray.searchers.driving import drive
from dpray.searchers.errors import SearchError, SearchUnfinished
from dpray.searchers.hype import DPHypeSearch

SPACE = {"x": tune.grid_search([0, 1, 2, 3]), "fixed": "y"}
HALF = Budget(4.0, 1e-5)
KEY = ReleaseKey("search", "winner", 0)


@pytest.fixture
def run(population):
    return population.run("first")


@pytest.fixture
def cohort(local_cohort):
    return local_cohort()


def searching(cohort, run, **changes):
    return DPHypeSearch(cohort, run, **{"budget": HALF, "space": SPACE, "release": "winner", **changes})


@pytest.fixture
def search(cohort, run):
    return searching(cohort, run)


class TestWinner:
    def test_the_candidate_most_clients_prefer_wins(self, search):
        drive(search, at_once=2)

        assert search.best_config == {"x": 2, "fixed": "y"}
        assert search.best_candidate == 2
        assert "candidate 2 was released as the winner" in search.reason

    def test_the_ledger_holds_the_index_and_nothing_else(self, search, run, population):
        drive(search)
        stored = run.stored(KEY)

        assert (stored.dtype, stored.tolist()) == (np.int64, [2])
        assert len(search.releases) == 1
        assert (population.account("client").spent, population.account("client").reserved) == (HALF.quanta, 0)
        assert population.account("client").statement("first").trust == ("central",)

    def test_there_are_no_votes_to_look_at(self, search):
        drive(search)

        with pytest.raises(SearchError, match="no noisy votes to look at"):
            _ = search.votes
        for name in ("sigma", "sigma_votes"):
            with pytest.raises(SearchError, match=r"no Gaussian noise.*release='winner'"):
                getattr(search, name)

    def test_a_vote_has_no_pure_epsilon(self, cohort, run):
        votes = DPHypeSearch(cohort, run, budget=HALF, space=SPACE)

        for name in ("epsilon", "scale"):
            with pytest.raises(SearchError, match="release='votes'"):
                getattr(votes, name)

    @pytest.mark.parametrize("epsilon", [0.25, 1.0])
    def test_its_noise_is_two_over_epsilon_whatever_k_is(self, cohort, run, epsilon):
        quanta = ceil_quanta(gdp.mu_from_pure(epsilon))
        for k in (1, 3):
            search = searching(cohort, run, budget=None, quanta=quanta, votes=k)
            assert search.mechanism == VoteWinner(k, 4)
            assert search.epsilon == pytest.approx(epsilon, rel=1e-9)
            assert search.scale == pytest.approx(2 / epsilon, rel=1e-9)
            assert gdp.mu_from_pure(search.epsilon) <= search.mu == to_mu(quanta)

    def test_without_noise_ties_are_broken_at_random(self, local_cohort, ledger):
        """Everybody likes all alike, and k = 3 of 4: seeded ties, eight runs, one winner in all of them once in 4⁷."""
        winners = set()
        for seed in range(8):
            people = ledger.population(f"open {seed}")
            people.account("client", Budget(math.inf, 1e-5, non_private=True))
            cohort = local_cohort(clients=1, judge=lambda client, config: 0.0, seed=seed)
            search = searching(cohort, people.run("r"), budget=None, quanta=None, votes=3)
            drive(search)
            assert (search.epsilon, search.scale) == (math.inf, 0.0)
            winners.add(search.best_candidate)

        assert len(winners) > 1

    @pytest.mark.parametrize("release", ["winner", "votes"])
    def test_no_count_is_written_or_logged(self, release, cohort, ledger, monkeypatch, tmp_path, caplog, leaks):
        """Ballots times a canary, no noise. Released votes are found in the ledger's files: the negative control."""
        people, canary, ballots = ledger.population("open"), 731652.9, cohort.ballots
        people.account("client", Budget(math.inf, 1e-5, non_private=True))
        monkeypatch.setattr(cohort, "ballots", lambda *asked: (canary * ballot for ballot in ballots(*asked)))
        search = searching(
            cohort, people.run("r"), budget=None, quanta=None, release=release, regime="central", votes=2
        )
        with caplog.at_level("DEBUG"):
            drive(search)

        assert search.best_candidate == 2
        grid = cohort.noise_for(TopKVotes(2, 4), math.inf, Regime.CENTRAL).grid
        total = 20 * float(from_grid(to_grid(canary, grid), grid))
        assert bool(leaks(tmp_path, total)) is (release == "votes")
        assert str(int(canary)) not in json.dumps(search.get_state()) + str(search.reason) + caplog.text

    def test_scores_do_not_pass_through_the_search(self, cohort, run, tmp_path, leaks):
        cohort.judge = lambda client, config: 0.8315246907
        search = searching(cohort, run)
        drive(search)

        assert leaks(tmp_path, 0.8315246907) == []
        assert "0.83152" not in json.dumps(search.get_state()) + repr(search.releases) + str(search.reason)

    def test_a_vote_that_is_mostly_noise_warns(self, cohort, run):
        search = searching(cohort, run, budget=Budget(0.5, 1e-5))

        with pytest.warns(UserWarning, match="mostly noise"):
            search.suggest("t")


class TestTrustIsSaid:
    @pytest.mark.parametrize("regime", [Regime.DISTRIBUTED, Regime.LOCAL, "distributed"])
    def test_without_a_trusted_aggregator_it_is_refused(self, cohort, run, regime):
        with pytest.raises(ValueError, match="trusted with the counts, regime='central'"):
            searching(cohort, run, regime=regime)

    def test_a_cohort_whose_sums_are_masked_is_refused(self, cohort, run):
        cohort.masked = True

        with pytest.raises(ValueError, match="masked"):
            searching(cohort, run, regime="central")

    def test_a_regime_that_is_not_given_is_the_one_it_needs(self, cohort, run):
        assert searching(cohort, run).regime is Regime.CENTRAL
        assert searching(cohort, run, release="votes").regime is Regime.DISTRIBUTED

    @pytest.mark.parametrize("release", ["best", None, 3])
    def test_another_release_is_refused(self, cohort, run, release):
        with pytest.raises(ValueError, match=r"'votes'.*'winner'"):
            searching(cohort, run, release=release)

    @pytest.mark.parametrize("votes", [4, 5, 0, True])
    def test_k_outside_1_to_p_minus_1(self, cohort, run, votes):
        with pytest.raises(ValueError, match="votes"):
            searching(cohort, run, votes=votes)

    def test_more_than_is_left(self, cohort, run):
        with pytest.raises(BudgetExceeded):
            searching(cohort, run, budget=Budget(9.0, 1e-5)).suggest("t")
        assert cohort.evaluated == []


class TestResume:
    def test_a_winner_that_was_released_is_read_and_no_trial_runs(self, search, cohort, population):
        drive(search)
        cohort.evaluated.clear()
        again = searching(cohort, population.run("first"))

        assert drive(again) == []
        assert (cohort.evaluated, cohort.sums) == ([], 1)
        assert again.best_config == search.best_config
        assert "released before" in again.reason
        assert population.account("client").spent == HALF.quanta

    def test_the_result_of_a_finished_run_needs_no_tuner_and_an_unfinished_one_has_none(
        self, search, cohort, population
    ):
        with pytest.raises(SearchUnfinished):
            _ = search.best_config
        drive(search)

        assert searching(cohort, population.run("first")).best_candidate == search.best_candidate

    def test_a_crash_between_charge_and_store_is_not_charged_again(self, search, cohort, population):
        def crash(attempt):
            raise KeyboardInterrupt

        cohort.before_sum = crash
        with pytest.raises(KeyboardInterrupt):
            drive(search)
        assert population.account("client").spent == HALF.quanta
        cohort.before_sum = lambda attempt: None
        again = searching(cohort, population.run("first"))
        drive(again)

        assert population.account("client").spent == HALF.quanta
        assert again.best_config["x"] == 2

    def test_a_lost_winner_is_charged_and_never_repeated(self, search, cohort, population):
        def lose(attempt):
            raise ReleaseLost("gone")

        cohort.before_sum = lose
        with pytest.raises(ReleaseLost, match="gone"):
            drive(search)
        cohort.before_sum = lambda attempt: None
        with pytest.raises(ReleaseLost):
            drive(searching(cohort, population.run("first")))
        assert population.account("client").spent == HALF.quanta
        assert cohort.sums == 0

    def test_other_candidates_or_another_k_under_the_same_key_are_refused(self, search, cohort, population):
        drive(search)

        for changes in ({"space": {"x": tune.choice([5, 6, 7])}}, {"votes": 2}):
            with pytest.raises(KeyConflict):
                searching(cohort, population.run("first"), **changes).suggest("t")

    def test_a_state_of_the_other_release_is_refused(self, search, cohort, population):
        votes = searching(cohort, population.run("first"), release="votes", regime="central")

        with pytest.raises(SearchError, match="release = 'winner'"):
            votes.set_state(search.get_state())

    def test_a_state_from_before_there_was_a_choice_is_one_of_votes(self, cohort, population):
        votes = searching(cohort, population.run("first"), release="votes")
        state = votes.get_state()
        old = json.loads(json.dumps(state))
        del next(part for part in (old, *old.values()) if isinstance(part, dict) and "regime" in part)["release"]
        votes.set_state(old)

        assert votes.release == "votes"

    def test_a_plan_that_has_the_winner_already(self, cohort, run, population):
        run.reserve(Plan((PlannedRelease("search", "winner", Unit.CLIENT, HALF.quanta, 1),)))
        drive(searching(cohort, run, budget=None, quanta=HALF.quanta, reserve=False))

        assert population.account("client").spent == HALF.quanta
        assert population.account("client").reserved == 0
