"""What an account says to a reader: budget, spends by run and mechanism, what is left, and on which assumptions.

ε does not add up: every amount is shown as a share of the budget's μ² (which does) and as the ε it amounts to alone.
Spends are rounded up, what is left is rounded down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import part_of, remaining_epsilon, to_mu, upper_mu
from dpray.platform.privacy.figures import significant
from dpray.platform.privacy.ledger import composing, rows, schema
from dpray.platform.privacy.ledger.charging import factor
from dpray.platform.privacy.ledger.composing import Spend
from dpray.platform.privacy.ledger.plan import spend_of
from dpray.platform.privacy.mechanisms import Unit

RELATION = "replace-one"
NOT_PRIVATE = "NOT PRIVATE (no noise)"
ASSUMPTIONS = (
    "Timing is out of scope: how long things take, and how often they are retried, is visible.",
    "The loss of a process, host or network is independent of the data.",
    "Counts (users, clients, records per client), feature widths and the set of classes are public by declaration.",
    "How the data came to be split among clients is given, not protected.",
    "Populations are disjoint people.",
    "The float64 normal sampler is ideal.",
    "The budget was fixed before the first release; a budget amended later is a new claim, listed as such.",
)
"""Of an account of kind `gdp` whose every claim was made before the first release; the last one depends on that."""


COMPOSED = (
    "Noise and sampling probabilities of sampled releases were fixed before the first release (a plan); samples were "
    "drawn afresh and kept secret."
)
"""Further assumption of an account of kind `pld`."""


@dataclass(frozen=True)
class Amount:
    """An amount of μ², or of events.

    Attributes:
        quanta: in 2⁻⁶⁰; None: infinite. On an account of kind `pld`: of the releases without their sampling.
        mu: its square root. epsilon: ε at the account's δ of this amount alone.
        share: of the budget's μ²; NaN where the budget is infinite.

    Events of an account of kind `pld` have no μ and no share: NaN. Nor can what is left of such an account be told:
    `remaining` is NaN throughout.
    """

    quanta: int | None
    mu: float
    epsilon: float
    share: float


@dataclass(frozen=True)
class Line:
    """All releases of one (run, label, mechanism, trust mode): how many, how many of them lost, and what they cost.

    `sampling_probability` is below 1 for Poisson-sampled releases.
    """

    run: str
    label: str
    mechanism: str
    unit: str
    trust: str
    steps: int
    lost: int
    amount: Amount
    sampling_probability: float = 1.0


@dataclass(frozen=True)
class Claim:
    """A budget the account has had: since which entry, after how many releases, and why."""

    epsilon: float
    delta: float
    non_private: bool
    reason: str
    releases_before: int
    sequence: int


@dataclass(frozen=True)
class Statement:
    """The statement of one account. `run` and `run_spent` are set when it was asked for one run: `lines` are then that
    run's, while `spent`, `reserved` and `remaining` are always the account's: everything that led here."""

    population: str
    unit: str
    kind: str
    relation: str
    epsilon: float
    delta: float
    mu: float
    non_private: bool
    spent: Amount
    reserved: Amount
    remaining: Amount
    run: str | None
    run_spent: Amount | None
    lines: tuple[Line, ...]
    trust: tuple[str, ...]
    stamps: tuple[str, ...]
    claims: tuple[Claim, ...]
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; infinities and NaN as the text `inf` and `nan`."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain


@dataclass(frozen=True)
class _Scale:
    """The account's δ and limit, against which amounts are shown, and how its events compose."""

    account: rows.AccountRow
    population: str
    maxima: rows.Maxima

    @property
    def delta(self) -> float:
        return self.account.budget.delta

    @property
    def limit(self) -> int | None:
        return self.account.limit

    def of(self, spends: Sequence[Spend], noiseless: int = 0) -> Amount:
        """The amount of some releases, `noiseless` of which are without noise."""
        if noiseless:
            return self.amount(None)
        unit = self.account.unit
        quanta = sum(
            factor(self.population, unit, each.unit, self.maxima) * each.quanta * each.count for each in spends
        )
        if self.account.kind != composing.PLD:
            return self.amount(quanta)
        epsilon = composing.epsilon(self.population, unit, self.delta, self.maxima, spends)
        return Amount(quanta, math.nan, epsilon, math.nan)

    def amount(self, quanta: int | None) -> Amount:
        if quanta is None:
            return Amount(None, math.inf, math.inf, math.nan if self.limit is None else math.inf)
        mu = upper_mu(quanta)
        epsilon = gdp.epsilon(mu, self.delta)
        if self.limit is not None and quanta <= self.limit:
            epsilon = min(epsilon, self.account.budget.epsilon)  # the limit is rounded down, so this holds exactly
        return Amount(quanta, mu, epsilon, math.nan if self.limit is None else part_of(quanta, self.limit))


@dataclass
class _Group:
    """Releases of one line."""

    steps: int = 0
    lost: int = 0
    noiseless: int = 0
    spends: list[Spend] = field(default_factory=list)


def draw_up(connection: Connection, population: str, unit: Unit, run: str | None) -> Statement:
    """The statement of an account as the ledger stands.

    Errors: LedgerError for a run the population does not have.
    """
    if run is not None:
        rows.run(connection, population, run)
    account = next(row for row in rows.accounts(connection, population) if row.unit is unit)
    scale = _Scale(account, population, rows.maxima(connection, population))
    composed = account.kind == composing.PLD
    claims = _claims(connection, population, unit)
    query = _charged(population, run)
    lines, total, noiseless = [], list[Spend](), 0
    trusts: set[str] = set()
    stamps: set[str] = set()
    grouped: dict[tuple[str, ...], _Group] = {}
    for row in connection.execute(query):
        key = (row.run, row.label, row.mechanism, row.unit, row.trust, row.sampling)
        group = grouped.setdefault(key, _Group())
        each, count = spend_of(row.quanta), row.number
        group.steps += count
        group.lost += count if row.state == "lost" else 0
        if each is None:
            group.noiseless += count
        else:
            group.spends.append(Spend(Unit(row.unit), each, float(row.sampling), count))
        trusts.add(row.trust)
        stamps.update(json.loads(row.stamps))
    for (name, label, mechanism, of, trust, sampling), group in sorted(grouped.items()):
        amount = scale.of(group.spends, group.noiseless)
        lines.append(Line(name, label, mechanism, of, trust, group.steps, group.lost, amount, float(sampling)))
        total, noiseless = total + group.spends, noiseless + group.noiseless
    if account.unbounded or account.budget.non_private:
        stamps.add(NOT_PRIVATE)
    return Statement(
        population=population,
        unit=str(unit),
        kind=account.kind,
        relation=RELATION,
        epsilon=account.budget.epsilon,
        delta=account.budget.delta,
        mu=math.nan if composed else math.inf if account.limit is None else to_mu(account.limit),
        non_private=account.budget.non_private,
        spent=scale.of(composing.charged(connection, population))
        if composed
        else scale.amount(None if account.unbounded else account.spent),
        reserved=scale.of(composing.planned(connection, population)) if composed else scale.amount(account.reserved),
        remaining=_remaining(account),
        run=run,
        run_spent=None if run is None else scale.of(total, noiseless),
        lines=tuple(lines),
        trust=tuple(sorted(trusts)),
        stamps=tuple(sorted(stamps)),
        claims=claims,
        assumptions=(*ASSUMPTIONS[:-1], budget_fixed(claims), *([COMPOSED] if composed else [])),
    )


def budget_fixed(claims: Sequence[Claim]) -> str:
    """When the budget in force was fixed, and what its guarantee therefore assumes."""
    first, last = claims[0], claims[-1]
    if not last.releases_before:
        return ASSUMPTIONS[-1]
    earlier = (
        "The account had no budget before the first release"
        if first.releases_before
        else f"The budget fixed before the first release was ε = {significant(first.epsilon, 6)} at δ = "
        f"{significant(first.delta, 6)}"
    )
    return (
        f"The budget in force was NOT fixed before the first release but after {last.releases_before} of them (see the "
        f"claims): it is a guarantee only if nothing released by then influenced the choice of it. {earlier}."
    )


def _charged(population: str, run: str | None) -> Any:
    release = schema.releases.c
    names = ("run", "label", "mechanism", "unit", "trust", "quanta", "sampling", "state", "stamps")
    columns = [release[name] for name in names]
    query = select(*columns, func.count().label("number")).where(release.population == population).group_by(*columns)
    return query if run is None else query.where(release.run == run)


def _remaining(account: rows.AccountRow) -> Amount:
    if account.kind == composing.PLD:
        return Amount(None, math.nan, math.nan, math.nan)
    if account.limit is None:
        return Amount(None, math.inf, math.inf, math.nan)
    used = account.spent + account.reserved
    left = max(account.limit - used, 0)
    epsilon = remaining_epsilon(account.budget, used)
    return Amount(left, to_mu(left) if left else 0.0, epsilon, part_of(left, account.limit, up=False))


def _claims(connection: Connection, population: str, unit: Unit) -> tuple[Claim, ...]:
    claim = schema.claims.c
    query = select(schema.claims).where(claim.population == population, claim.unit == str(unit)).order_by(claim.number)
    found = []
    for row in connection.execute(query):
        budget = rows.budget(row)
        found.append(Claim(budget.epsilon, budget.delta, budget.non_private, row.reason, row.releases, row.sequence))
    return tuple(found)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
