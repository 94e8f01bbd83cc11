"""A forecast of a search is arithmetic on public facts: closed forms, and what the ledger would admit."""

import math

import numpy as np
import pytest

from dpray.experiments import standing
from dpray.experiments.central import plan
from dpray.experiments.central.building import build, quanta_of, space_of
from dpray.experiments.central.objectives import GPRegression, GroupLasso
from dpray.experiments.parts import budget_of
from dpray.experiments.reading import RecipeError
from dpray.platform.privacy import Budget, gdp
from dpray.platform.privacy.ledger import Ledger, LedgerError
from dpray.platform.user_losses import check_losses_alone, check_task
from dpray.searchers import DPGIBOSearch, FiniteDifferenceSearch, GlobalBOSearch

NOT_PRIVATE = ("budget", {"delta": 1e-5, "non_private": True})


@pytest.fixture
def forecast(tmp_path):
    return lambda given: plan.forecast(given, given.objective.make(tmp_path))


def test_sigma_is_2_b_root_t_over_n_mu(recipe, forecast):
    found = forecast(recipe(("search.iterations", 20), ("search.clip", 0.05)))
    mu = gdp.mu(5, 1e-5)
    assert found.noise.sigma == pytest.approx(2 * 0.05 * math.sqrt(20) / (400 * mu), rel=1e-5)
    assert found.noise.to_clip == pytest.approx(found.noise.sigma * math.sqrt(3) / 0.05)
    assert found.search.epsilon == pytest.approx(5, rel=1e-9)
    assert found.search.epsilon_step == pytest.approx(gdp.epsilon(mu / math.sqrt(20), 1e-5), rel=1e-9)


def test_trials_and_points(recipe, forecast):
    found = forecast(recipe(("search.points_per_trial", 3)))
    assert (found.users, found.dimension, found.points) == (400, 3, 4)
    assert found.trials == 6 * 2  # four points, three in a trial
    (planned,) = found.planned
    assert (planned.label, planned.mechanism, planned.steps) == ("search", "gradient", 6)


@pytest.mark.parametrize(
    ("spend", "epsilon"),
    [
        (None, 5.0),
        ({"epsilon": 2.0}, 2.0),
        ({"mu": 1.0}, gdp.epsilon(1.0, 1e-5)),
        ({"share": 0.25}, gdp.epsilon(gdp.mu(5, 1e-5) / 2, 1e-5)),
    ],
)
def test_what_a_run_takes_of_the_account(recipe, forecast, spend, epsilon):
    found = forecast(recipe(("spend", spend)))
    assert found.search.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert found.search.charged == found.planned[0].quanta <= found.budget.quanta


def test_a_score_takes_its_share_of_what_the_run_spends(recipe, forecast):
    found = forecast(recipe(("spend", {"share": 0.5}), ("score", {"bound": 4.0, "share": 0.2})))
    assert [(line.mechanism, line.quanta) for line in found.planned] == [
        ("gradient", found.search.quanta),
        ("score", found.score.quanta),
    ]
    assert found.charged == found.budget.quanta // 2
    assert found.score.share == pytest.approx(0.1)
    mu = gdp.mu(5, 1e-5) * math.sqrt(0.1)
    assert found.score_sigma == pytest.approx(4 / (400 * mu), rel=1e-5)
    assert found.noise.sigma == pytest.approx(2 * math.sqrt(6) / (400 * gdp.mu(5, 1e-5) * math.sqrt(0.4)), rel=1e-5)


def test_a_score_of_nothing_is_refused(recipe, forecast):
    with pytest.raises(RecipeError, match=r"`score.share: 1e-30` of the whole budget is nothing"):
        forecast(recipe(("score", {"bound": 4.0, "share": 1e-30})))


@pytest.mark.parametrize("spend", [{"mu": 2.0}, {"epsilon": 5.01}])
def test_more_than_the_whole_budget_is_refused(recipe, forecast, spend):
    with pytest.raises(RecipeError, match=r"more than the account's whole budget, ε=5"):
        forecast(recipe(("spend", spend)))


@pytest.mark.parametrize("spend", [{"share": 1e-18}, {"mu": 1e-9}])
def test_less_than_a_quantum_a_release_is_refused(recipe, spend):
    given = recipe(("spend", spend))
    with pytest.raises(RecipeError, match="too small to be split over 6 releases"):
        quanta_of(given, budget_of(given.budget))


def test_the_lead_of_a_private_winner_is_the_softmax_of_gumbel_noise(recipe, forecast):
    """Simulated: of 20 candidates one is ahead of all by the lead; wrong once in 20, within 5 standard errors."""
    search = {"algorithm": "private_random", "candidates": 20, "bound": 4.0}
    noise = forecast(recipe(("search", search))).noise
    assert noise.scale == pytest.approx(2 * 4.0 / (400 * noise.epsilon))
    scores = np.full((200_000, 20), -noise.lead)
    scores[:, 0] = 0
    scores += noise.scale * np.random.default_rng(0).gumbel(size=scores.shape)
    assert (scores.argmax(axis=1) == 0).mean() == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / 200_000))


def test_hopeless_settings_are_warned_of_and_good_ones_are_not(recipe, forecast):
    assert forecast(recipe()).warnings == ()
    (drowned,) = forecast(recipe(("objective.users", 10), ("search.iterations", 100))).warnings
    assert "drowned" in drowned
    search = {"algorithm": "private_random", "candidates": 20, "bound": 4.0}
    (noisy,) = forecast(recipe(("search", search), ("objective.users", 5))).warnings
    assert "mostly noise" in noisy


def test_without_noise_nothing_is_charged_and_nothing_is_noisy(recipe, forecast):
    found = forecast(recipe(("search", {"algorithm": "gibo", "iterations": 3}), NOT_PRIVATE))
    assert (found.charged, found.noise, found.search.epsilon) == (None, None, math.inf)


def test_searches_are_built_as_the_recipe_says(recipe, tmp_path):
    given = recipe(
        ("search.space", {"x_2": 0.5, "x_0": {"loguniform": [0.1, 2.0]}}),
        ("search.start", {"x_0": 1.0, "x_1": 0.0}),
        ("search.lengthscale", 2.0),
        ("search.keep", 1),
    )
    search = build(given, given.objective.make(tmp_path), 2**60)
    assert isinstance(search, DPGIBOSearch)
    assert search.box.names == ("x_0", "x_1")
    assert list(search.box.logarithmic) == [True, False]
    np.testing.assert_allclose(search.history.iterates[0], [0.0, 0.0], atol=1e-12)
    assert search.path[0]["x_2"] == 0.5
    assert (search.lengthscale, search.keep, search.noise_seed, search.label) == (2.0, 1, 1, "search")


def test_others_have_as_many_points_as_dp_gibo_by_default(recipe, tmp_path):
    task = recipe().objective.make(tmp_path)
    given = recipe(("search", {"algorithm": "global_bo", "iterations": 3}), NOT_PRIVATE)
    assert isinstance(search := build(given, task, None), GlobalBOSearch)
    assert search.batch_size == 4
    given = recipe(("search", {"algorithm": "finite_differences", "iterations": 3, "clip": 1.0}))
    assert isinstance(search := build(given, task, 2**60), FiniteDifferenceSearch)
    assert search.batch_size == 4


def test_a_walk_starts_where_the_objective_says(recipe, tmp_path):
    given = recipe(("objective", {"name": "group_lasso", "dimension": 2}), ("search.seed", 4))
    task = given.objective.make(tmp_path)
    assert build(given, task, 2**60).path[0] == pytest.approx(task.start(4))
    assert recipe().objective.make(tmp_path).users == 400  # negative control: the paraboloid says nothing
    np.testing.assert_array_equal(
        build(recipe(), recipe().objective.make(tmp_path), 2**60).history.iterates, [[0, 0, 0]]
    )


REFUSED = [
    (("search.space", {"x_3": 1.0}), ["`search.space.x_3`", "did you mean `x_", "`paraboloid`"]),
    (("search.space", {f"x_{j}": 0.0 for j in range(3)}), ["`search`", "nothing to search"]),
    (("search.start", {"x_0": 1.0}), ["`search`", "starting point has no x_1"]),
    (("search.start", {"x_0": 1.0, "x_1": 9.0, "x_2": 0.0}), ["x_1 = 9.0", "outside its range"]),
    (("search.lengthscale", {"x_0": 1.0}), ["lengthscale", "x_1"]),
    (("search.bias", 0.1), ["`search`", "bias", "adaptive"]),
]


@pytest.mark.parametrize(("change", "facts"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_only_the_search_can_refuse_is_refused_before_anything_is_spent(recipe, forecast, change, facts):
    with pytest.raises(RecipeError) as refusal:
        forecast(recipe(change))
    assert [fact for fact in facts if fact not in str(refusal.value)] == []


def test_a_population_is_bound_to_whose_losses_they_are_and_to_their_being_public(recipe, forecast, tmp_path):
    protected = recipe(("objective.public", False))
    with Ledger(f"sqlite:///{tmp_path / 'dpray-ledger.db'}") as ledger:
        ledger.population("people", declaration=forecast(protected).declaration).account("user", Budget(5, 1e-5))
        head = ledger.head()
        for change in (("objective.public", True), ("objective.seed", 7), ("objective.users", 300)):
            other = recipe(("objective.public", False), change)
            with pytest.raises(LedgerError, match=rf"{change[0]} was .* another population name"):
                standing.look(other, tmp_path, forecast(other))
        same = recipe(("objective.public", False), ("search.iterations", 3), ("search.clip", 0.5))
        standing.look(same, tmp_path, forecast(same))
        assert ledger.head() == head


@pytest.mark.parametrize("section", [GroupLasso(name="group_lasso"), GPRegression(name="gp_regression")])
def test_registered_objectives_are_tasks_with_a_space(section, tmp_path):
    task = section.make(tmp_path)
    assert check_task(task) == section.users
    assert len(task.space()) == section.dimension
    assert task.start(0).keys() == task.space().keys()


def test_real_records_of_a_registered_objective(recipe, data_dir, tmp_path):
    objective = {"name": "kernel_svr", "dataset": "gas", "features": 4, "train": 50, "users": 60}
    given = recipe(("objective", {**objective, "folder": str(data_dir)}))
    task = given.objective.make(tmp_path)
    assert (check_task(task), len(space_of(given, task))) == (60, 7)
    assert "objective.folder" not in given.objective.people()


def test_the_paraboloid_treats_users_alone(tmp_path, recipe):
    def made(lowest):
        task = recipe().objective.make(tmp_path)
        task._lowest, task.users = lowest, len(lowest)
        return task

    check_losses_alone(made, np.zeros((5, 3)), {"x_0": 1.0, "x_1": 0.0, "x_2": 0.5})
