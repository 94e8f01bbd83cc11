"""Statements as text: complete, and impossible to misread."""

import math

import numpy as np
import pytest

from dpray.experiments import report
from dpray.experiments.figures import number, percent
from dpray.experiments.reading import RecipeError
from dpray.experiments.runs import RunDirectory, find_recipe
from dpray.platform.privacy import Budget, ClippedSum, TopKVotes, Unit
from dpray.platform.privacy.ledger import Ledger, ReleaseKey, ReleaseLost

BUDGET = Budget(6, 1e-5)
GRADIENTS = ClippedSum(1.0, Unit.RECORD, 10, 100)


@pytest.fixture
def population(tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield ledger.population("people")
    ledger.close()


def release(run, label, step, share, mechanism=GRADIENTS, compute=lambda attempt: np.zeros(1)):
    quanta = None if share is None else int(BUDGET.quanta * share)
    run.release(ReleaseKey(label, "m", step), {"step": step}, mechanism, quanta, compute, trust="central")


def rows(account, run=None):
    text = report.statement_text(account.statement(run).as_dict())
    return {line.split("  ")[0].strip(): line for line in text.splitlines()}, text


def test_shares_epsilons_and_what_is_left(population):
    account = population.account("record", BUDGET)
    run = population.run("first")
    release(run, "search", 0, 0.3, TopKVotes(1, 3))
    release(run, "training", 1, 0.2)
    release(run, "training", 2, 0.2)
    found, text = rows(account, "first")
    assert text.startswith("Account of population people: unit record, ε = 6 at δ = 1e-05, replace-one\n")
    assert "30.0 %" in found["search"]
    assert "2.992" in found["search"]  # 2.99119…, rounded up
    assert ("40.0 %" in found["training"], " 2 " in found["training"]) == (True, True)
    assert "70.0 %" in found["total"]
    assert "30.0 %" in found["left"]
    assert list(found).index("search") < list(found).index("training") < list(found).index("total")


def test_other_runs_and_lost_releases_are_told(population):
    account = population.account("record", BUDGET)
    release(population.run("first"), "training", 1, 0.25)

    def lose(attempt):
        raise ReleaseLost("a client is gone")

    second = population.run("second")
    with pytest.raises(ReleaseLost):
        release(second, "training", 1, 0.25, compute=lose)
    found, _ = rows(account, "second")
    assert "1 (1 lost)" in found["training"]
    assert "25.0 %" in found["total"]
    assert "50.0 %" in found["total of all runs"]
    every, _ = rows(account)
    assert {"first: training", "second: training"} <= set(every)


def test_a_raised_budget_is_a_new_claim(population):
    account = population.account("record", BUDGET)
    release(population.run("first"), "training", 1, 1)
    account.amend(Budget(8, 1e-5), "a second study")
    found, text = rows(account)
    assert "Claims" in text
    assert "1 releases" in found["2"]
    assert "a second study" in found["2"]
    assert "NOT fixed before the first release but after 1 of them" in " ".join(text.split())
    assert "The budget was fixed before the first release" not in text


def test_an_account_opened_after_releases_shows_its_claim(population):
    population.account("record", BUDGET)
    release(population.run("first"), "training", 1, 0.1, TopKVotes(1, 3))
    found, text = rows(population.account("client", BUDGET))
    assert "Claims" in text
    assert "1 releases" in found["1"]
    assert "had no budget before the first release" in " ".join(text.split())
    assert "The budget was fixed before the first release" not in text


def test_what_is_spent_is_rounded_up_and_what_is_left_down(population):
    account = population.account("record", BUDGET)
    release(population.run("first"), "training", 1, 1e-14)
    found, _ = rows(account)
    assert "0.1 %" in found["total"]
    assert found["total"].split()[-2:] != ["0", "0"]
    assert "99.9 %" in found["left"]
    assert "5.999" in found["left"]


def test_no_noise_and_seeded_noise_are_in_capitals(population):
    account = population.account("record", Budget(math.inf, 1e-5, non_private=True))
    release(population.run("first", stamps=["NOT PRIVATE (seeded noise)"]), "training", 1, None)
    found, text = rows(account)
    assert "NOT PRIVATE (no noise)" in text
    assert "NOT PRIVATE (seeded noise)" in text
    assert "ε = ∞ (NOT PRIVATE)" in text
    assert "∞" in found["total"]


def test_where_a_share_has_no_meaning_there_is_a_dash_and_the_reason(population):
    account = population.account("record", BUDGET, kind="pld")
    release(population.run("first"), "training", 1, 0.2)
    found, text = rows(account)
    assert found["total"].split()[1] == found["total"].split()[-1] == "–"
    assert found["left"].split()[1:] == ["–", "–", "–"]
    assert found["budget"].split()[1:] == ["–", "6", "–"]
    assert "–: composed events have no μ and no share of μ²" in text
    assert not any(word in text for word in ("nan", "?", "%"))


def test_an_account_without_limit_has_no_shares(population):
    found, text = rows(population.account("record", Budget(math.inf, 1e-5, non_private=True)))
    assert found["budget"].split()[1:] == ["–", "∞", "∞"]
    assert "–: there is no limit to have a share of." in text


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [
        (6, "6", "6"),
        (3.52449, "3.525", "3.524"),
        (0.1, "0.1", "0.1"),
        (0.000123, "0.00013", "0.00012"),
        (0.000999, "0.001", "0.00099"),
        (5e-7, "5e-07", "5e-07"),
        (5.21e-9, "5.3e-09", "5.2e-09"),
        (0, "0", "0"),
        ("inf", "∞", "∞"),
        (math.inf, "∞", "∞"),
        ("nan", "?", "?"),
    ],
)
def test_numbers(value, above, below):
    assert (number(value), number(value, up=False)) == (above, below)


def test_shown_numbers_are_never_on_the_wrong_side_and_never_far():
    for value in np.random.default_rng(0).lognormal(-3, 6, 2000):
        above, below = float(number(value)), float(number(value, up=False))
        assert below <= value <= above
        assert above - below <= max(0.00100001, 0.11 * value)


@pytest.mark.parametrize(
    ("share", "above", "below"),
    [
        (0.3, "30.0 %", "30.0 %"),
        (0.1 + 0.2, "30.0 %", "30.0 %"),
        (0.70001, "70.1 %", "70.0 %"),
        (1e-12, "0.1 %", "0.0 %"),
        (1 - 1e-12, "100.0 %", "99.9 %"),
        (0.0, "0.0 %", "0.0 %"),
        (math.inf, "∞", "∞"),
    ],
)
def test_shares(share, above, below):
    assert (percent(share), percent(share, up=False)) == (above, below)


def test_a_run_keeps_its_recipe(tmp_path):
    recipe = find_recipe("digits_quickstart")
    files = RunDirectory(tmp_path, "one")
    files.begin(recipe)
    files.begin(recipe)
    assert RunDirectory(tmp_path, "one").recipe() == recipe
    with pytest.raises(RecipeError, match="has not finished; `dpray resume one`"):
        files.finished()
    with pytest.raises(RecipeError, match="differs in name"):
        files.begin(recipe.model_copy(update={"name": "other"}))
    with pytest.raises(RecipeError, match="Runs here: one"):
        RunDirectory(tmp_path, "two").recipe()
