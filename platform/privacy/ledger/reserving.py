"""Plans: set aside before the first release, so that no other run can exhaust the budget mid-way, and given back."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, func, insert, select, update

from dpray.platform.privacy.ledger import composing, rows, schema
from dpray.platform.privacy.ledger.chain import Transaction
from dpray.platform.privacy.ledger.charging import admit, factor
from dpray.platform.privacy.ledger.composing import Spend, refuse_sampled
from dpray.platform.privacy.ledger.errors import LedgerError, PlanConflict, RunClosed
from dpray.platform.privacy.ledger.plan import Plan, spend_text
from dpray.platform.privacy.ledger.releasing import holders, refuse_without_account
from dpray.platform.privacy.ledger.rows import AccountRow, LineRow, RunRow
from dpray.platform.privacy.mechanisms import Unit


def reserve(transaction: Transaction, population: str, name: str, run: RunRow, plan: Plan) -> None:
    """Set a plan aside on every account (m² times its quanta where the account is coarser), or refuse.

    Errors: BudgetExceeded, PlanConflict, RunClosed, LedgerError; nothing is written then.
    """
    connection, text = transaction.connection, plan.text()
    if run.plan == text:
        return
    if run.plan is not None:
        raise PlanConflict(
            f"Run {name!r} of population {population!r} has a plan ({run.plan}), and another was given ({text}): a run "
            "keeps its plan. Start a run with another name for another plan."
        )
    if run.closed:
        raise RunClosed(f"Run {name!r} of population {population!r} is closed: give a new run another name.")
    release = schema.releases.c
    mine = (release.population == population) & (release.run == name)
    released = connection.execute(select(func.count()).where(mine)).scalar_one()
    if released:
        raise PlanConflict(
            f"Run {name!r} of population {population!r} has charged {released} release(s) already: a plan is set aside "
            "before the first one."
        )
    accounts = rows.accounts(connection, population)
    refuse_without_account(population, accounts)
    for line in plan.releases:
        what = f"The plan of run {name!r} ({line.label}/{line.mechanism})"
        refuse_sampled(population, accounts, what, line.quanta, line.sampling_probability)
    after = {}
    for account in accounts:
        if account.kind == composing.PLD:
            _admit_events(connection, population, account, plan, f"the plan of run {name!r}")
            after[account.unit] = account.reserved + _finite(plan, population, account.unit, run)
            continue
        asked: int | None = 0
        for line in plan.releases:
            each = factor(population, account.unit, line.unit, run.maxima)
            asked = None if asked is None or line.quanta is None else asked + each * line.quanta
        admit(population, account, asked, 0, f"the plan of run {name!r}", holders(connection, population))
        after[account.unit] = account.reserved + _finite(plan, population, account.unit, run)
    _set_aside(transaction, population, after)
    connection.execute(
        insert(schema.lines),
        [
            {
                "population": population,
                "run": name,
                "label": line.label,
                "mechanism": line.mechanism,
                "unit": str(line.unit),
                "quanta": spend_text(line.quanta),
                "sampling": repr(line.sampling_probability),
                "remaining": spend_text(line.quanta),
                "steps": line.steps,
                "left": line.steps,
            }
            for line in plan.releases
        ],
    )
    _update_run(transaction, population, name, plan=text)
    transaction.append("reserve", {"population": population, "run": name, "epoch": run.epoch, "plan": text})


def close(transaction: Transaction, population: str, name: str, run: RunRow) -> None:
    """Finish a run: what its plan has not used is free again."""
    connection = transaction.connection
    mine = tuple(line for line in rows.lines(connection, population) if line.run == name and line.remaining)
    after = {
        account.unit: account.reserved - _weighed(mine, population, account.unit, run)
        for account in rows.accounts(connection, population)
    }
    _set_aside(transaction, population, after)
    line = schema.lines.c
    connection.execute(
        update(schema.lines)
        .where(line.population == population, line.run == name, line.remaining != spend_text(None))
        .values(remaining="0", left=0)
    )
    _update_run(transaction, population, name, state="closed")
    given_back = {str(unit): str(_weighed(mine, population, unit, run)) for unit in after}
    transaction.append("close", {"population": population, "run": name, "epoch": run.epoch, "given_back": given_back})


def _admit_events(connection: Connection, population: str, account: AccountRow, plan: Plan, what: str) -> None:
    spends = composing.charged(connection, population) + composing.planned(connection, population)
    for line in plan.releases:
        if line.quanta is None:
            raise LedgerError(
                f"Population {population!r}, {account.unit} account (pld): {what} has releases without noise, whose ε "
                "is infinite. Nothing was set aside."
            )
        if line.sampling_probability == 1:
            spends.append(Spend(line.unit, line.quanta, 1.0))
        else:
            each = -(-line.quanta // line.steps)
            spends.append(Spend(line.unit, each, line.sampling_probability, line.steps))
    composing.admit(connection, population, account, spends, what, holders(connection, population))


def _finite(plan: Plan, population: str, unit: Unit, run: RunRow) -> int:
    return sum(factor(population, unit, line.unit, run.maxima) * (line.quanta or 0) for line in plan.releases)


def _weighed(lines: Iterable[LineRow], population: str, unit: Unit, run: RunRow) -> int:
    return sum(factor(population, unit, line.unit, run.maxima) * (line.remaining or 0) for line in lines)


def _set_aside(transaction: Transaction, population: str, reserved: dict[Unit, int]) -> None:
    account = schema.accounts.c
    for unit, quanta in reserved.items():
        transaction.connection.execute(
            update(schema.accounts)
            .where(account.population == population, account.unit == str(unit))
            .values(reserved=str(quanta))
        )


def _update_run(transaction: Transaction, population: str, name: str, **cells: str) -> None:
    run = schema.runs.c
    transaction.connection.execute(
        update(schema.runs).where(run.population == population, run.name == name).values(cells)
    )
