"""What a run is shown to have spent: never less than it was charged."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, to_mu
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.tracking.progress import Spent, against_noise

BUDGET = Budget(8.0, 1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with Ledger(f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db") as ledger:
        people = ledger.population("people")
        people.account(Unit.RECORD, BUDGET)
        yield people.run("run")


@settings(max_examples=60, deadline=None)
@given(spends=st.lists(st.integers(1, 2**61), min_size=1, max_size=5))
def test_a_spend_is_rounded_up(run, spends):
    spent = Spent(run, "training", Unit.RECORD, tuple(spends))
    for t in range(1, len(spends) + 1):
        row, exact = spent.row(t), Fraction(sum(spends[:t]), 2**60)
        assert Fraction(row["privacy/mu_run"]) ** 2 >= exact
        assert Fraction(math.nextafter(row["privacy/mu_run"], 0.0)) ** 2 < exact  # by no more than it must
        assert gdp.delta(math.sqrt(exact), row["privacy/epsilon_run"]) <= BUDGET.delta
        if row["privacy/epsilon_run"] > 0:
            assert gdp.delta(math.sqrt(exact), row["privacy/epsilon_run"] * (1 - 1e-6)) > BUDGET.delta


def test_rounded_down_it_would_be_too_little(run):
    """Negative control: the μ that noise is made for is below the spend, for nearly all spends."""
    below = [quanta for quanta in range(10**9, 10**9 + 50) if Fraction(to_mu(quanta)) ** 2 < Fraction(quanta, 2**60)]
    assert len(below) > 40


def test_nothing_and_everything(run):
    spent = Spent(run, "training", Unit.RECORD, (5, None))
    assert spent.row(0)["privacy/mu_run"] == spent.row(0)["privacy/epsilon_run"] == 0
    assert spent.row(2)["privacy/mu_run"] == math.inf


def test_a_release_against_its_noise():
    assert against_noise(5.0, 3.0, "round") == {"round/noise_to_signal": 0.6, "round/signal_to_noise": 4 / 3}
    assert against_noise(1.0, 2.0, "round")["round/signal_to_noise"] == 0  # shorter than its own noise
    assert against_noise(1.0, 0.0, "round") == {"round/noise_to_signal": 0.0, "round/signal_to_noise": math.inf}
    assert against_noise(0.0, 1.0, "round")["round/noise_to_signal"] == math.inf
