"""Accounts: one lifetime budget per unit, charged by every release on the population."""

import math
import pickle
import re
from fractions import Fraction

import pytest

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, ceil_quanta
from dpray.platform.privacy.ledger import (
    BudgetConflict,
    BudgetExceeded,
    LedgerError,
    Plan,
    PlannedRelease,
)
from dpray.platform.privacy.mechanisms import Unit

SIX = Budget(6, 1e-5)
OPEN = Budget(math.inf, 1e-5, non_private=True)


def test_a_new_account_has_spent_nothing(account):
    assert (account.unit, account.kind, account.budget) == (Unit.RECORD, "gdp", SIX)
    assert (account.spent, account.reserved, account.remaining) == (0, 0, SIX.quanta)
    assert account.spent_epsilon == 0
    assert account.remaining_epsilon == pytest.approx(6, abs=1e-9)


def test_a_release_charges_an_account_of_its_own_unit_its_quanta(account, run, releases):
    releases.make(run, 12345)
    assert account.spent == 12345
    assert account.remaining == SIX.quanta - 12345


def test_epsilon_spent_is_that_of_mu_and_on_the_safe_side(account, run, releases):
    quanta = ceil_quanta(0.5)
    releases.make(run, quanta)
    assert account.spent_epsilon == pytest.approx(gdp.epsilon(0.5, 1e-5), rel=1e-9)
    assert gdp.delta(math.sqrt(quanta / 2**60), account.spent_epsilon) <= 1e-5
    assert account.remaining_epsilon < 6 - account.spent_epsilon + 3  # ε does not subtract
    left = math.sqrt((SIX.quanta - quanta) / 2**60)
    assert account.remaining_epsilon == pytest.approx(gdp.epsilon(left, 1e-5), rel=1e-9)


@pytest.mark.parametrize(
    ("account_unit", "mechanism", "factor"),
    [
        ("record", "record", 1),
        ("record", "user", 1),
        ("record", "client", 1),
        ("user", "record", 3**2),
        ("user", "user", 1),
        ("user", "client", 1),
        ("client", "record", 10**2),
        ("client", "user", 10**2),
        ("client", "client", 1),
    ],
)
def test_a_coarser_account_pays_m_squared_a_finer_or_equal_one_pays_once(
    ledger, releases, account_unit, mechanism, factor
):
    people = ledger.population("ward", records_per_user=3, records_per_client=10)
    account = people.account(account_unit, SIX)
    releases.make(people.run("a"), 7, mechanism=getattr(releases, mechanism))
    assert account.spent == factor * 7


def test_one_release_charges_every_account_of_its_population_and_no_other(ledger, population, releases):
    client = population.account("client", Budget(60, 1e-5))
    stranger = ledger.population("others").account("record", SIX)
    releases.make(population.run("a"), 1000)
    assert (population.account("record").spent, client.spent, stranger.spent) == (1000, 100_000, 0)


def test_a_release_that_one_account_cannot_pay_charges_none(population, releases):
    client = population.account("client", Budget(1, 1e-5))
    run = population.run("a")
    with pytest.raises(BudgetExceeded, match=r"client account: .* asks for .* is left"):
        releases.make(run, client.budget.quanta // 50)
    assert population.account("record").spent == client.spent == 0


def test_an_undeclared_maximum_is_refused_with_how_to_declare_it(ledger, releases):
    people = ledger.population("ward")
    people.account("client", SIX)
    run = people.run("a")
    with pytest.raises(LedgerError, match=r"ledger\.population\('ward', records_per_client=…\)"):
        releases.make(run, 1)
    ledger.population("ward", records_per_client=2)
    releases.make(run, 1)
    assert people.account("client").spent == 4
    assert people.records_per_client == 2
    assert people.records_per_user is None
    assert ledger.verify() == ()


def test_a_declared_maximum_stays(ledger):
    ledger.population("ward", records_per_user=4)
    assert ledger.population("ward").records_per_user == 4
    assert ledger.population("ward", records_per_user=4).records_per_user == 4
    with pytest.raises(LedgerError, match="records_per_user = 4, and 5 was given"):
        ledger.population("ward", records_per_user=5)


@pytest.mark.parametrize("bad", [0, -1, 1.5, math.nan, math.inf, True, "3"])
def test_a_maximum_is_a_whole_number_from_one(ledger, bad):
    with pytest.raises(LedgerError, match="records_per_client is"):
        ledger.population("ward", records_per_client=bad)
    assert ledger.populations() == ()


def test_an_account_opened_later_is_charged_the_past_and_the_plans(population, releases):
    run = population.run("a")
    run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, 500, 5),)))
    releases.make(run, 100)
    releases.make(run, 11, label="other", mechanism=releases.client)
    client = population.account("client", SIX)
    assert client.spent == 100 * 100 + 11
    assert client.reserved == 100 * 400
    releases.make(run, 400, step=1)
    assert (client.spent, client.reserved) == (100 * 500 + 11, 0)


def test_an_account_opened_later_that_cannot_pay_the_past_is_refused(ledger, population, releases):
    releases.make(population.run("a"), SIX.quanta // 10)
    with pytest.raises(BudgetExceeded, match="a new account is charged"):
        population.account("client", SIX)
    assert [str(account.unit) for account in population.accounts()] == ["record"]
    assert ledger.verify() == ()


def test_reopening_with_the_same_budget_opens_and_with_another_is_refused_with_both(population):
    assert population.account("record", Budget(6, 1e-5)).budget == SIX
    with pytest.raises(BudgetConflict, match=r"ε = 6 at δ = 1e-05; .* ε = 3 at δ = 1e-05"):
        population.account("record", Budget(3, 1e-5))
    assert population.account("record").budget == SIX


def test_an_account_that_is_not_there_needs_a_budget(population):
    with pytest.raises(LedgerError, match=r"has no client account\. Create it with a lifetime budget"):
        population.account("client")


def test_an_unknown_unit_is_named(population):
    with pytest.raises(LedgerError, match="A unit is record, user or client; 'person' was given"):
        population.account("person", SIX)


def test_an_unknown_kind_of_account_is_named(population):
    with pytest.raises(LedgerError, match=r"of kind 'gdp' \(exact μ²\) or 'pld' .*; 'rdp' was given"):
        population.account("client", SIX, kind="rdp")


def test_a_release_on_a_population_without_account_is_refused(ledger, releases):
    run = ledger.population("ward").run("a")
    with pytest.raises(LedgerError, match="has no account"):
        releases.make(run)
    with pytest.raises(LedgerError, match="has no account"):
        run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, 500, 5),)))


def test_the_refusal_has_both_numbers_in_words_and_as_attributes(account, run, releases):
    releases.make(run, SIX.quanta - 10)
    with pytest.raises(BudgetExceeded) as caught:
        releases.make(run, 11, step=1)
    error = caught.value
    assert (error.population, error.unit, error.asked, error.spent) == ("digits", "record", 11, SIX.quanta - 10)
    assert (error.reserved, error.budget, error.remaining) == (0, SIX.quanta, 10)
    assert "'digits', record account: release training/sum step 1 of run 'first' asks for" in str(error)
    assert "% of μ² (ε = " in str(error)
    assert "spent 100 %" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.asked, again.remaining) == (str(error), 11, 10)
    releases.make(run, 10, step=1)
    assert account.remaining == 0
    assert account.remaining_epsilon == 0


def test_what_is_asked_and_spent_is_told_rounded_up_and_what_is_left_down(account, run, releases):
    releases.make(run, SIX.quanta // 3 + 1)
    with pytest.raises(BudgetExceeded) as caught:
        releases.make(run, SIX.quanta * 2 // 3 + 1, step=1)
    told = re.findall(r"([\d.]+) % of μ² \(ε = ([\d.]+) alone\)", str(caught.value))
    asked, left, spent = [(Fraction(share), float(epsilon)) for share, epsilon in told]
    assert (asked[0], left[0], spent[0]) == (Fraction("66.6667"), Fraction("66.6666"), Fraction("33.3334"))
    for (_, epsilon), quanta, up in [(asked, 2 / 3, True), (left, 2 / 3, False), (spent, 1 / 3, True)]:
        exact = gdp.epsilon(math.sqrt(quanta) * SIX.mu, 1e-5)
        assert abs(epsilon - exact) < 2e-3
        assert (epsilon > exact) == up


@pytest.mark.parametrize("quanta", [0, -5, 1.0, math.nan, math.inf, True, "7"])
def test_zero_negative_and_unreal_spends_are_refused(account, run, releases, quanta):
    with pytest.raises(LedgerError, match="quanta is"):
        releases.make(run, quanta)
    assert account.spent == 0
    assert account.history()[-1].kind == "account"


def test_a_private_account_refuses_a_release_without_noise(account, run, releases):
    with pytest.raises(BudgetExceeded, match="infinite μ²") as caught:
        releases.make(run, None)
    assert caught.value.asked is None
    assert account.unbounded == account.spent == 0


def test_a_non_private_account_takes_anything_and_says_so(ledger, releases):
    people = ledger.population("toy", records_per_client=2)
    account = people.account("record", OPEN)
    run = people.run("a")
    run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, None, 5),)))
    releases.make(run, None)
    releases.make(run, 50, step=1)
    assert (account.spent, account.reserved, account.unbounded, account.remaining) == (50, 0, 1, None)
    assert account.spent_epsilon == account.remaining_epsilon == math.inf
    run.close()
    assert ledger.verify() == ()
    with pytest.raises(BudgetExceeded, match="infinite μ²"):
        people.account("client", SIX)
    with pytest.raises(BudgetConflict, match="release\\(s\\) without noise"):
        account.amend(SIX, "make it private after all")


def test_a_non_private_account_without_such_a_release_can_become_private(ledger, releases):
    account = ledger.population("toy").account("record", OPEN)
    assert account.spent_epsilon == 0
    account.amend(SIX, "it was a dry run")
    assert account.remaining == SIX.quanta


def test_a_budget_can_be_given_up_on_record(ledger, account, run, releases):
    releases.make(run, 10)
    account.amend(OPEN, "the data were published")
    releases.make(run, None, step=1)
    assert (account.remaining, account.spent_epsilon) == (None, math.inf)
    assert [claim.non_private for claim in account.statement().claims] == [False, True]
    assert ledger.verify() == ()


def test_an_amended_budget_is_in_force_and_stays_a_claim(ledger, population, account, run, releases):
    releases.make(run, 1000)
    assert account.amend(Budget(8, 1e-5), " ethics board, 2 May ") is account
    assert account.budget == Budget(8, 1e-5)
    assert account.remaining == Budget(8, 1e-5).quanta - 1000
    assert population.account("record", Budget(8, 1e-5)).budget == Budget(8, 1e-5)
    with pytest.raises(BudgetConflict):
        population.account("record", SIX)
    claims = account.statement().claims
    assert [(claim.epsilon, claim.reason, claim.releases_before) for claim in claims] == [
        (6, "opened", 0),
        (8, "ethics board, 2 May", 1),
    ]
    assert ledger.verify() == ()


def test_amending_to_the_budget_in_force_records_nothing(account):
    account.amend(SIX, "again")
    assert len(account.statement().claims) == 1


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_an_amendment_has_a_reason(account, reason):
    with pytest.raises(LedgerError, match="for a reason"):
        account.amend(Budget(8, 1e-5), reason)


def test_a_budget_is_not_lowered_below_what_is_spent_and_set_aside(account, run, releases):
    half, third = SIX.quanta // 2, SIX.quanta // 3
    run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, third + half, 5),)))
    releases.make(run, half)
    with pytest.raises(BudgetConflict, match=r"cannot be lowered to ε = 3 at δ = 1e-05: .* spent and .* set aside"):
        account.amend(Budget(3, 1e-5), "too much")
    assert account.budget == SIX
    run.close()
    account.amend(Budget(5, 1e-5), "the run is over")
    assert account.remaining == Budget(5, 1e-5).quanta - half


def test_history_is_what_touched_the_account(ledger, population, account, run, releases):
    ledger.population("others").account("record", SIX)
    population.account("client", Budget(100, 1e-5))
    releases.make(run, 5)
    account.amend(Budget(8, 1e-5), "more")
    entries = account.history()
    assert [entry.kind for entry in entries] == ["account", "charge", "amend"]
    assert entries[1].body["costs"] == {"record": "5", "client": "500"}
    assert entries[1].at.endswith("+00:00")
    assert [entry.sequence for entry in entries] == sorted(entry.sequence for entry in entries)


def test_accounts_are_listed_from_fine_to_coarse(population):
    for unit in ("client", "user"):
        population.account(unit, SIX)
    assert [str(account.unit) for account in population.accounts()] == ["record", "user", "client"]
    assert repr(population.accounts()[0]) == "Account('digits', unit='record')"


@pytest.mark.parametrize("name", ["", " padded ", "line\nbreak", "x" * 201, 7, None])
def test_names_are_printable(ledger, name):
    with pytest.raises(LedgerError, match="The population is a name of 1 to 200 printable characters"):
        ledger.population(name)
