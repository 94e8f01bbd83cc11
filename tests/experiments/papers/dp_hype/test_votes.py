"""Ways to choose: their sensitivities under attack, what they choose, and the product's noise."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.experiments.papers.dp_hype.votes import DELTA, RULES, Scores, Subsets, Votes, WinnerOnly
from dpray.platform.privacy import gdp
from dpray.platform.privacy.noise import NoiseSource

GOLDEN = json.loads((Path(__file__).resolve().parents[3] / "golden" / "hype_sigma.json").read_text())["rows"]
SOURCE = NoiseSource(0)
ODD = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30, -0.0, 5e-324]))


def sent(rule, scores):
    """Messages with the ballots' generator of one and the same release."""
    return rule.messages(scores, SOURCE.generator("ballots"))


@st.composite
def neighbours(draw):
    """Scores of some clients, and of the same with one client replaced by anything; k of a rule."""
    p = draw(st.integers(2, 12))
    n, k = draw(st.integers(p, 15)), draw(st.integers(1, p - 1))
    row = st.lists(ODD, min_size=p, max_size=p)
    scores = np.array(draw(st.lists(row, min_size=n, max_size=n)))
    other, place = scores.copy(), draw(st.integers(0, n - 1))
    other[place] = draw(row)
    return scores, other, place, k


@given(neighbours())
@settings(max_examples=200)
def test_replacing_a_client_moves_the_sum_by_the_stated_sensitivity_at_most(case):
    scores, other, place, k = case
    for rule in (Votes(k), Scores(k), Scores(None), Subsets()):
        mechanism = rule.mechanism(*scores.shape)
        before, after = sent(rule, scores), sent(rule, other)
        moved = np.linalg.norm(after[place] - before[place])
        assert moved <= mechanism.sensitivity + 1e-12
        assert np.linalg.norm(after.sum(axis=0) - before.sum(axis=0)) <= (
            mechanism.sensitivity + mechanism.summation_error + 1e-12
        )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_stated_sensitivity_is_attained(rule):
    """A client for some candidates is replaced by one for others (all scores: for none)."""
    n = p = 100
    scores, other = np.zeros((n, p)), np.zeros((n, p))
    if isinstance(rule, WinnerOnly):
        pytest.skip("its sensitivity is that of each count, tested below")
    if isinstance(rule, Subsets) or rule == Scores(None):
        other[0] = 1.0
    else:
        scores[0, :5], other[0, 5:10] = 1.0, 1.0
    moved = np.linalg.norm(sent(rule, other)[0] - sent(rule, scores)[0])
    assert moved == pytest.approx(rule.mechanism(n, p).sensitivity)


@pytest.mark.parametrize(
    ("rule", "clients", "candidates", "expected"),
    [
        (Votes(5), 100, 100, math.sqrt(10)),
        (Votes(1), 100, 100, math.sqrt(2)),
        (Scores(5), 100, 100, math.sqrt(10)),
        (Scores(7), 100, 10, math.sqrt(10)),
        (Scores(None), 100, 100, 10.0),
        (Subsets(), 250, 100, 1.0),
    ],
)
def test_sensitivities_in_closed_form(rule, clients, candidates, expected):
    assert rule.mechanism(clients, candidates).sensitivity == pytest.approx(expected)


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_the_votes_noise_is_the_papers(case):
    mechanism = Votes(case["k"]).mechanism(100, case["p"])
    assert mechanism.sigma(gdp.mu(case["epsilon"], case["delta"])) == pytest.approx(case["sigma"], rel=1e-6)


@given(neighbours())
@settings(max_examples=100)
def test_replacing_a_client_moves_no_count_by_more_than_1(case):
    scores, other, _, k = case
    rule = WinnerOnly(k)
    assert np.abs(sent(rule, scores).sum(axis=0) - sent(rule, other).sum(axis=0)).max() <= 1


@pytest.mark.parametrize("pure", [True, False])
def test_a_winner_alone_is_as_private_as_it_says(pure):
    """Counts (1, 0) against (0, 1): the log odds of a winner move by ε′, its probability by the factor e^(ε′/2).

    2 000 draws each; 4 standard errors of the log ratio are .14 (false alarm 6e-5).
    """
    rule = WinnerOnly(1, pure=pure)
    epsilon = 1.4 if pure else 5.0
    promised = epsilon if pure else gdp.pure_epsilon(gdp.mu(epsilon, DELTA))
    wins = []
    for counts in ([1.0, 0.0], [0.0, 1.0]):
        total = np.array(counts)
        wins.append(np.mean([rule.winner(total, 1, epsilon, SOURCE, number) == 0 for number in range(2_000)]))
    assert math.log(wins[0] / wins[1]) == pytest.approx(promised / 2, abs=0.14)
    assert math.log(wins[0] / wins[1]) <= promised


# What is chosen ----------------------------------------------------------------------------------------------------


def agreed(n=120, p=100, best=42, margin=0.5):
    scores = np.random.default_rng(0).random((n, p)) * 0.4
    scores[:, best] += margin
    return scores


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_without_noise_what_all_clients_agree_on_is_chosen(rule):
    assert rule.choose(agreed(), [math.inf], SOURCE, "run", 1) == [42]


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_a_choice_is_repeated_by_its_key_and_new_under_another(epsilon):
    chosen = [Votes(5).choose(agreed(), [epsilon], SOURCE, "run", number) for number in range(10)]
    assert chosen == [Votes(5).choose(agreed(), [3.0, epsilon], SOURCE, "run", number)[1:] for number in range(10)]
    if epsilon < 1:
        assert len({number for (number,) in chosen}) > 1


def test_the_noise_in_the_count_is_that_of_a_cohort_with_one_colluder():
    """No scores at all: 100 clients vote at random, so the count of a candidate is 5 votes on average. Noise of std
    σ_S = σ√(100/99) is what is left. 4 000 draws: 4 standard errors are 4.5 % (false alarm 6e-5)."""
    rule, epsilon = Votes(5), 0.25
    seen = []

    class Watched(Votes):
        def standing(self, total, clients):
            seen.append(total)
            return total

    for number in range(40):
        Watched(5).choose(np.full((100, 100), np.nan), [epsilon], SOURCE, number)
    ballots = 100 * 0.05 * 0.95
    sigma = rule.mechanism(100, 100).sigma(gdp.mu(epsilon, DELTA))
    expected = math.sqrt(sigma**2 * 100 / 99 + ballots)
    assert np.std(seen) == pytest.approx(expected, rel=0.045)
    assert np.std(seen) != pytest.approx(math.sqrt((sigma / 2) ** 2 * 100 / 99 + ballots), rel=0.045)  # half the noise
    assert np.mean(seen) == pytest.approx(5.0, abs=4 * sigma / math.sqrt(len(seen) * 100))


def test_ties_do_not_go_to_the_front_of_the_grid():
    """Nobody has a score: each of 4 candidates wins about a quarter of 400 votes (false alarm 3e-4 by the binomial)."""
    wins = [Votes(1).choose(np.full((4, 4), np.nan), [math.inf], SOURCE, number)[0] for number in range(400)]
    assert np.bincount(wins, minlength=4) == pytest.approx([100] * 4, abs=33)


def test_a_diverged_candidate_is_chosen_last():
    scores = np.full((6, 3), np.nan)
    scores[:, 1] = 0.0
    assert Votes(1).choose(scores, [math.inf], SOURCE, 0) == [1]
    scores[:, 1], scores[:, 2] = np.nan, 0.1
    for rule in (Scores(1), Scores(None)):
        assert rule.choose(scores, [math.inf], SOURCE, 0) == [2]


def test_votes_by_loss_are_by_rank_alone():
    """Losses in nats are below 0 as scores: what is sent is the ballot, not they."""
    assert Votes(5, "loss").choose(agreed() * 10 - 40, [math.inf], SOURCE, "run", 1) == [42]


def test_a_subset_is_judged_by_its_mean():
    """Five clients for two candidates: three of them have the worse one, whose sum is larger."""
    scores = np.tile([0.5, 0.7], (5, 1))
    assert Subsets().messages(scores, np.random.default_rng(0)).sum(axis=0) == pytest.approx([1.5, 1.4])
    assert Subsets().choose(scores, [math.inf], SOURCE, 0) == [1]


def test_subsets_need_a_client_a_candidate():
    with pytest.raises(ValueError, match="99 clients cannot be dealt over 100 candidates"):
        Subsets().choose(np.zeros((99, 100)), [1.0], SOURCE, 0)
