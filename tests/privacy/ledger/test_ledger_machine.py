"""The ledger against a simple model, in any order of plans, charges, crashes, retries, zombies, amendments and ends.

The model is a few dictionaries of integers. Whatever the order: what the ledger has charged is what the model says, no
budget is ever exceeded, no key hands out two values, everything handed out was charged before, and the ledger verifies.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import (
    BudgetConflict,
    BudgetExceeded,
    KeyConflict,
    LeaseLost,
    LedgerError,
    ParticipantsChanged,
    Plan,
    PlanConflict,
    PlannedRelease,
    Release,
    ReleaseKey,
    ReleaseLost,
    RunClosed,
)
from dpray.platform.privacy.mechanisms import Unit

M = 2
BUDGETS = {"record": Budget(2, 1e-5), "client": Budget(5, 1e-5)}
PART = BUDGETS["record"].quanta // 9 + 1  # nine do not fit into the smaller budget
RUNS, LABELS = ("a", "b"), ("search", "training")
UNITS = (Unit.RECORD, Unit.CLIENT)
ZOMBIE = st.sampled_from([False, False, False, True])
LINES = st.lists(
    st.tuples(st.sampled_from(LABELS), st.sampled_from(UNITS), st.integers(1, 5)),
    min_size=1,
    max_size=3,
    unique_by=lambda line: line[:2],
)


@dataclass
class ModelRun:
    epoch: int = 0
    plan: tuple | None = None
    closed: bool = False
    left: dict = field(default_factory=dict)  # (label, unit) -> quanta


@dataclass
class ModelRelease:
    unit: Unit
    quanta: int
    value: float | None = None
    lost: bool = False
    members: frozenset | None = None


def weight(account, unit):
    return M * M if account == "client" and unit is Unit.RECORD else 1


class Machine(RuleBasedStateMachine):
    attempts = Bundle("attempts")

    def __init__(self, new_place, constants):
        super().__init__()
        self.place, self.constants = new_place(), constants
        self.runs = {name: ModelRun() for name in RUNS}
        self.releases = {}
        self.limits = {"record": BUDGETS["record"].quanta}
        self.held = {}
        self.draws = 0

    @initialize(parts=LINES)
    def begin(self, parts):
        self.ledger = self.place.open()
        self.population = self.ledger.population("people", records_per_client=M)
        self.population.account("record", BUDGETS["record"])
        for name in RUNS:
            self.open(name)
        self.reserve("a", False, parts)

    @rule(name=st.sampled_from(RUNS))
    def open(self, name):
        """Also what a restart after a crash does: the old holder is left behind as a zombie."""
        run = self.population.run(name)
        self.runs[name].epoch += 1
        assert run.epoch == self.runs[name].epoch
        self.held.setdefault(name, []).append(run)

    @rule()
    def restart(self):
        """Everything in memory is gone."""
        self.ledger = self.place.open()
        self.population = self.ledger.population("people")

    @precondition(lambda self: "client" not in self.limits)
    @rule()
    def open_client_account(self):
        spent, reserved = self.spent("client"), self.reserved("client")
        fits = spent + reserved <= BUDGETS["client"].quanta
        self.expect(None if fits else BudgetExceeded, lambda: self.population.account("client", BUDGETS["client"]))
        if fits:
            self.limits["client"] = BUDGETS["client"].quanta

    @rule(name=st.sampled_from(RUNS), zombie=ZOMBIE, parts=LINES)
    def reserve(self, name, zombie, parts):
        run, model = self.holder(name, zombie), self.runs[name]
        lines = tuple(sorted((label, str(unit), part * PART) for label, unit, part in parts))
        plan = Plan(tuple(PlannedRelease(label, "sum", Unit(unit), quanta, 1) for label, unit, quanta in lines))
        asked = {
            account: sum(weight(account, Unit(unit)) * quanta for _, unit, quanta in lines) for account in self.limits
        }
        if run.epoch != model.epoch:
            expected = LeaseLost
        elif model.plan is not None:
            expected = None if model.plan == lines else PlanConflict
        elif model.closed:
            expected = RunClosed
        elif any(key[0] == name for key in self.releases):
            expected = PlanConflict
        elif any(asked[account] > self.free(account) for account in self.limits):
            expected = BudgetExceeded
        else:
            expected = None
            model.plan = lines
            model.left = {(label, Unit(unit)): quanta for label, unit, quanta in lines}
        self.expect(expected, lambda: run.reserve(plan))

    @rule(
        target=attempts,
        name=st.sampled_from(RUNS),
        zombie=ZOMBIE,
        label=st.sampled_from(LABELS),
        unit=st.sampled_from(UNITS),
        step=st.integers(0, 2),
        part=st.integers(1, 4),
    )
    def charge(self, name, zombie, label, unit, step, part):
        run, model, quanta = self.holder(name, zombie), self.runs[name], part * PART
        key, known = (name, label, step), self.releases.get((name, label, step))
        own = min(model.left.get((label, unit), 0), quanta)
        if run.epoch != model.epoch:
            expected = LeaseLost
        elif known is not None:
            if (known.unit, known.quanta) != (unit, quanta):
                expected = KeyConflict
            elif known.value is not None:
                expected = None
            else:
                expected = ReleaseLost if known.lost else RunClosed if model.closed else None
        elif model.closed:
            expected = RunClosed
        elif any(weight(account, unit) * (quanta - own) > self.free(account) for account in self.limits):
            expected = BudgetExceeded
        else:
            expected = None
            self.releases[key] = ModelRelease(unit, quanta)
            if own:
                model.left[label, unit] -= own
        charged = self.expect(
            expected,
            lambda: run.charge(ReleaseKey(label, "sum", step), {"step": step}, self.constants(unit), quanta),
        )
        if isinstance(charged, Release):
            assert charged.value.item() == self.releases[key].value
            return None
        if charged is not None:
            assert charged.participants == self.releases[key].members
        return None if charged is None else (run, charged, key)

    @precondition(lambda self: any(model.left for model in self.runs.values()))
    @rule(target=attempts, data=st.data(), step=st.integers(0, 2), part=st.integers(1, 3))
    def charge_as_planned(self, data, step, part):
        lines = sorted((name, *line) for name, model in self.runs.items() for line in model.left)
        name, label, unit = data.draw(st.sampled_from(lines))
        return self.charge(name, False, label, unit, step, part)

    @rule(attempt=attempts, members=st.sampled_from([frozenset("xy"), frozenset("xyz")]))
    def commit(self, attempt, members):
        if attempt is None:
            return
        run, charged, key = attempt
        model, release = self.runs[key[0]], self.releases[key]
        if run.epoch != model.epoch:
            expected = LeaseLost
        elif release.lost:
            expected = ReleaseLost
        elif release.members is not None:
            expected = None if release.members == members else ParticipantsChanged
        elif model.closed:
            expected = RunClosed
        elif release.value is not None:
            expected = LedgerError
        else:
            expected = None
            release.members = members
        self.expect(expected, lambda: charged.commit(members))

    @rule(attempt=attempts)
    def store(self, attempt):
        """By whoever was charged, a zombie too, with a value nobody else drew."""
        if attempt is None:
            return
        run, charged, key = attempt
        release = self.releases[key]
        self.draws += 1
        if release.value is not None:
            expected = None
        elif release.lost:
            expected = ReleaseLost
        else:
            expected = RunClosed if self.runs[key[0]].closed else None
        stored = self.expect(expected, lambda: run.store(charged, np.array([float(self.draws)])))
        if stored is not None:
            assert stored.first == (release.value is None)
            if release.value is None:
                release.value = float(self.draws)
            assert stored.value.item() == release.value

    @rule(attempt=attempts)
    def lose(self, attempt):
        if attempt is None:
            return
        run, charged, key = attempt
        release = self.releases[key]
        if release.value is None and run.epoch != self.runs[key[0]].epoch:
            self.expect(LeaseLost, lambda: run.lose(charged, "gone"))
            return
        kept = self.expect(None, lambda: run.lose(charged, "gone"))
        assert (kept is not None) == (release.value is not None)
        release.lost = release.value is None

    @rule(name=st.sampled_from(RUNS), zombie=ZOMBIE)
    def close(self, name, zombie):
        run, model = self.holder(name, zombie), self.runs[name]
        self.expect(LeaseLost if run.epoch != model.epoch else None, run.close)
        if run.epoch == model.epoch:
            model.closed, model.left = True, {}

    @rule(account=st.sampled_from(["record", "client"]), epsilon=st.sampled_from([0.5, 1.0, 2.5, 4.0, 6.0]))
    def amend(self, account, epsilon):
        if account not in self.limits:
            return
        budget = Budget(epsilon, 1e-5)
        fits = self.spent(account) + self.reserved(account) <= budget.quanta
        self.expect(
            None if fits else BudgetConflict, lambda: self.population.account(account).amend(budget, "so they decided")
        )
        if fits:
            self.limits[account] = budget.quanta

    @invariant()
    def the_ledger_says_what_the_model_says(self):
        if not hasattr(self, "population"):
            return
        for name in self.limits:
            account = self.population.account(name)
            assert (account.spent, account.reserved) == (self.spent(name), self.reserved(name))
            assert account.spent + account.reserved <= account.budget.quanta == self.limits[name]
            assert account.remaining == self.free(name)
        for (run, label, step), release in self.releases.items():
            stored = self.held[run][-1].stored(ReleaseKey(label, "sum", step))
            assert (None if stored is None else stored.item()) == release.value

    def teardown(self):
        if hasattr(self, "ledger"):
            assert self.ledger.verify([self.ledger.head()]) == ()
        self.place.close()

    def holder(self, name, zombie):
        return self.held[name][0 if zombie else -1]

    def spent(self, account):
        return sum(weight(account, release.unit) * release.quanta for release in self.releases.values())

    def reserved(self, account):
        left = [line for model in self.runs.values() for line in model.left.items()]
        return sum(weight(account, unit) * quanta for (_, unit), quanta in left)

    def free(self, account):
        return self.limits[account] - self.spent(account) - self.reserved(account)

    def expect(self, error, call):
        if error is None:
            return call()
        with pytest.raises(LedgerError) as raised:
            call()
        assert type(raised.value) is error
        return None


def explore(new_place, releases, examples, **options):
    constants = {Unit.RECORD: releases.record, Unit.CLIENT: releases.client}.__getitem__
    run_machine(
        lambda: Machine(new_place, constants),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


def test_any_order_of_everything(new_place, releases, request):
    explore(new_place, releases, 5 if "postgresql" in request.node.name else 20)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_any_order_of_everything_at_length(new_place, releases, request):
    explore(new_place, releases, 100 if "postgresql" in request.node.name else 500)


SABOTAGE = {
    "charges are not refused": ("releasing.admit", lambda *_: None),
    "plans are not refused": ("reserving.admit", lambda *_: None),
    "charges leave the reservation": ("releasing.set_aside", lambda *_: 0),
    "coarser accounts pay once": ("releasing.factor", lambda *_: 1),
    "an old lease is not noticed": ("run.Run._stale", lambda *_: RunClosed("")),
}


@pytest.mark.parametrize("new_place", ["sqlite"], indirect=True)
@pytest.mark.parametrize("fault", SABOTAGE)
def test_negative_control_the_model_notices_a_faulty_ledger(new_place, releases, request, monkeypatch, fault):
    where, instead = SABOTAGE[fault]
    monkeypatch.setattr(f"dpray.platform.privacy.ledger.{where}", instead)
    with pytest.raises(Exception, match=r"."):  # AssertionError, or a group of them
        explore(new_place, releases, 30, phases=[Phase.generate], derandomize=True)
