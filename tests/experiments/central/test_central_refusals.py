"""What can be refused of a search is refused with exit code 2 and a sentence: nothing spent, nothing written."""

import math
import sys

import pytest
from typer.testing import CliRunner

from dpray.experiments import kinds
from dpray.experiments.central import plan
from dpray.experiments.cli import app
from dpray.experiments.figures import number
from dpray.platform.privacy import Budget, Unit, gdp
from dpray.platform.privacy.ledger import Ledger, Plan, PlannedRelease

BUDGET = Budget(5, 1e-5)


def dpray(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result, *facts):
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert [fact for fact in facts if fact not in result.stderr] == []
    assert result.stdout == ""


def ray_runs():
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def file(tmp_path, small):
    def write(*changes):
        place = tmp_path / "small.yaml"
        place.write_text(small(*changes), encoding="utf-8")
        return place

    return write


@pytest.fixture
def ledger(workspace):
    ledger = Ledger(f"sqlite:///{workspace / 'dpray-ledger.db'}")
    yield ledger
    ledger.close()


TABLE = {
    "unknown objective": (("objective.name", "group_laso"), ["group_laso", "did you mean `group_lasso`"]),
    "unknown key": (("search.iteration", 3), ["`search.iteration`", "`iterations`"]),
    "whole numbers": (("search.space", {"x_1": {"randint": [0, 3]}}), ["`search.space.x_1`", "range of floats"]),
    "choices": (("search.space", {"x_1": {"choice": [0.5, 1.0]}}), ["`search.space.x_1`", "range of floats"]),
    "unknown setting": (("search.space", {"y": 1.0}), ["`search.space.y`", "`paraboloid`", "x_0"]),
    "no budget": (("budget", {"delta": 1e-5}), ["`budget.epsilon`", "missing"]),
    "mu zero": (("spend", {"mu": 0.0}), ["`spend.mu`", "above 0"]),
    "mu over budget": (("spend", {"mu": 3.0}), ["`spend.mu: 3`", "ε=5"]),
    "no iterations": (("search.iterations", 0), ["`search.iterations`", "at least 1"]),
    "clip zero": (("search.clip", 0), ["`search.clip`", "above 0"]),
    "unit": (("population.unit", "client"), ["`population.unit`", "`user`"]),
    "data that is not there": (
        ("objective", {"name": "kernel_svr", "folder": "no_such_folder"}),
        ["no_such_folder"],
    ),
    "more features than there are": (
        ("objective", {"name": "kernel_svr", "dataset": "digits", "features": 3}),
        ["`objective`", "digits"],
    ),
}


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(("change", "facts"), TABLE.values(), ids=TABLE)
def test_a_recipe_is_refused_and_nothing_is_made(command, change, facts, file, workspace):
    before = ray_runs()
    refused(dpray(command, file(change), "--workspace", workspace), *facts)
    assert list(workspace.iterdir()) == []
    assert ray_runs() == before


def test_the_unchanged_recipe_is_planned(file, workspace):
    """Negative control of the table, which also shows what a plan says, and that it makes nothing."""
    result = dpray("plan", file(("search.points_per_trial", 2)), "--workspace", workspace)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    mu = gdp.mu(5, 1e-5)
    sigma = 2 * math.sqrt(6) / (400 * mu)
    for fact in (
        "NOT PRIVATE (seeded noise)",
        "Plan of small: 400 users, 3 settings, at most 24 evaluations. Nothing was spent.",
        f"search 6 user 100.0 % 5 {number(gdp.epsilon(mu / math.sqrt(6), 1e-5))}",
        f"DP-GIBO, 6 iterations of at most 4 points, B = 1, σ_DP = {sigma:.3g}",
        "at most 12 trials of 2 points: 24 evaluations",
        f"its length is {sigma * math.sqrt(3):.3g} times the longest a gradient can be (σ_DP·√d / B)",
        "Account of population people: unit user, ε=5, δ=1e-05",
        "before 0.0 % 0.0 % 100.0 % 5",
        "after 100.0 % 0.0 % 0.0 % 0",
    ):
        assert fact in text
    assert list(workspace.iterdir()) == []


def test_a_plan_of_the_shipped_recipe(workspace):
    result = dpray("plan", "group_lasso", "--workspace", workspace)
    assert result.exit_code == 0, result.output
    assert "group_lasso: 150 users, 10 searched settings; the users' losses are declared public" in " ".join(
        result.stdout.split()
    )


def test_over_budget_names_both_numbers_and_changes_nothing(file, workspace, ledger):
    population = ledger.population("people")
    population.account("user", BUDGET)
    line = PlannedRelease("search", "gradient", Unit.USER, BUDGET.quanta * 3 // 4, 3)
    population.run("other").reserve(Plan((line,)))
    head = ledger.head()
    refused(dpray("run", file(), "--workspace", workspace), "100.0 % of μ²", "25.0 % of μ²", "user account")
    planned = dpray("plan", file(("spend", {"share": 0.5})), "--workspace", workspace)
    assert (planned.exit_code, "75.0 %" in planned.stdout, "50.0 % of μ²" in planned.stderr) == (2, True, True)
    assert dpray("plan", file(("spend", {"share": 0.25})), "--workspace", workspace).exit_code == 0
    assert ledger.head() == head


def test_an_account_reopened_with_another_budget(file, workspace, ledger):
    ledger.population("people").account("user", Budget(8, 1e-5))
    head = ledger.head()
    refused(dpray("run", file(), "--workspace", workspace), "ε=8", "ε=5", "amend people --unit user")
    assert ledger.head() == head


def test_users_who_were_protected_are_not_made_public_later(file, workspace, ledger, small, tmp_path):
    given = kinds.read(small(("objective.public", False)))
    expected = plan.forecast(given, given.objective.make(tmp_path))
    ledger.population("people", declaration=expected.declaration).account("user", BUDGET)
    head = ledger.head()
    refused(dpray("run", file(), "--workspace", workspace), "objective.public was False and is True")
    assert ledger.head() == head


def test_a_search_without_noise_on_a_private_account(file, workspace, ledger):
    ledger.population("people").account("user", BUDGET)
    changes = ("search", {"algorithm": "gibo", "iterations": 2}), ("budget", {"delta": 1e-5, "non_private": True})
    refused(dpray("run", file(*changes), "--workspace", workspace), "ε=5", "amend")
