"""Large values: files that are on disk before the ledger names them, dropped when a checkpoint stands for them."""

import os
import stat

import numpy as np
import pytest

from dpray.platform.privacy.ledger import LeaseLost, LedgerTampered, ReleaseLost, ValuePruned
from dpray.platform.privacy.ledger.values import LARGE, ValueFiles

BIG = np.arange(LARGE // 8 + 1, dtype=np.float64)
EDGE = np.arange(LARGE // 8, dtype=np.float64)


def files(place):
    return sorted(place.values.iterdir()) if place.values.is_dir() else []


def test_a_value_above_one_mebibyte_is_a_private_file(place, ledger, run, releases):
    releases.make(run, value=EDGE)
    assert files(place) == []
    releases.make(run, step=1, value=BIG)
    (file,) = files(place)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_bytes() == BIG.tobytes()
    assert np.array_equal(run.stored(releases.key(1)), BIG)
    assert np.array_equal(releases.make(run, step=1, value=-BIG).value, BIG)
    assert ledger.verify() == ()


@pytest.mark.parametrize("new_place", ["postgresql"], indirect=True)
def test_without_a_folder_large_values_stay_in_their_rows(place, releases):
    from dpray.platform.privacy.budget import Budget

    ledger = place.open(values_dir=None)
    people = ledger.population("digits")
    people.account("record", Budget(6, 1e-5))
    run = people.run("first")
    releases.make(run, value=BIG)
    assert np.array_equal(run.stored(releases.key()), BIG)
    assert run.prune("training", "sum", 1) == 1
    assert ledger.verify() == ()
    with pytest.raises(ValuePruned):
        run.stored(releases.key())


def test_the_file_of_a_computation_that_came_second_is_removed(place, population, run, releases):
    zombie, resumed = releases.charge(run), population.run("first")
    alive = releases.charge(resumed)
    resumed.store(alive, BIG)
    assert np.array_equal(run.store(zombie, -BIG).value, BIG)
    assert [file.read_bytes() == BIG.tobytes() for file in files(place)] == [True]
    assert np.array_equal(run.store(zombie, BIG).value, BIG)
    assert len(files(place)) == 1


def test_a_file_that_was_never_named_is_removed_by_the_next_lease_and_its_owner_stores_nothing(
    place, population, run, releases, monkeypatch
):
    attempt, write = releases.charge(run), ValueFiles.write

    def slow(self, name, data):
        where = write(self, name, data)
        assert len(files(place)) == 1
        population.run("first")  # the run is opened elsewhere while this one is about to store
        return where

    monkeypatch.setattr(ValueFiles, "write", slow)
    with pytest.raises(LeaseLost):
        run.store(attempt, BIG)
    monkeypatch.undo()
    assert files(place) == []
    resumed = population.run("first")
    assert releases.make(resumed, value=BIG).first
    assert population.run("first").stored(releases.key()).size == BIG.size  # a named file survives new leases


def test_a_refused_store_leaves_no_file(place, run, releases):
    attempt = releases.charge(run)
    run.lose(attempt, "why")
    with pytest.raises(ReleaseLost):
        run.store(attempt, BIG)
    assert files(place) == []


def test_a_half_written_file_has_no_final_name(place, run, releases, monkeypatch):
    releases.make(run, step=1, value=BIG + 1)
    attempt = releases.charge(run)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("dpray.platform.privacy.ledger.values.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.store(attempt, BIG)
    monkeypatch.undo()
    assert len(files(place)) == 1
    assert run.store(attempt, BIG).first


def test_a_file_removed_while_it_is_written_is_a_lost_lease(place, population, run, releases, monkeypatch):
    attempt, replace = releases.charge(run), os.replace

    def slow(source, target):
        population.run("first")
        replace(source, target)

    monkeypatch.setattr("dpray.platform.privacy.ledger.values.os.replace", slow)
    with pytest.raises(LeaseLost):
        run.store(attempt, BIG)
    assert files(place) == []


def test_pruning_drops_large_values_of_earlier_steps_only(place, ledger, account, run, releases):
    for step in range(3):
        releases.make(run, step=step, value=BIG + step)
    releases.make(run, step=3)
    releases.make(run, step=0, label="search", value=BIG)
    assert run.prune("training", "sum", 2) == 2
    assert run.prune("training", "sum", 2) == 0
    assert len(files(place)) == 2
    with pytest.raises(ValuePruned, match="resume from the checkpoint"):
        run.stored(releases.key(1))
    with pytest.raises(ValuePruned):
        releases.make(run, step=1, value=BIG)
    assert np.array_equal(run.stored(releases.key(2)), BIG + 2)
    assert run.prune("training", "sum", 9) == 1
    assert np.array_equal(run.stored(releases.key(3)), releases.value)
    assert account.spent == 5000
    assert ledger.verify() == ()


def test_a_changed_or_missing_value_file_is_found_when_verified_and_when_read(place, ledger, population, run, releases):
    releases.make(run, value=BIG)
    (file,) = files(place)
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"\x01")
    assert any("was changed" in problem for problem in ledger.verify())
    with pytest.raises(LedgerTampered, match="no longer have the digest"):
        run.stored(releases.key())
    file.write_bytes(good[:-8])
    assert any("was changed" in problem for problem in ledger.verify())
    with pytest.raises(LedgerTampered, match=f"has {len(good) - 8} bytes instead of {len(good)}"):
        population.run("first")
    file.unlink()
    assert any("is gone" in problem for problem in ledger.verify())
    with pytest.raises(LedgerTampered, match="is gone"):
        population.run("first")
    with pytest.raises(LedgerTampered, match="is gone"):
        run.stored(releases.key())
    file.write_bytes(good)
    assert ledger.verify() == ()
    assert population.run("first").epoch == 2
