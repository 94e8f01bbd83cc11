"""Selections: one unit moves the odds of every index by e^ε at most, and half the noise would not do."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import beta, chisquare

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, ceil_quanta, to_mu
from dpray.platform.privacy.mechanisms import Mechanism, NoisyMax, Selection, VoteWinner, top_k_votes
from dpray.platform.privacy.selection import noisy_argmax

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared
ANYTHING = st.one_of(st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 1e30, 0.0, -0.0]), st.floats(-3, 3))
SCORES = st.lists(ANYTHING, min_size=7, max_size=7)


def log_odds(counts, scale):
    """log P(j wins): the exponential mechanism, in closed form."""
    scaled = np.asarray(counts) / scale
    return scaled - logsumexp(scaled)


def loss(first, second, scale):
    """Largest change of log P(j wins) over all j."""
    return float(np.max(np.abs(log_odds(first, scale) - log_odds(second, scale))))


def test_noisy_max_is_pure_epsilon_and_enters_as_the_exact_mu():
    mechanism = NoisyMax(bound=2.0, users=100, candidates=50)
    assert mechanism.scale(0.5) == pytest.approx(2 * 2.0 / (100 * 0.5), rel=1e-15)
    assert mechanism.scale(math.inf) == 0.0
    assert mechanism.mu_of(1.0) == gdp.mu_from_pure(1.0)
    assert mechanism.mu_of(1.0) == pytest.approx(1.232, abs=5e-4)
    assert mechanism.describe() == {
        "mechanism": "noisy max",
        "bound": 2.0,
        "users": 100,
        "candidates": 50,
        "unit": "user",
    }
    assert not isinstance(mechanism, Mechanism)
    with pytest.raises(ValueError, match="epsilon must"):
        mechanism.scale(0.0)


def test_noisy_max_noise_hides_one_user():
    # Worst neighbours: the user moves one candidate up by c/n and the other down. The odds of the argmax are exact.
    mechanism, epsilon = NoisyMax(bound=1.0, users=10, candidates=2), 0.7
    moved = 2 * mechanism.bound / mechanism.users

    def privacy_loss(scale: float, lead: float) -> float:
        """Largest change of log P(a candidate wins) when the first one's lead grows by what one user can move."""
        before, after = (1 / (1 + math.exp(-gap / scale)) for gap in (lead, lead + moved))
        return max(math.log(after / before), math.log((1 - before) / (1 - after)))

    leads = [-5.0, -1.0, -0.1, 0.0, 1.0, 5.0]
    assert max(privacy_loss(mechanism.scale(epsilon), lead) for lead in leads) <= epsilon
    assert max(privacy_loss(mechanism.scale(epsilon) / 2, lead) for lead in leads) > epsilon


class TestVoteWinner:
    @pytest.mark.parametrize(("k", "p"), [(1, 2), (5, 100), (25, 100)])
    def test_its_noise_depends_on_epsilon_alone(self, k, p):
        assert VoteWinner(k, p).sensitivity == 1.0
        assert VoteWinner(k, p).scale(0.25) == pytest.approx(8.0, rel=1e-14)
        assert VoteWinner(k, p).scale(math.inf) == 0.0

    @pytest.mark.parametrize(("epsilon", "mu"), [(1.0, 1.232), (0.25, 0.313)])
    def test_it_costs_the_published_mu(self, epsilon, mu):
        """Three decimals as published; the zCDP number would be √(ε²/4), half of it and wrong."""
        assert VoteWinner(5, 100).mu_of(epsilon) == pytest.approx(mu, abs=5e-4)

    @pytest.mark.parametrize("epsilon", [1e-3, 0.25, 1.0, 5.0])
    def test_a_spend_in_quanta_buys_the_epsilon_it_was_made_from_and_no_more(self, epsilon):
        winner = VoteWinner(5, 100)
        bought = winner.epsilon_of(to_mu(ceil_quanta(winner.mu_of(epsilon))))
        assert bought == pytest.approx(epsilon, rel=1e-9)
        assert winner.mu_of(bought) <= to_mu(ceil_quanta(winner.mu_of(epsilon)))

    def test_it_is_described_by_its_ballots(self):
        described = VoteWinner(np.int64(5), 100).describe()
        assert json.loads(json.dumps(described)) == described
        assert described == {"mechanism": "vote winner", "votes": 5, "candidates": 100, "unit": "client"}
        assert isinstance(VoteWinner(1, 2), Selection)
        assert not isinstance(VoteWinner(1, 2), Mechanism)  # nothing that adds up sums takes it for a Gaussian release
        assert VoteWinner(5, 100).dimension == 100

    @pytest.mark.parametrize(("votes", "candidates"), [(5, 5), (6, 5), (1, 1)])
    def test_a_vote_that_chooses_nothing_is_refused(self, votes, candidates):
        with pytest.raises(ValueError, match="choose nothing"):
            VoteWinner(votes, candidates)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, True, "3", None, math.nan])
    def test_bad_counts_are_refused(self, bad):
        for make in (lambda: VoteWinner(bad, 10), lambda: VoteWinner(1, bad)):
            with pytest.raises(ValueError, match=r"must be a(t least| whole number)"):
                make()


@RELAXED
@given(scores=st.lists(SCORES, min_size=2, max_size=6), k=st.integers(1, 6), epsilon=st.floats(0.01, 10))
def test_replacing_one_client_by_anything_moves_the_odds_of_every_winner_by_epsilon_at_most(scores, k, epsilon):
    generator = np.random.default_rng(0)
    ballots = [top_k_votes(each, k, generator) for each in scores]
    first, second = np.sum(ballots[1:], axis=0), np.sum([ballots[0], *ballots[2:]], axis=0)
    winner = VoteWinner(k, 7)
    assert np.max(np.abs(first - second)) <= winner.sensitivity
    assert loss(first, second, winner.scale(epsilon)) <= epsilon * (1 + 1e-12)


def test_two_per_epsilon_is_needed():
    """A vote that moves from the winner to a candidate far behind: the odds of the latter change by almost e^ε."""
    first, second = np.array([100, 0, 0]), np.array([99, 1, 0])
    winner = VoteWinner(1, 3)
    assert 0.999 < loss(first, second, winner.scale(1.0)) <= 1.0
    assert loss(first, second, winner.scale(1.0) / 2) > 1.9


def limits(count, runs, confidence):
    """Clopper-Pearson limits of a rate."""
    tail = (1 - confidence) / 2
    return beta.ppf(tail, count, runs - count + 1), beta.isf(tail, count + 1, runs - count)


def test_seen_winners_do_not_refute_epsilon_and_those_of_half_the_noise_do():
    """Lower confidence limit on log P'(1)/P(1), which is .81 here and 1.89 under half the noise. False alarms: 10⁻⁶."""
    runs, winner, counts = 20_000, VoteWinner(1, 2), (np.array([4, 0]), np.array([3, 1]))

    def seen(scale):
        generator = np.random.default_rng(5)
        before, after = (
            limits(sum(noisy_argmax(each, scale, generator) for _ in range(runs)), runs, 1 - 5e-7) for each in counts
        )
        return math.log(after[0] / before[1])

    epsilon = 1.0
    assert 0.5 < seen(winner.scale(epsilon)) <= epsilon
    assert seen(winner.scale(epsilon) / 2) > epsilon


def test_winners_come_as_often_as_the_exponential_mechanism_says():
    """Chi-square over four candidates, false alarms 10⁻⁶; the control draws with half the noise."""
    counts, scale, runs = np.array([10, 7, 7, 0]), VoteWinner(2, 4).scale(0.5), 20_000
    generator = np.random.default_rng(3)

    def alarm(drawn):
        won = np.bincount([noisy_argmax(counts, drawn, generator) for _ in range(runs)], minlength=4)
        return chisquare(won, runs * np.exp(log_odds(counts, scale))).pvalue < 1e-6

    assert not alarm(scale)
    assert alarm(scale / 2)


def test_without_noise_ties_are_broken_at_random():
    generator = np.random.default_rng(0)
    won = np.bincount([noisy_argmax([3, 5, 5, 1], 0.0, generator) for _ in range(400)], minlength=4)
    assert won[[0, 3]].tolist() == [0, 0]
    assert 120 < won[1] < 280  # Binomial(400, 1/2), ±8 std: once in 10¹⁵


def test_the_index_carries_no_count():
    """A plain int, whatever the counts are of."""
    assert type(noisy_argmax(np.array([1, 2**40]), 1.0, np.random.default_rng(0))) is int


def test_the_trade_that_is_documented():
    """n = 100, p = 100, five good candidates 40 votes ahead; exact odds of the winner at ε = .25, and at equal μ²."""
    counts = np.concatenate([np.full(5, 40), np.zeros(95)])
    good = [
        float(np.exp(logsumexp(log_odds(counts, scale)[:5])))
        for scale in (
            VoteWinner(5, 100).scale(0.25),
            VoteWinner(5, 100).scale(gdp.pure_epsilon(Budget(0.25, 1e-5).mu)),
        )
    ]
    assert good == pytest.approx([0.88, 0.15], abs=0.01)
    sigma = math.sqrt(10) / Budget(0.25, 1e-5).mu
    noisy = counts + np.random.default_rng(2).normal(0, sigma, (20_000, 100))
    won = int((np.argmax(noisy, axis=1) < 5).sum())
    low, high = limits(won, 20_000, 1 - 1e-6)
    assert low < 0.32 < high
