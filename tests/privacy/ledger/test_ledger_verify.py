"""Verification: whatever was changed behind the ledger's back is found and named, and no run is opened on it."""

import hashlib
import json
import math
import shutil

import pytest
import sqlalchemy

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Head, LedgerTampered, Plan, PlannedRelease, schema
from dpray.platform.privacy.mechanisms import Unit


@pytest.fixture
def full(ledger, population, account, run, releases):
    """A ledger with a row of every kind in every table."""
    population.account("client", Budget(60, 1e-5))
    run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, 5000, 5),)))
    releases.make(run)
    attempt = releases.charge(run, step=1)
    attempt.commit({"a", "b"})
    run.store(attempt, releases.value)
    run.lose(releases.charge(run, step=2), "a client lost its journal")
    account.amend(Budget(7, 1e-5), "more people")
    other = population.run("other")
    releases.make(other)
    other.close()
    toy = ledger.population("toy")
    toy.account("record", Budget(math.inf, 1e-5, non_private=True))
    ledger.population("toy", records_per_user=2, declaration={"data.dataset": "toys"})
    releases.make(toy.run("toy"), None)
    releases.charge(population.run("first"), step=3)
    assert ledger.verify() == ()
    return ledger


def test_a_whole_ledger_verifies(place, full):
    assert full.verify([full.head()]) == ()
    assert place.open(create=False).verify([full.head()]) == ()


CELLS = [
    (table, column)
    for table in schema.metadata.tables.values()
    for column in table.columns
    if (table.name, column.name) != ("entries", "sequence")  # moved and removed entries are below
]


def _other(column, value):
    """Another value a column accepts."""
    if column.name in {"state", "kind", "unit", "place"}:
        return {"stored": "lost", "gdp": "pld", "record": "user", "row": "pruned"}.get(value, "x")
    if isinstance(value, bytes):
        return b"\x01" + value[1:]
    if isinstance(value, int):
        return value + 1000
    if value is None:
        return "changed" if column.type.python_type is str else 3 if column.type.python_type is int else b"x"
    try:
        return str(int(value) + 1)
    except ValueError:
        return value[:-1] + ("0" if value[-1:] != "0" else "1")


def test_every_edited_cell_of_every_table_is_found(place, full):
    engine = sqlalchemy.create_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    found = 0
    for table, column in CELLS:
        keys = list(table.primary_key.columns)
        with engine.begin() as connection:
            row = connection.execute(sqlalchemy.select(table).order_by(*keys)).first()._mapping
        here = sqlalchemy.and_(*(key == row[key.name] for key in keys))
        there = sqlalchemy.and_(
            *(key == (_other(key, row[key.name]) if key is column else row[key.name]) for key in keys)
        )
        with engine.begin() as connection:
            connection.execute(table.update().where(here).values({column: _other(column, row[column.name])}))
        problems = full.verify()
        assert problems, f"an edited {table.name}.{column.name} was not found"
        assert all(problem.endswith((".", ")")) for problem in problems)
        found += 1
        with engine.begin() as connection:
            connection.execute(table.update().where(there).values({column: row[column.name]}))
        assert full.verify() == (), f"{table.name}.{column.name} was not restored"
    engine.dispose()
    assert found == len(CELLS) > 50


@pytest.mark.parametrize("table", [table.name for table in schema.PROJECTIONS])
def test_a_deleted_row_is_found_and_no_run_is_opened(place, full, table):
    place.sql(f"DELETE FROM {table}")
    assert any(table in problem for problem in full.verify())
    if table != "populations":
        with pytest.raises(LedgerTampered, match="does not verify, so run 'new' is not opened"):
            full.populations()[0].run("new")


def test_an_inserted_row_is_found(place, full):
    place.sql("INSERT INTO runs (population, name, epoch, state) VALUES ('digits', 'forged', 1, 'open')")
    assert full.verify() == ("Table runs has a row ('digits', 'forged') that no entry explains.",)


def test_a_deleted_entry_is_found(place, full):
    for sequence in (2, 7):
        copy = place.scalar(f"SELECT body FROM entries WHERE sequence = {sequence}")
        assert copy
    place.sql("DELETE FROM entries WHERE sequence = 7")
    assert any("Entries 7 to 7 are missing" in problem for problem in full.verify())


def test_reordered_entries_are_found(place, full):
    place.sql(
        "UPDATE entries SET sequence = -1 WHERE sequence = 6",
        "UPDATE entries SET sequence = 6 WHERE sequence = 7",
        "UPDATE entries SET sequence = 7 WHERE sequence = -1",
    )
    assert any("does not follow the entry before it" in problem for problem in full.verify())


def test_an_inserted_entry_is_found_although_its_own_digest_is_right(place, full):
    last = full.head()
    body = json.dumps({"population": "digits"})
    parts = [last.sequence + 1, "2030-01-01T00:00:00+00:00", "gift", body, last.digest]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    place.sql(
        "INSERT INTO entries (sequence, at, kind, body, previous, digest) VALUES "
        f"({parts[0]}, '{parts[1]}', 'gift', '{body}', '{last.digest}', '{digest}')"
    )
    problems = full.verify()
    assert any("The head names entry" in problem for problem in problems)
    assert any("(gift) does not fit the entries before it" in problem for problem in problems)


def test_a_truncated_tail_is_found_by_the_tables_and_by_an_anchor(place, full):
    anchor = full.head()
    cut = anchor.sequence - 1
    digest = place.scalar(f"SELECT digest FROM entries WHERE sequence = {cut}")
    place.sql(f"DELETE FROM entries WHERE sequence > {cut}", f"UPDATE head SET sequence = {cut}, digest = '{digest}'")
    assert any("Table releases has a row" in problem for problem in full.verify())
    assert any(f"An anchor names entry {anchor.sequence}" in problem for problem in full.verify([anchor]))


@pytest.mark.parametrize("new_place", ["sqlite"], indirect=True)
def test_an_old_copy_verifies_by_itself_and_is_found_by_an_anchor(place, ledger, population, run, releases):
    early = ledger.head()
    ledger.close()
    old = place.folder / "old.db"
    shutil.copy(place.folder / "ledger.db", old)
    ledger = place.open()
    releases.make(ledger.population("digits").run("first"))
    late = ledger.head()
    ledger.close()
    for suffix in ("-wal", "-shm"):
        (place.folder / f"ledger.db{suffix}").unlink(missing_ok=True)
    shutil.copy(old, place.folder / "ledger.db")
    restored = place.open()
    assert restored.verify([early]) == ()
    assert any("an old copy was restored" in problem for problem in restored.verify([late]))
    again = restored.population("digits").run("first")  # it goes on, and passes the anchor's number
    for step in range(3):
        releases.make(again, step=step)
    assert restored.head().sequence > late.sequence
    assert restored.verify() == ()
    assert any("went on from an old copy" in problem for problem in restored.verify([early, late]))


def test_an_anchor_of_another_ledger_is_found(full):
    assert any("is another one" in problem for problem in full.verify([Head(1, "0" * 64)]))


def test_a_chain_rewritten_as_a_whole_is_found_by_an_anchor_only(place, full):
    """Its negative control: without the anchor, somebody who recomputes everything is not found, as documented."""
    anchor = full.head()
    engine = sqlalchemy.create_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    previous = "0" * 64
    with engine.begin() as connection:
        rows = connection.execute(sqlalchemy.select(schema.entries).order_by(schema.entries.c.sequence)).all()
        for row in rows:
            at = row.at.replace("20", "19", 1)
            digest = hashlib.sha256(json.dumps([row.sequence, at, row.kind, row.body, previous]).encode()).hexdigest()
            changed = {"at": at, "previous": previous, "digest": digest}
            connection.execute(schema.entries.update().where(schema.entries.c.sequence == row.sequence).values(changed))
            previous = digest
        connection.execute(schema.head.update().values(digest=previous))
    engine.dispose()
    assert full.verify() == ()
    assert any("the ledger was rewritten" in problem for problem in full.verify([anchor]))


def _forge(place, kind, change):
    """Rewrite the last entry of a kind, and the chain from there, so that every digest is right."""
    engine = sqlalchemy.create_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    entries = schema.entries
    with engine.begin() as connection:
        rows = connection.execute(sqlalchemy.select(entries).order_by(entries.c.sequence)).all()
        target = max(row.sequence for row in rows if row.kind == kind)
        previous = "0" * 64
        for row in rows:
            body = json.loads(row.body)
            if row.sequence == target:
                change(body)
            text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            digest = hashlib.sha256(json.dumps([row.sequence, row.at, row.kind, text, previous]).encode()).hexdigest()
            cells = {"body": text, "previous": previous, "digest": digest}
            connection.execute(entries.update().where(entries.c.sequence == row.sequence).values(cells))
            previous = digest
        connection.execute(schema.head.update().values(digest=previous))
    engine.dispose()


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("charge", lambda body: body["costs"].update(record="1"), "charges"),
        ("charge", lambda body: body.update(from_plan="7"), "charges"),
        ("charge", lambda body: body.update(quanta=str(2**70)), "over its budget"),
        ("account", lambda body: body.update(spent="1"), "opens an account with other amounts"),
        ("lease", lambda body: body.update(epoch=9), "takes lease 9"),
        ("commit", lambda body: body.update(release=1), "does not fit"),
        ("store", lambda body: body.pop("digest"), "does not fit"),
        ("lose", lambda body: body.update(release=7), "makes release 7 lost; it was stored"),
        (
            "ledger",
            lambda body: body.update(format=schema.FORMAT + 1),
            f"format {schema.FORMAT + 1} is not {schema.FORMAT}",
        ),
    ],
)
def test_entries_that_break_the_rules_are_found_although_their_digests_are_right(place, full, kind, change, sentence):
    _forge(place, kind, change)
    assert any(sentence in problem for problem in full.verify())


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE head SET digest = 'x'", "nothing is charged on a damaged ledger"),
        ("UPDATE entries SET body = '{}' WHERE sequence = (SELECT sequence FROM head)", "changed after it was written"),
        ("DELETE FROM head", "has lost its head or its entries"),
        ("DELETE FROM entries", "has lost its head or its entries"),
        ("DELETE FROM entries WHERE sequence = (SELECT sequence FROM head)", "nothing is charged on a damaged ledger"),
    ],
)
def test_every_charge_checks_the_end_of_the_chain(place, run, account, releases, statement, sentence):
    place.sql(statement)
    with pytest.raises(LedgerTampered, match=sentence):
        releases.make(run)
    assert account.spent == 0
    assert run.population.storage.read(lambda connection: True)


def test_a_lost_head_row_is_said(place, ledger):
    place.sql("DELETE FROM head")
    with pytest.raises(LedgerTampered, match="head row is gone"):
        ledger.head()
    assert any("The head names entry nothing" in problem for problem in ledger.verify())


def test_a_changed_stored_value_is_found_when_it_is_read(place, ledger, run, releases):
    releases.make(run)
    data = "x'00'" if place.sqlite else "'\\x00'::bytea"
    place.sql(f"UPDATE released_values SET data = {data}")
    with pytest.raises(LedgerTampered, match="no longer have the digest"):
        releases.make(run)
    place.sql("UPDATE released_values SET data = NULL")
    with pytest.raises(LedgerTampered, match="is gone from its row"):
        run.stored(releases.key())
    assert any("is gone from its row" in problem for problem in ledger.verify())


def test_a_value_in_a_file_needs_the_folder(place, ledger, run, releases):
    releases.make(run)
    place.sql("UPDATE released_values SET place = 'file:nowhere.bin'")
    problems = ledger.verify()
    assert any("data are there that belong to file:nowhere.bin" in problem for problem in problems)
    assert any("is gone" in problem for problem in problems)
    if not place.sqlite:
        bare = place.open(values_dir=None)
        assert any("without values_dir" in problem for problem in bare.verify())


def test_many_problems_are_counted_where_a_run_is_refused(place, full):
    place.sql("UPDATE accounts SET spent = '0', reserved = '0', delta = '0.5'")
    with pytest.raises(LedgerTampered, match=r"\(and \d+ more\)$"):
        full.population("digits").run("first")


@pytest.mark.parametrize("new_place", ["sqlite"], indirect=True)
def test_a_damaged_file_is_a_sentence_not_a_traceback(place, full):
    full.close()
    file = place.folder / "ledger.db"
    for suffix in ("-wal", "-shm"):
        (place.folder / f"ledger.db{suffix}").unlink(missing_ok=True)
    content = bytearray(file.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 64] = b"\xff" * 64
    file.write_bytes(content)
    try:
        problems = place.open().verify()
    except LedgerTampered as error:  # SQLite may refuse the file as a whole
        problems = (str(error),)
    assert problems
    assert any("damaged" in problem or "not a readable ledger" in problem for problem in problems)
