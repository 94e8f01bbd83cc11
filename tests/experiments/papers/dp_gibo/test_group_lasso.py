"""Group LASSO: optimal by the KKT conditions, and equal to scikit-learn's LASSO where groups are single features."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Lasso

from dpray.experiments.papers.dp_gibo.group_lasso import NotSolved, group_lasso


def problem(seed=0, n=30, d=8, size=5, smallest=1e-6, count=3):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d, size)) + 3 * rng.standard_normal((n, d, 1))
    x = x.reshape(n, -1)
    y = x[:, :size] @ rng.standard_normal(size) + rng.standard_normal(n)
    return x, y / y.std(), np.exp(rng.uniform(math.log(smallest), 0.0, (count, d)))


def violation(x, y, penalties, beta, size):
    """Largest breach of the KKT conditions, relative to λ: ‖X_gᵀr/n‖ ≤ λ_g, and equal, along β_g, if β_g ≠ 0."""
    pull = ((y - beta @ x.T) @ x / len(y)).reshape(len(beta), -1, size)
    groups = beta.reshape(pull.shape)
    norms = np.linalg.norm(groups, axis=2)
    excess = np.linalg.norm(pull, axis=2) / penalties - 1.0
    slack = (penalties * norms - (groups * pull).sum(axis=2)) / np.maximum(penalties * norms, 1e-3)
    return max(excess.max(), slack.max())


def objective(x, y, penalties, beta, size):
    norms = np.linalg.norm(beta.reshape(len(beta), -1, size), axis=2)
    return 0.5 * ((y - beta @ x.T) ** 2).mean(axis=1) + (penalties * norms).sum(axis=1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000), d=st.integers(1, 20), size=st.integers(1, 5), smallest=st.sampled_from([1e-6, 1e-2])
)
def test_the_kkt_conditions_hold(seed, d, size, smallest):
    x, y, penalties = problem(seed, d=d, size=size, smallest=smallest)

    beta = group_lasso(x, y, penalties, size=size, tolerance=1e-11)

    assert violation(x, y, penalties, beta, size) < 1e-3


def test_the_check_sees_a_coefficient_that_is_off():
    """Negative control."""
    x, y, penalties = problem(smallest=1e-2)
    beta = group_lasso(x, y, penalties, size=5, tolerance=1e-11)

    assert violation(x, y, penalties, 1.02 * beta, 5) > 1e-3


@pytest.mark.parametrize("smallest", [1e-6, 1e-2])
def test_single_features_are_scikit_learns_lasso(smallest):
    """Oracle: coordinate descent on x/λ with a penalty of 1 for all."""
    x, y, penalties = problem(3, d=6, size=1, smallest=smallest)

    beta = group_lasso(x, y, penalties, size=1, tolerance=1e-11)

    for lam, found in zip(penalties, beta, strict=True):
        oracle = Lasso(alpha=1.0, fit_intercept=False, tol=1e-14, max_iter=1_000_000).fit(x / lam, y).coef_ / lam
        assert found == pytest.approx(oracle, abs=1e-5)


def test_no_other_point_is_better():
    x, y, penalties = problem(5)
    beta = group_lasso(x, y, penalties, size=5)
    best = objective(x, y, penalties, beta, 5)

    for scale in (1e-1, 1e-3):
        for seed in range(20):
            other = beta + scale * np.random.default_rng(seed).standard_normal(beta.shape)
            assert (objective(x, y, penalties, other, 5) >= best - 1e-8).all()


def test_problems_solved_together_and_alone_agree():
    x, y, penalties = problem(7, count=5)

    together = group_lasso(x, y, penalties, size=5)

    for lam, beta in zip(penalties, together, strict=True):
        assert x @ group_lasso(x, y, lam, size=5)[0] == pytest.approx(x @ beta, abs=1e-6)


def test_the_unit_of_the_targets_does_not_matter():
    x, y, penalties = problem(8)

    assert group_lasso(x, 1e3 * y, 1e3 * penalties, size=5) == pytest.approx(1e3 * group_lasso(x, y, penalties, size=5))


def test_penalties_above_all_correlations_leave_nothing():
    x, y, _ = problem()

    assert np.abs(group_lasso(x, y, np.full(8, 1e3), size=5)).max() < 1e-6
    assert (group_lasso(x, 0 * y, np.ones(8), size=5) == 0).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x, y, lam: (x, y, 0 * lam), "above 0"),
        (lambda x, y, lam: (x, y, lam * np.nan), "above 0"),
        (lambda x, y, lam: (x * np.inf, y, lam), "must be finite"),
        (lambda x, y, lam: (x[:, :-1], y, lam), "number of groups times their size"),
        (lambda x, y, lam: (x, y[:-1], lam), r"\(n, p\) and \(n,\)"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(change, sentence):
    x, y, lam = change(*problem())

    with pytest.raises(ValueError, match=sentence):
        group_lasso(x, y, lam, size=5)


def test_a_tolerance_out_of_reach_is_said():
    x, y, penalties = problem()

    with pytest.raises(NotSolved, match="larger tolerance"):
        group_lasso(x, y, penalties, size=5, tolerance=1e-30)
