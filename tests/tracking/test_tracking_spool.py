"""The spool: what is on disk survives, is private to its owner, and is never half a line."""

import os
import stat

import pytest

from dpray.platform.tracking.spool import Spool


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def entries(spool):
    return [entry["n"] for entry in spool.entries() if "n" in entry]


def test_everything_is_private_to_its_owner(tmp_path):
    before = os.umask(0)
    try:
        spool = Spool(tmp_path / "run" / "spool")
        spool.append({"op": "x", "n": 1})
        file, _ = spool.keep("plot.png", b"image")
        spool.advance(spool.end)
    finally:
        os.umask(before)
    assert mode(spool.folder) == 0o700
    assert {mode(path) for path in spool.folder.rglob("*") if path.is_file()} == {0o600}
    assert (spool.folder / file).read_bytes() == b"image"


def test_entries_and_cursor_are_found_again(tmp_path):
    spool = Spool(tmp_path, {"run": "a"})
    for n in range(5):
        spool.append({"op": "x", "n": n})
    read, position = spool.read(2)
    assert [entry["n"] for entry in read] == [0, 1]
    spool.advance(position)
    spool.close()
    again = Spool(tmp_path, {"run": "another name"})
    assert (again.fresh, again.identity, again.header["run"]) == (False, spool.identity, "a")
    assert entries(again) == [0, 1, 2, 3, 4]
    assert [entry["n"] for entry in again.read(10)[0]] == [2, 3, 4]


def test_a_torn_last_line_is_cut_off(tmp_path):
    spool = Spool(tmp_path)
    spool.append({"op": "x", "n": 1})
    spool.close()
    with spool.path.open("ab") as file:
        file.write(b'{"op":"x","n":2')
    again = Spool(tmp_path)
    again.append({"op": "x", "n": 3})
    assert entries(again) == [1, 3]


@pytest.mark.parametrize("cursor", ["", "nonsense", "-3", "999999"])
def test_a_damaged_cursor_means_from_the_beginning(tmp_path, cursor):
    spool = Spool(tmp_path)
    spool.append({"op": "x", "n": 1})
    spool.advance(spool.end)
    spool.close()
    (tmp_path / "cursor").write_text(cursor)
    assert Spool(tmp_path).cursor == 0


def test_a_spool_that_continues_another_run_keeps_its_identity(tmp_path):
    spool = Spool(tmp_path)
    spool.adopt("the other")
    assert spool.identity == "the other"
    assert Spool(tmp_path).identity == "the other"


def test_infinities_are_no_json(tmp_path):
    spool = Spool(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        spool.append({"op": "x", "n": float("inf")})
    assert entries(spool) == []


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "spool.jsonl").write_text('{"op":"something else"}\n')
    with pytest.raises(ValueError, match="move it away"):
        Spool(tmp_path)
