"""Whole runs through the command line: what they leave behind, and that a killed one ends as if nothing had been."""

import json
import sqlite3
import stat
import time
from contextlib import closing

import numpy as np
import pytest

from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.privacy.budget import split
from dpray.platform.privacy.ledger import Head, ReleaseKey
from dpray.searchers.hype import MECHANISM as VOTES
from dpray.trainers import load_model, load_parameters
from dpray.trainers.base import MECHANISM as GRADIENTS

pytestmark = pytest.mark.timeout(900)

TRIES = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_workspace):
    """One uninterrupted run with test-only seeds."""
    workspace = make_workspace(tmp_path_factory.mktemp("whole") / "w")
    workspace.ended = workspace.run("run", workspace.recipe())
    assert workspace.ended.code == 0, workspace.ended.stderr
    return workspace


def planned(population):
    """What the small recipe sets aside: all of μ², the search's 30 % rounded down, the training's 70 % too."""
    budget = population.account("record").budget.quanta
    return budget * 3 // 10, budget * 7 // 10


def parameters(workspace):
    newest = max((workspace.path() / "training").glob("round-*"))
    return load_parameters(newest)


def test_the_report_names_winner_accuracy_and_account(whole):
    text = whole.ended.stdout
    for fact in ("Winner", "records declared public; chance", "record, ε = 6 at δ = 1e-05, replace-one", "Assumptions"):
        assert fact in text
    rows = {line.split()[0]: line for line in text.split("Account of population")[1].splitlines()[1:] if line.strip()}
    assert "30.0 %" in rows["search"]
    assert "70.0 %" in rows["training"]
    assert "100.0 %" in rows["total"]
    assert "0.0 %" in rows["left"]
    assert "central (aggregator trusted, shares simulated)" in rows["Trust"]
    assert "dpray ui" in text


def test_nothing_is_said_on_stderr(whole):
    assert whole.ended.stderr == ""


def test_progress_is_told_without_a_terminal(whole):
    lines = [line for line in whole.ended.stdout.splitlines() if line.startswith(("search ", "training "))]
    assert any("6/6" in line for line in lines)
    assert any("12/12" in line and "spent" in line and "left" in line for line in lines)


def test_what_is_spent_is_what_was_planned(whole):
    with whole.ledger() as ledger:
        (population,) = ledger.populations()
        account = population.account("record")
        search, training = planned(population)
        assert account.spent == search + training
        assert account.reserved == 0
        assert ledger.verify() == ()
        lines = {line.label: line.amount.quanta for line in account.statement("small").lines}
        assert lines == {"search": search, "training": training}


def test_every_release_is_in_the_ledger(whole):
    with whole.ledger() as ledger:
        run = ledger.populations()[0].run("small")
        votes = run.stored(ReleaseKey("search", VOTES, 0))
        assert list(votes[:6]) == whole.outcome()["noisy_votes"]
        assert all(run.stored(ReleaseKey("training", GRADIENTS, t)) is not None for t in range(1, 13))


def test_seeded_noise_is_not_private_everywhere(whole):
    stamp = "NOT PRIVATE (seeded noise)"
    assert stamp in whole.ended.stdout
    assert whole.outcome()["stamps"] == [stamp]
    assert stamp in whole.run("ledger", "show").stdout
    assert stamp in mlflow_runs(whole)["experiment"]["tags"]["dpray.stamps"]


def test_mlflow_has_parent_search_trials_training_and_artefacts(whole):
    runs = mlflow_runs(whole)
    assert {name.split("/")[0] for name in runs} == {"experiment", "search", "training"}
    assert sum(name.startswith("search/trial/") for name in runs) == 6
    assert all(run["status"] == "FINISHED" for run in runs.values())
    assert runs["training"]["metrics"]["accuracy"] == pytest.approx(whole.outcome()["accuracy"])
    assert runs["training"]["metrics"]["privacy/epsilon"] == pytest.approx(6, abs=1e-6)
    assert runs["training"]["metrics"]["privacy/share_spent"] == pytest.approx(1)
    assert runs["experiment"]["tags"]["unit"] == "record"
    kept = [path.name for path in (whole.folder / "mlartifacts").rglob("*") if path.is_file()]
    assert {"recipe.yaml", "statement.json", "statement.txt", "rounds.png"} <= set(kept)


def test_the_ledgers_head_is_anchored_in_mlflow(whole):
    tags = mlflow_runs(whole)["experiment"]["tags"]
    with whole.ledger() as ledger:
        anchor = Head(int(tags["dpray.ledger.sequence"]), tags["dpray.ledger.digest"])
        assert ledger.verify([anchor]) == ()
        assert ledger.verify([Head(anchor.sequence, "0" * 64)]) != ()
    verified = whole.run("ledger", "verify", "--tracking", "sqlite:///mlflow.db")
    assert (verified.code, "1 anchor" in verified.stdout) == (0, True)


def test_the_clients_have_seen_the_last_release_stored(whole):
    """So that no copy of the ledger from before is taken for it."""
    journal = SiteJournal(next((whole.folder / "dpray-sites").rglob("journal.db")))
    seen = journal.anchor()
    journal.close()
    with whole.ledger() as ledger:
        assert ledger.verify([seen]) == ()
    with closing(sqlite3.connect(whole.folder / "dpray-ledger.db")) as entries:
        ((last,),) = entries.execute("SELECT max(sequence) FROM entries WHERE kind = 'store'")
    assert seen.sequence >= last


def test_the_model_is_taken_away_with_what_it_cost(whole):
    exported = whole.run("export", "small", "--out", "exported")
    assert exported.code == 0, exported.stderr
    assert "NOT PRIVATE (seeded noise)" in exported.stdout
    model, theta, statement = load_model(whole.folder / "exported")
    assert np.array_equal(theta, parameters(whole))
    assert (model.features, statement.run, statement.budget) == (64, "small", 6)
    assert statement.epsilon_run == pytest.approx(6, abs=1e-6)
    again = whole.run("export", "small", "--out", "exported")
    assert (again.code, "holds something already" in again.stderr) == (2, True)
    assert whole.run("export", "other", "--out", "elsewhere").code == 2
    kept = [path.name for path in (whole.folder / "mlartifacts").rglob("model/**/*") if path.is_file()]
    assert {"MLmodel", "model.safetensors", "privacy.json"} <= set(kept)


def test_the_same_run_again_shows_what_came_out_and_spends_nothing(whole):
    with whole.ledger() as ledger:
        head = ledger.head()
    again = whole.run("run", whole.recipe())
    assert again.code == 0
    assert "is finished" in again.stdout
    assert whole.run("report", "small").stdout.split("Winner")[1] in again.stdout
    with whole.ledger() as ledger:
        assert ledger.head() == head


def test_another_recipe_under_the_same_name_is_refused(whole):
    other = whole.run("run", whole.recipe(cohort={"clients": 4}))
    assert other.code == 2
    assert "begun with another recipe (it differs in cohort)" in other.stderr


def test_its_population_is_bound_to_its_public_part_and_its_clients(whole):
    shown = whole.run("ledger", "show").stdout
    for fact in ("people is bound to cohort.clients = 8", "data.dataset = digits", "data.evaluation.fraction = 0.3"):
        assert fact in " ".join(shown.split())
    data = {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.3, "seed": 1}}
    for command in ("plan", "run"):
        other = whole.run(command, whole.recipe(data=data, name="other"))
        assert other.code == 2
        assert "data.evaluation.seed was 0 and is 1" in other.stderr
    assert not whole.path("other").exists()


def test_a_second_run_finds_the_budget_spent(whole):
    second = whole.run("run", whole.recipe(), "--name", "second")
    assert second.code == 2
    assert " 0.0 % of μ²" in second.stderr
    assert not whole.path("second").exists()


def test_files_with_private_state_are_closed_to_others(whole):
    for place in [whole.folder / "dpray-ledger.db", *(whole.folder / "dpray-sites").rglob("*.db")]:
        assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_killed_in_the_search_and_in_the_training_it_ends_as_if_nothing_had_been(whole, make_workspace, tmp_path):
    workspace, evaluated = killed_in_search(make_workspace, tmp_path)
    assert 0 < len(evaluated) < 6
    with workspace.ledger() as ledger:
        (population,) = ledger.populations()
        account = population.account("record")
        search, training = planned(population)
        assert ledger.verify() == ()
        assert account.spent in (0, search)
        assert account.spent + account.reserved == search + training

    process = workspace.begin("resume", "small")
    await_(process, lambda: list((workspace.path() / "training").glob("round-*")))
    workspace.kill(process)
    done = len(json.loads((newest_round(workspace) / "state.json").read_text())["rows"])
    assert 0 < done < 12
    with workspace.ledger() as ledger:
        (population,) = ledger.populations()
        assert ledger.verify() == ()
        spent = population.account("record").spent - search
        charged = [sum(split(training, 12)[:t]) for t in range(13)].index(spent)
        assert charged >= done  # charged ≥ revealed

    ended = workspace.run("resume", "small")
    assert ended.code == 0, ended.stderr
    with workspace.ledger() as ledger:
        (population,) = ledger.populations()
        assert population.account("record").spent == search + training
        assert population.account("record").reserved == 0
        assert ledger.verify() == ()
    assert workspace.outcome() == whole.outcome()
    assert np.array_equal(parameters(workspace), parameters(whole))
    runs = mlflow_runs(workspace)
    assert all(run["status"] == "FINISHED" for run in runs.values())
    assert len(runs) == len(mlflow_runs(whole))


@pytest.mark.slow
def test_other_noise_gives_other_votes(whole, make_workspace, tmp_path):
    """Negative control of the comparison above; and a run goes on without MLflow, which is told later."""
    workspace = make_workspace(tmp_path / "w")
    in_the_way = workspace.folder / "store"
    in_the_way.touch()
    ended = workspace.run("run", workspace.recipe(noise={"seed": 2}, tracking={"uri": "sqlite:///store/mlflow.db"}))
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("MLflow") == 1, ended.stderr
    assert "not all has reached MLflow" in ended.stdout
    assert workspace.outcome()["noisy_votes"] != whole.outcome()["noisy_votes"]
    in_the_way.unlink()
    assert "not all" not in workspace.run("resume", "small").stdout
    assert mlflow_runs(workspace, "store/mlflow.db")["training"]["metrics"].keys() >= {"accuracy", "privacy/epsilon"}


@pytest.mark.slow
def test_without_noise_it_says_not_private(make_workspace, tmp_path):
    workspace = make_workspace(tmp_path / "w")
    recipe = workspace.recipe(budget={"delta": 1e-5, "non_private": True}, noise=None, tracking={"uri": None})
    process = workspace.begin("run", recipe)
    await_(process, (workspace.path() / "training").exists)
    heard = workspace.listening(process)
    assert heard
    assert heard <= {"127.0.0.1", "::1"}
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert stdout.count("NOT PRIVATE (no noise)") >= 2
    assert "ε = ∞ (NOT PRIVATE)" in stdout
    assert workspace.outcome()["statement"]["spent"]["epsilon"] == "inf"
    assert not (workspace.folder / "mlflow.db").exists()


@pytest.mark.slow
def test_training_alone(make_workspace, tmp_path):
    workspace = make_workspace(tmp_path / "w")
    training = {"algorithm": "dp_fedgd", "rounds": 4, "learning_rate": 4.0, "clip": 1.0, "regime": "central"}
    recipe = workspace.recipe(search=None, shares={"training": 0.5}, training=training, tracking={"uri": None})
    ended = workspace.run("run", recipe)
    assert ended.code == 0, ended.stderr
    assert "no search" in ended.stdout
    assert workspace.outcome()["statement"]["trust"] == ["central"]
    assert workspace.outcome()["statement"]["remaining"]["share"] == pytest.approx(0.5)


def test_a_ledger_that_was_put_back_is_refused_by_the_clients(whole, make_workspace, tmp_path):
    workspace = make_workspace(tmp_path / "w")
    recipe = workspace.recipe(search=None, shares={"training": 0.3}, training=TRAINING_ALONE, tracking={"uri": None})
    assert workspace.run("run", recipe).code == 0
    (workspace.folder / "dpray-ledger.db").rename(workspace.folder / "away.db")
    refused = workspace.run("run", recipe, "--name", "second")
    assert refused.code == 2, refused.stdout
    assert "have seen a ledger" in refused.stderr
    assert not (workspace.folder / "dpray-ledger.db").exists()
    assert not workspace.path("second").exists()


TRAINING_ALONE = {"algorithm": "dp_fedsofim", "rounds": 3, "learning_rate": 4.0, "clip": 1.0}


def killed_in_search(make_workspace, tmp_path):
    """A run killed after its first and before its last trial, and which candidates were evaluated by then."""
    for attempt in range(TRIES):
        workspace = make_workspace(tmp_path / f"w{attempt}")
        saved = workspace.path() / "search" / "searcher.json"
        process = workspace.begin("run", workspace.recipe())
        await_(process, saved.exists)
        workspace.kill(process)
        evaluated = json.loads(saved.read_text())["batch"]["evaluated"]
        if 0 < len(evaluated) < 6:
            return workspace, evaluated
    pytest.fail(f"In {TRIES} tries the run was never killed while its search was under way.")


def newest_round(workspace):
    return max((workspace.path() / "training").glob("round-*"))


def await_(process, condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def mlflow_runs(workspace, store="mlflow.db"):
    """Runs of the workspace's store by their part."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{workspace.folder / store}")
    experiment = client.get_experiment_by_name("dpray")
    return {
        run.data.tags["dpray.part"]: {
            "status": run.info.status,
            "tags": dict(run.data.tags),
            "metrics": dict(run.data.metrics),
        }
        for run in client.search_runs([experiment.experiment_id])
    }
