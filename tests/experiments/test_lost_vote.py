"""A lost vote ends its run: what training had set aside is free again, and the sentence says how to vote again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer

from dpray.experiments import cli
from dpray.experiments.job import Job
from dpray.experiments.kinds import Begun
from dpray.experiments.plan import SEARCH, TRAINING, Scale, forecast
from dpray.experiments.reading import write_yaml
from dpray.experiments.runs import RunDirectory
from dpray.experiments.spec import Recipe
from dpray.platform.privacy import Budget, TopKVotes
from dpray.platform.privacy.ledger import Ledger, LedgerError, ReleaseKey, ReleaseLost
from dpray.searchers.hype import MECHANISM

RECIPE = Recipe.read(
    write_yaml(
        {
            "name": "try",
            "population": {"name": "people"},
            "budget": {"epsilon": 6, "delta": 1e-5},
            "shares": {"search": 0.3, "training": 0.7},
            "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.2}},
            "cohort": {"clients": 4},
            "search": {"votes": 1, "space": {"learning_rate": {"grid": [1.0, 4.0]}, "clip": 1.0}},
            "training": {"algorithm": "dp_fedsofim", "rounds": 3},
        }
    )
)
EXPECTED = forecast(RECIPE, Scale(clients=4, records=1437, dimension=650, largest_client=360))
PLAN = EXPECTED.ledger_plan(search=MECHANISM, training="gradients")


@pytest.fixture
def population(tmp_path):
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        people = ledger.population("people")
        people.account("record", Budget(6, 1e-5))
        yield people


def lose_the_vote(run):
    def lost(attempt):
        raise ReleaseLost("a client lost its journal")

    run.release(ReleaseKey(SEARCH, MECHANISM, 0), {}, TopKVotes(1, 2), EXPECTED.search.quanta, lost)


def job_of(run, monkeypatch, folder: Path) -> Job:
    unused: Any = None
    begun = Begun(RunDirectory(folder, run.name), unused, run, unused, unused, unused)
    monkeypatch.setattr(Job, "_hold", lambda self, search: lose_the_vote(self.begun.run))
    return Job(
        RECIPE,
        unused,
        EXPECTED,
        SimpleNamespace(clients=("a", "b", "c", "d"), check_candidate=lambda config: None),
        begun,
    )


def test_the_run_is_closed_and_another_name_votes_again(population, monkeypatch, tmp_path):
    account, run = population.account("record"), population.run("first")
    run.reserve(PLAN)
    assert account.reserved == EXPECTED.search.quanta + EXPECTED.training.quanta
    for _ in range(2):  # resumed, it says the same
        with pytest.raises(ReleaseLost, match=r"a client lost its journal.*run first is over.*another `--name`"):
            job_of(run, monkeypatch, tmp_path).search()
    assert run.closed
    assert (account.spent, account.reserved) == (EXPECTED.search.quanta, 0)  # the charge stands
    again = population.run("second")
    again.release(
        ReleaseKey(TRAINING, "gradients", 0), {}, TopKVotes(1, 2), EXPECTED.training.quanta, lambda attempt: np.zeros(2)
    )


def stopped_by(error):
    with cli.refusing() as began:
        began("first")
        raise error


def test_the_command_does_not_advise_to_resume(capsys):
    for error, advised in [(ReleaseLost("lost"), False), (LedgerError("held by another"), True)]:
        with pytest.raises(typer.Exit) as ended:
            stopped_by(error)
        assert ended.value.exit_code == cli.STOPPED
        assert ("dpray resume first" in capsys.readouterr().err) == advised
