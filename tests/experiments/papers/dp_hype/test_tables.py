"""The tables on made-up numbers: resuming, what is averaged over what, and what text and plot say."""

import math

import numpy as np
import pytest

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_hype import __main__ as command
from dpray.experiments.papers.dp_hype import private, private_shown, tables
from dpray.experiments.papers.dp_hype.grid import GRID, SANE
from dpray.experiments.papers.dp_hype.measured import Measured
from dpray.experiments.papers.dp_hype.private import Trained
from dpray.experiments.papers.dp_hype.shown import NOTE, gathered, order, written
from dpray.experiments.papers.dp_hype.tables import EPSILONS, TABLES, Block, Choice, Table, Worth
from dpray.experiments.papers.dp_hype.tasks import TASKS
from dpray.platform.datasets import DatasetMissing

BEST = 17
REPETITIONS = 4
SMALL = Table("adult", "Small", (Block(("iid",), (100, 50)), Block(("dir0.5",), (100,))), range(2))


def made_up(condition, cache):
    """All clients agree on candidate 17, which is worth .9; the others are worth .5 to .6."""
    rng = np.random.default_rng(condition.seed)
    local = rng.random((condition.clients, len(GRID))) * 0.5
    local[:, BEST] = 0.9
    return Measured(local, made_up_worth())


def made_up_worth():
    worth = np.linspace(0.5, 0.6, len(GRID))
    worth[BEST] = 0.9
    return worth


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "measured", made_up)
    monkeypatch.setattr(tables, "local_losses", lambda condition, cache: made_up(condition, cache).local - 1)
    monkeypatch.setattr(tables, "REPETITIONS", REPETITIONS)
    return tmp_path


def filled(folder, table=SMALL, seeds=range(2)):
    count = tables.fill(tables.jobs(table, seeds, folder), folder, table.name, told=lambda text: None)
    return count, rows.read(folder / "adult_candidates.csv", Worth), rows.read(folder / "adult.csv", Choice)


def test_a_table_has_every_candidate_and_every_way_to_choose(folder):
    count, worths, choices = filled(folder)
    assert count == 6
    assert len(worths) == 6 * 100
    methods = {(row.clients, row.method) for row in choices}
    assert {clients for clients, method in methods if method == "subsets"} == {100}
    assert {method for clients, method in methods if clients == 50} == {
        *("k=5", "k=1", "k=5, by loss", "top scores", "all scores"),
        *("winner only, same μ", "winner only, pure ε"),
    }
    assert {row.epsilon for row in choices} == set(EPSILONS)
    assert {len(row.chosen) for row in choices} == {REPETITIONS}
    for row in choices:
        worth = {
            each.candidate: each.accuracy for each in worths if (each.clients, each.seed) == (row.clients, row.seed)
        }
        assert row.accuracy == pytest.approx(np.mean([worth[number] for number in row.chosen]), abs=1e-5)


def test_an_interrupted_table_goes_on_and_ends_alike(folder, tmp_path, monkeypatch):
    _, _, whole = filled(folder)
    other = tmp_path / "other"
    asked = []

    def counted(condition, cache):
        asked.append(condition.key)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return made_up(condition, cache)

    monkeypatch.setattr(tables, "measured", counted)
    with pytest.raises(KeyboardInterrupt):
        filled(other)
    assert {row.clients for row in rows.read(other / "adult_candidates.csv", Worth)} == {100}
    assert filled(other)[0] == 5
    assert filled(other)[2] == whole
    assert filled(other)[0] == 0


def test_a_line_that_was_not_written_whole_is_left_out(folder):
    _, worths, _ = filled(folder, seeds=range(1))
    place = folder / "adult_candidates.csv"
    place.write_text(place.read_text()[:-12])
    assert rows.read(place, Worth) == worths[:-1]


def test_intervals_are_over_runs_and_seeds_are_told_apart(folder):
    _, worths, choices = filled(folder)
    shown = gathered(worths, choices)["adult", "iid", 100]
    assert len(shown.runs["k=5", 1.0]) == 2 * REPETITIONS
    assert len(shown.worth) == 2
    assert shown.best.mean == pytest.approx(0.9)
    assert shown.sane.mean == pytest.approx(np.mean(made_up_worth()[list(SANE)]), abs=1e-5)
    assert shown.good("k=5", math.inf) == 1.0
    # The clients' other four votes are spread: the noise of ε = .1 drowns 100 votes, that of ε = 3 does not.
    assert shown.good("k=5", 3.0) == 1.0
    assert shown.good("k=5", 0.1) < 0.5


def test_a_seed_that_has_not_voted_yet_is_left_out(folder):
    _, worths, choices = filled(folder)
    shown = gathered(worths, [choice for choice in choices if choice.seed == 0 and choice.clients == 100])
    assert {population[2] for population in shown} == {100}
    assert list(shown["adult", "iid", 100].worth) == [0]


def test_the_text_stands_beside_the_papers_numbers(folder):
    _, worths, choices = filled(folder)
    text = written(SMALL, order(gathered(worths, choices)))
    assert NOTE in text
    assert "| iid | 100 | 2 | 0.900 [0.900, 0.900] |" in text
    assert "| 0.851, 0.626 |" in text
    assert text.index("| iid | 50 |") < text.index("| iid | 100 |") < text.index("| dir0.5 | 100 |")
    assert text.count("| subsets |") == 2


def test_the_command_makes_all_files_and_says_what_is_missing(folder, monkeypatch, capsys):
    monkeypatch.setitem(TABLES, "adult", SMALL)
    arguments = ["adult", "--seeds", "0:1", "--workers", "1", "--out", str(folder), "--cache", str(folder)]
    assert command.main(arguments) == 0
    assert {"adult.csv", "adult_candidates.csv", "adult.md", "adult.png"} <= {path.name for path in folder.iterdir()}
    assert (folder / "adult.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "adult.md").read_text() in capsys.readouterr().out

    def absent(condition, cache):
        raise DatasetMissing("no data here")

    monkeypatch.setattr(tables, "measured", absent)
    assert command.main([*arguments, "--show"]) == 0
    assert command.main([*arguments[:1], "--seeds", "7:8", *arguments[3:]]) == 1
    assert "skipped: no data here" in capsys.readouterr().out


def test_every_table_has_its_task():
    assert set(TABLES) == set(TASKS)
    keys = [job.key for job in tables.jobs(TABLES["adult"], range(2), None)]
    assert len(set(keys)) == len(keys) == 24


# Private trainings -------------------------------------------------------------------------------------------------


def trained(seed, method, accuracy, epsilon=1.0):
    return Trained("iid", seed, epsilon, method, 0, 2.0, 1.0, accuracy, epsilon * 0.999)


def test_the_vote_is_paired_by_seed_with_what_else_could_be_done():
    found = [trained(seed, f"grid {number}", 0.7 + 0.01 * number) for seed in range(3) for number in range(12)]
    found += [trained(seed, "vote", 0.8 + 0.01 * seed) for seed in range(3)]
    found += [trained(seed, "default", 0.78 + 0.01 * seed) for seed in range(3)]
    done = private_shown.compared(found)["iid", 1.0]
    assert done["at random"] == {seed: pytest.approx(0.755) for seed in range(3)}
    assert done["OPT"] == {seed: pytest.approx(0.81) for seed in range(3)}
    text = private_shown.written(found)
    assert "| iid | 1 | 3 | 0.810 [0.785, 0.835] | 0.755 [0.755, 0.755] |" in text
    assert "| +0.020 [+0.020, +0.020] |" in text
    assert "No account spent more than 0.999 times its ε" in text


def test_a_grid_that_is_not_whole_is_left_out():
    done = private_shown.compared([trained(0, "vote", 0.8), trained(0, "grid 0", 0.9)])["iid", 1.0]
    assert done["OPT"] == {}


@pytest.mark.slow
def test_vote_and_training_spend_one_account(ray_local, monkeypatch):
    """Three candidates on made-up records, through Tune: one of them has a rate so small that it learns nothing."""
    from dpray.experiments.papers.dp_hype.tasks import Ground
    from dpray.platform.cohort.client import Records

    grid = (
        {"learning_rate": 4.0, "clip": 1.0},
        {"learning_rate": 1e-9, "clip": 1.0},
        {"learning_rate": 2.0, "clip": 1.0},
    )
    monkeypatch.setattr(private, "GRID", grid)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((900, 4))
    y = (x[:, 0] > 0).astype(np.int64)
    clients = tuple(Records(x[i : i + 40], y[i : i + 40]) for i in range(0, 400, 40))
    ground = Ground(clients, Records(x[400:], y[400:]))
    found = private.trained(private.Job("iid", 1, 40.0, rounds=5, clients=10), ground)
    assert [row.method for row in found] == ["vote", "default", "grid 0", "grid 1", "grid 2"]
    assert found[0].candidate in (0, 2)
    assert found[0].accuracy > 0.8
    assert all(39.0 < row.spent <= 40.0 for row in found)
