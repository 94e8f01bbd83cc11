"""Accounts of kind pld: releases are events, their composed ε is held below the budget, and kinds do not mix."""

import math
import re
from dataclasses import dataclass

import pytest

from dpray.platform.privacy import gdp, pld
from dpray.platform.privacy.budget import Budget, ceil_quanta, split
from dpray.platform.privacy.ledger import (
    BudgetConflict,
    BudgetExceeded,
    KeyConflict,
    LedgerError,
    Plan,
    PlanConflict,
    PlannedRelease,
    ReleaseLost,
)
from dpray.platform.privacy.mechanisms import ClippedSum, Unit
from dpray.platform.privacy.pld import Gaussian, PoissonGaussian, PoissonSampled

TWO = Budget(2, 1e-5)
UNIT_MU = ceil_quanta(1.0)
Q = 0.05


def sampled(probability=Q, unit=Unit.RECORD):
    return PoissonSampled(ClippedSum(1.0, unit, 4, 100), probability)


@pytest.fixture
def people(ledger):
    """Records in clients of at most 10, with a record-level account of ε = 2 at δ = 1e-5, of kind pld."""
    population = ledger.population("ward", records_per_client=10)
    population.account("record", TWO, kind="pld")
    return population


@pytest.fixture
def account(people):
    return people.account("record")


@pytest.fixture
def run(people):
    return people.run("first")


def plan(steps, quanta=UNIT_MU, probability=Q, unit=Unit.RECORD):
    return Plan((PlannedRelease("training", "sum", unit, quanta * steps, steps, probability),))


def eps(*events):
    return pld.epsilon(events, 1e-5)


def close_to(value):
    return pytest.approx(value, rel=1e-6)


def test_an_unsampled_release_is_charged_as_a_gaussian(ledger, account, run, releases):
    releases.make(run, ceil_quanta(0.3))
    assert account.kind == "pld"
    assert gdp.epsilon(0.3, 1e-5) <= account.spent_epsilon <= gdp.epsilon(0.3, 1e-5) * 1.001
    assert account.spent_epsilon == close_to(eps(Gaussian(1 / 0.3)))
    (charge,) = (entry for entry in account.history() if entry.kind == "charge")
    assert pld.from_json(charge.body["event"]).noise_multiplier == pytest.approx(1 / 0.3, rel=1e-15)
    assert ledger.verify() == ()


def test_sampled_releases_are_charged_as_what_they_compose_to(ledger, account, run, releases):
    for step in range(5):
        releases.make(run, UNIT_MU, step, mechanism=sampled())
    releases.make(run, ceil_quanta(0.2), label="search")
    assert account.spent_epsilon == close_to(eps(PoissonGaussian(1.0, Q, 5), Gaussian(5.0)))
    assert account.spent_epsilon < gdp.epsilon(math.sqrt(5.04), 1e-5) / 3
    charges = [entry for entry in account.history() if entry.kind == "charge"]
    assert isinstance(pld.from_json(charges[0].body["event"]), PoissonGaussian)
    assert charges[0].body["parameters"]["sampling"] == Q
    assert ledger.verify() == ()


def test_a_release_over_the_composed_budget_is_refused_with_both_numbers_and_costs_nothing(
    ledger, account, run, releases
):
    releases.make(run, UNIT_MU, mechanism=sampled())
    before, head = account.spent_epsilon, ledger.head()
    with pytest.raises(BudgetExceeded, match=r"take it to ε = 4\.3.* the budget is ε = 2\. Spent is ε = ") as caught:
        releases.make(run, UNIT_MU, step=1)
    assert (caught.value.population, caught.value.unit) == ("ward", "record")
    assert (account.spent_epsilon, ledger.head()) == (before, head)
    releases.make(run, UNIT_MU, step=1, mechanism=sampled())


def test_one_refusing_account_stops_the_charge_of_all(ledger, people, account, run, releases):
    client = people.account("client", Budget(0.5, 1e-5), kind="pld")
    with pytest.raises(BudgetExceeded, match="client account"):
        releases.make(run, ceil_quanta(0.1))  # group privacy: 10 × 0.1
    assert account.spent_epsilon == client.spent_epsilon == 0
    releases.make(run, ceil_quanta(0.01))
    assert client.spent_epsilon == close_to(eps(Gaussian(10.0)))
    assert account.spent_epsilon == close_to(eps(Gaussian(100.0)))
    assert ledger.verify() == ()


def test_a_sampled_release_has_no_price_for_groups(people, account, run, releases):
    people.account("client", TWO, kind="pld")
    for ask in (lambda: releases.make(run, 1000, mechanism=sampled()), lambda: run.reserve(plan(5))):
        with pytest.raises(LedgerError, match="no finite μ, so that its cost to groups is not known"):
            ask()
    assert account.spent_epsilon == 0


def test_a_sampled_release_of_whole_clients_costs_records_the_same(people, account, releases):
    client = people.account("client", TWO, kind="pld")
    releases.make(people.run("a"), UNIT_MU, mechanism=sampled(unit=Unit.CLIENT))
    assert client.spent_epsilon == account.spent_epsilon == close_to(eps(PoissonGaussian(1.0, Q)))


def test_groups_of_one_are_no_groups(ledger, releases):
    people = ledger.population("singles", records_per_client=1)
    account = people.account("client", TWO, kind="pld")
    releases.make(people.run("a"), UNIT_MU, mechanism=sampled())
    assert account.spent_epsilon == close_to(eps(PoissonGaussian(1.0, Q)))


def test_a_sampled_release_is_refused_where_accounts_are_gdp(ledger, population, run, releases):
    digits = population.run("gdp")
    with pytest.raises(LedgerError, match=r"Release training/sum step 0 .* sampled with probability 0\.05 .* 'gdp'"):
        releases.make(digits, 1000, mechanism=sampled())
    with pytest.raises(LedgerError, match=r"plan of run 'gdp' \(training/sum\) is sampled"):
        digits.reserve(plan(5))
    assert population.account("record").spent == 0
    releases.make(digits, 1000, mechanism=sampled(1.0))


def test_a_release_without_noise_is_refused_where_accounts_are_pld(account, run, releases):
    with pytest.raises(LedgerError, match=r"\(pld\): release .* has no noise"):
        releases.make(run, None)
    with pytest.raises(LedgerError, match=r"\(pld\): the plan of run 'first' has releases without noise"):
        run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, None, 5),)))
    assert account.spent_epsilon == 0


def test_kinds_do_not_mix_on_one_population(population, people):
    for place, kind, other in ((population, "gdp", "pld"), (people, "pld", "gdp")):
        for unit in ("record", "client"):
            with pytest.raises(LedgerError, match=f"of kind '{kind}', and '{other}' was asked for"):
                place.account(unit, TWO, kind=other)
        with pytest.raises(LedgerError, match=f"of kind '{kind}', and '{other}'"):
            place.account("record", kind=other)
        assert place.account("record", kind=kind).kind == place.account("record").kind == kind
    with pytest.raises(LedgerError, match="of kind 'pld', and 'gdp' was asked for"):
        people.account("record", TWO)  # whoever names a budget and no kind means gdp
    with pytest.raises(BudgetConflict):
        people.account("record", Budget(3, 1e-5), kind="pld")
    assert people.account("record", TWO, kind="pld").budget == TWO


@pytest.mark.parametrize(
    ("budget", "words"),
    [(Budget(2, 1e-10), "δ of at least 1e-09"), (Budget(math.inf, 1e-5, non_private=True), "open it as kind 'gdp'")],
)
def test_budgets_that_cannot_be_composed_are_refused(ledger, people, budget, words):
    with pytest.raises(LedgerError, match=words):
        ledger.population("other").account("record", budget, kind="pld")
    with pytest.raises(LedgerError, match=words):
        people.account("record").amend(budget, "why not")


def test_a_later_account_is_charged_the_past_and_the_plans(ledger, people, run, releases):
    run.reserve(plan(10, unit=Unit.CLIENT))
    releases.make(run, UNIT_MU, mechanism=sampled(unit=Unit.CLIENT))
    with pytest.raises(BudgetExceeded, match=r"released and planned so far.*set aside by plans"):
        people.account("client", Budget(eps(PoissonGaussian(1.0, Q, 10)) * 0.99, 1e-5), kind="pld")
    client = people.account("client", TWO, kind="pld")
    assert client.spent_epsilon == close_to(eps(PoissonGaussian(1.0, Q)))
    assert ledger.verify() == ()


def test_a_plan_is_composed_and_what_it_set_aside_no_other_run_can_use(ledger, people, account, run, releases):
    run.reserve(plan(60))
    run.reserve(plan(60))
    assert account.spent_epsilon == 0
    with pytest.raises(PlanConflict):
        run.reserve(plan(60, probability=0.04))
    other = people.run("other")
    with pytest.raises(BudgetExceeded, match=r"the plan of run 'other' .*\(runs 'first'\)"):
        other.reserve(plan(60))
    with pytest.raises(BudgetExceeded):
        releases.make(other, ceil_quanta(0.45))
    run.close()
    other.reserve(plan(60))
    assert ledger.verify() == ()


def test_a_plan_that_fits_exactly_is_spent_to_its_last_step(ledger, releases):
    total, steps = 12 * UNIT_MU + 7, 12
    each = -(-total // steps)
    budget = Budget(eps(PoissonGaussian(math.nextafter(1 / math.sqrt((each + 2**30) / 2**60), 0), Q, steps)), 1e-5)
    people = ledger.population("exact")
    account = people.account("record", budget, kind="pld")
    run = people.run("a")
    run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, total, steps, Q),)))
    for step, quanta in enumerate(split(total, steps)):
        releases.make(run, quanta, step, mechanism=sampled())
    assert budget.epsilon * 0.999 < account.spent_epsilon <= budget.epsilon
    with pytest.raises(BudgetExceeded):
        releases.make(run, UNIT_MU, steps, mechanism=sampled())
    run.close()
    assert ledger.verify() == ()


def test_planned_charges_are_not_composed_again(run, releases, monkeypatch):
    run.reserve(Plan((*plan(10).releases, PlannedRelease("search", "sum", Unit.RECORD, ceil_quanta(0.1), 1))))
    monkeypatch.setattr(pld, "epsilon", None)
    for step in range(10):
        releases.make(run, UNIT_MU, step, mechanism=sampled())
    releases.make(run, ceil_quanta(0.1), label="search")
    with pytest.raises(TypeError):  # the plan is used up
        releases.make(run, UNIT_MU, 10, mechanism=sampled())


@pytest.mark.parametrize(
    ("mechanism", "quanta"), [(sampled(0.06), UNIT_MU), (sampled(), 2 * UNIT_MU), (sampled(1.0), UNIT_MU // 9)]
)
def test_a_release_other_than_planned_has_to_fit_beside_the_plan(ledger, account, run, releases, mechanism, quanta):
    run.reserve(plan(10))
    releases.make(run, quanta, mechanism=mechanism)
    multiplier = 1 / math.sqrt(quanta / 2**60)
    assert account.spent_epsilon == close_to(eps(PoissonGaussian(multiplier, mechanism.sampling_probability)))
    assert ledger.verify() == ()
    for step in range(1, 10):
        releases.make(run, UNIT_MU, step, mechanism=sampled())
    run.close()
    assert ledger.verify() == ()


def test_a_plan_whose_steps_are_used_up_sets_nothing_aside(ledger, people, run, releases):
    run.reserve(plan(2))
    for step in range(2):
        releases.make(run, UNIT_MU // 2, step, mechanism=sampled())
    assert people.account("record").statement().reserved.epsilon == 0
    assert ledger.verify() == ()


def test_a_key_is_charged_once_and_keeps_its_sampling(ledger, account, run, releases):
    first = releases.make(run, UNIT_MU, mechanism=sampled())
    spent = account.spent_epsilon
    again = releases.make(run, UNIT_MU, mechanism=sampled())
    assert (first.first, again.first) == (True, False)
    with pytest.raises(KeyConflict):
        releases.make(run, UNIT_MU, mechanism=sampled(0.06))
    assert account.spent_epsilon == spent
    run.lose(releases.charge(run, UNIT_MU, 1, mechanism=sampled()), "gone")
    assert account.spent_epsilon == close_to(eps(PoissonGaussian(1.0, Q, 2)))
    with pytest.raises(ReleaseLost):
        releases.make(run, UNIT_MU, 1, mechanism=sampled())


def test_participants_of_a_client_sample_are_not_committed_to(people, run, releases):
    attempt = releases.charge(run, UNIT_MU, mechanism=sampled(unit=Unit.CLIENT))
    with pytest.raises(LedgerError, match="its participants are its sample, which has to stay secret"):
        attempt.commit({"a", "b"})
    attempt.commit({"a", "b"}, sample_inside=True)  # each has drawn its own place in the sample
    releases.charge(run, UNIT_MU, 1, mechanism=sampled()).commit({"a", "b"})  # records are sampled inside clients


def test_what_is_left_of_a_pld_account_is_no_number(account):
    with pytest.raises(LedgerError, match="leave no μ² to subtract"):
        _ = account.remaining
    assert math.isnan(account.remaining_epsilon)


def test_amending_composes_at_the_new_delta(ledger, account, run, releases):
    releases.make(run, UNIT_MU, mechanism=sampled())
    spent = account.spent_epsilon
    with pytest.raises(BudgetConflict, match="composes to ε = ") as caught:
        account.amend(Budget(spent * 0.9, 1e-5), "less")
    told = float(re.search(r"composes to ε = ([\d.]+)", str(caught.value)).group(1))
    assert spent <= told <= spent * (1 + 1e-5)  # six digits, rounded up
    with pytest.raises(BudgetConflict):
        account.amend(Budget(spent, 1e-6), "stricter")
    account.amend(Budget(spent * 1.01, 1e-5), "just enough")
    account.amend(Budget(6, 1e-5), "more")
    assert ledger.verify() == ()


def test_a_statement_shows_epsilon_and_no_shares(people, account, run, releases):
    run.reserve(plan(4))
    for step in range(3):
        releases.make(run, UNIT_MU, step, mechanism=sampled())
    releases.make(people.run("other"), ceil_quanta(0.2))
    whole = account.statement("first")
    assert (whole.kind, whole.relation, whole.epsilon, whole.delta) == ("pld", "replace-one", 2, 1e-5)
    (line,) = whole.lines
    assert (line.steps, line.sampling_probability) == (3, Q)
    assert line.amount.epsilon == whole.run_spent.epsilon == close_to(eps(PoissonGaussian(1.0, Q, 3)))
    assert whole.spent.epsilon == account.spent_epsilon == close_to(eps(PoissonGaussian(1.0, Q, 3), Gaussian(5.0)))
    assert whole.reserved.epsilon == close_to(eps(PoissonGaussian(1.0, Q)))
    amounts = [line.amount, whole.spent, whole.reserved, whole.remaining, whole.run_spent]
    assert all(math.isnan(amount.share) and math.isnan(amount.mu) for amount in amounts)
    assert math.isnan(whole.mu)
    assert any("drawn afresh and kept secret" in text for text in whole.assumptions)
    assert whole.as_dict()["spent"]["share"] == "nan"
    assert [line.run for line in account.statement().lines] == ["first", "other"]


def test_a_mixed_statement_keeps_sampled_and_unsampled_steps_apart(account, run, releases):
    releases.make(run, UNIT_MU, mechanism=sampled())
    releases.make(run, ceil_quanta(0.1), step=1)
    assert sorted(line.sampling_probability for line in account.statement().lines) == [Q, 1.0]


@dataclass(frozen=True)
class Odd:
    unit = Unit.RECORD
    sampling_probability: float

    def describe(self):
        return {"mechanism": "odd"}


@pytest.mark.parametrize("probability", [0, 1.5, math.nan, "half"])
def test_a_sampling_probability_is_checked(run, releases, probability):
    with pytest.raises(LedgerError, match="sampling_probability"):
        releases.make(run, 1000, mechanism=Odd(probability))
    with pytest.raises(LedgerError, match="sampling_probability"):
        plan(5, probability=probability)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE releases SET sampling = '0.001'",
        "UPDATE lines SET sampling = '0.001'",
        'UPDATE lines SET "left" = 9',
        "UPDATE accounts SET kind = 'gdp'",
        "UPDATE accounts SET epsilon = '7.0'",
    ],
)
def test_a_changed_row_of_a_pld_account_is_found(place, ledger, run, releases, change):
    run.reserve(plan(3))
    releases.make(run, UNIT_MU, mechanism=sampled())
    assert ledger.verify() == ()
    place.sql(change)
    assert ledger.verify()


def test_a_forged_chain_that_overspends_does_not_verify(ledger, people, run, releases, monkeypatch):
    from dpray.platform.privacy.ledger import composing

    with monkeypatch.context() as patched:
        patched.setattr(composing, "admit", lambda *arguments: None)
        releases.make(run, UNIT_MU)
    (problem,) = ledger.verify()
    assert "over its budget: ε = 4.3" in problem


def test_forged_kinds_and_events_do_not_verify(ledger, population, people, run, releases, monkeypatch):
    from dpray.platform.privacy.ledger import composing, releasing

    with monkeypatch.context() as patched:
        patched.setattr(releasing, "refuse_sampled", lambda *arguments: None)
        releases.make(population.run("forged"), 1000, mechanism=sampled())
        patched.setattr(type(people), "_refuse_other_kind", lambda *arguments: None)
        people.account("client", TWO)
        patched.setattr(composing, "recorded", lambda *arguments: {"event": "gaussian"})
        releases.make(run, 1000)
    found = " ".join(ledger.verify())
    assert "takes a sampled release to accounts of kind 'gdp'" in found
    assert "opens an account of kind 'gdp' where it cannot be one" in found
    assert "is charged as another event" in found
