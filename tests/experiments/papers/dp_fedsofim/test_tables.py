"""The tables on small clients: what is in them, resuming, pairing, and what text and plots say."""

import math

import numpy as np
import pytest

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_fedsofim import __main__ as command
from dpray.experiments.papers.dp_fedsofim import compared, data, methods, shown, shown_tuned, tables
from dpray.experiments.papers.dp_fedsofim.compared import NOTE, Place, cells, difference, first_at, rounds_earlier
from dpray.experiments.papers.dp_fedsofim.data import Ground
from dpray.experiments.papers.dp_fedsofim.methods import BOXES, MATCHED, REFERENCE, SCAFFOLD
from dpray.experiments.papers.dp_fedsofim.tables import EPSILONS, SEEDS, Job, Row, TunedJob
from dpray.platform.datasets import DatasetMissing

from .conftest import blobs

SILENT = {"told": lambda text: None}


@pytest.fixture
def small(monkeypatch):
    """600 records instead of a data set."""
    whole = Ground(blobs(600, 1), blobs(200, 2), 3)
    for module in (tables, data, command):
        monkeypatch.setattr(module, "ground", lambda task: whole)
    return whole


@pytest.fixture
def short(small, monkeypatch):
    """Two rounds, few clients, four trials."""
    monkeypatch.setattr(methods, "ROUNDS", 2)
    monkeypatch.setattr(tables, "TRIALS", 4)
    monkeypatch.setattr(tables, "MANY", 20)
    monkeypatch.setattr(tables, "FEW", 10)
    monkeypatch.setattr(shown_tuned, "TRIALS", 4)
    monkeypatch.setattr(tables.run, "__defaults__", (2,))
    return small


def test_a_job_has_all_methods_at_all_epsilons_and_one_of_them_no_noise(small):
    names, finite = set(methods.paper(data.TASKS["pneumonia"])), [each for each in EPSILONS if not math.isinf(each)]
    places = set()
    for regime, clients in (("local", 100), ("local", 20), ("distributed", 100)):
        found = tables.run(Job("pneumonia", regime, 400, clients), rounds=2)
        asked = {(row.method, row.epsilon) for row in found if row.regime != "none"}
        assert asked == {(name, epsilon) for name in names for epsilon in finite}
        assert all(len(row.rounds) == 2 for row in found)
        assert all(row.rounds[-1] == pytest.approx(row.accuracy, abs=5.1e-4) for row in found)
        assert {tables._job_of(row) for row in found} == {Job("pneumonia", regime, 400, clients).key}
        places |= {(row.regime, row.clients) for row in found}
    assert places == {("local", 20), ("local", 100), ("distributed", 100), ("none", 0)}
    assert "FedFC" not in {row.method for row in tables.run(Job("cifar10-eighth", "local", 400, 100), rounds=1)}


def test_iid_and_dirichlet_differ_where_clients_are_seen_and_only_there(small):
    def accuracies(part, kind):
        return [row.accuracy for row in tables.run(Job("pneumonia", part, 400, 20, kind), rounds=3)]

    assert accuracies("scaffold", "iid") != accuracies("scaffold", "dirichlet")
    assert accuracies("means", "iid") != accuracies("means", "dirichlet")
    conditions = {row.epsilon for row in tables.run(Job("pneumonia", "means", 400, 20, "dirichlet"), rounds=1)}
    assert conditions == set(tables.MEANS_EPSILONS)


def test_float32_products_give_the_same_accuracies(small):
    single, double = (
        [row.accuracy for row in tables.run(Job("pneumonia", "local", 400, 100, single=single), rounds=4)]
        for single in (True, False)
    )
    np.testing.assert_allclose(single, double, atol=1.5 / len(small.scored))


def test_an_interrupted_table_goes_on_and_ends_alike(short, tmp_path, monkeypatch):
    todo = tables.jobs(["pneumonia", "cifar10-eighth"], range(400, 401))
    assert len({job.key for job in todo}) == len(todo) == 3 + 1 + 6
    whole = tmp_path / "whole"
    assert tables.fill(todo, whole, **SILENT) == len(todo)
    assert tables.fill(todo[:3], tmp_path, **SILENT) == 3
    assert tables.fill(todo, tmp_path, **SILENT) == len(todo) - 3
    assert tables.fill(todo, tmp_path, **SILENT) == 0
    bare = [
        [(row.method, row.regime, row.clients, row.partition, row.epsilon, row.seed, row.curve) for row in found]
        for found in (rows.read(folder / "paper.csv", Row) for folder in (whole, tmp_path))
    ]
    assert bare[0] == bare[1]


def test_trials_are_scored_on_held_out_records_and_the_best_of_them_on_the_test_set(short, monkeypatch):
    """The test part is handed out with labels of its own: no trial sees it, and all final trainings do."""
    seen = []

    def watched(model, thetas, scored):
        seen.append((len(thetas), scored))
        return np.arange(len(thetas)) / 1000

    monkeypatch.setattr(tables, "scores", watched)
    found = tables.run_tuned(TunedJob("pneumonia", 5.0, "local", 20))
    trials, finals = [row for row in found if not row.final], [row for row in found if row.final]
    assert len(trials) == len(BOXES) * 4
    assert {(row.method, row.trial) for row in finals} == {(name, 3) for name in BOXES}
    assert {row.seed for row in finals} == set(SEEDS)
    assert [number for number, _ in seen] == [len(trials), len(BOXES) * len(SEEDS)]
    held_out = seen[0][1]
    assert len(held_out) == 120
    assert all(scored is short.scored for _, scored in seen[1:])
    train = {row.tobytes() for row in short.train.x}
    assert all(row.tobytes() in train for row in held_out.x)


def test_local_steps_are_tuned_over_the_box_of_dp_fedgd(short):
    found = tables.run_tuned(TunedJob("pneumonia", math.inf, "local", 20, "iid"))
    assert {row.method for row in found} == {SCAFFOLD}
    others = tables.run_tuned(TunedJob("pneumonia", math.inf, "none", 0))
    plain = [row.config for row in others if row.method == REFERENCE]
    assert [row.config for row in found][:4] == plain[:4]


def test_every_tuned_place_is_asked_for_once():
    todo = tables.tuned_jobs(["cifar10", "cifar10-eighth"])
    assert len({job.key for job in todo}) == len(todo)
    assert {job.task for job in todo} == {"cifar10"}
    assert {job.epsilon for job in todo if (job.regime, job.clients, job.partition) == ("local", 100, "any")} == {
        epsilon for epsilon in EPSILONS if not math.isinf(epsilon)
    }


# What is made of the rows ------------------------------------------------------------------------------------------


def row(method, accuracy, *, seed=0, epsilon=1.0, curve="", regime="local", clients=20, partition="any", part="local"):
    return Row("pneumonia", part, method, regime, clients, partition, epsilon, seed, accuracy, curve)


def test_differences_are_paired_by_seed():
    """Two methods whose accuracies differ by 1 point with every seed, which themselves differ by 30."""
    own = {seed: row("SOFIM momentum", 0.5 + 0.1 * seed + 0.01, seed=seed) for seed in range(4)}
    reference = {seed: row(REFERENCE, 0.5 + 0.1 * seed, seed=seed) for seed in range(5)}
    found = difference(own, reference)
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))
    assert compared.points(found).startswith("**+1.00")
    assert difference(own, {}) is None
    assert compared.accuracy(own).high - compared.accuracy(own).low > 30


def test_intervals_are_students_over_seeds():
    """t(.975, 2) = 4.3027; of 60, 62, 64 the deviation is 2."""
    found = compared.accuracy({seed: row(REFERENCE, 0.6 + 0.02 * seed, seed=seed) for seed in range(3)})
    assert (found.mean, found.high - found.mean) == pytest.approx((62.0, 4.30265 * 2 / 3**0.5), abs=1e-4)


def test_rounds_are_counted_until_the_baselines_last_accuracy():
    slow = {0: row(REFERENCE, 0.7, curve="100 400 600 700"), 1: row(REFERENCE, 0.7, seed=1, curve="100 700 650 700")}
    quick = {0: row("x", 0.8, curve="300 700 650 800"), 1: row("x", 0.6, seed=1, curve="500 600 600 600")}
    assert rounds_earlier(quick, slow) == [2, None]
    assert rounds_earlier(slow, slow) == [0, 0]
    assert compared.earlier([2, None]) == "+2 (1 of 2)"
    assert compared.earlier([None]) == "never"
    assert first_at([0.1, 0.5, 0.4], 0.45) == 2


def test_what_has_no_noise_stands_at_every_place_of_its_task():
    found = cells([
        row(REFERENCE, 0.5),
        row(REFERENCE, 0.6, clients=100),
        row(REFERENCE, 0.9, epsilon=math.inf, regime="none", clients=0),
        row(SCAFFOLD, 0.4, clients=100, partition="iid", part="scaffold"),
        row(REFERENCE, 0.4, clients=100, partition="dirichlet", part="means"),
    ])  # fmt: skip
    assert set(found) == {Place("pneumonia", "local", 20), Place("pneumonia", "local", 100)}
    assert found[Place("pneumonia", "local", 20)][REFERENCE, math.inf][0].accuracy == 0.9
    assert {name for name, _ in found[Place("pneumonia", "local", 100)]} == {
        REFERENCE,
        "SCAFFOLD, iid",
        "FedGD, client means, dirichlet",
    }


def test_the_text_names_differences_to_the_matched_step():
    found = [row(name, accuracy, seed=seed, curve="500 500") for seed in range(3) for name, accuracy in (
        (REFERENCE, 0.60), (MATCHED, 0.64), ("SOFIM gradient", 0.63)
    )]  # fmt: skip
    text = shown.written(found)
    assert NOTE in text
    assert "| SOFIM gradient − FedGD |  | **+3.00 ± 0.00** |" in text
    assert f"| SOFIM gradient − {MATCHED} |  | **-1.00 ± 0.00** |" in text
    assert "βf/ρ" in text


def test_the_price_of_tuning_is_that_of_all_its_trainings(short):
    """ε = 1 at δ = 1e-5 is μ = 20·√70/624.254 (golden); four trials and the last training are √5 of it."""
    mu = 20 * 70**0.5 / 624.2540725147934
    assert "are 5 trainings" in shown_tuned.cost()
    assert f"ε = 1 (μ = {mu:.3f}) →" in shown_tuned.cost()
    assert f"(μ = {mu * 5**0.5:.3f});" in shown_tuned.cost()


def test_the_command_makes_all_files_and_goes_on_with_what_is_there(short, tmp_path, capsys, monkeypatch):
    arguments = ["--tasks", "pneumonia", "--out", str(tmp_path)]
    assert command.main(["paper", "--seeds", "400:401", *arguments]) == 0
    assert command.main(["paper", "--seeds", "400:401", "--show", "--out", str(tmp_path)]) == 0
    made = {"paper.csv", "paper.md", "paper.png", "differences.png", "curves.png"}
    assert made <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(tables, "tuned_jobs", lambda tasks: [TunedJob("pneumonia", 1.0, "local", 20)])
    assert command.main(["tuned", *arguments]) == 0
    assert (tmp_path / "tuned.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "tuned.md").read_text() in capsys.readouterr().out

    def absent(task):
        raise DatasetMissing("no data here")

    monkeypatch.setattr(command, "ground", absent)
    assert command.main(["paper", *arguments]) == 1
    assert "skipped: no data here" in capsys.readouterr().out
