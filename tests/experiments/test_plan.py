"""A forecast is arithmetic on public facts: compared with closed forms, and with what the ledger would admit."""

import math

import numpy as np
import pytest

from dpray.experiments import report_plan
from dpray.experiments.plan import Scale, forecast, lead_needed, winner_lead_needed
from dpray.experiments.reading import RecipeError, write_yaml
from dpray.experiments.spec import Recipe
from dpray.platform.privacy import gdp
from dpray.platform.privacy.mechanisms import Unit, vote_failure_bound, winner_failure_bound

SCALE = Scale(clients=20, records=1437, dimension=650, largest_client=200)


def recipe(**sections) -> Recipe:
    document = {
        "name": "try",
        "population": {"name": "people"},
        "budget": {"epsilon": 6, "delta": 1e-5},
        "shares": {"search": 0.3, "training": 0.7},
        "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.2}},
        "cohort": {"clients": 20},
        "search": {
            "votes": 3,
            "space": {"learning_rate": {"grid": [0.1, 1.0, 10.0, 20.0]}, "clip": {"grid": [0.5, 1]}},
        },
        "training": {"algorithm": "dp_fedsofim", "rounds": 40},
    }
    return Recipe.read(write_yaml(document | sections))


def test_shares_of_mu_squared_and_epsilon_of_each_part():
    found = forecast(recipe(), SCALE)
    mu = gdp.mu(6, 1e-5)
    assert [part.share for part in found.parts] == pytest.approx([0.3, 0.7], abs=1e-12)
    assert found.search.epsilon == pytest.approx(gdp.epsilon(mu * math.sqrt(0.3), 1e-5), rel=1e-9)
    assert found.training.epsilon == pytest.approx(gdp.epsilon(mu * math.sqrt(0.7), 1e-5), rel=1e-9)
    assert found.training.epsilon_step == pytest.approx(gdp.epsilon(mu * math.sqrt(0.7 / 40), 1e-5), rel=1e-9)


def test_noise_of_a_vote_is_sensitivity_over_mu():
    found = forecast(recipe(), SCALE)
    mu = gdp.mu(6, 1e-5) * math.sqrt(0.3)
    assert found.search.sigma == pytest.approx(math.sqrt(2 * 3) / mu, rel=1e-9)
    assert found.search.answered_sigma == pytest.approx(found.search.sigma * math.sqrt(20 / 19))


def test_a_quorum_and_colluders_make_the_answered_noise_larger():
    found = forecast(recipe(cohort={"clients": 20, "quorum": 15, "colluders": 5}), SCALE)
    assert found.search.answered_sigma == pytest.approx(found.search.sigma * math.sqrt(20 / 10))


@pytest.mark.parametrize(
    ("regime", "times"), [("central", 1), ("distributed", math.sqrt(20 / 19)), ("local", math.sqrt(20))]
)
def test_noise_to_signal_of_the_mean_gradient(regime, times):
    found = forecast(recipe(training={"algorithm": "dp_fedsofim", "rounds": 40, "regime": regime}), SCALE)
    mu_round = gdp.mu(6, 1e-5) * math.sqrt(0.7 / 40)
    expected = 2 / mu_round / 1437 * math.sqrt(650) * times
    assert found.noise_to_signal == pytest.approx(expected, rel=1e-2)  # the grid's own share is below 1 %
    assert found.noise_to_signal >= expected
    assert found.sigma_over_clip == pytest.approx(2 / mu_round * times, rel=1e-2)


def test_the_lead_is_where_the_failure_bound_is_one_in_twenty():
    assert vote_failure_bound(lead_needed(2.0, 11), 2.0, 11) == pytest.approx(0.05)
    assert vote_failure_bound(lead_needed(7.0, 99), 7.0, 99) == pytest.approx(0.05)
    assert lead_needed(0.0, 11) == 0


def test_all_of_the_budget_is_planned_and_never_more():
    rng = np.random.default_rng(0)
    for _ in range(200):
        search = round(float(rng.uniform(0.01, 0.99)), 2)
        shares = {"search": search, "training": round(1 - search, 2)}
        found = forecast(recipe(shares=shares, budget={"epsilon": float(rng.uniform(0.1, 10)), "delta": 1e-6}), SCALE)
        assert 0 <= found.budget.quanta - found.charged <= 2


def test_a_client_account_pays_for_record_level_rounds_by_group_privacy():
    population = {"name": "people", "unit": "client", "records_per_client": 200}
    found = forecast(recipe(population=population), SCALE)
    assert found.search.charged == found.search.quanta
    assert found.training.charged == found.training.quanta * 200**2
    assert found.training.share == pytest.approx(0.7, rel=1e-9)


def test_the_ledger_plan_has_both_parts():
    plan = forecast(recipe(), SCALE).ledger_plan(search="votes", training="gradients")
    names = [(line.label, line.mechanism, line.unit, line.steps) for line in plan.releases]
    assert names == [("search", "votes", Unit.CLIENT, 1), ("training", "gradients", Unit.RECORD, 40)]


def test_without_noise_everything_is_infinite():
    found = forecast(recipe(budget={"delta": 1e-5, "non_private": True}), SCALE)
    assert found.charged is None
    assert found.search.epsilon == math.inf
    assert (found.search.sigma, found.noise_to_signal, found.lead) == (0, 0, 0)


def test_hopeless_settings_are_warned_of_and_good_ones_are_not():
    search = {"votes": 1, "space": {"learning_rate": {"grid": [1, 2, 3]}, "clip": 1}}
    assert forecast(recipe(search=search), SCALE).warnings == ()
    drowned = forecast(recipe(budget={"epsilon": 0.2, "delta": 1e-5}), SCALE).warnings
    assert any("hopeless" in text and "20 clients" in text for text in drowned)
    assert any("drowned" in text for text in drowned)
    noisy = forecast(recipe(), SCALE).warnings
    assert [text.split(":")[0] for text in noisy] == ["The vote is noisy"]


@pytest.mark.parametrize(("rho", "uphill"), [(1e-9, True), (1e9, False)])
def test_a_trainer_that_noise_turns_around_is_warned_of(rho, uphill):
    changed = recipe(training={"algorithm": "dp_fedsofim", "rounds": 10, "rho": rho})
    assert any("uphill" in text for text in forecast(changed, SCALE).warnings) == uphill


def test_a_budget_too_small_to_spend_is_refused():
    with pytest.raises(RecipeError, match="too small"):
        forecast(recipe(budget={"epsilon": 1e-15, "delta": 1e-300}), SCALE)


def masked(**cohort):
    return {"clients": 20, "secure_sum": "masked", **cohort}


def test_masked_sums_are_planned_with_their_threshold():
    assert forecast(recipe(), SCALE).masked is None
    found = forecast(recipe(cohort=masked(quorum=16, colluders=2)), SCALE).masked
    assert (found.degree, found.threshold) == (19, 12)
    with pytest.raises(RecipeError, match=r"`cohort.secure_sum: masked`.*needs 11 of them.*quorum is 9"):
        forecast(recipe(cohort=masked(quorum=9)), SCALE)


def test_masked_sums_without_shared_noise_are_warned_of():
    training = {"algorithm": "dp_fedsofim", "rounds": 40, "regime": "local"}
    space = {"learning_rate": {"grid": [0.1, 1.0, 10.0, 20.0]}, "clip": {"grid": [0.5, 1]}}
    search = {"votes": 3, "regime": "local", "space": space}
    found = forecast(recipe(cohort=masked(), training=training, search=search), SCALE)
    assert found.masked is None
    assert any("changes nothing here" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("cohort", "words"),
    [
        ({"clients": 20}, ["central (aggregator trusted, shares simulated)"]),
        (
            masked(quorum=16),
            ["masked between clients", "shown as distributed", "19 others; 11 shares", "4 may be lost before"],
        ),
    ],
)
def test_the_plan_says_how_sums_are_added_up(cohort, words):
    given = recipe(cohort=cohort)
    said = str(report_plan._noise(given, forecast(given, SCALE), SCALE))
    assert all(word in said for word in words)


GRID = {"learning_rate": {"grid": [0.1, 1.0, 10.0, 20.0]}, "clip": {"grid": [0.5, 1]}}
ALONE = {"votes": 3, "release": "winner", "space": GRID}


def test_a_winner_costs_its_share_as_a_pure_epsilon():
    found = forecast(recipe(search=ALONE), SCALE)
    mu = gdp.mu(6, 1e-5) * math.sqrt(0.3)
    assert gdp.mu_from_pure(found.search.pure_epsilon) == pytest.approx(mu, rel=1e-9)
    assert found.search.scale == pytest.approx(2 / found.search.pure_epsilon, rel=1e-12)
    assert found.search.share == pytest.approx(0.3, abs=1e-12)
    assert found.lead == pytest.approx(found.search.scale * math.log(19 * 5))
    assert winner_failure_bound(found.lead, found.search.scale, 5) == pytest.approx(0.05)
    assert winner_lead_needed(0.0, 11) == 0
    assert found.unanimous_failure == winner_failure_bound(20, found.search.scale, 5, 3)


def test_the_plan_of_a_winner_names_what_noisy_votes_would_need():
    alone, votes = recipe(search=ALONE), recipe()
    found = forecast(alone, SCALE)
    assert found.search.votes_lead == forecast(votes, SCALE).lead
    said = str(report_plan._noise(alone, found, SCALE))
    for words in (
        "the winner alone",
        "pure: Gumbel noise of scale",
        f"{found.search.votes_lead:.1f} for the same share",
    ):
        assert words in said
    assert "σ_S" not in said
    assert "Gumbel" not in str(report_plan._noise(votes, forecast(votes, SCALE), SCALE))


def test_without_noise_a_winner_is_exact():
    found = forecast(recipe(search=ALONE, budget={"delta": 1e-5, "non_private": True}), SCALE)
    assert (found.search.pure_epsilon, found.search.scale, found.lead) == (math.inf, 0, 0)


def test_fewer_votes_are_not_advised_where_they_do_not_help():
    tight = {"epsilon": 1, "delta": 1e-5}
    noisy = {key: value for key, value in ALONE.items() if key != "release"}
    advice = [forecast(recipe(search=each, budget=tight), SCALE).warnings[0] for each in (ALONE, noisy)]
    assert ["fewer votes per client" in each for each in advice] == [False, True]
