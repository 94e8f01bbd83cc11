"""What would be refused is refused by looking: the ledger is not created and not changed."""

import sqlite3

import pytest

from dpray.experiments import binding, standing
from dpray.experiments.plan import Scale, forecast
from dpray.experiments.reading import write_yaml
from dpray.experiments.spec import Recipe
from dpray.platform.privacy import Budget, Unit
from dpray.platform.privacy.ledger import (
    BudgetConflict,
    BudgetExceeded,
    Ledger,
    LedgerError,
    LedgerTampered,
    Plan,
    PlannedRelease,
    back_up,
    restore,
)
from dpray.platform.tracking import Tracker

SCALE = Scale(clients=20, records=1437, dimension=650, largest_client=200)
BUDGET = Budget(6, 1e-5)


def recipe(**sections) -> Recipe:
    document = {
        "name": "try",
        "population": {"name": "people"},
        "budget": {"epsilon": 6, "delta": 1e-5},
        "shares": {"training": 0.5},
        "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.2}},
        "cohort": {"clients": 20},
        "training": {"algorithm": "dp_fedsofim", "rounds": 40, "learning_rate": 1, "clip": 1},
    }
    return Recipe.read(write_yaml(document | sections))


def look(workspace, given=None, run=None):
    given = given or recipe()
    return standing.look(given, workspace, forecast(given, SCALE), run)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'dpray-ledger.db'}")
    yield ledger
    ledger.close()


def reserve(population, fraction, name="other"):
    quanta = int(BUDGET.quanta * fraction)
    run = population.run(name)
    run.reserve(Plan((PlannedRelease("training", "gradients", Unit.RECORD, quanta, 3),)))
    return run


def test_a_population_of_composed_events_is_refused_in_a_sentence(tmp_path, ledger):
    ledger.population("people").account("record", BUDGET, kind="pld")
    before = ledger.head()
    with pytest.raises(LedgerError, match=r"'people' .* of kind 'pld'.* a population of its own\.$"):
        look(tmp_path)
    assert ledger.head() == before


def test_a_ledger_that_is_not_there_is_not_made(tmp_path):
    assert look(tmp_path).remaining == BUDGET.quanta
    assert list(tmp_path.iterdir()) == []


def test_what_is_spent_and_set_aside_is_told(tmp_path, ledger):
    population = ledger.population("people")
    population.account("record", BUDGET)
    reserve(population, 0.25)
    found = look(tmp_path)
    assert (found.spent, found.reserved) == (0, int(BUDGET.quanta * 0.25))


def test_a_look_changes_nothing(tmp_path, ledger):
    ledger.population("people").account("record", BUDGET)
    before = ledger.head()
    look(tmp_path)
    assert ledger.head() == before


def test_a_plan_larger_than_what_is_left_is_refused_with_both_numbers(tmp_path, ledger):
    population = ledger.population("people")
    population.account("record", BUDGET)
    reserve(population, 0.75)
    before = ledger.head()
    with pytest.raises(BudgetExceeded, match=r"asks for 50\.0 % of μ² .* has 25\.0 % of μ²"):
        look(tmp_path)
    assert ledger.head() == before


def test_a_run_that_has_its_plan_is_not_asked_for_it_again(tmp_path, ledger):
    population = ledger.population("people")
    population.account("record", BUDGET)
    reserve(population, 0.75, "mine")
    assert look(tmp_path, run="mine").reserved == int(BUDGET.quanta * 0.75)


def test_an_account_with_another_budget_is_refused(tmp_path, ledger):
    ledger.population("people").account("record", Budget(8, 1e-5))
    with pytest.raises(BudgetConflict, match=r"ε=8.* recipe says ε=6"):
        look(tmp_path)


def test_a_coarser_account_of_the_same_people_is_asked_too(tmp_path, ledger):
    population = ledger.population("people", records_per_client=200)
    population.account("client", Budget(6, 1e-5))
    with pytest.raises(BudgetExceeded, match="client account"):
        look(tmp_path)


def test_a_declared_maximum_cannot_be_declared_otherwise(tmp_path, ledger):
    ledger.population("people", records_per_client=200)
    with pytest.raises(LedgerError, match=r"200.*300"):
        look(tmp_path, recipe(population={"name": "people", "records_per_client": 300}))


def test_the_ledgers_own_maximum_holds_for_clients_whatever_the_recipe_says(tmp_path, ledger):
    ledger.population("people", records_per_client=199)
    with pytest.raises(LedgerError, match=r"records_per_client = 199 .* holds 200"):
        look(tmp_path)
    ledger.population("others", records_per_client=200)
    look(tmp_path, recipe(population={"name": "others"}))


OTHERS = {
    "another fraction": {"data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.3}}},
    "another public seed": {"data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.2, "seed": 1}}},
    "the data set's own public part": {"data": {"dataset": "digits", "evaluation": {"public": True}}},
    "another data set": {"data": {"dataset": "mnist", "evaluation": {"public": True, "fraction": 0.2}}},
    "fewer clients": {"cohort": {"clients": 19}},
    "another partition": {"cohort": {"clients": 20, "partition": {"kind": "dirichlet", "alpha": 1.0}}},
    "other people behind the names": {"cohort": {"clients": 20, "partition": {"seed": 1}}},
}


def test_the_folder_of_the_data_is_not_bound():
    here, there = ({"dataset": "mnist", "folder": folder, "evaluation": {"public": True}} for folder in ("a", "b"))
    assert binding.declaration(recipe(data=here), SCALE) == binding.declaration(recipe(data=there), SCALE)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_population_is_bound_to_its_public_part_and_its_clients(tmp_path, ledger, other):
    ledger.population("people", declaration=binding.declaration(recipe(), SCALE))
    head = ledger.head()
    with pytest.raises(LedgerError, match=r"bound to what was declared at its first use.*another population name"):
        look(tmp_path, recipe(**other))
    look(tmp_path, recipe(**other, population={"name": "others"}))
    other_settings = {"algorithm": "dp_fedgd", "rounds": 3, "learning_rate": 2, "clip": 2}
    look(tmp_path, recipe(training=other_settings, ledger="sqlite:///dpray-ledger.db"))
    assert ledger.head() == head


def test_a_private_account_refuses_a_recipe_without_noise(tmp_path, ledger):
    ledger.population("people").account("client", BUDGET)
    with pytest.raises(BudgetExceeded, match="private"):
        look(tmp_path, recipe(budget={"delta": 1e-5, "non_private": True}))


def test_a_tampered_ledger_is_refused(tmp_path, ledger):
    ledger.population("people").account("record", BUDGET)
    ledger.close()
    with sqlite3.connect(tmp_path / "dpray-ledger.db") as database:
        changed = database.execute("update accounts set budget = '9' || budget").rowcount
    assert changed == 1
    with pytest.raises(LedgerTampered, match="not what was written"):
        look(tmp_path)


def test_an_older_copy_of_the_ledger_than_mlflow_has_seen_is_refused_with_what_to_do(tmp_path):
    place, uri = tmp_path / "dpray-ledger.db", f"sqlite:///{tmp_path / 'mlflow.db'}"
    with Ledger(f"sqlite:///{place}") as ledger:
        ledger.population("people").account("record", BUDGET)
        back_up(ledger.url, tmp_path / "old.db")
        ledger.population("people").run("newer than the copy")
        with Tracker(tmp_path / "spool", "newer than the copy", uri=uri, experiment="dpray") as tracker:
            tracker.anchor(ledger.head(), ledger.identity)
    given = recipe(tracking={"uri": uri})
    standing.check_tracked(given, tmp_path, uri)
    place.unlink()
    restore(tmp_path / "old.db", f"sqlite:///{place}")
    with pytest.raises(LedgerTampered, match=r"MLflow at .* has seen more of the ledger.*restore a newer copy"):
        standing.check_tracked(given, tmp_path, uri)
    place.unlink()
    with Ledger(f"sqlite:///{place}") as another:
        another.population("people")
    standing.check_tracked(given, tmp_path, uri)  # another ledger is no copy; clients' journals tell it apart


def test_a_store_that_is_away_does_not_stop_a_run(tmp_path, ledger):
    standing.check_tracked(recipe(), tmp_path, "http://127.0.0.1:1")
