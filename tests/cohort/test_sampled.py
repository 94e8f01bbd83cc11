"""Sums over samples that only the clients know: what a message holds, and how far one unit can move it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dpray.platform.cohort import Cohort
from dpray.platform.cohort.client import Records
from dpray.platform.cohort.covariance import CovarianceSum
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.local_steps import LocalDescent
from dpray.platform.cohort.queries import ClientUpdate, GradientSum, Terms, Votes
from dpray.platform.cohort.sampled import Sampled
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.ledger import LedgerError, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Regime, Unit
from dpray.platform.privacy.noise import NoiseSource, to_grid
from dpray.platform.privacy.sampling import PoissonSampling
from dpray.trainers.models import LinearHead

from .conftest import CLIP, DIMENSION, RowSum, ask, gradient_mechanism, records, shards_of
from .test_queries import Clients

THETA = np.zeros(DIMENSION)
SUM = GradientSum(THETA, CLIP)
RECORDS, CLIENTS = PoissonSampling(0.4), PoissonSampling(0.4, "client")


class Tossing(Clients):
    """Clients whose coins follow from a number and their names, as with a seeded source."""

    def __init__(self, task, shards, toss=0):
        super().__init__(task, shards)
        self.toss = toss

    def coins(self, client):
        return NoiseSource(self.toss).generator(client)


class Updating(RowSum):
    def update(self, theta, records, settings):
        return records.x.sum(axis=0)


class Lenient(ClientUpdate):
    """A query of somebody's own that takes any charge, and draws no sample."""

    def check(self, mechanism, terms):
        pass


def sample_of(shards, toss, sampling=RECORDS):
    return {name: sampling.draw(len(shard), NoiseSource(toss).generator(name)) for name, shard in shards.items()}


@pytest.mark.parametrize("toss", range(5))
def test_a_message_is_the_sum_over_the_clients_own_sample(toss):
    shards = shards_of(4, rows=9)
    rows = Sampled(SUM, RECORDS).messages(Tossing(RowSum(), shards, toss))
    for row, (name, taken) in zip(rows, sample_of(shards, toss).items(), strict=True):
        shard = shards[name]
        np.testing.assert_array_equal(row, RowSum().clipped_sum(THETA, Records(shard.x[taken], shard.y[taken]), CLIP))


def test_clients_are_weighted_by_their_public_counts_and_not_by_their_sample():
    shards = {"a": records(1, 5), "b": records(2, 20)}
    plain = Sampled(SUM, RECORDS).messages(Tossing(RowSum(), shards))
    weighted = Sampled(replace(SUM, floor=5), RECORDS).messages(Tossing(RowSum(), shards))
    np.testing.assert_allclose(weighted, plain * np.array([[1.0], [0.25]]))


POISONS = [np.nan, np.inf, -np.inf, 1e30, 1e300, -1.0]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("toss", range(4))
def test_a_replaced_record_moves_its_clients_sum_by_2c_if_it_is_sampled_and_not_at_all_otherwise(poison, toss):
    head, shards = LinearHead(DIMENSION, 2), shards_of(3, rows=6)
    query = GradientSum(np.ones(head.dimension), CLIP)
    before = Sampled(query, RECORDS).messages(Tossing(head, shards, toss))
    changed = dict(shards)
    name = list(shards)[1]
    x, y = shards[name].x.copy(), shards[name].y.copy()
    x[2], y[2] = poison, 77
    changed[name] = Records(x, y)
    after = Sampled(query, RECORDS).messages(Tossing(head, changed, toss))
    moved = np.linalg.norm(after - before, axis=1)
    assert moved[0] == moved[2] == 0
    assert moved[1] <= 2 * CLIP * (1 + 1e-12)
    if not sample_of(shards, toss)[name][2]:
        assert moved[1] == 0


def test_adding_a_contribution_moves_a_sum_by_c_at_most():
    """What the coin decides: the record's contribution, or nothing."""
    whole = records(3, 1)
    found = {
        float(np.linalg.norm(Sampled(SUM, RECORDS).messages(Tossing(RowSum(), {"a": whole}, toss))))
        for toss in range(40)
    }
    assert 0.0 in found
    assert max(found) <= CLIP * (1 + 1e-12)
    assert len(found) == 2


def test_a_client_that_is_not_sampled_sends_a_zero_after_the_same_work():
    done = []

    class Counting(Updating):
        def update(self, theta, records, settings):
            done.append(len(records))
            return super().update(theta, records, settings)

    shards = shards_of(6)
    query = ClientUpdate(THETA, CLIP)
    rows = Sampled(query, CLIENTS).messages(Tossing(Counting(), shards))
    taken = [bool(CLIENTS.draw(1, NoiseSource(0).generator(name))[0]) for name in shards]
    assert 0 < sum(taken) < 6
    assert done == [5] * 6
    plain = query.messages(Tossing(Updating(), shards))
    np.testing.assert_array_equal(rows, plain * np.array(taken)[:, None])


def test_code_that_fails_on_a_sample_sends_an_ordinary_zero():
    class Raising(RowSum):
        def clipped_sum(self, theta, records, clip):
            raise ValueError(str(records.x))

        clipped_sums = RowSum.clipped_sums

    class Slow(Raising):
        def clipped_sums(self, theta, shards, clip):
            return None

    rows = Sampled(SUM, RECORDS).messages(Tossing(Slow(), shards_of(3)))
    np.testing.assert_array_equal(rows, np.zeros((3, DIMENSION)))


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        (gradient_mechanism(), "released by its own mechanism, sampled at that rate"),
        (PoissonSampling(0.5).mechanism(gradient_mechanism()), "released by its own mechanism, sampled at that rate"),
        (RECORDS.mechanism(gradient_mechanism(clip=2 * CLIP)), "A GradientSum with clip"),
        (RECORDS.mechanism(gradient_mechanism(records=3)), "bounds its rounding for 3 summands"),
        (CLIENTS.mechanism(ClippedSum(CLIP, Unit.CLIENT, DIMENSION, 4)), "records are sampled"),
    ],
)
def test_sampler_and_charge_that_do_not_belong_together_are_refused(mechanism, words):
    with pytest.raises(CohortError, match=words):
        Sampled(SUM, RECORDS).check(mechanism, Terms(DIMENSION, 0.0, 4, 20))


CONTROLS = np.zeros((4, DIMENSION))
UNSAMPLED = [
    SUM,
    ClientUpdate(THETA, CLIP),
    Votes("run", 1, 3),
    CovarianceSum(CLIP, 2),
    LocalDescent(THETA, CLIP, 2, 1.0, CONTROLS, CONTROLS[0], ("a", "b", "c", "d")),
]


@pytest.mark.parametrize("query", UNSAMPLED, ids=lambda query: type(query).__name__)
@pytest.mark.parametrize("sampling", [RECORDS, CLIENTS])
def test_a_sampled_charge_does_not_pay_for_a_sum_over_everybody(query, sampling):
    mechanism = sampling.mechanism(ClippedSum(CLIP, sampling.unit, DIMENSION, 20))
    with pytest.raises(CohortError, match="released by"):
        query.check(mechanism, Terms(DIMENSION, 0.0, 4, 20))


def sampled_ask(step=0, **changes):
    mechanism = RECORDS.mechanism(gradient_mechanism())
    return ask(step, query=Sampled(SUM, RECORDS), mechanism=mechanism, **changes)


def contributed(host, **changes):
    return host.contribute(sampled_ask(regime=Regime.CENTRAL, **changes)).steps


def test_a_host_draws_afresh_for_every_release_and_for_every_computation(make_host):
    host = make_host(shards_of(4))
    found = {contributed(host, step=step).tobytes() for step in range(8)}
    assert len(found) > 1
    again = {contributed(host, step=20).tobytes() for _ in range(8)}
    assert len(again) > 1  # nothing of it was seen: the trusted server adds noise to one of them


def test_seeded_samples_follow_from_the_release_and_are_not_the_noise(make_host):
    hosts = [make_host(shards_of(4), site=f"site{i}", noise=NoiseSource(5)) for i in range(2)]
    np.testing.assert_array_equal(*[contributed(host, step=3) for host in hosts])
    release = ("people", "run", "training", "clipped sum", 3)
    coins = hosts[0].coins("client-000", release).random(4)
    assert not np.array_equal(coins, NoiseSource(5).generator(*release, "client-000").random(4))


def test_a_revealed_message_is_repeated_with_its_sample(make_host):
    host = make_host(shards_of(4))
    request = sampled_ask()
    host.prepare(request)
    everyone = tuple(shards_of(4))
    first = host.reveal(("people", "run"), request.key, everyone, request.head)
    host.prepare(replace(request, participants=everyone))
    second = host.reveal(("people", "run"), request.key, everyone, request.head)
    np.testing.assert_array_equal(first[0].steps, second[0].steps)


def test_the_noise_covers_a_contribution_and_its_opposite(make_host):
    """σ ≥ 2C/μ for the quanta that are charged, at every host."""
    host = make_host(shards_of(4))
    noise = host.prepare(sampled_ask()).noise
    assert noise.sigma >= 2 * CLIP / 0.5
    assert (
        noise.sigma
        == RECORDS.mechanism(gradient_mechanism()).noise(math.sqrt(floor_quanta(0.5) / 2**60), noisers=4).sigma
    )


@pytest.mark.parametrize("secure_sum", ["trusted", "masked"])
def test_on_ray_every_client_answers_and_only_the_sampled_ones_count(by_value, ledger, tmp_path, secure_sum):
    """Seeded, so that sample and noise can be worked out here; the ledger commits to all, not to the sample."""
    people = ledger.population("people", records_per_client=50)
    people.account(Unit.CLIENT, Budget(30.0, 1e-5), kind="pld")
    shards, source = shards_of(6), NoiseSource(11)
    query = Sampled(ClientUpdate(THETA, CLIP), CLIENTS)
    mechanism = CLIENTS.mechanism(ClippedSum(CLIP, Unit.CLIENT, DIMENSION, 6))
    settings = {"state_dir": tmp_path / "state", "actors": 1, "noise": source, "secure_sum": secure_sum}
    with Cohort(Updating(), shards, timeout=60.0, **settings) as cohort:
        trust, key = cohort.trust(Regime.DISTRIBUTED), ReleaseKey("training", "updates", 3)
        attempt = people.run("run").charge(key, query.describe(), mechanism, floor_quanta(0.5), trust)
        found = cohort.sum(attempt, query, mechanism, Regime.DISTRIBUTED)
        noise = cohort.noise_for(mechanism, attempt.mu, Regime.DISTRIBUTED)
        query = Lenient(THETA, CLIP)
        key = ReleaseKey("training", "updates", 4)
        other = people.run("other").charge(key, query.describe(), mechanism, floor_quanta(0.5), trust)
        with pytest.raises(LedgerError, match="participants are its sample"):
            cohort.sum(other, query, mechanism, Regime.DISTRIBUTED)
        assert other.participants is None
    assert attempt.participants == frozenset(shards)
    release, total = ("people", "run", "training", "updates", 3), np.zeros(DIMENSION, dtype=np.int64)
    taken = {name: CLIENTS.draw(1, source.generator("sample", *release, name))[0] for name in shards}
    assert 0 < sum(taken.values()) < 6
    rows = ClientUpdate(THETA, CLIP).messages(Clients(Updating(), shards))
    for name, row in zip(shards, rows, strict=True):
        total += to_grid(row * taken[name], found.grid) + source.draw(noise, DIMENSION, *release, name)
    np.testing.assert_array_equal(found.total, total)
