"""The tables: small versions of each, resuming, equal evaluations, and what text and plot say."""

import math

import pytest

from dpray.experiments.papers.dp_gibo import __main__ as command
from dpray.experiments.papers.dp_gibo import tables
from dpray.experiments.papers.dp_gibo.methods import FAMILIES, Ground, candidates, proposed
from dpray.experiments.papers.dp_gibo.shown import NOTE, REFERENCE, draw, written
from dpray.experiments.papers.dp_gibo.simulate import accounts
from dpray.experiments.papers.dp_gibo.tables import TABLES, Block, Row, Table, available, fill, jobs, read
from dpray.experiments.papers.dp_gibo.tasks import TASKS, Task

SMALL = {
    "lasso2": Task("lasso2", 2, 0.05),
    "lasso10": Task("lasso10", 1, 0.05),
    "lasso20": Task("lasso20", 1, 0.05),
    **{f"gp{d}": Task(f"gp{d}", 1, 0.05) for d in (2, 5, 10, 15)},
}
QUICK = tuple(name for name in FAMILIES if name != "global bo")


def small(*tasks, families=QUICK, mus=(1.0,)):
    return Table("small", "Small", (Block(tasks, families, mus),), range(2))


def quiet(text):
    return None


@pytest.mark.parametrize("name", ["lasso", "gp"])
def test_a_small_version_of_a_table_runs_whole(tmp_path, name):
    blocks = tuple(
        Block(block.tasks, QUICK if block.most_seeds is None else (), block.mus) for block in TABLES[name].blocks
    )
    table = Table(name, "x", blocks, range(1))
    fill(jobs(table, [0], SMALL), tmp_path / "t.csv", told=quiet)
    rows = read(tmp_path / "t.csv")
    assert {row.task for row in rows} == {task for block in TABLES[name].blocks for task in block.tasks}
    assert all(row.loss > 0 for row in rows)
    text = written(table, rows)
    assert NOTE in text
    assert all(f"| {row.method} |" in text for row in rows)
    draw(table, rows, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_small_version_of_the_ablations_runs_whole(tmp_path):
    table = TABLES["ablations"]
    fill(jobs(table, [0], SMALL), tmp_path / "t.csv", told=quiet)
    rows = read(tmp_path / "t.csv")
    assert {row.variant for row in rows} == {block.variant for block in table.blocks}
    used = {row.variant: row.evaluations for row in rows if row.task == "gp10"}
    assert used["bias=6"] < 11 < used["bias=0.5"]
    assert NOTE in written(table, rows)
    draw(table, rows, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size < 200_000


def test_a_small_version_of_the_svr_runs_whole(tmp_path, uci_folder, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(uci_folder))
    _, missing = available(TABLES["svr"])
    assert [sentence.split(" ")[0] for sentence in missing if "ct_slices" not in sentence] == []
    own = {"svr-keggundirected": Task("svr-keggundirected", 1, 0.5, users=50)}
    few = Table("svr", "x", (Block(tuple(own), ("start", "dp-gibo", "random")),), range(1))
    fill(jobs(few, [0], own), tmp_path / "t.csv", told=quiet)
    rows = read(tmp_path / "t.csv")
    assert {row.mu for row in rows} == {1.0, 0.2, math.inf}
    assert {row.evaluations for row in rows} == {0, 30}


@pytest.mark.timeout(120)
def test_global_bo_makes_as_many_evaluations(tmp_path):
    table = small("lasso2", families=("global bo",))
    fill(jobs(table, [0], {"lasso2": Task("lasso2", 4, 0.05)}), tmp_path / "t.csv", told=quiet)
    (row,) = read(tmp_path / "t.csv")
    assert (row.method, row.mu, row.evaluations) == ("global BO", math.inf, 12)


@pytest.mark.parametrize("d", [1, 2, 5, 10, 20])
def test_global_bo_has_room_for_its_proposals(d):
    count = 20 * (d + 1)
    assert 0 < proposed(d, count) <= count - 2


def test_evaluations_are_equal_but_for_spsa(tmp_path):
    table = small("gp2", "gp5")
    fill(jobs(table, [0], {name: Task(name, 3, 0.05) for name in ("gp2", "gp5")}), tmp_path / "t.csv", told=quiet)
    for row in read(tmp_path / "t.csv"):
        d = int(row.task[2:])
        expected = 0 if row.method == "start" else 3 * 2 * ((d + 1) // 2) if "SPSA" in row.method else 3 * (d + 1)
        assert row.evaluations == expected


def test_all_methods_start_alike():
    with accounts() as opened:
        ground = Ground(TASKS["lasso10"], 3, opened, ())
        start = ground.objective.start(3)
        assert ground.descent["start"] == start
        for whole in (False, True):
            assert candidates(ground, whole)[0][0] == start
        inside = candidates(ground, False)[1]
        assert (inside >= -6.0 - 1e-9).all()
        assert (candidates(ground, True)[1] < -6.0).any()


# Interrupted -------------------------------------------------------------------------------------------------------


def test_rows_that_are_there_are_not_computed_again(tmp_path, monkeypatch):
    place, table = tmp_path / "t.csv", small("lasso2", families=("start", "dp-gibo"))
    todo = jobs(table, range(2), SMALL)
    ran, real = [], tables.Job.rows

    def counted(job):
        ran.append(job.key)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return real(job)

    monkeypatch.setattr(tables.Job, "rows", counted)
    with pytest.raises(KeyboardInterrupt):
        fill(todo, place, told=quiet)
    before = read(place)
    assert {(row.family, row.seed) for row in before} == {("start", 0), ("dp-gibo", 0)}
    assert fill(todo, place, told=quiet) == 2
    after = read(place)
    assert after[: len(before)] == before
    assert ran[3:] == [todo[2].key, todo[3].key]
    assert fill(todo, place, told=quiet) == 0


def test_an_interrupted_table_ends_with_the_same_losses(tmp_path):
    table = small("lasso2", families=("dp-gibo", "random"))
    fill(jobs(table, range(2), SMALL), tmp_path / "whole.csv", told=quiet)
    fill(jobs(table, range(1), SMALL), tmp_path / "parts.csv", told=quiet)
    fill(jobs(table, range(2), SMALL), tmp_path / "parts.csv", told=quiet)
    whole, parts = ({_key(row): row.loss for row in read(tmp_path / f"{name}.csv")} for name in ("whole", "parts"))
    assert whole == parts


def test_a_line_that_was_not_written_whole_is_left_out(tmp_path):
    place = tmp_path / "t.csv"
    fill(jobs(small("lasso2", families=("start",)), range(2), SMALL), place, told=quiet)
    text = place.read_text()
    place.write_text(text[: text.rindex("inf") - 1])
    assert [row.seed for row in read(place)] == [0]


def _key(row: Row):
    return row.task, row.method, row.mu, row.seed


# What is shown -----------------------------------------------------------------------------------------------------


def row(method, seed, loss, mu=1.0, task="lasso2"):
    return Row(task, "", "family", method, mu, seed, 60, loss, 0.1)


def test_the_text_pairs_methods_with_dp_gibo():
    rows = [row(REFERENCE, seed, 2.0**seed) for seed in range(4)]
    rows += [row("other", seed, 3 * 2.0**seed) for seed in range(4)]
    rows += [row("open", seed, 2.0**seed / 2, mu=math.inf) for seed in range(4)]
    text = written(small("lasso2"), rows)
    assert "| other | yes | 8.49 [" in text
    assert "| 3 [3, 3] | 4 of 4 | 60 |" in text
    assert text.index("| open | no |") < text.index(f"| {REFERENCE} | yes |") < text.index("| other |")


def test_a_task_without_its_data_is_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(tmp_path))
    table, missing = available(TABLES["svr"])
    assert all(block.tasks == () for block in table.blocks)
    assert len(missing) == 3
    assert all("was skipped: " in sentence and str(tmp_path) in sentence for sentence in missing)


def test_the_command_makes_all_three_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TABLES, "lasso", small("lasso2", families=("start", "dp-gibo"), mus=(1.0,)))
    monkeypatch.setitem(TASKS, "lasso2", SMALL["lasso2"])
    assert command.main(["lasso", "--seeds", "0:2", "--workers", "1", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.csv", "small.md", "small.png"]
    printed = capsys.readouterr().out
    assert "done: 4 jobs" in printed
    assert (tmp_path / "small.md").read_text() in printed


@pytest.mark.parametrize("seeds", ["5", "3:3", "a:b", "-1:2"])
def test_odd_seeds_are_refused(seeds, capsys):
    with pytest.raises(SystemExit):
        command.main(["lasso", f"--seeds={seeds}"])
    assert "seed" in capsys.readouterr().err
