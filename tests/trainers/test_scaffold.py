"""DP-SCAFFOLD against Algorithm 1 of its paper client by client, DP-FedGD where it has one step, and its price."""

import math

import numpy as np
import pytest
from scipy.stats import chi2

from dpray.platform.privacy.budget import to_mu
from dpray.platform.privacy.ledger import ReleaseKey, ReleaseLost
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.noise import NoiseSource, from_grid, to_grid
from dpray.trainers.base import MECHANISM
from dpray.trainers.fedgd import DPFedGDTrainer, FedGDSettings
from dpray.trainers.models import LinearHead
from dpray.trainers.rehearsal import Rehearsal
from dpray.trainers.scaffold import DPScaffoldTrainer, ScaffoldSettings

from .conftest import BUDGET, F, K, PlayedCohort, blobs

T, STEPS = 4, 3
SETTINGS = ScaffoldSettings(rounds=T, learning_rate=0.8, clip=0.7, local_steps=STEPS, local_rate=0.6)


def a_trainer(people, cohort=None, settings=SETTINGS, *, run="run", kind=DPScaffoldTrainer, **changes):
    cohort = cohort or PlayedCohort()
    arguments = {"quanta": BUDGET.quanta, "evaluation": blobs(30, seed=99), "regime": "local", **changes}
    return kind(cohort, people.run(run), cohort.task, settings, **arguments)


@pytest.mark.parametrize("regime", list(Regime))
def test_with_one_local_step_it_is_dp_fedgd_to_the_last_bit(people, regime):
    one = ScaffoldSettings(rounds=T, learning_rate=0.5, clip=0.7, local_rate=0.5)
    plain = FedGDSettings(rounds=T, learning_rate=0.25, clip=0.7)
    half = BUDGET.quanta // 2
    scaffold = a_trainer(people, settings=one, regime=regime, quanta=half)
    scaffold.fit()
    fedgd = a_trainer(people, settings=plain, regime=regime, quanta=half, run="other", kind=DPFedGDTrainer)
    fedgd.fit()
    np.testing.assert_array_equal(scaffold.theta, fedgd.theta)


def by_the_paper(cohort, settings, noise):
    """Noble et al. 2022, Algorithm 1: all clients, full batches, clients weighted by their records."""
    head, eta_l, eta_g = LinearHead(F, K), settings.local_rate, settings.learning_rate
    weights = {name: n / sum(cohort.counts.values()) for name, n in cohort.counts.items()}
    x, c, c_i = np.zeros(15), np.zeros(15), dict.fromkeys(cohort.clients, np.zeros(15))
    for t in range(1, settings.rounds + 1):
        delta_y, delta_c, key = np.zeros(15), np.zeros(15), str(ReleaseKey("training", MECHANISM, t))
        for name in cohort.clients:
            y = x.copy()
            for k in range(settings.local_steps):
                total = to_grid(head.clipped_sum(y, cohort.shards[name], settings.clip), noise.grid)
                total = total + NoiseSource(7).draw(noise, 15, key, k, name)
                y = y - eta_l * (from_grid(total, noise.grid) / cohort.counts[name] - c_i[name] + c)
            new = c_i[name] - c + (x - y) / (settings.local_steps * eta_l)
            delta_y += weights[name] * (y - x)
            delta_c += weights[name] * (new - c_i[name])
            c_i[name] = new
        x, c = x + eta_g * delta_y, c + delta_c
    return x, np.array(list(c_i.values()))


def test_it_is_the_papers_algorithm_with_noise_in_every_step(people):
    cohort = PlayedCohort()
    training = a_trainer(people, cohort)
    training.fit()
    noise = training.mechanism.noise(to_mu(training.spends[0]))
    theta, controls = by_the_paper(cohort, SETTINGS, noise)
    np.testing.assert_allclose(training.theta, theta, rtol=0, atol=1e-12 * T)
    np.testing.assert_allclose(training.controls, controls, rtol=0, atol=1e-12 * T)


def test_control_variates_hold_back_the_drift_of_clients_that_differ(people):
    """Two clients with a class each: without noise, more is learned of the third than by steps without corrections."""
    cohort = PlayedCohort(sizes=(30, 30, 30))
    for label, name in enumerate(cohort.clients):
        shard = blobs(400, seed=label)
        rows = np.flatnonzero(shard.y == label)[:30]
        cohort.shards[name] = type(shard)(shard.x[rows], shard.y[rows])
    quiet = cohort.noise_for
    cohort.noise_for = lambda mechanism, mu, regime: quiet(mechanism, 1e7 * mu, regime)
    settings = ScaffoldSettings(rounds=12, learning_rate=1.0, clip=100.0, local_steps=20, local_rate=0.2)

    class Uncorrected(DPScaffoldTrainer):
        @property
        def controls(self):
            return np.zeros((3, 15))

    losses = {}
    for kind in (DPScaffoldTrainer, Uncorrected):
        half = BUDGET.quanta // 2
        result = a_trainer(people, cohort, settings, run=kind.__name__, kind=kind, quanta=half).fit()
        losses[kind] = result.metrics["loss"]
    assert losses[DPScaffoldTrainer] < 0.8 * losses[Uncorrected]


def test_the_noise_of_a_step_is_that_of_t_times_k_compositions(people):
    training = a_trainer(people)
    mu = math.sqrt(BUDGET.quanta / 2**60)
    noise = training.mechanism.noise(to_mu(training.spends[-1]))
    assert noise.sigma == pytest.approx(2 * 0.7 * math.sqrt(T * STEPS) / mu, rel=1e-5)
    assert noise.sigma >= 2 * 0.7 * math.sqrt(T * STEPS) / mu
    row = training.fit().metrics
    assert row["round/sigma"] == pytest.approx(noise.sigma * math.sqrt(4 * STEPS))
    assert row["round/records"] == 160
    assert people.account(Unit.RECORD).spent == BUDGET.quanta


def test_told_noise_is_the_noise_in_the_gradient(people):
    """Records without a gradient: G is noise of the std the server step is told, χ² at a false-alarm rate of 1e-6."""
    told, gradients = [], []

    class Told(DPScaffoldTrainer):
        def server_step(self, state, gradient, t, noise):
            told.append(noise)
            gradients.append(gradient)
            return super().server_step(state, gradient, t, noise)

    class Flat(LinearHead):
        def clipped_sum(self, theta, records, clip):
            return np.zeros(self.dimension)

        def clipped_sums(self, theta, shards, clip):
            return np.zeros((len(shards), self.dimension))

    cohort = PlayedCohort(Flat(F, K))
    settings = ScaffoldSettings(rounds=40, clip=0.7, local_steps=STEPS, local_rate=0.6)
    a_trainer(people, cohort, settings, kind=Told).fit()
    energy, values = np.sum(np.square(gradients)), np.size(gradients)
    low, high = chi2.ppf([5e-7, 1 - 5e-7], values)
    assert low < energy / told[0] ** 2 < high
    assert not low < energy / (1.2 * told[0]) ** 2 < high  # negative control


def test_a_lost_round_leaves_control_variates_as_they_were(people):
    cohort = PlayedCohort()
    cohort.script = {2: ReleaseLost("not all clients could reveal their message")}
    seen = []
    training = a_trainer(people, cohort, on_round=lambda row: seen.append(training.controls))
    training.fit()
    np.testing.assert_array_equal(seen[1], seen[0])
    assert not np.array_equal(seen[2], seen[1])


def test_checkpoints_hold_the_released_control_variates(people, tmp_path):
    training = a_trainer(people, storage=tmp_path / "training")
    training.fit()
    with np.load(tmp_path / "training" / f"round-{T:06d}" / "state.npz", allow_pickle=False) as arrays:
        assert sorted(arrays.files) == ["slot.controls", "theta"]
        np.testing.assert_array_equal(arrays["slot.controls"], training.controls)


BY_CLIENTS = ScaffoldSettings(**{**SETTINGS.as_dict(), "weighting": "clients"})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"regime": "distributed"}, "3 local steps are private in regime `local` only"),
        ({"regime": "central"}, "3 local steps are private in regime `local` only"),
        ({"unit": "client"}, "protects the unit `record` only"),
        ({"settings": BY_CLIENTS}, "weighs clients by their records"),
        ({"cohort": PlayedCohort(quorum=3)}, "a quorum of 3 of 4 was given"),
    ],
)
def test_misfits_are_refused_with_a_sentence_before_anything_is_spent(people, changes, sentence):
    with pytest.raises(ValueError, match=r".") as refusal:
        a_trainer(people, **changes)
    assert sentence in str(refusal.value)
    assert people.account(Unit.RECORD).spent == 0


def test_a_rehearsal_is_refused_with_a_sentence():
    facts = {"quanta": None, "regime": "local", "clients": 4, "records": 160, "n_min": 3}
    with pytest.raises(ValueError, match="rehearse DP-FedGD, which it is with one local step"):
        Rehearsal(LinearHead(F, K), ScaffoldSettings.from_config, **facts)
