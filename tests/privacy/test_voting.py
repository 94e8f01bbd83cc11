"""Bounds on how often a noisy vote names a bad candidate: golden, attained, and held by simulated votes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from dpray.platform.privacy.mechanisms import TopKVotes, VoteWinner, vote_failure_bound, winner_failure_bound
from dpray.platform.privacy.selection import noisy_argmax

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "hype_failure_bound.json").read_text())["rows"]


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_vote_failure_bound_golden(row):
    assert vote_failure_bound(row["gamma"], row["sigma"], row["bad"]) == pytest.approx(row["bound"], rel=1e-9)


def test_simulated_votes_fail_less_often_than_the_bound_and_more_without_the_lead():
    # Binomial test at level 1e-6: the failure rate is at most the bound.
    noise = TopKVotes(3, 20).noise(0.4, noisers=60)
    sigma, bad, runs = noise.std(80), 17, 20_000
    gap = 4 * sigma
    counts = np.concatenate([np.full(3, 70.0), np.full(bad, 70.0 - gap)])
    generator = np.random.default_rng(11)

    def failures(std: float) -> int:
        return int((np.argmax(counts + generator.normal(0, std, (runs, 20)), axis=1) >= 3).sum())

    bound = vote_failure_bound(gap, sigma, bad)
    assert 0 < bound < 0.05
    assert binom.sf(failures(sigma) - 1, runs, bound) > 1e-6
    assert binom.sf(failures(2 * sigma) - 1, runs, bound) < 1e-6  # the control: twice the noise breaks it


def test_failure_bound_at_the_edges():
    assert vote_failure_bound(10.0, 0.0, 5) == 0.0
    assert vote_failure_bound(0.0, 0.0, 5) == 1.0
    assert vote_failure_bound(0.0, 0.0, 0) == 0.0
    assert vote_failure_bound(-5.0, 1.0, 3) == 1.0
    assert vote_failure_bound(5.0, 1.0, 0) == 0.0
    for bad in ({"gap": math.inf}, {"sigma_sum": math.inf}, {"sigma_sum": -1.0}, {"bad": -1}, {"gap": math.nan}):
        with pytest.raises(ValueError, match="must"):
            vote_failure_bound(**{"gap": 1.0, "sigma_sum": 1.0, "bad": 1, **bad})


def test_a_winner_fails_as_often_as_its_bound_says_where_it_is_attained():
    """#bad/(#bad + #good·e^(γ/b)) by hand: 95 bad, 5 good, 40 votes at ε = .25."""
    assert winner_failure_bound(40, 8.0, 95, 5) == pytest.approx(95 / (95 + 5 * math.exp(5)), rel=1e-14)
    assert winner_failure_bound(0, 8.0, 3, 1) == pytest.approx(0.75)
    assert winner_failure_bound(1e6, 8.0, 95) == pytest.approx(0.0, abs=1e-300)  # no overflow


@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_simulated_winners_fail_less_often_than_the_bound_and_more_with_twice_the_noise(spread):
    """Binomial test at level 10⁻⁶, at the bound (all bad candidates level) and inside it."""
    scale, bad, good, gap, runs = VoteWinner(3, 20).scale(0.5), 17, 3, 20.0, 20_000
    counts = np.concatenate([np.full(good, 70.0), 70.0 - gap - spread * np.arange(bad) / bad])
    generator = np.random.default_rng(7)

    def failures(drawn: float) -> int:
        return sum(noisy_argmax(counts, drawn, generator) >= good for _ in range(runs))

    bound = winner_failure_bound(gap, scale, bad, good)
    assert 0.01 < bound < 0.1
    assert binom.sf(failures(scale) - 1, runs, bound) > 1e-6
    assert binom.sf(failures(2 * scale) - 1, runs, bound) < 1e-6


def test_more_good_candidates_and_a_larger_lead_lower_a_winners_bound():
    bounds = [winner_failure_bound(gap, 8.0, 95, good) for gap, good in ((20, 1), (20, 5), (40, 5))]
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) == 3


def test_winner_bound_at_the_edges():
    assert winner_failure_bound(10.0, 0.0, 5) == 0.0
    assert winner_failure_bound(0.0, 0.0, 5) == 1.0
    assert winner_failure_bound(0.0, 0.0, 0) == 0.0
    assert winner_failure_bound(-5.0, 1e-300, 3) == 1.0
    assert winner_failure_bound(5.0, 1.0, 0) == 0.0
    bad_ones = {"gap": math.nan}, {"gap": math.inf}, {"scale": -1.0}, {"scale": math.inf}, {"bad": -1}, {"good": 0}
    for bad in bad_ones:
        with pytest.raises(ValueError, match="must"):
            winner_failure_bound(**{"gap": 1.0, "scale": 1.0, "bad": 1, **bad})
