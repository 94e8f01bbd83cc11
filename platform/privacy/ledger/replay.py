"""The tables as the entries say they must be: an independent reading of the journal, for `verify`.

`Replay.apply` takes the entries in order and keeps what each one means in plain Python; `Replay.tables` is then what
every table must hold, cell by cell (stored bytes are compared by their digests). It shares no code with the
transactions that wrote the tables, except how a charge is weighed for coarser units and how events are composed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Table

from dpray.platform.privacy.ledger import composing, schema
from dpray.platform.privacy.ledger.chain import canonical
from dpray.platform.privacy.ledger.charging import factor
from dpray.platform.privacy.ledger.plan import spend_of
from dpray.platform.privacy.ledger.rows import Maxima
from dpray.platform.privacy.mechanisms import Unit

Cells = dict[str, Any]
Key = tuple[Any, ...]
Body = Mapping[str, Any]
_SLACK = 1 + 1e-6
UNCOMPARED = {"released_values": frozenset({"data"}), "releases": frozenset({"participants"})}


@dataclass
class Replay:
    """State after the entries applied so far. `participants` maps a release to the digest of its set."""

    rows: dict[str, dict[Key, Cells]] = field(default_factory=lambda: {table.name: {} for table in schema.PROJECTIONS})
    participants: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def apply(self, sequence: int, kind: str, body: Body) -> None:
        """Take one entry: a wrong one adds to `problems`, a senseless one is a KeyError, ValueError or TypeError."""
        handler: Callable[[int, Body], None] | None = getattr(self, f"_{kind}", None)
        if handler is None:
            raise ValueError(f"unknown kind {kind!r}")
        handler(sequence, body)

    def _ledger(self, sequence: int, body: Body) -> None:
        if body["format"] != schema.FORMAT:
            raise ValueError(f"format {body['format']} is not {schema.FORMAT}")

    def _population(self, sequence: int, body: Body) -> None:
        name = body["population"]
        self.rows["populations"][name,] = {"name": name, **{key: body[key] for key in schema.DECLARED}}

    def _declare(self, sequence: int, body: Body) -> None:
        cells, new = self.rows["populations"][body["population"],], {k: body[k] for k in schema.DECLARED if k in body}
        if any(cells[key] is not None for key in new):
            self.problems.append(f"Entry {sequence} declares of population {cells['name']!r} what was declared before.")
        cells.update(new)

    def _account(self, sequence: int, body: Body) -> None:
        name, unit = body["population"], body["unit"]
        spent = unbounded = reserved = 0
        for release in self._of("releases", name):
            quanta = spend_of(release["quanta"])
            unbounded += quanta is None
            spent += self._factor(name, unit, release["unit"]) * (quanta or 0)
        for line in self._of("lines", name):
            reserved += self._factor(name, unit, line["unit"]) * (spend_of(line["remaining"]) or 0)
        amounts = {"spent": str(spent), "reserved": str(reserved), "unbounded": unbounded}
        others = {cells["kind"] for cells in self._of("accounts", name)}
        if body["kind"] not in {composing.GDP, composing.PLD} or others - {body["kind"]}:
            self.problems.append(f"Entry {sequence} opens an account of kind {body['kind']!r} where it cannot be one.")
        self.rows["accounts"][name, unit] = {
            "population": name,
            "unit": unit,
            "kind": body["kind"],
            **body["budget"],
            **amounts,
        }
        if amounts != {key: body[key] for key in amounts}:
            self.problems.append(f"Entry {sequence} opens an account with other amounts than its past releases cost.")
        self._claim(sequence, body, "opened")
        self._within(sequence, name, unit)

    def _amend(self, sequence: int, body: Body) -> None:
        account = self.rows["accounts"][body["population"], body["unit"]]
        self._composed_within(account, f"Entry {sequence} amends")
        account.update(body["budget"])
        self._claim(sequence, body, body["reason"])
        self._within(sequence, body["population"], body["unit"])

    def _lease(self, sequence: int, body: Body) -> None:
        key = body["population"], body["run"]
        epoch = self.rows["runs"].get(key, {"epoch": 0})["epoch"] + 1
        if epoch != body["epoch"]:
            self.problems.append(
                f"Entry {sequence} takes lease {body['epoch']} of run {key[1]!r}, lease {epoch} was next."
            )
        fresh = {"population": key[0], "name": key[1], "state": "open", "plan": None}
        self.rows["runs"].setdefault(key, fresh)["epoch"] = epoch

    def _reserve(self, sequence: int, body: Body) -> None:
        name, run = body["population"], body["run"]
        self.rows["runs"][name, run]["plan"] = body["plan"]
        for label, mechanism, unit, quanta, steps, sampling in json.loads(body["plan"]):
            key = (name, run, label, mechanism, unit)
            cells = dict(zip(("population", "run", "label", "mechanism", "unit"), key, strict=True))
            self.rows["lines"][key] = {
                **cells,
                "quanta": quanta,
                "sampling": sampling,
                "remaining": quanta,
                "steps": steps,
                "left": steps,
            }
            self._refuse_sampled(sequence, name, quanta, sampling)
            self._reserved(sequence, name, unit, spend_of(quanta) or 0)

    def _charge(self, sequence: int, body: Body) -> None:
        name, unit, quanta = body["population"], body["unit"], spend_of(body["quanta"])
        line = self.rows["lines"].get((name, body["run"], body["label"], body["mechanism"], unit))
        unlike = line is None or line["sampling"] != body["sampling"]
        aside = 0 if line is None or unlike else spend_of(line["remaining"]) or 0
        own = min(aside, quanta or 0)
        if line is not None and own:
            line["remaining"] = str(aside - own)
            line["left"] = max(line["left"] - 1, 0)
            self._reserved(sequence, name, unit, -own)
        costs = {}
        for account in self._of("accounts", name):
            cost = None if quanta is None else self._factor(name, account["unit"], unit) * quanta
            costs[account["unit"]] = "inf" if cost is None else str(cost)
            account["spent"] = str(int(account["spent"]) + (cost or 0))
            account["unbounded"] += cost is None
            self._within(sequence, name, account["unit"])
        if costs != body["costs"] or str(own) != body["from_plan"] or not costs:
            self.problems.append(f"Entry {sequence} charges {body['costs']} where its release costs {costs}.")
        self._refuse_sampled(sequence, name, body["quanta"], body["sampling"])
        kind = self._of("accounts", name)[0]["kind"] if costs else composing.GDP
        if body["event"] != composing.recorded(kind, quanta, float(body["sampling"])):
            self.problems.append(f"Entry {sequence} is charged as another event than its noise and sampling make it.")
        columns = ("population", "run", "label", "mechanism", "step", "unit", "quanta", "sampling", "request", "trust")
        stamps = canonical(body["stamps"])
        state = {"sequence": sequence, "stamps": stamps, "state": "charged", "participants": None, "reason": None}
        self.rows["releases"][sequence,] = {**{key: body[key] for key in columns}, **state}

    def _commit(self, sequence: int, body: Body) -> None:
        release = self._moved(sequence, body, {"charged"}, "committed")
        release["stamps"] = canonical(body["stamps"])
        self.participants[body["release"]] = body["participants"]

    def _store(self, sequence: int, body: Body) -> None:
        release = self._moved(sequence, body, {"charged", "committed"}, "stored")
        release["stamps"] = canonical(body["stamps"])
        cells = {key: body[key] for key in ("dtype", "shape", "size", "digest", "place")}
        self.rows["released_values"][body["release"],] = {"release": body["release"], **cells}

    def _lose(self, sequence: int, body: Body) -> None:
        self._moved(sequence, body, {"charged", "committed"}, "lost")["reason"] = body["reason"]

    def _prune(self, sequence: int, body: Body) -> None:
        for release in body["releases"]:
            self.rows["released_values"][release,]["place"] = "pruned"

    def _close(self, sequence: int, body: Body) -> None:
        name, run = body["population"], body["run"]
        self.rows["runs"][name, run]["state"] = "closed"
        for line in self._of("lines", name):
            remaining = spend_of(line["remaining"])
            if line["run"] == run and remaining is not None:
                line["remaining"], line["left"] = "0", 0
                self._reserved(sequence, name, line["unit"], -remaining)

    def _of(self, table: str, population: str) -> list[Cells]:
        return [cells for cells in self.rows[table].values() if cells["population"] == population]

    def _maxima(self, population: str) -> Maxima:
        cells = self.rows["populations"][population,]
        return Maxima(cells["records_per_user"], cells["records_per_client"])

    def _factor(self, population: str, account: str, release: str) -> int:
        return factor(population, Unit(account), Unit(release), self._maxima(population))

    def _reserved(self, sequence: int, population: str, unit: str, quanta: int) -> None:
        for account in self._of("accounts", population):
            more = self._factor(population, account["unit"], unit) * quanta
            account["reserved"] = str(int(account["reserved"]) + more)
            self._within(sequence, population, account["unit"])

    def finish(self) -> None:
        """Compose accounts of kind `pld` as they ended: their ε only grows, except where a budget is amended."""
        for account in self.rows["accounts"].values():
            self._composed_within(account, "The last entry leaves")

    def _refuse_sampled(self, sequence: int, population: str, quanta: str, sampling: str) -> None:
        kinds = {cells["kind"] for cells in self._of("accounts", population)}
        if sampling != "1.0" and quanta != schema.INFINITE and composing.GDP in kinds:
            self.problems.append(f"Entry {sequence} takes a sampled release to accounts of kind 'gdp'.")

    def _composed_within(self, account: Cells, what: str) -> None:
        """Up to one part in a million: another machine may round a composition otherwise."""
        if account["kind"] != composing.PLD:
            return
        name, unit = account["population"], Unit(account["unit"])
        spends = []
        for release in self._of("releases", name):
            quanta = spend_of(release["quanta"])
            if quanta is None:
                self.problems.append(f"{what} the {unit} account of population {name!r} with a release without noise.")
                return
            spends.append(composing.Spend(Unit(release["unit"]), quanta, float(release["sampling"])))
        for line in self._of("lines", name):
            remaining, q = spend_of(line["remaining"]) or 0, float(line["sampling"])
            if remaining and q == 1:
                spends.append(composing.Spend(Unit(line["unit"]), remaining, 1.0))
            elif remaining and line["left"]:
                each = -(-int(line["quanta"]) // line["steps"])
                spends.append(composing.Spend(Unit(line["unit"]), each, q, line["left"]))
        epsilon = composing.epsilon(name, unit, float(account["delta"]), self._maxima(name), spends)
        if epsilon > float(account["epsilon"]) * _SLACK:
            self.problems.append(f"{what} the {unit} account of population {name!r} over its budget: ε = {epsilon:g}.")

    def _within(self, sequence: int, population: str, unit: str) -> None:
        account = self.rows["accounts"][population, unit]
        if account["kind"] == composing.PLD:
            return
        limit = spend_of(account["budget"])
        if limit is not None and (account["unbounded"] or int(account["spent"]) + int(account["reserved"]) > limit):
            self.problems.append(
                f"Entry {sequence} takes the {unit} account of population {population!r} over its budget."
            )

    def _claim(self, sequence: int, body: Body, reason: str) -> None:
        name, unit, budget = body["population"], body["unit"], body["budget"]
        number = 1 + sum(cells["unit"] == unit for cells in self._of("claims", name))
        self.rows["claims"][name, unit, number] = {
            "population": name,
            "unit": unit,
            "number": number,
            **{key: budget[key] for key in ("epsilon", "delta", "non_private")},
            "reason": reason,
            "releases": len(self._of("releases", name)),
            "sequence": sequence,
        }

    def _moved(self, sequence: int, body: Body, before: set[str], after: str) -> Cells:
        release = self.rows["releases"][body["release"],]
        if release["state"] not in before:
            self.problems.append(
                f"Entry {sequence} makes release {body['release']} {after}; it was {release['state']}."
            )
        release["state"] = after
        return release


def primary_key(table: Table) -> tuple[str, ...]:
    """Names of a table's primary key columns."""
    return tuple(column.name for column in table.primary_key.columns)
