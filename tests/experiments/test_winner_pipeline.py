"""A whole run whose vote releases its winner alone: planned, trained with, shown, reported; no count anywhere."""

import pytest

from dpray.platform.privacy.ledger import ReleaseKey

from .conftest import SMALL
from .test_pipeline import mlflow_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(make_workspace, tmp_path_factory):
    workspace = make_workspace(tmp_path_factory.mktemp("winner") / "w")
    recipe = workspace.recipe(search={**SMALL["search"], "release": "winner"})
    planned = workspace.run("plan", recipe)
    workspace.ended = workspace.run("run", recipe)
    workspace.planned = planned.stdout
    assert workspace.ended.code == 0, workspace.ended.stderr
    return workspace


def test_the_plan_shows_its_numbers(whole):
    for words in ("the winner alone", "pure: Gumbel noise of scale", "noisy votes, which need no trusted aggregator"):
        assert words in " ".join(whole.planned.split())


def test_the_ledger_holds_one_index_and_the_training_uses_it(whole):
    outcome = whole.outcome()
    with whole.ledger() as ledger:
        stored = ledger.populations()[0].run("small").stored(ReleaseKey("search", "winner", 0))
        assert ledger.verify() == ()
    assert (stored.dtype.kind, stored.shape) == ("i", (1,))
    assert outcome["winner"] == outcome["candidates"][int(stored[0])]
    assert outcome["noisy_votes"] == []
    assert "the winner alone was released" in whole.run("report", "small").stdout
    assert "central" in outcome["statement"]["trust"]


def test_mlflow_shows_the_winner_and_no_votes(whole):
    metrics = mlflow_runs(whole)["search"]["metrics"]
    assert {"search/winner", "search/pure_epsilon", "search/scale", "search/candidates"} <= metrics.keys()
    assert not {"search/noisy_votes", "search/noisy_gap", "search/sigma"} & metrics.keys()
    assert metrics["search/scale"] == pytest.approx(2 / metrics["search/pure_epsilon"])


def test_the_same_run_again_spends_nothing(whole):
    with whole.ledger() as ledger:
        head = ledger.head()
    again = whole.run("run", whole.recipe(search={**SMALL["search"], "release": "winner"}))
    assert again.code == 0
    with whole.ledger() as ledger:
        assert ledger.head() == head
