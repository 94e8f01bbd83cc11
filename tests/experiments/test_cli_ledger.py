"""`dpray ledger`: the account outside of any run."""

import sqlite3

import pytest
from typer.testing import CliRunner

from dpray.experiments.cli import app


@pytest.fixture
def ledger(tmp_path):
    url = f"sqlite:///{tmp_path / 'book.db'}"

    def call(*arguments):
        return CliRunner().invoke(app, ["ledger", *map(str, arguments), "--ledger", url])

    call.path = tmp_path / "book.db"
    return call


def test_create_show_amend_verify(ledger):
    created = ledger("create", "people", "--epsilon", 6, "--delta", "1e-5", "--records-per-client", 50)
    assert created.exit_code == 0, created.output
    assert "ε=6, δ=1e-05" in created.stdout
    shown = ledger("show")
    assert "population people: unit record, ε = 6 at δ = 1e-05, replace-one" in shown.stdout
    assert "Populations are disjoint people" in shown.stdout
    amended = ledger("amend", "people", "--epsilon", 8, "--delta", "1e-5", "--reason", "second study")
    assert "claim 2" in amended.stdout
    assert "second study" in ledger("show", "people").stdout
    whole = ledger("verify")
    assert whole.exit_code == 0
    assert "The ledger is whole" in whole.stdout
    assert "an older copy was not checked" in whole.stdout
    head = whole.stdout.split("head ")[1].splitlines()[0].rstrip(".")
    anchored = ledger("verify", "--anchor", head)
    assert anchored.exit_code == 0
    assert "not checked" not in anchored.stdout


def test_creating_twice_with_the_same_budget_changes_nothing(ledger):
    for _ in range(2):
        assert ledger("create", "people", "--epsilon", 6, "--delta", "1e-5").exit_code == 0
    assert "claim" not in ledger("show").stdout.split("Assumptions")[0]


REFUSED = [
    (("create", "p", "--epsilon", "0", "--delta", "1e-5"), ["epsilon", "0"]),
    (("create", "p", "--epsilon", "-1", "--delta", "1e-5"), ["epsilon", "-1"]),
    (("create", "p", "--epsilon", "nan", "--delta", "1e-5"), ["epsilon", "NaN"]),
    (("create", "p", "--epsilon", "inf", "--delta", "1e-5"), ["--non-private"]),
    (("create", "p", "--epsilon", "six", "--delta", "1e-5"), ["--epsilon", "'six'"]),
    (("create", "p", "--epsilon", "6", "--delta", "2"), ["delta", "2"]),
    (("create", "p", "--epsilon", "6", "--delta", "1e-5", "--unit", "house"), ["record, user or client", "'house'"]),
    (("create", "p", "--epsilon", "6", "--delta", "1e-5", "--records-per-client", "0"), ["records_per_client", "0"]),
    (("create", "p", "--epsilon", "6", "--delta", "1e-5", "--kind", "rdp"), ["--kind", "'gdp'", "'pld'", "'rdp'"]),
    (("create", "p", "--epsilon", "6", "--delta", "1e-12", "--kind", "pld"), ["--kind", "1e-12"]),
    (("create", "p", "--epsilon", "inf", "--delta", "1e-5", "--non-private", "--kind", "pld"), ["--kind", "'gdp'"]),
    (("show",), ["no ledger", "dpray ledger create"]),
    (("verify",), ["no ledger"]),
    (("amend", "p", "--epsilon", "6", "--delta", "1e-5", "--reason", "x"), ["no ledger"]),
]


@pytest.mark.parametrize(("arguments", "facts"), REFUSED, ids=lambda value: " ".join(value)[:50])
def test_refused_without_making_a_file(ledger, arguments, facts):
    result = ledger(*arguments)
    assert result.exit_code == 2, result.output
    assert [fact for fact in facts if fact not in result.stderr] == []
    assert not any(name in result.output for name in ("Traceback", "sqlalchemy"))
    if "--records-per-client" not in arguments:
        assert not ledger.path.exists()


def test_an_account_of_composed_events_is_created_and_shown_without_shares(ledger):
    created = ledger("create", "people", "--epsilon", 2, "--delta", "1e-5", "--kind", "pld")
    assert created.exit_code == 0, created.output
    assert "kind pld" in created.stdout
    shown = ledger("show").stdout
    left = next(line for line in shown.splitlines() if line.startswith("left"))
    assert left.split()[1:] == ["–", "–", "–"]
    assert "–: composed events have no μ and no share of μ²" in shown
    assert not any(word in shown for word in ("nan", "?"))


def test_refused_on_a_ledger_that_is_there(ledger):
    ledger("create", "people", "--epsilon", 6, "--delta", "1e-5")
    for arguments, fact in [
        (("create", "people", "--epsilon", 6, "--delta", "1e-5", "--kind", "pld"), "kind 'gdp'"),
        (("create", "people", "--epsilon", 7, "--delta", "1e-5"), "ε = 7"),
        (("show", "nobody"), "'nobody'"),
        (("amend", "nobody", "--epsilon", 7, "--delta", "1e-5", "--reason", "x"), "nobody"),
        (("amend", "people", "--epsilon", 7, "--delta", "1e-5", "--reason", " "), "reason"),
        (("amend", "people", "--unit", "client", "--epsilon", 7, "--delta", "1e-5", "--reason", "x"), "client account"),
        (("verify", "--anchor", "seven"), "SEQUENCE:DIGEST"),
        (("verify", "--anchor", f"99:{'0' * 64}"), "99"),
    ]:
        result = ledger(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert fact in result.stderr, (arguments, result.output)


def test_a_change_behind_the_ledgers_back_is_found(ledger):
    ledger("create", "people", "--epsilon", 6, "--delta", "1e-5")
    with sqlite3.connect(ledger.path) as database:
        assert database.execute("update accounts set spent = '1'").rowcount == 1
    result = ledger("verify")
    assert result.exit_code == 2
    assert "people" in result.stderr


def test_an_account_without_limit_says_so_in_capitals(ledger):
    result = ledger("create", "p", "--epsilon", "inf", "--delta", "1e-5", "--non-private")
    assert result.exit_code == 0
    assert "NOT PRIVATE" in result.stdout
    assert "NOT PRIVATE" in ledger("show").stdout


def test_a_backup_is_restored_where_there_is_no_ledger_and_says_what_was_not_checked(tmp_path):
    url, copy = f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path / "copy.db"

    def ledger(*arguments):
        return CliRunner().invoke(app, ["ledger", *map(str, arguments)])

    assert ledger("create", "people", "--epsilon", "6", "--delta", "1e-5", "--ledger", url).exit_code == 0
    made = ledger("backup", copy, "--ledger", url)
    assert made.exit_code == 0
    head = made.stdout.split("Head ")[1].strip().rstrip(".")
    taken = ledger("restore", copy, "--ledger", url)
    assert taken.exit_code == 2
    assert "never written over" in taken.stderr
    back = ledger("restore", copy, "--ledger", f"sqlite:///{tmp_path / 'back.db'}")
    assert back.exit_code == 0
    assert "not checked" in back.stdout
    known = ledger("restore", copy, "--anchor", head, "--ledger", f"sqlite:///{tmp_path / 'again.db'}")
    assert known.exit_code == 0
    assert "not checked" not in known.stdout
    older = ledger("restore", copy, "--anchor", f"9:{'0' * 64}", "--ledger", f"sqlite:///{tmp_path / 'older.db'}")
    assert older.exit_code == 2
    assert "Restore a newer one" in older.stderr
    assert not (tmp_path / "older.db").exists()
