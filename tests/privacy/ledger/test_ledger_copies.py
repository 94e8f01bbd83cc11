"""A backup is the ledger of one moment; a restored one that is older than an anchor is refused."""

import numpy as np
import pytest

from dpray.platform.privacy.ledger import Head, Ledger, LedgerError, LedgerTampered, back_up, restore


def tables(url):
    with Ledger(url, create=False) as ledger:
        assert ledger.verify() == ()
        return ledger.identity, ledger.head(), [account.spent for account in ledger.populations()[0].accounts()]


@pytest.fixture
def used(place, ledger, run, releases):
    """A ledger with two releases."""
    for step in (0, 1):
        releases.make(run, 1000, step)
    return place


def test_a_backup_is_the_same_ledger_of_mode_0600(used, tmp_path):
    copy = tmp_path / "copy.db"
    head = back_up(used.url, copy)
    assert tables(f"sqlite:///{copy}") == tables(used.url)
    assert head == tables(used.url)[1]
    assert copy.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".copy*"))


def test_a_restored_ledger_goes_on_where_the_backup_was_made(used, new_place, tmp_path, releases):
    back_up(used.url, tmp_path / "copy.db")
    other = new_place()
    restore(tmp_path / "copy.db", other.url)
    with Ledger(other.url, create=False) as ledger:
        run = ledger.populations()[0].run("first")
        again = releases.make(run, 1000, 1, value=np.ones(4))
        assert np.array_equal(again.value, releases.value)  # what was stored, not what would be computed now
        assert ledger.populations()[0].accounts()[0].spent == 2000


def test_an_older_copy_is_refused_by_an_anchor_with_what_to_do(used, new_place, tmp_path, run, releases):
    back_up(used.url, tmp_path / "old.db")
    releases.make(run, 1000, 2)
    anchor = tables(used.url)[1]
    other = new_place()
    with pytest.raises(LedgerTampered, match=r"an old copy was restored.*Restore a newer one.*release nothing more"):
        restore(tmp_path / "old.db", other.url, [anchor])
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(other.url, create=False)
    back_up(used.url, tmp_path / "new.db")
    assert restore(tmp_path / "new.db", other.url, [anchor]) == anchor


def test_a_ledger_is_never_written_over(used, tmp_path):
    back_up(used.url, tmp_path / "copy.db")
    before = tables(used.url)
    with pytest.raises(LedgerError, match="never written over"):
        back_up(used.url, tmp_path / "copy.db")
    with pytest.raises(LedgerError, match="never written over"):
        restore(tmp_path / "copy.db", used.url)
    assert tables(used.url) == before


def test_a_damaged_ledger_is_not_backed_up(used, tmp_path):
    used.sql("UPDATE accounts SET spent = '1'")
    with pytest.raises(LedgerTampered, match="does not verify"):
        back_up(used.url, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


def test_large_values_travel_as_files(used, new_place, run, releases, tmp_path):
    large = np.arange(200_000.0)
    releases.make(run, 1000, 7, value=large)
    if not used.sqlite:
        pytest.skip("a ledger in PostgreSQL keeps values in rows unless it is given a folder")
    back_up(used.url, tmp_path / "copy.db")
    (stored,) = (tmp_path / "copy.db.values").iterdir()
    assert stored.stat().st_mode & 0o777 == 0o600
    restore(tmp_path / "copy.db", f"sqlite:///{tmp_path}/back.db")
    with Ledger(f"sqlite:///{tmp_path}/back.db", create=False) as ledger:
        assert ledger.verify() == ()
        again = releases.make(ledger.populations()[0].run("first"), 1000, 7, value=large)
        assert np.array_equal(again.value, large)


def test_an_anchor_of_another_ledger_is_told(used, tmp_path):
    back_up(used.url, tmp_path / "copy.db")
    with pytest.raises(LedgerTampered, match="is another one"):
        restore(tmp_path / "copy.db", f"sqlite:///{tmp_path}/back.db", [Head(2, "0" * 64)])
