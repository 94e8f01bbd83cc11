"""The paper's black boxes: independent oracles for their losses, users who do not touch each other, real data."""

import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.svm import SVR

from dpray.experiments.papers.dp_gibo.data import Split
from dpray.experiments.papers.dp_gibo.group_lasso import group_lasso
from dpray.experiments.papers.dp_gibo.objectives import GPRegression, GroupLasso, KernelSVR
from dpray.platform.user_losses import check_losses_alone, evaluated
from dpray.searchers.box import Box


def split(seed=0, train=60, users=25, features=4):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((train + users, features))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.standard_normal(len(x))
    return Split(x[:train], y[:train], x[train:], y[train:], "made up")


TASKS = [
    pytest.param(lambda people=None: GroupLasso(3, 1, people=people), id="group LASSO"),
    pytest.param(lambda people=None: GPRegression(4, 1, people=people), id="GP regression"),
    pytest.param(lambda people=None: KernelSVR(split(), people=people), id="kernel SVR"),
]


@pytest.fixture(params=TASKS)
def make(request):
    return request.param


class TestEveryTask:
    def test_a_user_depends_on_nobody_else(self, make):
        task = make()

        people = (task._x[:9], task._y[:9])

        check_losses_alone(make, people, task.start(0))

    def test_many_points_are_the_same_as_one_by_one(self, make):
        task = make()
        configs = [task.start(seed) for seed in range(4)]

        many = task.losses_many([task.theta(config) for config in configs])

        assert many.shape == (4, task.users)
        for losses, config in zip(many, configs, strict=True):
            assert evaluated(task, config) == pytest.approx(losses, abs=1e-6)

    def test_the_space_is_the_box(self, make):
        task = make()
        box = Box.of(task.space())

        assert box.names == task.names
        assert box.lower == pytest.approx(task.lower)
        assert box.upper == pytest.approx(task.upper)
        assert box.theta(task.start(3)) == pytest.approx(task.theta(task.start(3)))

    def test_starts_are_drawn_by_seed_from_where_searches_start(self, make):
        task = make()
        starts = np.array([task.theta(task.start(seed)) for seed in range(200)])

        assert task.start(1) == task.start(1)
        assert (starts >= task.start_lower - 1e-9).all()
        assert (starts <= task.start_upper + 1e-9).all()
        assert (np.ptp(starts, axis=0) > 0.8 * (task.start_upper - task.start_lower)).all()
        assert (task.start_lower >= task.lower).all()
        assert (task.start_upper <= task.upper).all()

    def test_the_whole_box_can_be_evaluated(self, make):
        task = make()
        corners = np.array([task.lower, task.upper, (task.lower + task.upper) / 2])

        assert np.isfinite(task.losses_many(corners)).all()


class TestGroupLasso:
    def test_losses_are_half_squared_residuals_of_the_solver(self):
        task = GroupLasso(4, 2)
        config = task.start(0)
        coefficients = group_lasso(task._x_train, task._y_train, list(config.values()), size=5, tolerance=1e-11)[0]

        oracle = 0.5 * (task._y - task._x @ coefficients) ** 2

        assert evaluated(task, config) == pytest.approx(oracle, abs=1e-4)

    def test_data_are_as_stated(self):
        """20 000 records; 5 standard errors of a correlation of .9 are .007, of a variance .05."""
        task = GroupLasso(3, 0, users=20_000)
        correlation = np.corrcoef(task._x.T).reshape(3, 5, 3, 5)

        inside = correlation[range(3), :, range(3), :][:, ~np.eye(5, dtype=bool)]
        assert inside == pytest.approx(0.9, abs=0.01)
        assert np.abs(correlation[0, :, 1, :]).max() < 0.04
        assert task._y.var() == pytest.approx(1.0, abs=0.05)
        strength = [np.abs(np.corrcoef(task._x[:, 5 * g], task._y)[0, 1]) for g in range(3)]
        assert np.argmax(strength) == task.informative

    def test_penalising_the_other_groups_is_best(self):
        gains = []
        for seed in range(8):
            task = GroupLasso(10, seed)
            aware, blind = np.zeros(10), np.full(10, -6.0)
            aware[task.informative] = -4.0
            good, bad = task.losses_many([aware, blind]).mean(axis=1)
            gains.append(bad - good)

        assert min(gains) > 0

    @pytest.mark.parametrize("groups", [2, 10, 20])
    def test_sizes_are_the_papers(self, groups):
        task = GroupLasso(groups)

        assert (task.dimension, task.users, len(task._y_train)) == (groups, 150, 50)
        assert task.lower == pytest.approx(math.log(1e-6))
        assert task.upper == pytest.approx(0.0)


class TestGPRegression:
    def test_the_posterior_mean_is_scikit_learns(self):
        task = GPRegression(3, 5)
        config = task.start(1)
        oracle = GaussianProcessRegressor(RBF(list(config.values())), alpha=0.1**2, optimizer=None)
        oracle.fit(task._x_train, task._y_train)

        assert evaluated(task, config) == pytest.approx(0.5 * (task._y - oracle.predict(task._x)) ** 2, abs=1e-9)

    def test_the_true_lengthscales_are_better_than_equal_ones(self):
        gains = []
        for seed in range(8):
            task = GPRegression(10, seed)
            truth = np.where(np.arange(10) < task.relevant, math.log(2.0), math.log(100.0))
            good, bad = task.losses_many([truth, np.full(10, math.log(2.0))]).mean(axis=1)
            gains.append(bad - good)

        assert min(gains) > 0


class TestKernelSVR:
    def test_the_model_is_scikit_learns(self):
        task = KernelSVR(split())
        config = task.start(2)
        *lengths, epsilon, gamma, penalty = config.values()
        oracle = SVR(kernel="rbf", epsilon=epsilon, gamma=gamma / 4, C=penalty)
        oracle.fit(task._x_train / np.array(lengths), task._y_train)

        predictions = oracle.predict(task._x / np.array(lengths))

        assert evaluated(task, config) == pytest.approx(0.5 * (task._y - predictions) ** 2, abs=1e-2)

    def test_the_box_is_the_papers(self):
        task = KernelSVR(split(features=100))

        assert task.dimension == 103
        assert np.exp(task.lower[-3:]) == pytest.approx([0.01, 0.1, 0.01])
        assert np.exp(task.upper[-3:]) == pytest.approx([1.0, 3.0, 5.0])
        assert set(task.lower[:100]) == {-3.0}
        assert set(task.upper[:100]) == {3.0}

    @pytest.mark.parametrize(("name", "features", "users"), [("gas", 100, 1_565), ("keggundirected", 26, 9_000)])
    def test_on_real_data_it_predicts(self, uci_folder: Path, name, features, users):
        task = KernelSVR.of(name, features=features, folder=uci_folder)

        losses = evaluated(task, task.config(np.zeros(task.dimension).clip(task.lower, task.upper)))

        assert (task.dimension, task.users) == (features + 3, users)
        assert losses.mean() < 0.5 * 0.5  # the constant prediction has a loss of .5
