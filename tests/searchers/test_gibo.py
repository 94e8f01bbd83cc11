"""DP-GIBO as a search: what it releases, what it spends, and that nothing it shows depends on a loss otherwise."""

import json
import math
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray import tune

from dpray.platform.privacy.budget import Budget, ceil_quanta, floor_quanta
from dpray.platform.privacy.ledger import BudgetExceeded, KeyConflict, Ledger, LedgerError
from dpray.platform.privacy.mechanisms import ClippedMean
from dpray.platform.privacy.noise import NoiseSource, from_grid
from dpray.platform.user_losses import UserLosses
from dpray.searchers import (
    DPGIBOSearch,
    FiniteDifferenceSearch,
    GIBOSearch,
    GlobalBOSearch,
    PrivateRandomSearch,
    SpaceError,
    SPSASearch,
    release_score,
    steps,
)
from dpray.searchers.driving import drive, run_trial
from dpray.searchers.errors import SearchError, SearchUnfinished

SPACE = {"x": tune.uniform(-2.0, 2.0), "deep": {"y": tune.loguniform(math.exp(-2.0), math.exp(2.0))}}
BUDGET = Budget(60.0, 1e-5)
GOLDEN = Path(__file__).parent.parent / "golden"


class Bowl(UserLosses):
    """Every user's loss is a paraboloid with its lowest point near (1, -1) in the coordinates of the box."""

    def __init__(self, users=400, at=(1.0, -1.0), change=lambda losses, config: losses):
        rng = np.random.default_rng(5)
        self.users, self.change = users, change
        self.lowest = np.asarray(at) + 0.1 * rng.standard_normal((users, 2))

    def fit(self, config):
        return np.array([config["x"], math.log(config["deep"]["y"])]), config

    def losses(self, model):
        z, config = model
        return self.change(0.5 * ((z - self.lowest) ** 2).sum(axis=1), config)


@pytest.fixture
def open_run(ledger):
    def opened(name="run", population="people", budget=None):
        people = ledger.population(population)
        people.account("user", budget or BUDGET)
        return people.run(name)

    return opened


@pytest.fixture
def make(open_run):
    def made(task=None, kind=DPGIBOSearch, run=None, **options):
        private = {"mu": 1.0, "clip": 1.0, "iterations": 6}
        given = {**private, "space": SPACE, "noise_seed": 3, "curator_actor": False, **options}
        return kind(task or Bowl(), run or open_run(), **{k: v for k, v in given.items() if v is not ...})

    return made


# What it finds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "noise_aware"])
def test_it_walks_towards_the_users_optimum(make, rule):
    search = make(iterations=25, step=rule, rate=0.3 if rule == "sgd" else None, mu=5.0)
    drive(search)
    found = search.box.theta(search.best_config)
    assert np.linalg.norm(found - [1.0, -1.0]) < 0.6 < np.linalg.norm(search.history.iterates[0] - [1.0, -1.0])


@pytest.mark.parametrize("kind", [FiniteDifferenceSearch, SPSASearch])
def test_the_baselines_walk_there_too(make, kind):
    search = make(kind=kind, iterations=25, mu=5.0, step="sgd", rate=0.3)
    drive(search)
    assert np.linalg.norm(search.box.theta(search.best_config) - [1.0, -1.0]) < 0.6


def test_without_noise_the_released_gradient_is_the_gradient(make, open_run):
    """A paraboloid's gradient at the center is −(1, −1); the posterior's is shrunk a little by the prior."""
    run = open_run(population="public", budget=Budget(math.inf, 1e-5, non_private=True))
    search = make(kind=GIBOSearch, run=run, iterations=1, mu=..., clip=..., noise=1e-4, lengthscale=2.0, batch_size=4)
    drive(search)
    np.testing.assert_allclose(search.history.gradients[0], -Bowl().lowest.mean(axis=0), rtol=0.1)


@pytest.mark.parametrize("kind", [FiniteDifferenceSearch, SPSASearch])
def test_difference_quotients_of_a_paraboloid_are_exact_where_they_are_symmetric(make, open_run, kind):
    run = open_run(population="public", budget=Budget(math.inf, 1e-5, non_private=True))
    own = {"two_sided": True} if kind is FiniteDifferenceSearch else {"directions": 400}
    search = make(kind=kind, run=run, iterations=1, mu=..., clip=None, quanta=None, **own)
    drive(search)
    tolerance = 1e-9 if kind is FiniteDifferenceSearch else 0.2
    np.testing.assert_allclose(search.history.gradients[0], -Bowl().lowest.mean(axis=0), rtol=tolerance)


def test_private_random_search_finds_a_good_candidate(make):
    search = make(kind=PrivateRandomSearch, iterations=..., clip=..., bound=4.0, candidates=16, mu=3.0)
    drive(search)
    losses = [Bowl().losses(Bowl().fit(config)).mean() for config in search.candidates]
    assert losses[search.candidates.index(search.best_config)] <= np.quantile(losses, 0.25)


def test_private_random_search_spends_the_mu_of_its_pure_epsilon(make):
    search = make(kind=PrivateRandomSearch, iterations=..., clip=..., bound=4.0, candidates=4, mu=1.2319)
    assert search.epsilon == pytest.approx(1.0, abs=1e-3)
    drive(search)
    account = search.run.population.account("user", BUDGET)
    assert account.spent == floor_quanta(1.2319)


def test_global_bo_is_not_private_and_says_so(make, open_run):
    options = {"kind": GlobalBOSearch, "iterations": 2, "batch_size": 2, "first": 4, "mu": ..., "clip": ...}
    with pytest.raises(LedgerError, match=r"non_private|noise"):
        drive(make(**options))
    for q in (1, 2):
        run = open_run(f"q{q}", population="public", budget=Budget(math.inf, 1e-5, non_private=True))
        search = make(run=run, **{**options, "batch_size": q})
        drive(search)
        assert search.reason == "all 2 steps are released."
        assert set(search.best_config) == set(SPACE)


# What it spends -----------------------------------------------------------------------------------------------------


def test_all_iterations_spend_the_plan_to_the_last_quantum(make):
    search = make()
    account = search.run.population.account("user", BUDGET)
    drive(search)
    assert account.spent == floor_quanta(1.0)
    assert len(search.releases) == 6
    assert search.reason == "all 6 iterations are released."


def test_the_noise_is_the_papers_to_1e9():
    for row in json.loads((GOLDEN / "gibo_noise_std.json").read_text())["rows"]:
        mechanism = ClippedMean(row["B"], row["n"], 5)
        assert mechanism.sigma(row["mu"] / math.sqrt(row["T"])) == pytest.approx(row["sigma"], rel=1e-9)


def test_the_applied_noise_is_no_less_and_hardly_more(make):
    search = make(iterations=20, clip=0.05)
    ideal = 2 * 0.05 * math.sqrt(20) / (400 * 1.0)
    assert ideal <= search.sigma <= ideal * (1 + 1e-5)


def test_an_early_stop_leaves_the_rest_in_the_account(make):
    seen = []

    def stop(history):
        seen.append(history.gradients.shape)
        return "the walk is long enough" if len(history.gradients) == 2 else None

    search = make(stop=stop)
    drive(search)
    account = search.run.population.account("user", BUDGET)
    assert account.spent == sum(search.spends[:2])
    assert search.reason == "after 2 of 6 iterations: the walk is long enough"
    assert seen[0] == (1, 2)
    search.run.close()
    assert account.remaining_epsilon > 0


def test_a_score_is_a_release_of_its_own(make):
    search = make(mu=2.0, users=400)
    account = search.run.population.account("user", BUDGET)
    with pytest.raises(SearchUnfinished):
        release_score(search, 4.0, mu=0.5)
    drive(search)
    before = account.spent
    told = release_score(search, 4.0, mu=0.5)
    assert account.spent == before + ceil_quanta(0.5)
    exact = np.clip(Bowl().losses(Bowl().fit(search.best_config)), 0, 4).mean()
    assert abs(told - exact) < 6 * 4.0 / (400 * 0.5)  # six standard deviations of its noise
    assert release_score(search, 4.0, mu=0.5) == told
    assert account.spent == before + ceil_quanta(0.5)
    with pytest.raises(KeyConflict):
        release_score(search, 5.0, mu=0.5)


# What does not depend on losses -------------------------------------------------------------------------------------


def replayed(directory, change):
    """A search over a ledger whose first two releases are those of the plain task, and its third step's locations."""
    ledger = Ledger(f"sqlite:///{directory / 'ledger.db'}")
    people = ledger.population("people")
    people.account("user", BUDGET)
    search = DPGIBOSearch(
        Bowl(change=change), people.run("run"), mu=1.0, clip=1.0, iterations=3, keep=1, batch="adaptive", bias=0.9,
        batch_size=6, space=SPACE, noise_seed=3, curator_actor=False,
    )  # fmt: skip
    drive(search, stop_after=None)
    found = [search.locations(t) for t in (1, 2)]
    weights = [search.weights(each.theta, each.points) for each in found]
    ledger.close()
    return search, found, weights


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scale=st.sampled_from([0.0, -1.0, 1e300, math.nan, math.inf]), users=st.integers(0, 400))
def test_given_the_released_values_locations_and_weights_do_not_depend_on_losses(tmp_path_factory, scale, users):
    directory = tmp_path_factory.mktemp("ledger")
    _, found, weights = replayed(directory, lambda losses, config: losses)

    def other(losses, config):
        return np.where(np.arange(400) < users, scale * losses, losses)

    search, again, weights_again = replayed(directory, other)  # the same releases, other losses
    assert search.releases[0].first is False
    for before, after in zip(found, again, strict=True):
        np.testing.assert_array_equal(before.points, after.points)
        assert before.rows == after.rows
    for before, after in zip(weights, weights_again, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0])
def test_one_users_losses_move_a_release_by_at_most_two_b_over_n(make, open_run, poison):
    """The same noise twice: what remains is the difference of the clipped means."""

    def replaced(losses, config):
        return np.concatenate([[poison], losses[1:]])

    first = make(iterations=1, clip=0.5)
    drive(first)
    second = make(Bowl(change=replaced), run=open_run(population="others"), iterations=1, clip=0.5)
    drive(second)
    # Noise is keyed by population and run, so it is taken off both.
    ask = [np.asarray(search.releases[0].value) - noise_of(search) for search in (first, second)]
    assert np.linalg.norm(ask[0] - ask[1]) <= 2 * 0.5 / 400 * (1 + 1e-9) + 2 * first.mechanism.noise(1.0).grid


def noise_of(search):
    noise = search.mechanism.noise(search.mu_of(0))
    key = (search.run.population.name, search.run.name, "search", "gradient", 0, "curator")
    return from_grid(NoiseSource(3).draw(noise, 2, *key), noise.grid)


def test_a_loss_that_cannot_be_had_costs_the_user_its_gradient_and_shows_nowhere(make):
    def failing(losses, config):
        raise RuntimeError("a private value: 0.8315")

    search = make(Bowl(change=failing), iterations=2)
    drive(search)
    assert search.finished
    assert np.abs(search.history.gradients).max() < 6 * search.sigma  # noise alone; false alarm below 1e-8


# Points that fail, curators that die, drivers that die ---------------------------------------------------------------


class Fragile(Bowl):
    def fit(self, config):
        if config["x"] > 0:
            raise RuntimeError("this model cannot be trained")
        return super().fit(config)


def test_points_that_cannot_be_evaluated_are_left_out_of_the_gradient(make):
    search = make(batch_size=6, iterations=2)
    failed = []

    def fails(trial, config):
        if "0.1" in config["__search__"].split():
            failed.append(trial)
            return True
        return False

    drive(search, fails=fails)
    assert len(failed) == 1 + search.max_retries
    assert search.finished
    assert len(search.releases) == 2


def test_a_step_without_points_ends_the_search_and_spends_nothing(make):
    search = make()
    drive(search, fails=lambda trial, config: " 1." in f" {config['__search__']}")
    account = search.run.population.account("user", BUDGET)
    assert "0 of the 3 points of iteration 1 could be evaluated" in search.reason
    assert account.spent == search.spends[0]
    assert search.best_config == search.path[1]


def test_losses_that_die_with_the_curator_are_evaluated_again_and_charged_once(make):
    search = make(iterations=2)
    drive(search, stop_after=2)
    search.curator.expect(())  # as a new process would: it knows nothing
    points = drive(search, prefix="later")
    account = search.run.population.account("user", BUDGET)
    assert len(points) == 1 + 3 + 3  # the third point of the batch comes too late for the new process, too
    assert account.spent == floor_quanta(1.0)


def test_a_new_process_takes_up_the_released_path_and_spends_the_rest(make, open_run):
    whole = make(run=open_run("whole", "twins"))
    drive(whole)
    first = make(run=open_run("whole"))
    drive(first, stop_after=3 * 3 + 1)
    second = make(run=open_run("whole"))
    points = drive(second)
    account = second.run.population.account("user", BUDGET)
    assert len(points) == 3 * 3
    assert account.spent == floor_quanta(1.0)
    np.testing.assert_array_equal(first.history.iterates[:4], second.history.iterates[:4])
    third = make(run=open_run("whole"))
    assert third.tune_config is not None
    drive(third)
    assert third.best_config == second.best_config
    assert "nothing was spent now" in third.reason


def test_another_search_under_the_same_run_is_refused(make, open_run):
    drive(make(run=open_run("same"), iterations=2))
    other = make(run=open_run("same"), iterations=2, lengthscale=3.0)
    with pytest.raises(KeyConflict):
        drive(other)


def test_several_points_in_a_trial_give_the_same_path(make, open_run):
    alone = make(run=open_run("a", "first"), batch_size=5, iterations=2)
    drive(alone)
    together = make(run=open_run("a", "second"), batch_size=5, iterations=2, points_per_trial=2)
    assert len(drive(together)) == 2 * 3
    difference = np.asarray(alone.releases[0].value) - noise_of(alone)
    np.testing.assert_allclose(np.asarray(together.releases[0].value) - noise_of(together), difference, atol=1e-12)


# Refusals, before anything is spent ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"space": {"x": tune.randint(1, 9)}}, "x is a whole number"),
        ({"space": {"x": tune.choice([1.0, 2.0])}}, "x is a choice"),
        ({"space": {"x": tune.grid_search([1.0, 2.0])}}, "x is a grid_search"),
        ({"space": {"x": tune.randn()}}, "x is unbounded"),
        ({"clip": 0}, "clip"),
        ({"clip": -1.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"clip": None}, "clip is missing"),
        ({"iterations": 0}, "iterations is 0"),
        ({"iterations": True}, "iterations is True"),
        ({"mu": 0.0}, "greater than zero"),
        ({"mu": -1.0}, "mu must"),
        ({"mu": math.nan}, "mu must"),
        ({"mu": math.inf}, "mu must"),
        ({"mu": ...}, "what the search may spend"),
        ({"budget": Budget(1.0, 1e-5)}, "what the search may spend, once"),
        ({"step": "newton"}, "newton"),
        ({"rate": -1.0}, "rate"),
        ({"noise": 0.0}, "noise"),
        ({"lengthscale": -1.0}, "lengthscale"),
        ({"lengthscale": {"x": 1.0}}, "lengthscale"),
        ({"batch": "some"}, "batch is 'some'"),
        ({"batch": "adaptive"}, "bias"),
        ({"bias": 0.1}, "bias"),
        ({"batch_size": 1}, "batch_size"),
        ({"start": "here"}, "start is 'here'"),
        ({"start": {"x": 9.0, "deep": {"y": 1.0}}}, "outside its range"),
        ({"users": 0}, "users is 0"),
        ({"points_per_trial": 0}, "points_per_trial"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(make, open_run, options, says):
    with pytest.raises((ValueError, SpaceError), match=says):
        make(**options)
    assert open_run().population.account("user", BUDGET).spent == 0


def test_a_plan_larger_than_what_is_left_is_refused_before_the_first_trial(make, open_run):
    search = make(mu=100.0)
    with pytest.raises(BudgetExceeded, match=r"asks|would|left"):
        search.suggest("a")
    assert open_run().population.account("user", BUDGET).spent == 0


class Mean(Bowl):
    def losses(self, model):
        return float(super().losses(model).mean())


class Ragged(Bowl):
    def losses(self, model):
        return super().losses(model)[:-1]


@pytest.mark.parametrize(("task", "says"), [(Mean, "one number"), (Ragged, r"\(399,\)")])
def test_losses_of_the_wrong_shape_end_the_search_with_the_reason(make, task, says):
    search = make(task())
    for trial in range(search.num_samples):
        config = search.suggest(f"t{trial}")
        if not isinstance(config, dict):
            break
        with pytest.raises(ValueError, match=says):
            run_trial(search.trainable(), config)
        search.on_trial_complete(f"t{trial}", error=True)
    account = search.run.population.account("user", BUDGET)
    assert account.spent == 0
    with pytest.raises(SearchUnfinished, match=says):
        _ = search.best_config


def test_a_task_that_cannot_be_made_does_not_say_why_in_its_own_words(make):
    def broken():
        raise ValueError("could not convert 'Jane Doe'")

    search = make(broken, users=400)
    config = search.suggest("a")
    with pytest.raises(SearchError, match=r"could not be made .* \(ValueError\)") as caught:
        run_trial(search.trainable(), config)
    assert "Jane" not in "".join(traceback.format_exception(caught.value))


def test_a_task_made_elsewhere_with_another_number_of_users_is_refused(make):
    search = make(Bowl, users=399)
    with pytest.raises(ValueError, match=r"shape \(400,\), but one loss per user is needed, shape \(399,\)"):
        run_trial(search.trainable(), search.suggest("a"))


def test_a_number_of_users_that_changes_later_costs_that_point_and_shows_nothing(make):
    def shorter(losses, config):
        return losses[:-1] if abs(config["x"]) > 0.9 else losses

    search = make(Bowl(at=(-1.9, 1.9), change=shorter), iterations=8, lengthscale=0.3)
    drive(search)
    assert search.finished
    assert search.progress["retried"] == 0


def test_a_saved_search_of_other_constants_is_refused(make, open_run, tmp_path):
    search = make()
    drive(search, stop_after=2)
    search.save(str(tmp_path / "state.json"))
    with pytest.raises(SearchError, match=r"clip = 1\.0, this one was built with 2\.0"):
        make(clip=2.0, run=open_run("again")).restore(str(tmp_path / "state.json"))


def test_the_step_rule_may_be_an_object(make):
    search = make(step=steps.rule("sgd", 0.1), iterations=2)
    drive(search)
    theta, gradient = search.history.iterates, search.history.gradients
    np.testing.assert_allclose(theta[1], search.box.project(theta[0] - 0.1 * gradient[0]))
