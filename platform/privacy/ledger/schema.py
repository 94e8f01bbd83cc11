"""Tables of the ledger: an append-only, hash-chained journal, and projections of it that make charging fast.

`entries` is the ledger. Everything else can be computed from it by replay (`replay.py`); `verify` does, and compares
cell by cell. Amounts of μ² are decimal text, since quanta of 2⁻⁶⁰ pass 64 bits; an infinite amount is `inf`. `sampling`
is the text of a probability, `1.0` without sampling; μ² is always that of the release without it. On an account of kind
`pld`, `spent` and `reserved` are sums of such μ² and decide nothing: releases and lines, composed as events, do.

| table | one row per |
|---|---|
| entries | thing that happened: `digest` covers sequence, time, kind, body and the digest before |
| head | ledger: the last entry; its row lock orders all writers |
| populations | population, with what is declared of it (`declaring.py`) |
| accounts | (population, unit): budget in force, spent, reserved |
| claims | budget an account has ever had, in order |
| runs | (population, run): lease epoch, state, plan |
| lines | planned release of a run: what is still set aside, in the release's own quanta, and the steps left |
| releases | release key: charge, public request digest, state, participant set |
| released_values | stored value: bytes, or the file that has them, and their hash |
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, MetaData, Table, Text, UniqueConstraint

FORMAT = 3
INFINITE = "inf"
DECLARED = ("records_per_user", "records_per_client", "declaration")
"""Columns of `populations` that hold what is declared."""

metadata = MetaData()
_Integer = BigInteger().with_variant(Integer, "sqlite")


def _name(column: str, *, key: bool = False) -> Column[str]:
    return Column(column, Text, primary_key=key, nullable=False)


def _count(column: str, *, key: bool = False, nullable: bool = False) -> Column[int]:
    return Column(column, _Integer, primary_key=key, nullable=nullable, autoincrement=False)


entries = Table(
    "entries",
    metadata,
    _count("sequence", key=True),
    *(_name(column) for column in ("at", "kind", "body", "previous", "digest")),
)
head = Table("head", metadata, _count("id", key=True), _count("sequence"), _name("digest"))
populations = Table(
    "populations",
    metadata,
    _name("name", key=True),
    _count("records_per_user", nullable=True),
    _count("records_per_client", nullable=True),
    Column("declaration", Text, nullable=True),
)
accounts = Table(
    "accounts",
    metadata,
    _name("population", key=True),
    _name("unit", key=True),
    *(_name(column) for column in ("kind", "epsilon", "delta")),
    _count("non_private"),
    *(_name(column) for column in ("budget", "spent", "reserved")),
    _count("unbounded"),
)
claims = Table(
    "claims",
    metadata,
    _name("population", key=True),
    _name("unit", key=True),
    _count("number", key=True),
    *(_name(column) for column in ("epsilon", "delta")),
    _count("non_private"),
    _name("reason"),
    _count("releases"),
    _count("sequence"),
)
runs = Table(
    "runs",
    metadata,
    _name("population", key=True),
    _name("name", key=True),
    _count("epoch"),
    _name("state"),
    Column("plan", Text, nullable=True),
)
lines = Table(
    "lines",
    metadata,
    *(_name(column, key=True) for column in ("population", "run", "label", "mechanism", "unit")),
    *(_name(column) for column in ("quanta", "sampling", "remaining")),
    _count("steps"),
    _count("left"),
)
releases = Table(
    "releases",
    metadata,
    _count("sequence", key=True),
    *(_name(column) for column in ("population", "run", "label", "mechanism")),
    _count("step"),
    *(_name(column) for column in ("unit", "quanta", "sampling", "request", "trust", "stamps", "state")),
    Column("participants", Text, nullable=True),
    Column("reason", Text, nullable=True),
    UniqueConstraint("population", "run", "label", "mechanism", "step"),
)
released_values = Table(
    "released_values",
    metadata,
    _count("release", key=True),
    *(_name(column) for column in ("dtype", "shape")),
    _count("size"),
    *(_name(column) for column in ("digest", "place")),
    Column("data", LargeBinary, nullable=True),
)

PROJECTIONS = (populations, accounts, claims, runs, lines, releases, released_values)
