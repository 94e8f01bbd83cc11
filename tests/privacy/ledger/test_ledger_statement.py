"""The statement of an account: this run and everything that led to it, in shares of μ² and in ε."""

import json
import math

import pytest

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, ceil_quanta, split
from dpray.platform.privacy.ledger import ASSUMPTIONS, ReleaseLost

SIX = Budget(6, 1e-5)


@pytest.fixture
def statement(population, account, releases):
    """30 % of μ² on a vote, a fifth of the budget on two of ten rounds, one more of another run."""
    run = population.run("first")
    releases.make(run, SIX.quanta * 3 // 10, label="search", mechanism=releases.client, trust="distributed")
    rounds = split(SIX.quanta // 5, 10)
    for step in range(2):
        releases.make(run, rounds[step], step)
    releases.make(population.run("second"), rounds[0])
    return account.statement


def test_lines_say_what_each_mechanism_of_each_run_cost(statement):
    lines = statement().lines
    assert [(line.run, line.label, line.mechanism, line.unit, line.trust, line.steps) for line in lines] == [
        ("first", "search", "sum", "client", "distributed", 1),
        ("first", "training", "sum", "record", "central", 2),
        ("second", "training", "sum", "record", "central", 1),
    ]
    assert [round(line.amount.share, 6) for line in lines] == [0.3, 0.04, 0.02]
    for line in lines:
        mu = math.sqrt(line.amount.share) * SIX.mu
        assert line.amount.mu == pytest.approx(mu, rel=1e-9)
        assert line.amount.epsilon == pytest.approx(gdp.epsilon(mu, 1e-5), rel=1e-6)


def test_shares_add_up_and_epsilons_do_not(statement):
    whole = statement()
    assert whole.spent.quanta == sum(line.amount.quanta for line in whole.lines)
    assert whole.spent.share == pytest.approx(0.36, abs=1e-6)
    assert whole.spent.share + whole.reserved.share + whole.remaining.share == pytest.approx(1, abs=1e-12)
    assert whole.remaining.quanta == SIX.quanta - whole.spent.quanta
    assert whole.spent.epsilon + whole.remaining.epsilon > 6
    assert whole.remaining.epsilon == pytest.approx(gdp.epsilon(math.sqrt(0.64) * SIX.mu, 1e-5), rel=1e-6)


def test_one_run_is_shown_beside_everything_that_led_to_it(statement):
    second = statement(run="second")
    assert [line.run for line in second.lines] == ["second"]
    assert second.run == "second"
    assert second.run_spent.share == pytest.approx(0.02, abs=1e-6)
    assert second.spent.share == pytest.approx(0.36, abs=1e-6)
    assert statement().run_spent is None
    assert (statement().trust, second.trust) == (("central", "distributed"), ("central",))


def test_a_statement_names_relation_budget_claims_and_assumptions(statement):
    whole = statement()
    assert (whole.population, whole.unit, whole.kind, whole.relation) == ("digits", "record", "gdp", "replace-one")
    assert (whole.epsilon, whole.delta, whole.mu, whole.non_private) == (6, 1e-5, SIX.mu, False)
    assert [(claim.epsilon, claim.reason, claim.releases_before) for claim in whole.claims] == [(6, "opened", 0)]
    assert whole.assumptions == ASSUMPTIONS
    for word in ("Timing", "loss of a process", "Counts", "disjoint", "sampler"):
        assert any(word in text for text in ASSUMPTIONS)


def test_the_assumption_about_the_budget_is_worded_from_the_claims(statement, account, population, releases):
    fixed = ASSUMPTIONS[-1]
    later = population.account("client", Budget(200, 1e-5)).statement()
    assert later.claims[0].releases_before == 4
    assert fixed not in later.assumptions
    assert "NOT fixed before the first release but after 4" in later.assumptions[-1]
    assert "had no budget" in later.assumptions[-1]
    assert statement().assumptions[-1] == fixed
    account.amend(Budget(7, 1e-5), "more people")
    amended = statement().assumptions
    assert fixed not in amended
    assert "after 4" in amended[-1]
    assert "was ε = 6 at δ = 1e-05" in amended[-1]
    assert amended[:-1] == ASSUMPTIONS[:-1]


def test_a_budget_amended_before_any_release_is_fixed_before_the_first(account):
    account.amend(Budget(7, 1e-5), "a typing error")
    assert account.statement().assumptions == ASSUMPTIONS


def test_a_spend_within_the_budget_is_never_told_as_more_than_the_budget(account, run, releases):
    releases.make(run, SIX.quanta)
    assert account.statement().spent.epsilon <= 6


def test_a_statement_is_plain_json(statement, account, population, releases):
    run = population.run("third")

    def lost(attempt):
        raise ReleaseLost("why")

    with pytest.raises(ReleaseLost):
        run.release(releases.key(), {}, releases.record, 5, lost)
    plain = statement(run="third").as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["lines"][0]["lost"] == 1
    assert plain["spent"]["quanta"] == account.spent


def test_coarser_accounts_state_what_they_were_charged(population, releases):
    releases.make(population.run("first"), ceil_quanta(0.01))
    client = population.account("client", SIX)
    assert client.statement().lines[0].amount.quanta == client.spent == 100 * ceil_quanta(0.01)


def test_an_empty_account_has_spent_nothing(account):
    whole = account.statement()
    assert (whole.spent.mu, whole.spent.epsilon, whole.spent.share, whole.lines) == (0, 0, 0, ())
    assert whole.remaining.epsilon == pytest.approx(6, abs=1e-9)


def test_an_exhausted_account_has_nothing_left(account, run, releases):
    releases.make(run, SIX.quanta)
    whole = account.statement()
    assert (whole.remaining.quanta, whole.remaining.mu, whole.remaining.epsilon) == (0, 0, 0)
    assert whole.spent.epsilon == pytest.approx(6, abs=1e-9)


def test_an_account_that_protects_nobody_says_so(ledger, releases):
    people = ledger.population("toy", records_per_client=3)
    account = people.account("record", Budget(math.inf, 1e-5, non_private=True))
    assert account.statement().stamps == ("NOT PRIVATE (no noise)",)
    run = people.run("a")
    releases.make(run, None)
    releases.make(run, 50, step=1)
    whole = account.statement(run="a")
    assert whole.spent.epsilon == whole.run_spent.epsilon == whole.remaining.epsilon == math.inf
    assert math.isnan(whole.remaining.share)
    plain = whole.as_dict()
    assert (plain["epsilon"], plain["spent"]["epsilon"], plain["spent"]["share"]) == ("inf", "inf", "nan")
    assert json.dumps(plain, allow_nan=False)
