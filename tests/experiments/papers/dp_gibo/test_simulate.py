"""A played search releases what the same search releases through a Tuner."""

import numpy as np
import pytest
from ray import tune

from dpray.experiments.papers.dp_gibo.objectives import GroupLasso
from dpray.experiments.papers.dp_gibo.simulate import AT_ONCE, accounts, play
from dpray.experiments.papers.dp_gibo.tasks import TASKS, Remembering, Unsteady
from dpray.searchers import DPGIBOSearch, PrivateRandomSearch


@pytest.fixture(scope="module")
def objective():
    return GroupLasso(2, 0, users=40)


def descent(objective, run, **options):
    own = {"mu": 1.0, "clip": 0.05, "iterations": 4, "space": objective.space(), "start": objective.start(0)}
    return DPGIBOSearch(objective, run, noise_seed=5, **{**own, **options})


def played(objective, **options):
    with accounts() as opened:
        search = descent(objective, opened.run("one run", private=True), curator_actor=False, **options)
        count = play(search, objective)
        return search.history.iterates, count


@pytest.mark.timeout(240)
def test_the_path_is_the_one_through_a_tuner(ray_local, objective, tmp_path):
    path, count = played(objective, points_per_trial=AT_ONCE)
    with accounts() as opened:
        search = descent(objective, opened.run("one run", private=True), points_per_trial=3)
        tune.Tuner(
            search.trainable(),
            param_space=objective.space(),
            tune_config=search.tune_config(),
            run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
        ).fit()
        tuned = search.history.iterates
        search.close()
    assert count == 12
    np.testing.assert_allclose(path, tuned, rtol=0, atol=1e-9)


def test_the_path_does_not_depend_on_how_many_points_a_suggestion_has(objective):
    one, _ = played(objective, points_per_trial=1)
    all_, _ = played(objective, points_per_trial=AT_ONCE)
    np.testing.assert_allclose(one, all_, rtol=0, atol=1e-9)


def test_another_noise_seed_gives_another_path(objective):
    """The negative control of the two above: they would see a path that differs."""
    one, _ = played(objective)
    with accounts() as opened:
        run = opened.run("one run", private=True)
        search = DPGIBOSearch(
            objective,
            run,
            **{"mu": 1.0, "clip": 0.05, "iterations": 4, "space": objective.space(), "start": objective.start(0)},
            noise_seed=6,
            curator_actor=False,
        )
        play(search, objective)
    assert np.abs(search.history.iterates - one).max() > 1e-3


def test_a_failing_release_is_raised_and_not_lost(objective):
    with accounts() as opened:
        run = opened.run("one run", private=True)
        first = descent(objective, run, curator_actor=False)
        play(first, objective)
        other = descent(objective, run, curator_actor=False, clip=0.1, reserve=False)
        with pytest.raises(Exception, match="gradient"):
            play(other, objective)


def test_candidates_that_are_remembered_are_evaluated_once(objective):
    class Counting:
        asked = 0

        def losses_many(self, thetas):
            self.asked += len(thetas)
            return objective.losses_many(thetas)

        def theta(self, config):
            return objective.theta(config)

    counting = Counting()
    remembered = Remembering(counting)
    with accounts() as opened:
        for name in ("a", "b"):
            run = opened.run(name, private=True)
            options = {"mu": 1.0, "bound": 0.5, "candidates": 6, "space": objective.space(), "noise_seed": 1}
            search = PrivateRandomSearch(objective, run, curator_actor=False, **options)
            assert play(search, remembered) == 6
    thetas = np.array([objective.theta(config) for config in search.candidates])
    np.testing.assert_allclose(remembered.losses_many(thetas), objective.losses_many(thetas), rtol=1e-6)
    assert counting.asked == 6


def test_unsteady_evaluations_move_all_users_alike(objective):
    thetas = np.full((50, 2), -1.0)
    moved = Unsteady(objective, 0.1, seed=0).losses_many(thetas) - objective.losses_many(thetas)
    assert np.ptp(moved, axis=1).max() < 1e-12
    assert 0.07 < moved[:, 0].std() < 0.14  # 50 draws of N(0, 0.1²): false alarm below 1e-3


def test_every_task_has_the_dimension_of_its_name():
    for name, task in TASKS.items():
        if not name.startswith("svr"):
            assert task.objective(0).dimension == int(name.strip("lasogp"))


def test_the_tasks_on_real_data(uci_folder, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(uci_folder))
    assert (TASKS["svr-gas"].objective(0).dimension, TASKS["svr-gas"].objective(0).users) == (103, 2265)
    assert (TASKS["svr-keggundirected"].objective(0).dimension, TASKS["svr-keggundirected"].objective(0).users) == (
        29,
        9000,
    )


def test_the_task_on_a_part_of_the_ct_slices(ct_folder, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(ct_folder))
    task = TASKS["svr-ct_slices"].objective(0)
    assert task.dimension == 22
    assert "a part of 682 records" in task.source
    assert task.users == 382
