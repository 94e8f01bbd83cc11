"""Plans: a run's whole spend is set aside before its first release, on every account, and what is left comes back."""

import math

import pytest

from dpray.platform.privacy.budget import Budget, split
from dpray.platform.privacy.ledger import (
    BudgetExceeded,
    LeaseLost,
    LedgerError,
    Plan,
    PlanConflict,
    PlannedRelease,
    RunClosed,
)
from dpray.platform.privacy.mechanisms import Unit

SIX = Budget(6, 1e-5)


def plan(quanta=1000, steps=10, *, label="training", unit=Unit.RECORD):
    return Plan((PlannedRelease(label, "sum", unit, quanta, steps),))


def test_a_plan_is_set_aside_on_every_account_with_group_privacy(population, account, run):
    client = population.account("client", Budget(60, 1e-5))
    run.reserve(plan())
    assert (account.spent, account.reserved, account.remaining) == (0, 1000, SIX.quanta - 1000)
    assert (client.spent, client.reserved) == (0, 100_000)


def test_charges_use_the_runs_own_reservation_first(account, run, releases):
    run.reserve(plan())
    releases.make(run, 300)
    assert (account.spent, account.reserved, account.remaining) == (300, 700, SIX.quanta - 1000)
    releases.make(run, 800, step=1)  # 100 more than was left of the plan
    assert (account.spent, account.reserved, account.remaining) == (1100, 0, SIX.quanta - 1100)


@pytest.mark.parametrize("steps", [1, 7, 70])
def test_a_whole_budget_planned_and_split_is_spent_to_the_last_quantum(ledger, account, run, releases, steps):
    run.reserve(plan(SIX.quanta, steps))
    for step, quanta in enumerate(split(SIX.quanta, steps)):
        releases.make(run, quanta, step)
    assert (account.spent, account.reserved, account.remaining) == (SIX.quanta, 0, 0)
    run.close()
    assert ledger.verify() == ()


def test_what_one_run_has_set_aside_no_other_can_use(population, account, run, releases):
    run.reserve(plan(SIX.quanta - 10))
    other = population.run("other")
    releases.make(other, 10)
    with pytest.raises(BudgetExceeded, match=r"set aside by plans .* \(runs 'first'\)"):
        releases.make(other, 1, step=1)
    with pytest.raises(BudgetExceeded, match="the plan of run 'third'"):
        population.run("third").reserve(plan(1, 1))
    releases.make(run, SIX.quanta - 10)
    assert account.remaining == 0


def test_one_line_of_a_plan_does_not_use_up_another(account, run, releases):
    lines = (
        PlannedRelease("search", "sum", Unit.RECORD, SIX.quanta // 4, 1),
        PlannedRelease("training", "sum", Unit.RECORD, SIX.quanta - SIX.quanta // 4, 3),
    )
    run.reserve(Plan(lines))
    releases.make(run, SIX.quanta // 4, label="search")
    with pytest.raises(BudgetExceeded):
        releases.make(run, SIX.quanta // 4, step=1, label="search")  # a lost vote, say, asked for again
    releases.make(run, SIX.quanta - SIX.quanta // 4)
    assert account.remaining == 0


def test_a_plan_that_does_not_fit_sets_nothing_aside(population, account, run):
    client = population.account("client", Budget(1, 1e-5))
    with pytest.raises(BudgetExceeded, match="client account: the plan of run 'first' asks for") as caught:
        run.reserve(plan(client.budget.quanta // 50))
    assert caught.value.asked == client.budget.quanta // 50 * 100
    assert (account.reserved, client.reserved) == (0, 0)


def test_the_same_plan_again_changes_nothing_whatever_the_order_of_its_lines(account, run, releases):
    first = PlannedRelease("search", "sum", Unit.CLIENT, 10, 1)
    second = PlannedRelease("training", "sum", Unit.RECORD, 100, 4)
    run.reserve(Plan((first, second)))
    releases.make(run, 25)
    run.reserve(Plan((second, first)))
    assert account.reserved == 85


def test_another_plan_is_refused(account, run):
    run.reserve(plan(1000))
    with pytest.raises(PlanConflict, match="a run keeps its plan"):
        run.reserve(plan(1001))
    assert account.reserved == 1000


def test_a_plan_after_the_first_release_is_refused(account, run, releases):
    releases.make(run)
    with pytest.raises(PlanConflict, match="before the first one"):
        run.reserve(plan())
    assert account.reserved == 0


def test_closing_gives_back_what_was_not_used(population, account, run, releases):
    run.reserve(plan())
    releases.make(run, 300)
    run.close()
    run.close()
    assert (account.spent, account.reserved, run.closed) == (300, 0, True)
    assert account.history()[-1].body["given_back"] == {"record": "700"}
    with pytest.raises(RunClosed, match="is closed"):
        releases.make(run, 1, step=1)
    again = population.run("second")
    again.close()
    with pytest.raises(RunClosed, match="is closed"):
        again.reserve(plan())


def test_a_plan_without_noise_needs_a_non_private_account(ledger, run):
    with pytest.raises(BudgetExceeded, match="infinite μ²"):
        run.reserve(plan(None))
    account = ledger.population("toy").account("record", Budget(math.inf, 1e-5, non_private=True))
    lines = (plan(None, label="search").releases[0], plan(50).releases[0])
    ledger.population("toy").run("a").reserve(Plan(lines))
    assert account.reserved == 50
    assert Plan(lines).quanta is None


def test_an_old_lease_can_neither_plan_nor_close(population, run):
    population.run("first")
    with pytest.raises(LeaseLost):
        run.reserve(plan())
    with pytest.raises(LeaseLost):
        run.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 0}, "steps is at least 1; 0 was given"),
        ({"steps": 2.5}, "steps is a whole number"),
        ({"steps": 2**63}, "steps is at most"),
        ({"quanta": 0}, "quanta is at least 1; 0 was given"),
        ({"quanta": math.inf}, "quanta is a whole number"),
        ({"quanta": 9, "steps": 10}, "10 planned releases .* cannot share 9 quanta"),
        ({"label": ""}, "The label is a name"),
        ({"mechanism": "a\x00b"}, "The mechanism is a name"),
    ],
)
def test_a_planned_release_is_checked(change, sentence):
    cells = {"label": "training", "mechanism": "sum", "unit": "record", "quanta": 100, "steps": 10} | change
    with pytest.raises(LedgerError, match=sentence):
        PlannedRelease(**cells)


def test_a_plan_has_lines_and_each_once():
    line = plan().releases[0]
    with pytest.raises(LedgerError, match="A plan without releases"):
        Plan(())
    with pytest.raises(LedgerError, match=r"names training/sum .* twice"):
        Plan((line, line))
    assert Plan([line]).releases == (line,)
    assert Plan((line, plan(5, 1, label="search").releases[0])).quanta == 1005
