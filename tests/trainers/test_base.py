"""The round loop on a cohort that is played: releases, resuming, lost rounds, checkpoints, refusals."""

import json
import math
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest

from dpray.platform.cohort.client import Records
from dpray.platform.cohort.errors import QuorumLost
from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, share, to_mu
from dpray.platform.privacy.clipping import clip_rows
from dpray.platform.privacy.ledger import (
    BudgetExceeded,
    KeyConflict,
    Ledger,
    LedgerError,
    Plan,
    PlanConflict,
    PlannedRelease,
    ReleaseKey,
    ReleaseLost,
)
from dpray.platform.privacy.mechanisms import ClippedSum, Regime, TopKVotes, Unit
from dpray.platform.tracking import DECLARED, UndeclaredMetric
from dpray.trainers.base import MECHANISM, FederatedTrainer
from dpray.trainers.checkpoints import CheckpointConflict, load_parameters
from dpray.trainers.fedgd import DPFedGDTrainer, FedGDSettings
from dpray.trainers.models import LinearHead
from dpray.trainers.sofim import DPFedSOFIMTrainer, SOFIMSettings

from .conftest import BUDGET, F, K, Killed, PlayedCohort, blobs, killed_in_round

T = 6
SETTINGS = SOFIMSettings(rounds=T, learning_rate=1.0, clip=1.0)


def trainer(people, cohort=None, settings=SETTINGS, *, kind=DPFedSOFIMTrainer, name="run", **changes):
    cohort = cohort or PlayedCohort()
    arguments = {"quanta": BUDGET.quanta, "evaluation": blobs(90, seed=99), **changes}
    return kind(cohort, people.run(name), cohort.task, settings, **arguments)


@pytest.mark.parametrize(("rho", "uphill"), [(1e-6, True), (0.5, False)])
def test_noise_that_turns_its_steps_around_is_said_before_anything_is_spent(people, rho, uphill):
    training = trainer(people, settings=replace(SETTINGS, rho=rho))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if not uphill:
            training.fit()
            return
        with pytest.raises(UserWarning, match="uphill"):
            training.fit()
    assert people.accounts()[0].spent == people.accounts()[0].reserved == 0


def test_fit_returns_rays_result(people, tmp_path):
    from ray.tune import Checkpoint, Result

    training = trainer(people, storage=tmp_path / "training")
    result = training.fit()
    assert isinstance(result, Result)
    assert isinstance(result.checkpoint, Checkpoint)
    assert result.error is None
    assert result.path == str(tmp_path / "training")
    assert result.metrics["training_iteration"] == T
    assert result.metrics["stopped"] == f"all {T} rounds done"
    assert result.metrics["rounds_lost"] == 0
    assert result.config == SETTINGS.as_dict()
    assert list(result.metrics_dataframe.index) == list(range(1, T + 1))
    assert result.metrics["accuracy"] == LinearHead(F, K).accuracy(training.theta, blobs(90, seed=99))
    np.testing.assert_array_equal(load_parameters(result.checkpoint.path), training.theta)


def test_without_noise_training_is_the_algorithm_on_all_records(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        people = ledger.population("people")
        people.account(Unit.RECORD, Budget(math.inf, 1e-5, non_private=True))
        cohort = PlayedCohort()
        training = trainer(people, cohort, quanta=None, regime="central")
        result = training.fit()
    head, state = LinearHead(F, K), SETTINGS.initial_state(np.zeros(15))
    for t in range(1, T + 1):
        total = head.clipped_sums(state.theta, list(cohort.shards.values()), 1.0).sum(axis=0)
        state = SETTINGS.server_step(state, total / 160, t, 0.0)
    np.testing.assert_allclose(training.theta, state.theta, atol=1e-6)  # sums are rounded to a grid of 2⁻²¹
    assert result.metrics["accuracy"] > 0.95
    assert result.metrics["privacy/epsilon_run"] == math.inf


@pytest.mark.parametrize("regime", list(Regime))
def test_the_shown_noise_is_the_noise_that_was_added(people, regime):
    """std of the sum over the clients that answered; and what the algorithm is told is that over N."""
    told = []

    class Told(DPFedGDTrainer):
        def server_step(self, state, gradient, t, noise):
            told.append(noise)
            return super().server_step(state, gradient, t, noise)

    cohort = PlayedCohort(quorum=4)
    settings = FedGDSettings(rounds=T, learning_rate=1.0, clip=1.0)
    training = trainer(people, cohort, settings, kind=Told, regime=regime)
    result = training.fit()
    per_round = to_mu(training.spends[0])
    sigma = training.mechanism.noise(per_round, noisers=3 if regime is Regime.DISTRIBUTED else 1).sigma
    factor = {Regime.CENTRAL: 1, Regime.DISTRIBUTED: math.sqrt(4 / 3), Regime.LOCAL: 2}[regime]
    assert result.metrics_dataframe["round/sigma"].to_numpy() == pytest.approx(sigma * factor)
    assert told == pytest.approx([sigma * factor / 160] * T)


def test_the_mean_is_over_the_records_of_those_who_answered(people):
    cohort = PlayedCohort(quorum=3)
    cohort.answering = cohort.clients[1:]
    training = trainer(people, cohort, FedGDSettings(rounds=1, learning_rate=1.0, clip=1.0), kind=FederatedTrainer)
    result = training.fit()
    assert (result.metrics["round/clients"], result.metrics["round/records"]) == (3, 130)
    stored = training.run.stored(ReleaseKey("training", MECHANISM, 1))
    np.testing.assert_allclose(training.theta, -stored[:-2] / 130, rtol=1e-12)


def test_a_mean_of_client_means(people):
    settings = FedGDSettings(rounds=1, learning_rate=1.0, clip=1.0, weighting="clients")
    cohort = PlayedCohort()
    quiet = cohort.noise_for
    cohort.noise_for = lambda mechanism, mu, regime: quiet(mechanism, 1e6 * mu, regime)
    training = trainer(people, cohort, settings, kind=DPFedGDTrainer)
    training.fit()
    head = LinearHead(F, K)
    means = [head.clipped_sum(np.zeros(15), shard, 1.0) / len(shard) for shard in cohort.shards.values()]
    np.testing.assert_allclose(training.theta, -np.mean(means, axis=0), atol=1e-4)


def test_of_unit_client_follows_the_clients_updates(people):
    settings = FedGDSettings(rounds=1, learning_rate=0.5, clip=0.3, local_steps=4, local_rate=0.1)
    cohort = PlayedCohort()
    quiet = cohort.noise_for
    cohort.noise_for = lambda mechanism, mu, regime: quiet(mechanism, 1e6 * mu, regime)
    training = trainer(people, cohort, settings, kind=DPFedGDTrainer, unit=Unit.CLIENT)
    assert (training.mechanism.unit, training.mechanism.sensitivity) == (Unit.CLIENT, 0.6)
    training.fit()
    local = {"local_steps": 4, "local_rate": 0.1}
    updates = np.array([LinearHead(F, K).update(np.zeros(15), shard, local) for shard in cohort.shards.values()])
    np.testing.assert_allclose(training.theta, 0.5 * clip_rows(updates, 0.3).mean(axis=0), atol=1e-4)


def test_the_whole_share_is_spent_to_the_last_quantum(people):
    quanta = share(BUDGET.quanta, 0.7)
    training = trainer(people, quanta=quanta)
    assert sum(training.spends) == quanta
    training.fit()
    account = people.account(Unit.RECORD)
    assert account.spent == quanta
    assert account.reserved == 0


def test_a_budget_may_be_given_instead_of_quanta(people):
    training = trainer(people, quanta="budget", budget=Budget(2.0, 1e-5))
    training.fit()
    assert people.account(Unit.RECORD).spent == Budget(2.0, 1e-5).quanta


def test_rows_say_what_the_run_has_spent_so_far(people):
    run = people.run("run")
    vote, rest = PlannedRelease("search", "votes", Unit.CLIENT, share(BUDGET.quanta, 0.3), 1), BUDGET.quanta
    rest -= vote.quanta
    run.reserve(Plan((vote, PlannedRelease("training", MECHANISM, Unit.RECORD, rest, T))))
    run.release(ReleaseKey("search", "votes", 0), {}, TopKVotes(1, 3), vote.quanta, lambda _: np.zeros(3))
    result = trainer(people, quanta=rest, reserve=False).fit()
    frame = result.metrics_dataframe
    assert frame["privacy/epsilon_run"].is_monotonic_increasing
    after_one = to_mu(vote.quanta + -(-rest // T))
    assert frame["privacy/mu_run"].iloc[0] == pytest.approx(after_one, rel=1e-12)
    assert frame["privacy/epsilon_run"].iloc[0] == pytest.approx(gdp.epsilon(after_one, 1e-5), rel=1e-9)
    assert frame["privacy/epsilon_run"].iloc[-1] == pytest.approx(8.0, rel=1e-9)
    assert set(frame["privacy/unit"]) == {"record"}


def test_signal_to_noise_is_debiased(people):
    row = trainer(people).fit().metrics
    floor = row["round/sigma"] / row["round/records"] * math.sqrt(15)
    norm = row["round/gradient_norm"]
    assert row["round/noise_to_signal"] == pytest.approx(floor / norm)
    assert row["round/signal_to_noise"] == pytest.approx(math.sqrt(max(norm**2 - floor**2, 0)) / floor)


def uninterrupted(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/whole.db") as ledger:
        people = ledger.population("people")
        people.account(Unit.RECORD, BUDGET)
        training = trainer(people)
        frame = training.fit().metrics_dataframe
        return training.theta, frame


@pytest.mark.parametrize("stored", ["checkpoints", "checkpoints every second round", "no checkpoints"])
@pytest.mark.parametrize("t", [1, 3, T])
def test_killed_and_resumed_it_is_the_uninterrupted_run(people, tmp_path, t, stored):
    changes = {"storage": None if stored == "no checkpoints" else tmp_path / "training"}
    changes["checkpoint_every"] = 2 if "second" in stored else 1
    cohort = PlayedCohort()
    with pytest.raises(Killed):
        trainer(people, cohort, on_round=killed_in_round(t), **changes).fit()
    assert cohort.asked == list(range(1, t + 1))
    resumed = trainer(people, cohort, **changes)
    frame = resumed.fit().metrics_dataframe
    assert cohort.asked == list(range(1, T + 1))  # no round was computed twice
    theta, expected = uninterrupted(tmp_path)
    np.testing.assert_array_equal(resumed.theta, theta)
    assert frame.equals(expected)
    assert people.account(Unit.RECORD).spent == BUDGET.quanta


def test_killed_between_charge_and_value_it_is_charged_once(people, tmp_path):
    cohort = PlayedCohort()
    cohort.script = {4: Killed()}
    with pytest.raises(Killed):
        trainer(people, cohort, storage=tmp_path / "training").fit()
    resumed = trainer(people, cohort, storage=tmp_path / "training")
    resumed.fit()
    np.testing.assert_array_equal(resumed.theta, uninterrupted(tmp_path)[0])
    assert people.account(Unit.RECORD).spent == BUDGET.quanta


def test_a_finished_training_is_not_trained_again(people, tmp_path):
    cohort = PlayedCohort()
    first = trainer(people, cohort, storage=tmp_path / "training").fit()
    again = trainer(people, cohort, storage=tmp_path / "training").fit()
    assert cohort.asked == list(range(1, T + 1))
    assert again.metrics == first.metrics
    assert again.metrics_dataframe.equals(first.metrics_dataframe)


def test_too_few_clients_stop_a_round_and_not_the_training(people, tmp_path):
    cohort = PlayedCohort()
    cohort.script = {3: QuorumLost("2 clients answered, and the quorum is 4.", answered=2, quorum=4)}
    training = trainer(people, cohort, storage=tmp_path / "training")
    with pytest.raises(QuorumLost):
        training.fit()
    training.fit()
    np.testing.assert_array_equal(training.theta, uninterrupted(tmp_path)[0])
    assert people.account(Unit.RECORD).spent == BUDGET.quanta


def test_a_lost_round_counts_and_leaves_the_state_as_it_was(people, tmp_path):
    cohort = PlayedCohort()
    cohort.script = {3: ReleaseLost("not all clients could reveal their message")}
    thetas = []
    training = trainer(people, cohort, storage=tmp_path / "t", on_round=lambda row: thetas.append(training.theta))
    result = training.fit()
    np.testing.assert_array_equal(thetas[2], thetas[1])
    assert not np.array_equal(thetas[3], thetas[2])
    assert result.metrics["rounds_lost"] == 1
    assert list(result.metrics_dataframe["round/lost"]) == [0, 0, 1, 0, 0, 0]
    assert training.state.steps == T - 1
    assert people.account(Unit.RECORD).spent == BUDGET.quanta
    # Resumed without its checkpoints, the round stays lost.
    shutil.rmtree(tmp_path / "t")
    resumed = trainer(people, cohort, storage=tmp_path / "t")
    assert resumed.fit().metrics["rounds_lost"] == 1
    np.testing.assert_array_equal(resumed.theta, training.theta)
    assert cohort.asked == list(range(1, T + 1))


def test_bias_correction_counts_steps_and_not_rounds(people):
    settings = SOFIMSettings(rounds=T, clip=1.0, learning_rate=1.0, bias_correction=True, precondition="momentum")
    cohort = PlayedCohort()
    cohort.script = {1: ReleaseLost("lost")}
    steps = []

    class Counted(DPFedSOFIMTrainer):
        def server_step(self, state, gradient, t, noise):
            steps.append(t)
            return super().server_step(state, gradient, t, noise)

    trainer(people, cohort, settings, kind=Counted).fit()
    assert steps == [1, 2, 3, 4, 5]


def test_diverging_stops_before_the_next_release(people):
    cohort = PlayedCohort()
    settings = FedGDSettings(rounds=T, learning_rate=1e308, clip=1e6)
    training = trainer(people, cohort, settings, kind=DPFedGDTrainer)
    result = training.fit()
    assert "diverged in round 1" in result.metrics["stopped"]
    assert np.isfinite(training.theta).all()
    assert cohort.asked == [1]
    assert people.account(Unit.RECORD).spent == training.spends[0]


def test_the_last_two_checkpoints_are_kept_and_nothing_partial(people, tmp_path):
    trainer(people, storage=tmp_path / "training").fit()
    names = sorted(place.name for place in (tmp_path / "training").iterdir())
    assert names == [f"round-{T - 1:06d}", f"round-{T:06d}"]


@pytest.mark.parametrize("damage", ["arrays", "manifest", "half", "gone"])
def test_a_damaged_checkpoint_is_passed_over(people, tmp_path, damage):
    cohort, folder = PlayedCohort(), tmp_path / "training"
    with pytest.raises(Killed):
        trainer(people, cohort, storage=folder, on_round=killed_in_round(5)).fit()
    newest = folder / "round-000004"
    arrays, manifest = newest / "state.npz", newest / "state.json"
    if damage == "arrays":
        content = bytearray(arrays.read_bytes())
        content[len(content) // 2] ^= 1
        arrays.write_bytes(content)
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-20])
    elif damage == "half":
        arrays.write_bytes(arrays.read_bytes()[:100])
    else:
        arrays.unlink()
    resumed = trainer(people, cohort, storage=folder)
    resumed.fit()
    np.testing.assert_array_equal(resumed.theta, uninterrupted(tmp_path)[0])
    assert cohort.asked == list(range(1, T + 1))


def test_checkpoints_of_another_training_are_refused(people, tmp_path):
    trainer(people, storage=tmp_path / "training").fit()
    other = SOFIMSettings(rounds=T, learning_rate=2.0, clip=1.0)
    with pytest.raises(CheckpointConflict, match="another settings"):
        trainer(people, settings=other, storage=tmp_path / "training").fit()
    with pytest.raises(CheckpointConflict, match="another run"):
        trainer(people, name="second", storage=tmp_path / "training").fit()


def test_without_checkpoints_other_settings_meet_the_ledger(people):
    with pytest.raises(Killed):
        trainer(people, on_round=killed_in_round(3)).fit()
    with pytest.raises(KeyConflict):
        trainer(people, settings=SOFIMSettings(rounds=T, learning_rate=2.0, clip=1.0)).fit()


def test_checkpoints_hold_no_code_and_no_records(people, tmp_path):
    trainer(people, storage=tmp_path / "training").fit()
    place = tmp_path / "training" / f"round-{T:06d}"
    with np.load(place / "state.npz", allow_pickle=False) as arrays:
        assert sorted(arrays.files) == ["slot.momentum", "slot.noise_variance", "theta"]
    manifest = json.loads((place / "state.json").read_text())
    assert sorted(manifest) == ["format", "identity", "round", "rows", "sha256", "steps"]


def test_large_values_are_dropped_once_checkpoints_stand_for_them(people, tmp_path):
    class Wide(LinearHead):
        pass

    wide = Wide(2**16, 3)
    cohort = PlayedCohort(wide, sizes=(1, 1))
    cohort.shards = {name: Records(np.ones((1, 2**16)), np.zeros(1, dtype=int)) for name in cohort.clients}
    training = trainer(people, cohort, storage=tmp_path / "training", evaluation=None)
    training.fit()
    values = [place for place in (tmp_path / "ledger.db.values").rglob("*") if place.is_file()]
    assert 1 <= len(values) <= 2


class Seen:
    """A tracker that accepts what the project's allow-list accepts, and remembers it."""

    def __init__(self, declared):
        self.declared, self.metrics, self.spends = declared, {}, []

    def public(self, metrics, step=0):
        self.metrics.setdefault(step, {}).update(self.declared.check("public", metrics))

    def released(self, metrics, step=0):
        self.metrics.setdefault(step, {}).update(self.declared.check("released", metrics))

    def spend(self, budget, spent, run_spent, *, step):
        self.spends.append((step, budget, spent, run_spent))


NEW = {"round/signal_to_noise": "estimate", "round/momentum_over_rho": "released"}


def test_rounds_are_shown_through_the_allow_list(people):
    tracker = Seen(DECLARED.extended(released=NEW))
    training = trainer(people, tracker=tracker)
    training.fit()
    assert sorted(tracker.metrics) == list(range(1, T + 1))
    shown = tracker.metrics[T]
    assert {"accuracy", "loss", "round/clients", "round/gradient_norm", "round/momentum_over_rho"} <= set(shown)
    assert [spend[0] for spend in tracker.spends] == list(range(1, T + 1))
    assert tracker.spends[-1][1:] == (BUDGET, BUDGET.quanta, BUDGET.quanta)


def test_a_metric_nobody_declared_is_not_shown(people):
    class Leaking(FedGDSettings):
        def diagnostics(self, state, t):
            return {"round/largest_record": 1.0}

    settings = Leaking(rounds=T, learning_rate=1.0, clip=1.0)
    with pytest.raises(UndeclaredMetric, match="largest_record"):
        trainer(people, settings=settings, kind=DPFedGDTrainer, tracker=Seen(DECLARED.extended(released=NEW))).fit()


def test_over_budget_is_refused_before_anything_is_asked(people):
    cohort = PlayedCohort()
    people.run("other").reserve(Plan((PlannedRelease("training", MECHANISM, Unit.RECORD, BUDGET.quanta // 2, 1),)))
    with pytest.raises(BudgetExceeded):
        trainer(people, cohort).fit()
    assert cohort.asked == []
    assert people.account(Unit.RECORD).spent == 0


def test_a_plan_made_for_the_run_is_used(people):
    training = trainer(people, reserve=False)
    training.run.reserve(Plan((training.planned,)))
    training.fit()
    account = people.account(Unit.RECORD)
    assert (account.spent, account.reserved) == (BUDGET.quanta, 0)


def test_another_plan_is_refused(people):
    training = trainer(people, quanta=BUDGET.quanta // 2)
    training.run.reserve(Plan((PlannedRelease("search", "votes", Unit.CLIENT, BUDGET.quanta // 4, 1),)))
    with pytest.raises(PlanConflict):
        training.fit()


class Broken(LinearHead):
    """User code with a mistake."""

    def clipped_sum(self, theta, records, clip):
        raise TypeError("a mistake in user code")


def test_a_mistake_in_the_model_shows_on_public_records_before_anything_is_charged(people):
    cohort = PlayedCohort(Broken(F, K))
    with pytest.raises(TypeError, match="a mistake in user code"):
        trainer(people, cohort).fit()
    assert cohort.asked == []
    account = people.account(Unit.RECORD)
    assert (account.spent, account.reserved) == (0, 0)


FEDGD = FedGDSettings(rounds=2, learning_rate=1.0, clip=1.0)
LOCAL = FedGDSettings(rounds=2, learning_rate=1.0, clip=1.0, local_steps=3)
BY_RECORDS = FedGDSettings(rounds=2, learning_rate=1.0, clip=1.0, weighting="records")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"settings": FEDGD}, "takes SOFIMSettings, and FedGDSettings"),
        ({"settings": LOCAL, "kind": DPFedGDTrainer}, "Local steps are for unit `client`"),
        ({"settings": BY_RECORDS, "kind": DPFedGDTrainer, "unit": "client"}, "every clipped update weighs the same"),
        ({"unit": "user"}, "`record` or a `client`"),
        ({"checkpoint_every": 0}, "`checkpoint_every` must be at least 1"),
        ({"quanta": "budget"}, "Say what training may spend"),
        ({"budget": BUDGET}, "not both"),
    ],
)
def test_misfits_are_refused_with_a_sentence(people, changes, sentence):
    with pytest.raises(ValueError, match=r".") as refusal:
        trainer(people, **changes)
    assert sentence in str(refusal.value)


def test_the_model_must_be_the_clients(people):
    cohort = PlayedCohort()
    with pytest.raises(ValueError, match="15 parameters and the model 21"):
        DPFedSOFIMTrainer(cohort, people.run("run"), LinearHead(6, K), SETTINGS, budget=BUDGET)


def test_a_private_account_refuses_training_without_noise(people):
    with pytest.raises(LedgerError):
        trainer(people, quanta=None).fit()
    assert people.account(Unit.RECORD).spent == 0


def test_a_population_without_an_account_has_nothing_to_spend(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/empty.db") as ledger:
        people = ledger.population("people")
        with pytest.raises((LedgerError, ValueError), match="account"):
            trainer(people).fit()


def test_a_callback_sees_every_round(people):
    rows = []
    trainer(people, on_round=rows.append).fit()
    assert [row["training_iteration"] for row in rows] == list(range(1, T + 1))


def test_the_played_cohort_is_like_a_real_one(tmp_path):
    from dpray.platform.cohort.cohort import Cohort

    played = PlayedCohort(quorum=3)
    real = Cohort(played.task, played.shards, state_dir=tmp_path, quorum=3)  # starts nothing before it is asked
    for name in ("clients", "counts", "n_min", "terms"):
        assert getattr(real, name) == getattr(played, name)
    mechanism = trainer_mechanism(played)
    for regime in Regime:
        assert real.noise_for(mechanism, 0.5, regime) == played.noise_for(mechanism, 0.5, regime)


def trainer_mechanism(cohort):
    return ClippedSum(1.0, Unit.RECORD, cohort.task.dimension, 160, cohort.task.relative_error)


class Narrow(LinearHead):
    """Holds clips up to 10 only."""

    def refuse_clip(self, clip):
        if clip > 10:
            raise ValueError(f"at most 10, and {clip} was given")


def test_a_clip_that_the_models_arithmetic_cannot_keep_is_refused_before_anything_is_charged(people):
    """Inside a client it would be a message of zeros, round after round."""
    settings = SOFIMSettings(rounds=T, learning_rate=1.0, clip=11.0)
    cohort = PlayedCohort(Narrow(F, K))
    with pytest.raises(ValueError, match=r"at most 10, and 11.0 was given"):
        DPFedSOFIMTrainer(cohort, people.run("run"), cohort.task, settings, budget=BUDGET)
    assert people.account(Unit.RECORD).spent == 0
    by_client = DPFedSOFIMTrainer(
        cohort, people.run("run"), cohort.task, settings, budget=BUDGET, unit=Unit.CLIENT
    )  # there the cohort clips, in float64
    assert by_client.mechanism.clip == 11.0
