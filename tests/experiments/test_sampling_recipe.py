"""Recipes that train on samples: what they may say, what the plan shows, and a whole run."""

import copy

import numpy as np
import pytest

from dpray.experiments.plan import Scale, forecast
from dpray.experiments.reading import RecipeError, write_yaml
from dpray.experiments.spec import Recipe
from dpray.trainers import load_model

pytestmark = pytest.mark.timeout(900)

SAMPLED = {
    "name": "sampled",
    "population": {"name": "people"},
    "budget": {"epsilon": 1, "delta": 1e-5},
    "shares": {"training": 1},
    "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.3}},
    "cohort": {"clients": 8},
    "training": {
        "algorithm": "dp_fedgd",
        "rounds": 10,
        "learning_rate": 4.0,
        "clip": 1.0,
        "sampling": {"unit": "record", "rate": 0.2},
    },
}
SCALE = Scale(clients=8, records=1258, dimension=650, largest_client=200)


def written(change):
    document = copy.deepcopy(SAMPLED)
    change(document)
    return write_yaml(document)


SEARCH = {"votes": 1, "space": {"learning_rate": {"grid": [1.0, 4.0]}}}


def with_search(document):
    document.update(search=SEARCH, shares={"search": 0.3, "training": 0.7})
    del document["training"]["learning_rate"]


def protecting_clients(document):
    document["population"].update(unit="client", records_per_client=200)


def with_algorithm(name, **settings):
    def change(document):
        document["training"].update(algorithm=name, **settings)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_algorithm("dp_fedfc", covariance_clip=4.0), "cannot be used with `dp_fedfc`"),
        (with_algorithm("dp_scaffold"), "cannot be used with `dp_scaffold`"),
        (with_search, "cannot stand beside `search`"),
        (lambda d: d["training"].update(unit="client"), "sample what is protected"),
        (protecting_clients, "cannot be charged to an account of unit client"),
        (lambda d: d.update(budget={"delta": 1e-5, "non_private": True}), "hides nothing without noise"),
        (lambda d: d["budget"].update(delta=1e-10), "`budget.delta` must be at least 1e-09"),
        (lambda d: d["shares"].update(training=0.5), "composed events have no shares"),
        (lambda d: d["cohort"].update(cap={"epsilon": 2.0, "delta": 1e-5}), "would stop the run"),
        (lambda d: d["training"]["sampling"].update(rate=1.0), "sampling.rate"),
        (lambda d: d["training"]["sampling"].update(rate=0.0), "sampling.rate"),
        (lambda d: d["training"]["sampling"].update(ratio=0.1), "ratio"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_words(change, words):
    with pytest.raises(RecipeError, match=words):
        Recipe.read(written(change))


def test_the_plan_spends_the_budget_by_composition_and_is_less_noisy_than_without():
    expected = forecast(Recipe.read(written(lambda document: None)), SCALE)
    part = expected.training
    assert expected.kind == "pld"
    assert 0.998 <= part.epsilon <= 1.0
    assert 0 < part.epsilon_step < part.epsilon
    (line,) = expected.ledger_plan("votes", "gradients").releases
    assert (line.sampling_probability, line.steps, line.quanta) == (0.2, 10, part.quanta)
    whole = forecast(Recipe.read(written(lambda document: document["training"].pop("sampling"))), SCALE)
    assert whole.kind == "gdp"
    assert part.sigma < whole.training.sigma
    # The same noise weighs more in a mean over a fifth of the records.
    assert expected.noise_to_signal == pytest.approx(whole.noise_to_signal * 5 * part.sigma / whole.training.sigma)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_workspace):
    """One sampled run."""
    workspace = make_workspace(tmp_path_factory.mktemp("sampled") / "w")
    place = workspace.folder / "sampled.yaml"
    place.write_text(written(lambda document: None))
    workspace.planned = workspace.run("plan", place)
    workspace.ended = workspace.run("run", place)
    assert workspace.ended.code == 0, workspace.ended.stderr
    return workspace


@pytest.mark.slow
def test_plan_and_report_say_what_is_sampled_and_what_it_costs(whole):
    assert whole.planned.code == 0, whole.planned.stderr
    for words in ("each record is in a round with probability 0.2", "divided by 0.2·N", "ε spent"):
        assert words in whole.planned.stdout
    for words in ("ε at most", "composed events have no μ", "samples were drawn afresh and kept secret"):
        assert words in " ".join(whole.ended.stdout.split())
    assert whole.ended.stderr == ""


@pytest.mark.slow
def test_the_account_has_spent_what_was_planned_and_not_more(whole):
    with whole.ledger() as ledger:
        (population,) = ledger.populations()
        account = population.account("record")
        assert account.kind == "pld"
        assert 0.998 <= account.spent_epsilon <= 1.0
        assert account.reserved == 0
        (line,) = account.statement("sampled").lines
        assert (line.steps, line.sampling_probability) == (10, 0.2)
        assert ledger.verify() == ()


@pytest.mark.slow
def test_its_model_and_its_curves_say_the_same(whole):
    from mlflow import MlflowClient

    _, theta, statement = load_model(whole.path("sampled") / "model")
    assert theta.any()
    assert (statement.kind, statement.private) == ("pld", True)
    assert 0.998 <= statement.epsilon <= 1.0
    client = MlflowClient(f"sqlite:///{whole.folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dpray").experiment_id
    runs = {run.data.tags["dpray.part"]: run for run in client.search_runs([experiment])}
    curve = client.get_metric_history(runs["training"].info.run_id, "privacy/epsilon_run")
    shown = [point.value for point in sorted(curve, key=lambda point: point.step)]
    assert len(shown) == 10
    assert np.all(np.diff(shown) >= 0)
    assert shown[-1] == pytest.approx(statement.epsilon, rel=1e-6)


@pytest.mark.slow
def test_a_second_run_and_an_unsampled_one_are_refused_before_anything_is_spent(whole):
    place = whole.folder / "other.yaml"
    place.write_text(written(lambda document: document.update(name="second")))
    second = whole.run("run", place)
    assert (second.code, "The plan asks for all of" in second.stderr) == (2, True)
    place.write_text(written(lambda document: document["training"].pop("sampling")))
    plain = whole.run("plan", place)
    assert (plain.code, "kind 'pld'" in plain.stderr) == (2, True)
