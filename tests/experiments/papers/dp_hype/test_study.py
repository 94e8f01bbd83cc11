"""The simulation of noisy votes: ballots as described, bounds held, one set of votes for all methods."""

import csv
import math

import numpy as np
import pytest
from scipy.stats import binom

from dpray.experiments.papers.dp_hype import study
from dpray.experiments.papers.dp_hype.study import AGREE, DIFFER, EPSILONS, METHODS, NO_NOISE, counts_of, rows_of

RUNS = 60


@pytest.fixture(scope="module")
def counts():
    return counts_of(50, 100, (1, 5), AGREE, RUNS, 1)


def test_every_client_votes_k_times_and_good_candidates_lead(counts):
    for k, votes in counts.items():
        assert votes.shape == (RUNS, 100)
        assert np.all(votes.sum(axis=1) == 50 * k)
        assert votes[:, :5].mean() > 10 * votes[:, 5:].mean()


def test_clients_that_differ_spread_their_votes(counts):
    assert counts_of(50, 100, (5,), DIFFER, RUNS, 1)[5][:, :5].mean() < 0.5 * counts[5][:, :5].mean()


def test_success_is_not_below_the_bound_of_any_method(counts):
    """Binomial test at level 10⁻⁶ a row. The control: a promise of .9 for the noisiest votes fails it."""
    rows = [row for k in (1, 5) for row in rows_of(50, 100, k, AGREE, counts[k], 1)]
    for row in rows:
        assert binom.cdf(round(row.success * RUNS), RUNS, max(row.bound, 0.0)) > 1e-6, row
    noisy = next(row for row in rows if row.k == 5 and row.epsilon == 0.1 and row.method == "votes")
    assert binom.cdf(round(noisy.success * RUNS), RUNS, 0.9) < 1e-6


def test_methods_differ_in_noise_alone(counts):
    rows = list(rows_of(50, 100, 5, AGREE, counts[5], 1))
    assert {(row.method, row.epsilon) for row in rows} == {
        (NO_NOISE, math.inf),
        *((method, epsilon) for method in METHODS for epsilon in EPSILONS),
    }
    assert len({row.lead for row in rows}) == 1
    at = {row.method: row for row in rows if row.epsilon == 0.25}
    assert at["winner, same ε"].success > at["votes"].success > at["winner, same μ²"].success


def test_the_command_writes_table_text_and_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "CANDIDATES", (100,))
    monkeypatch.setattr(study, "CLIENTS", (50, 100, 250))
    assert study.main(["--runs", "2", "--out", str(tmp_path)]) == 0
    with (tmp_path / "study.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 3 * (1 + len(METHODS) * len(EPSILONS))
    assert "NOT PRIVATE" in capsys.readouterr().out
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert "| agree | 100 | 5 | 0.25 |" in (tmp_path / "study.md").read_text()
