"""Training over real client actors and a real ledger: it learns, it resumes, it spends what was planned."""

import functools

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpray.platform.cohort.client import Records
from dpray.platform.cohort.partition import partition
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.noise import NoiseSource
from dpray.trainers.base import MECHANISM
from dpray.trainers.models import LinearHead
from dpray.trainers.named import trainer_named
from dpray.trainers.rehearsal import Rehearsal, TrainingTask
from dpray.trainers.sofim import DPFedSOFIMTrainer, SOFIMSettings
from dpray.trainers.torch_module import TorchModule

CLIENTS, T = 6, 12
BUDGET = Budget(6.0, 1e-5)
SETTINGS = SOFIMSettings(rounds=T, learning_rate=4.0, clip=1.0, momentum=0.5)


@pytest.fixture(scope="module")
def digits():
    """Shards of a third of the digits, and 300 others as the public evaluation set."""
    x, y = load_digits(return_X_y=True)
    x = x / 16
    parts = partition(y[300:], CLIENTS, "dirichlet", seed=0, alpha=1.0)
    shards = {f"client-{i}": Records(x[300:][rows], y[300:][rows]) for i, rows in enumerate(parts)}
    return shards, Records(x[:300], y[:300])


@pytest.fixture
def world(ray_local, tmp_path, digits):
    """Opens cohorts over the digits; all of one test share their sites and are closed at its end."""
    from dpray.platform.cohort.cohort import Cohort

    opened = []
    shards, evaluation = digits

    def cohort(task, folder="sites", **changes):
        opened.append(Cohort(task, shards, state_dir=tmp_path / folder, actors=1, **changes))
        return opened[-1]

    yield cohort, evaluation
    for each in opened:
        each.close()


def account(ledger):
    return ledger.population("digits").account(Unit.RECORD, BUDGET)


class Killed(BaseException):
    """The end of the driver, played."""


def test_it_learns_under_dp_and_spends_what_was_planned(world, tmp_path):
    cohort, evaluation = world
    head = LinearHead(64, 10)
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        account(ledger)
        run = ledger.population("digits").run("run")
        result = DPFedSOFIMTrainer(
            cohort(head), run, head, SETTINGS, budget=BUDGET, evaluation=evaluation, storage=tmp_path / "training"
        ).fit()
        assert result.metrics["accuracy"] > 0.7
        assert account(ledger).spent == BUDGET.quanta
        assert ledger.verify() == ()
        statement = account(ledger).statement("run")
        assert [(line.label, line.mechanism, line.steps, line.lost) for line in statement.lines] == [
            ("training", MECHANISM, T, 0)
        ]
        assert statement.trust == ("central (aggregator trusted, shares simulated)",)


def test_killed_and_resumed_it_equals_the_uninterrupted_run(world, tmp_path):
    cohort, evaluation = world
    head = LinearHead(64, 10)
    thetas = {}
    for name, kill in (("whole", None), ("killed", 5)):
        with Ledger(f"sqlite:///{tmp_path}/{name}.db") as ledger:
            account(ledger)

            def train(on_round=None, name=name, ledger=ledger):
                run = ledger.population("digits").run("run", stamps=("NOT PRIVATE (seeded noise)",))
                clients = cohort(head, folder=name, noise=NoiseSource(3))
                trainer = DPFedSOFIMTrainer(
                    clients, run, head, SETTINGS, budget=BUDGET, evaluation=evaluation, storage=tmp_path / name / "t",
                    on_round=on_round,
                )  # fmt: skip
                try:
                    trainer.fit()
                finally:
                    clients.close()
                return trainer.theta

            def stop(row, kill=kill):
                if row["training_iteration"] == kill:
                    raise Killed

            if kill is not None:
                with pytest.raises(Killed):
                    train(stop)
            thetas[name] = train()
            assert account(ledger).spent == BUDGET.quanta
    np.testing.assert_array_equal(thetas["killed"], thetas["whole"])


def module():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10))


@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_a_torch_module_trains(world, tmp_path, unit, by_value):
    cohort, evaluation = world
    model = TorchModule(module, 10)
    settings = SOFIMSettings(rounds=2, learning_rate=1.0, clip=1.0)
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        account(ledger)
        run = ledger.population("digits").run("run")
        trainer = DPFedSOFIMTrainer(
            cohort(model), run, model, settings, budget=BUDGET, unit=unit, evaluation=evaluation, regime="central"
        )
        result = trainer.fit()
    assert result.metrics["round/records"] == sum(trainer.cohort.counts.values())
    assert not np.array_equal(trainer.theta, model.initial())


@pytest.fixture
def by_value():
    """Ray's workers cannot import the tests: their functions travel by value."""
    import sys

    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[module.__module__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[module.__module__])


def test_clients_rehearse_and_the_scores_stay(world):
    cohort, _ = world
    head = LinearHead(64, 10)
    make = functools.partial(SOFIMSettings.from_config, defaults={"rounds": 3, "clip": 1.0})
    rehearsal = Rehearsal(head, make, BUDGET.quanta, Regime.DISTRIBUTED, CLIENTS, 1497, CLIENTS)
    clients = cohort(TrainingTask(head, rehearsal))
    assert clients.evaluate(("digits", "search"), 0, {"learning_rate": 4.0}) == CLIENTS


@pytest.mark.parametrize(
    ("algorithm", "settings", "changes"),
    [
        ("dp_fedfc", {"learning_rate": 1.0, "covariance_clip": 4.0, "gamma": 0.5}, {"secure_sum": "masked"}),
        ("dp_scaffold", {"local_steps": 2, "local_rate": 2.0}, {}),
    ],
)
def test_releases_of_other_kinds_go_through_real_clients(world, tmp_path, algorithm, settings, changes):
    """A covariance under masks, and several noised steps in one message; what was planned is spent and shown."""
    cohort, evaluation = world
    head, kind = LinearHead(64, 10), trainer_named(algorithm)
    chosen = kind.settings_type(**{"rounds": 3, "learning_rate": 1.0, "clip": 1.0, **settings})
    regime = Regime.DISTRIBUTED if changes else Regime.LOCAL
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        account(ledger)
        run = ledger.population("digits").run("run")
        result = kind(
            cohort(head, **changes), run, head, chosen, budget=BUDGET, evaluation=evaluation, regime=regime
        ).fit()
        assert result.metrics["stopped"] == "all 3 rounds done"
        assert result.metrics["accuracy"] > 0.4
        assert account(ledger).spent == BUDGET.quanta
        assert ledger.verify() == ()
        [trust] = account(ledger).statement("run").trust
        assert trust == f"{regime} (clients simulated)"
