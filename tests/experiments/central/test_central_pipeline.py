"""Whole searches from a recipe: what they leave behind, and that a killed one ends as if nothing had been."""

import io
import math
import os
import signal
import sqlite3
import struct
import time

import numpy as np
import pytest
from rich.console import Console

from dpray.experiments import kinds, pipeline
from dpray.experiments.central.paraboloid import Paraboloid
from dpray.experiments.report import plain
from dpray.experiments.runs import RunDirectory
from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import split
from dpray.platform.privacy.ledger import Ledger, ReleaseKey
from dpray.searchers.central import CentralSearch

pytestmark = pytest.mark.timeout(900)

T = 6
STAMP = "NOT PRIVATE (seeded noise)"
NOT_PRIVATE = ("budget", {"delta": 1e-5, "non_private": True})
WITHOUT_NOISE = "NOT PRIVATE (no noise)"


class Central:
    """A workspace and the recipe in it."""

    def __init__(self, workspace, text):
        self.workspace, self.folder = workspace, workspace.folder
        self.recipe = workspace.folder.with_suffix(".yaml")
        self.recipe.write_text(text)

    def released(self) -> int:
        """Releases stored so far, counted beside the run."""
        place = self.folder / "dpray-ledger.db"
        if not place.exists():
            return 0
        try:
            with sqlite3.connect(f"file:{place}?mode=ro", uri=True) as database:
                return database.execute("select count(*) from releases where state = 'stored'").fetchone()[0]
        except sqlite3.OperationalError:
            return 0

    def account(self, ledger):
        return ledger.populations()[0].account("user")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_workspace, small):
    """One uninterrupted run with test-only seeds."""
    central = Central(make_workspace(tmp_path_factory.mktemp("whole") / "w"), small())
    central.ended = central.workspace.run("run", central.recipe)
    assert central.ended.code == 0, central.ended.stderr
    return central


def test_the_report_names_result_losses_and_account(whole):
    text = whole.ended.stdout
    for fact in (
        "DP-GIBO, 6 iterations of at most 4 points, B = 1, σ_DP = ",
        "all 6 iterations are released",
        "paraboloid: 400 users, 3 searched settings; the users' losses are declared public",
        "unit user, ε = 5 at δ = 1e-05",
        "Assumptions",
        "dpray report small",
    ):
        assert fact in " ".join(text.split())
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    outcome = whole.workspace.outcome()
    assert rows["x_0"] == ["x_0", "0", f"{outcome['best_config']['x_0']:.4g}"]
    assert rows["mean"][:4] == ["mean", "loss", "(public", "data)"]
    assert rows["mean"][4:] == [f"{outcome['losses'][0]:.4g}", f"{outcome['result_loss']:.4g}"]
    assert whole.ended.stderr == ""


def test_it_finds_a_better_place_than_the_start(whole):
    outcome = whole.workspace.outcome()
    assert outcome["result_loss"] < 0.5 * outcome["losses"][0]
    assert len(outcome["path"]) == len(outcome["losses"]) == T + 1


def test_progress_is_told_without_a_terminal(whole):
    lines = [line for line in whole.ended.stdout.splitlines() if line.startswith("search ")]
    assert any("6/6" in line and "24 trials" in line and "ε 5 spent, 0 left" in line for line in lines)


def test_what_is_spent_is_what_was_planned_and_every_release_is_in_the_ledger(whole):
    with whole.workspace.ledger() as ledger:
        account = whole.account(ledger)
        assert (account.spent, account.reserved) == (account.budget.quanta, 0)
        run = ledger.populations()[0].run("small")
        assert all(run.stored(ReleaseKey("search", "gradient", t)).shape == (3,) for t in range(T))
        assert ledger.verify() == ()


def test_seeded_noise_is_not_private_everywhere(whole):
    assert STAMP in whole.ended.stdout
    assert whole.workspace.outcome()["stamps"] == [STAMP]
    assert STAMP in whole.workspace.run("ledger", "show").stdout
    assert STAMP in mlflow_runs(whole)["experiment"]["tags"]["dpray.stamps"]


def test_mlflow_has_the_search_step_by_step(whole):
    runs = mlflow_runs(whole)
    assert set(runs) == {"experiment", "search"}
    assert all(run["status"] == "FINISHED" for run in runs.values())
    search, outcome = runs["search"], whole.workspace.outcome()
    assert search["history"]["loss"] == pytest.approx(dict(enumerate(outcome["losses"])))
    x = {step: config["x_1"] for step, config in enumerate(outcome["path"])}
    assert search["history"]["iterate/x_1"] == pytest.approx(x)
    assert set(search["history"]["search/gradient_norm"]) == set(range(1, T + 1))
    assert search["metrics"]["privacy/epsilon"] == pytest.approx(5, abs=1e-6)
    spent = list(search["history"]["privacy/share_run"].values())
    assert spent == pytest.approx([t / T for t in range(T + 1)])
    assert runs["experiment"]["metrics"]["loss"] == pytest.approx(outcome["result_loss"])
    assert runs["experiment"]["tags"]["unit"] == "user"
    kept = [path.name for path in (whole.folder / "mlartifacts").rglob("*") if path.is_file()]
    assert {"recipe.yaml", "statement.json", "statement.txt", "path.png"} <= set(kept)


def test_the_same_run_again_shows_what_came_out_and_spends_nothing(whole):
    with whole.workspace.ledger() as ledger:
        head = ledger.head()
    again = whole.workspace.run("resume", "small")
    assert (again.code, "is finished" in again.stdout) == (0, True)
    assert whole.workspace.run("report", "small").stdout.split("Search")[1] in again.stdout
    with whole.workspace.ledger() as ledger:
        assert ledger.head() == head


def test_a_recipe_of_the_other_kind_under_the_same_name_is_refused(whole):
    other = whole.workspace.run("run", "digits_quickstart", "--name", "small")
    assert other.code == 2
    assert "another kind" in other.stderr


def test_a_second_run_finds_the_budget_spent(whole):
    for command in (("plan", whole.recipe), ("run", whole.recipe, "--name", "second")):
        second = whole.workspace.run(*command)
        assert second.code == 2
        assert "100.0 % of μ²" in second.stderr
        assert " 0.0 % of μ²" in second.stderr
    assert not whole.workspace.path("second").exists()


@pytest.mark.slow  # `test_pipeline` kills a run in every `make test`
def test_killed_within_iterations_it_ends_with_the_planned_spend_and_the_same_path(
    whole, make_workspace, tmp_path, small
):
    central = Central(make_workspace(tmp_path / "w"), small())
    for command, after in ((("run", central.recipe), 2), (("resume", "small"), 4)):
        process = central.workspace.begin(*command)
        await_(process, lambda after=after: central.released() >= after)
        central.workspace.kill(process)
        released = central.released()
        assert after <= released < T
        with central.workspace.ledger() as ledger:
            account = central.account(ledger)
            assert ledger.verify() == ()
            charged = [sum(split(account.budget.quanta, T)[:t]) for t in range(T + 1)].index(account.spent)
            assert charged >= released  # charged ≥ revealed
            assert account.spent + account.reserved == account.budget.quanta

    ended = central.workspace.run("resume", "small")
    assert ended.code == 0, ended.stderr
    with central.workspace.ledger() as ledger:
        account = central.account(ledger)
        assert (account.spent, account.reserved) == (account.budget.quanta, 0)
        assert ledger.verify() == ()
    assert central.workspace.outcome() == whole.workspace.outcome()
    runs = mlflow_runs(central)
    assert {part: run["status"] for part, run in runs.items()} == {"experiment": "FINISHED", "search": "FINISHED"}
    for name in ("loss", "iterate/x_0", "search/gradient_norm", "privacy/share_run"):
        assert runs["search"]["history"][name] == mlflow_runs(whole)["search"]["history"][name]


# In this process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def carry_out(ray_local, tmp_path, small):
    """Runs the small recipe, changed, on the session's Ray; returns outcome and what was printed."""

    def run(*changes, name="small"):
        file = io.StringIO()
        recipe = kinds.read(small(*changes))
        console = Console(file=file, width=160)
        return pipeline.run(recipe, name, tmp_path, console=console), file.getvalue()

    return run


def test_other_noise_gives_another_path(whole, carry_out):
    """Negative control of the comparison after a kill."""
    done, _ = carry_out(("noise.seed", 2))
    assert list(done.path) != whole.workspace.outcome()["path"]
    assert next(iter(done.path)) == whole.workspace.outcome()["path"][0]  # the start is no release


def test_of_protected_users_no_loss_is_shown(carry_out, tmp_path):
    done, text = carry_out(("objective.public", False), ("noise", {}))
    assert (done.losses, done.result_loss, done.stamps) == ([], None, [])
    assert "the users' losses are protected" in text
    assert "mean loss" not in text
    search = mlflow_runs_of(tmp_path)["search"]
    assert "loss" not in search["metrics"]
    assert {"search/gradient_norm", "iterate/x_0"} <= set(search["metrics"])
    assert found_in_files(tmp_path, canaries(done)) == []


def test_a_score_of_the_result_is_one_more_release(carry_out, tmp_path):
    done, text = carry_out(
        ("objective.public", False), ("noise", {}), ("score", {"bound": 4.0, "share": 0.1}), ("search.iterations", 2)
    )
    exact = np.clip(paraboloid_losses(done.best_config), 0, 4).mean()
    mu = gdp.mu(5, 1e-5) * math.sqrt(0.1)
    assert done.score_sigma == pytest.approx(4 / (400 * mu), rel=1e-5)
    assert abs(done.score - exact) < 6 * done.score_sigma  # fails by chance once in 5e8 runs
    assert done.score != exact
    assert f"std of the noise {done.score:.4g} ± {done.score_sigma:.2g}" in " ".join(text.split())
    with Ledger(f"sqlite:///{tmp_path / 'dpray-ledger.db'}", create=False) as ledger:
        account = ledger.populations()[0].account("user")
        assert (account.spent, account.reserved) == (account.budget.quanta, 0)
        lines = account.statement("small").lines
        assert [(line.mechanism, line.steps) for line in lines] == [("gradient", 2), ("score", 1)]
    assert mlflow_runs_of(tmp_path)["experiment"]["metrics"]["search/score"] == pytest.approx(done.score)


def test_of_public_data_the_losses_are_found_again(carry_out, tmp_path):
    """Negative control of the search for losses in files: here the means may be shown, and are."""
    done, text = carry_out(("noise", {}), ("search.iterations", 2))
    assert "mean loss (public data)" in text
    assert set(found_in_files(tmp_path, canaries(done))) >= set(done.losses)


SEARCHES = {
    "gibo": ({"iterations": 2, "points_per_trial": 4}, "gradient", 2),
    "finite_differences": ({"iterations": 2, "clip": 1.0, "points_per_trial": 4}, "gradient", 2),
    "spsa": ({"iterations": 2, "clip": 1.0, "points_per_trial": 4}, "gradient", 2),
    "private_random": ({"candidates": 6, "bound": 4.0, "points_per_trial": 6}, "winner", 1),
    "global_bo": ({"iterations": 2, "points_per_trial": 4}, "mean losses", 2),
}
DAILY = (
    "private_random",
    "global_bo",
)  # DP-GIBO's whole run is in the tests above; the rest differ in their gradient only


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in SEARCHES],
)
def test_every_search_runs_from_a_recipe(algorithm, carry_out, tmp_path):
    settings, mechanism, releases = SEARCHES[algorithm]
    without_noise = algorithm in ("gibo", "global_bo")
    changes = [("search", {"algorithm": algorithm, **settings}), ("noise", {})]
    done, text = carry_out(*changes, *([NOT_PRIVATE] if without_noise else []))
    assert done.best_config.keys() == {"x_0", "x_1", "x_2"}
    assert math.isfinite(done.result_loss)
    assert (WITHOUT_NOISE in text) == (WITHOUT_NOISE in done.stamps) == without_noise
    with Ledger(f"sqlite:///{tmp_path / 'dpray-ledger.db'}", create=False) as ledger:
        population = ledger.populations()[0]
        line = population.account("user").statement("small").lines[0]
        assert (line.label, line.steps) == ("search", releases)
        run = population.run("small")
        assert run.stored(ReleaseKey("search", mechanism, releases - 1)) is not None
    search = mlflow_runs_of(tmp_path)["search"]
    assert search["history"]["loss"][releases] == pytest.approx(done.losses[-1])
    assert (WITHOUT_NOISE in search["tags"].get("dpray.stamps", "")) == without_noise


def test_a_part_of_the_account_leaves_the_rest(carry_out, tmp_path):
    done, _ = carry_out(("spend", {"share": 0.25}), ("tracking", {"uri": None}))
    assert done.statement["remaining"]["share"] == pytest.approx(0.75)
    second, _ = carry_out(("spend", {"share": 0.75}), ("tracking", {"uri": None}), name="second")
    assert float(second.statement["remaining"]["share"]) <= 1e-12


@pytest.mark.slow
def test_an_iteration_that_cannot_be_evaluated_stops_the_run_and_does_not_end_it(carry_out, tmp_path, monkeypatch):
    from dpray.experiments.central import paraboloid
    from dpray.searchers.errors import SearchUnfinished

    class Failing(paraboloid.Paraboloid):
        def fit(self, config):
            raise RuntimeError("no disk")

    changes = (("objective.dimension", 1), ("search.max_retries", 2), ("tracking", {"uri": None}))
    with monkeypatch.context() as patch:
        patch.setattr(paraboloid, "Paraboloid", Failing)
        with pytest.raises(SearchUnfinished, match=r"after 0 of 6 releases: .* could be evaluated.* Nothing was spent"):
            carry_out(*changes)
    done, _ = carry_out(*changes)
    assert len(done.path) == T + 1


@pytest.mark.slow
def test_a_curator_that_dies_more_often_than_tune_has_samples_to_spare_stops_nothing(carry_out, tmp_path, monkeypatch):
    """Killed with all losses of a step, in three steps of six: twelve evaluations more, and six are planned for."""
    usable, struck = CentralSearch.usable, set()

    def robbed(self, step, batch, least=2):
        if step % 2 and step not in struck:
            struck.add(step)
            os.kill(self.curator.process, signal.SIGKILL)
        return usable(self, step, batch, least)

    monkeypatch.setattr(CentralSearch, "usable", robbed)
    done, _ = carry_out()
    assert struck == {1, 3, 5}
    assert len(done.path) == T + 1
    with Ledger(f"sqlite:///{tmp_path / 'dpray-ledger.db'}") as ledger:
        account = ledger.population("people").account("user")
        assert (account.spent, account.reserved) == (account.budget.quanta, 0)
        assert [entry.kind for entry in account.history()].count("charge") == T


def test_a_report_that_is_read_back_is_the_same(whole, tmp_path):
    done = RunDirectory(whole.folder, "small").finished()
    assert plain(kinds.drawn(done)).split("Objective")[1].split("Account")[0].split() == (
        whole.ended.stdout.split("Objective")[1].split("Account")[0].split()
    )


def paraboloid_losses(config):
    task = Paraboloid(dimension=3, users=400, seed=0)
    return task.losses(task.fit(dict(config)))


def canaries(done):
    """Exact mean losses along the path, and the losses of some users at its ends: some forty numbers."""
    rows = [paraboloid_losses(config) for config in done.path]
    return [float(row.mean()) for row in rows] + [float(loss) for row in (rows[0], rows[-1]) for loss in row[:16]]


def found_in_files(folder, numbers):
    """Those that stand in a file as decimal text (12 digits) or as a float64: chance hits are below 1e-6."""
    found = []
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for number in numbers:
        forms = (repr(number)[:13].encode(), struct.pack("<d", number), struct.pack(">d", number))
        if any(form in content for content in contents for form in forms):
            found.append(number)
    return found


def await_(process, condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def mlflow_runs(central):
    return mlflow_runs_of(central.folder)


def mlflow_runs_of(folder):
    """Runs of a workspace's store by their part, with the history of every metric."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dpray")
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        for name, points in history.items():
            assert len({point.step for point in points}) == len(points), f"{name} has a step twice"
        found[run.data.tags["dpray.part"]] = {
            "status": run.info.status,
            "tags": dict(run.data.tags),
            "metrics": dict(run.data.metrics),
            "history": {
                name: {p.step: p.value for p in sorted(points, key=lambda p: p.step)}
                for name, points in history.items()
            },
        }
    return found
