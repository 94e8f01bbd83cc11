"""A recipe is read as written and refused in sentences."""

import copy
from importlib import resources

import pytest

from dpray.experiments import kinds
from dpray.experiments.domains import Domain
from dpray.experiments.reading import RecipeError, read_yaml, write_yaml
from dpray.experiments.spec import Recipe

SHIPPED = [file for file in resources.files("dpray.experiments.recipes").iterdir() if file.name.endswith(".yaml")]


def base() -> dict:
    return {
        "name": "try",
        "population": {"name": "people", "unit": "record"},
        "budget": {"epsilon": 6, "delta": 1e-5},
        "shares": {"search": 0.3, "training": 0.7},
        "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.2}},
        "cohort": {"clients": 20, "partition": {"kind": "dirichlet", "alpha": 0.5}},
        "search": {"votes": 2, "space": {"learning_rate": {"grid": [0.1, 1.0, 10.0]}, "clip": {"choice": [0.5, 1]}}},
        "training": {"algorithm": "dp_fedsofim", "rounds": 10},
    }


REMOVE = "(removed)"  # a word, so that tests have the same names in every process


def changed(path: str, value: object) -> dict:
    document = copy.deepcopy(base())
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    if value is REMOVE:
        del place[last]
    else:
        place[last] = value
    return document


def read(document: dict) -> Recipe:
    return Recipe.read(write_yaml(document))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_shipped_recipes_are_valid_and_read_back(file):
    recipe = kinds.read(file.read_text())
    assert recipe.name == file.name.removesuffix(".yaml")
    assert kinds.read(recipe.write()) == recipe


def test_everything_left_out_has_its_default_and_reads_back():
    recipe = read(base())
    assert recipe.search.candidate_count == 6
    assert recipe.cohort.n_min == 19  # one client's own share does not hide it from itself
    assert recipe.ledger == "sqlite:///dpray-ledger.db"
    assert recipe.search.space["clip"] == Domain("choice", (0.5, 1))
    assert Recipe.read(recipe.write()) == recipe


def test_the_quorum_less_the_colluders_carries_the_noise():
    assert read(changed("cohort", {"clients": 20, "quorum": 15, "colluders": 5})).cohort.n_min == 10
    assert read(changed("cohort", {"clients": 5, "quorum": 3, "colluders": 4})).cohort.n_min == 1


def test_no_noise_has_to_be_asked_for_in_words():
    assert read(changed("budget", {"delta": 1e-5, "non_private": True})).budget.non_private
    infinite = {"epsilon": float("inf"), "delta": 1e-5, "non_private": True}
    assert read(changed("budget", infinite)).budget.epsilon == float("inf")


def test_a_recipe_without_a_search_trains_only():
    document = changed("search", REMOVE)
    document["shares"] = {"training": 1}
    document["training"] |= {"learning_rate": 1, "clip": 2}
    recipe = read(document)
    assert recipe.search is None
    assert recipe.training.fixed() == {"learning_rate": 1, "clip": 2}


REFUSED = [
    ("cohort.client", 3, ["`cohort.client`", "did you mean `clients`"]),
    ("bugdet", {}, ["`bugdet`", "did you mean `budget`"]),
    ("votes", 2, ["`votes`", "did you mean `search.votes`"]),
    ("training.rounds", "forty", ["`training.rounds`", "whole number", "'forty'"]),
    ("training.rounds", 10.0, ["`training.rounds`", "whole number", "10.0"]),
    ("training.rounds", True, ["`training.rounds`", "whole number", "true"]),
    ("training.rounds", 0, ["`training.rounds`", "at least 1", "0"]),
    ("training.rounds", REMOVE, ["`training.rounds`", "missing"]),
    ("training.algorithm", "dp_fedsofin", ["dp_fedsofin", "`dp_fedsofim`"]),
    ("training.algorithm", REMOVE, ["`training.algorithm`", "missing"]),
    ("training.regime", "secret", ["`training.regime`", "`distributed`", "'secret'"]),
    ("training.unit", "user", ["`training.unit`", "`record`", "`client`"]),
    ("budget.epsilon", 0, ["`budget.epsilon`", "above 0", "0.0", "non_private"]),
    ("budget.epsilon", -1, ["`budget.epsilon`", "-1.0"]),
    ("budget.epsilon", float("nan"), ["`budget.epsilon`", "nan"]),
    ("budget.epsilon", float("inf"), ["`budget.epsilon`", "inf", "non_private: true"]),
    ("budget.epsilon", "6", ["`budget.epsilon`", "a number", "'6' (text)"]),
    ("budget.epsilon", True, ["`budget.epsilon`", "a number", "true"]),
    ("budget.epsilon", REMOVE, ["`budget.epsilon`", "missing", "non_private"]),
    ("budget.delta", 0, ["`budget.delta`", "between 0 and 1"]),
    ("budget.delta", 1, ["`budget.delta`", "between 0 and 1"]),
    ("budget.delta", float("nan"), ["`budget.delta`", "nan"]),
    ("budget.non_private", True, ["`budget.non_private: true`", "6", "delete one"]),
    ("budget.non_private", "true", ["`budget.non_private`", "true or false", "'true' (text)"]),
    ("shares.search", 0.4, ["`shares`", "1.1", "at most 1"]),
    ("shares.search", 0, ["`shares.search`", "missing"]),
    ("shares.training", 0, ["`shares.training`", "above 0"]),
    ("data.evaluation.public", False, ["`data.evaluation.public`", "true"]),
    ("data.evaluation.fraction", 1.5, ["`data.evaluation.fraction`", "below 1"]),
    ("cohort.clients", 0, ["`cohort.clients`", "at least 1"]),
    ("cohort.quorum", 21, ["20", "quorum of 21", "fewer"]),
    ("cohort.colluders", 20, ["`cohort.colluders`", "20 of 20", "honest"]),
    ("cohort.actors", "many", ["`cohort.actors`", "`auto`", "'many'"]),
    ("cohort.partition", {"kind": "dirichlet"}, ["`cohort.partition.alpha`", "missing"]),
    ("cohort.partition", {"kind": "iid", "alpha": 1}, ["`cohort.partition.alpha`", "`iid`"]),
    ("search.votes", 6, ["k = 6", "p = 6"]),
    ("search.votes", 0, ["`search.votes`", "at least 1"]),
    ("search.space", {"learning_rate": 1.0, "clip": {"grid": [1]}}, ["nothing to search"]),
    ("search.space", {"learning_rate": {"grid": [1, 2, 3]}}, ["`training.clip`", "missing"]),
    ("search.space", {"learning_rat": {"grid": [1, 2, 3]}}, ["`search.space.learning_rat`", "`learning_rate`"]),
    ("search.space", {"clip": {"grd": [1, 2, 3]}}, ["`search.space.clip`", "did you mean `grid`"]),
    ("search.space", {"clip": {"grid": []}}, ["`search.space.clip`", "no values"]),
    ("search.space", {"clip": {"grid": [1, 1, 2]}}, ["`search.space.clip`", "twice"]),
    ("search.space", {"clip": {"uniform": [2, 1]}}, ["low < high", "[2, 1]"]),
    ("search.space", {"clip": {"loguniform": [0, 1]}}, ["above 0"]),
    ("search.space", {"rounds": {"grid": [1, 2, 3]}}, ["`search.space.rounds`", "plan"]),
    ("search.space", {"learning_rate": {"grid": [1, 2, -3]}, "clip": 1}, ["`search.space.learning_rate`", "-3"]),
    ("search.space", {"learning_rate": {"loguniform": [1, 9]}, "clip": 1}, ["`search.candidates`", "missing"]),
    ("search.candidates", 7, ["7", "6"]),
    ("search.candidates", 1, ["nothing to search"]),
    ("training.clip", 1.0, ["`clip`", "keep one"]),
    ("population.unit", "client", ["`population.records_per_client`", "missing"]),
    ("population.unit", "user", ["`population.unit`", "`user`", "`objective`"]),
    ("population.name", "two words", ["`population.name`", "letters"]),
    ("population", 3, ["`population`", "mapping", "3"]),
    ("noise", {"seed": -1}, ["`noise.seed`", "at least 0"]),
]


@pytest.mark.parametrize(("path", "value", "facts"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(path, value, facts):
    with pytest.raises(RecipeError) as refusal:
        read(changed(path, value))
    assert [fact for fact in facts if fact not in str(refusal.value)] == []


def test_a_setting_of_another_algorithm_is_refused():
    document = changed("training", {"algorithm": "dp_fedgd", "rounds": 3, "rho": 0.5})
    with pytest.raises(RecipeError, match=r"`training\.rho` means nothing to the chosen algorithm"):
        read(document)


def test_several_problems_are_told_at_once():
    document = changed("budget.delta", 2)
    document["cohort"]["clients"] = "twenty"
    with pytest.raises(RecipeError) as refusal:
        read(document)
    assert len(refusal.value.problems) == 2


def test_a_recipe_cannot_be_changed_after_it_was_checked():
    recipe = read(base())
    with pytest.raises(ValueError, match="frozen"):
        recipe.budget.epsilon = 100.0


def test_a_duplicate_key_is_not_overwritten():
    with pytest.raises(RecipeError, match="twice"):
        Recipe.read(write_yaml(base()) + "name: other\n")


def test_the_unchanged_recipe_is_accepted():
    """Negative control of the table: only the named change is what each refusal is about."""
    assert read_yaml(read(base()).write())["name"] == "try"


def test_a_winner_alone_is_chosen_by_a_trusted_aggregator():
    alone = {**base()["search"], "release": "winner"}
    assert read(base()).search.release == "votes"
    found = read(changed("search", alone))
    assert (found.search.release, found.search.regime) == ("winner", "central")
    assert Recipe.read(found.write()) == found
    assert read(changed("search", {**alone, "regime": "central"})) == found


@pytest.mark.parametrize("regime", ["distributed", "local"])
def test_a_winner_without_a_trusted_aggregator_is_refused(regime):
    with pytest.raises(RecipeError, match=rf"`search.regime` is `{regime}`.*`regime: central`"):
        read(changed("search", {**base()["search"], "release": "winner", "regime": regime}))


def test_a_winner_from_masked_sums_is_refused():
    document = changed("search", {**base()["search"], "release": "winner"})
    document["cohort"] = {"clients": 20, "quorum": 16, "secure_sum": "masked"}
    with pytest.raises(RecipeError, match=r"`cohort.secure_sum: masked` hides"):
        read(document)


@pytest.mark.parametrize("part", ["search", "training"])
def test_masked_sums_are_not_shown_to_a_central_server(part):
    document = changed(part, {**base()[part], "regime": "central"})
    document["cohort"] = {"clients": 20, "quorum": 16, "secure_sum": "masked"}
    with pytest.raises(RecipeError, match=rf"hides sums without noise.*`{part}.regime: central`"):
        read(document)


def test_another_release_is_refused_with_what_there_is():
    with pytest.raises(RecipeError, match=r"search\.release.*votes.*winner"):
        read(changed("search", {**base()["search"], "release": "counts"}))
