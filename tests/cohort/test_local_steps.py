"""Several noised local steps of a client: what a record can do to each, exactly once, and only where it is private."""

import math
import signal
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from dpray.platform.cohort.client import Records
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.local_steps import LocalDescent
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.ticket import JournalRefused
from dpray.platform.privacy.budget import floor_quanta
from dpray.platform.privacy.clipping import clip_rows
from dpray.platform.privacy.ledger import ReleaseKey
from dpray.platform.privacy.local_steps import LocalSteps
from dpray.platform.privacy.mechanisms import ClippedSum, Regime, Unit
from dpray.platform.privacy.noise import NoiseSource

from .conftest import CLIP, DIMENSION, RowSum, ask, gradient_mechanism, shards_of
from .test_queries import Clients

N, STEPS, RATE = 4, 3, 0.1
TERMS = Terms(DIMENSION, 0.0, N, 5 * N)
MECHANISM = LocalSteps(CLIP, STEPS, DIMENSION, N, 5 * N)
ANYTHING = st.sampled_from([0.0, 1.0, -1.0, 1e-320, 1e30, -1e300, np.nan, np.inf, -np.inf]) | st.floats(width=64)


def a_query(**changes):
    rng = np.random.default_rng(3)
    settings = {
        "theta": rng.standard_normal(DIMENSION),
        "clip": CLIP,
        "steps": STEPS,
        "rate": RATE,
        "controls": rng.standard_normal((N, DIMENSION)),
        "control": rng.standard_normal(DIMENSION),
        "clients": tuple(shards_of(N)),
    }
    return LocalDescent(**{**settings, **changes})


def request(regime=Regime.LOCAL, mu=0.5, **changes):
    quanta = None if math.isinf(mu) else floor_quanta(mu)
    return replace(ask(regime=regime), query=a_query(), mechanism=MECHANISM, quanta=quanta, **changes)


def message(host, asked):
    host.prepare(asked)
    [revealed] = host.reveal(("people", "run"), asked.key, tuple(shards_of(N)), asked.head)
    return revealed.steps


def test_without_noise_it_is_the_descent_written_out(make_host):
    steps = message(make_host(shards_of(N)), request(mu=math.inf))
    query, grid = a_query(), MECHANISM.noise(math.inf).grid
    for place, shard in enumerate(shards_of(N).values()):
        y, total = query.theta.copy(), np.zeros(DIMENSION)
        for _ in range(STEPS):
            u = RowSum().clipped_sum(y, shard, CLIP)
            total += u
            y -= RATE * (u / 5 - query.controls[place] + query.control)
        block = steps.reshape(N, DIMENSION)[place] * grid
        np.testing.assert_allclose(block, total, atol=1e-5)


@given(
    record=st.lists(ANYTHING, min_size=DIMENSION, max_size=DIMENSION),
    other=st.lists(ANYTHING, min_size=DIMENSION, max_size=DIMENSION),
    row=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    scale=st.floats(0, 1e6),
)
def test_a_record_moves_every_steps_sum_within_two_clips_and_no_other_client(record, other, row, seed, scale):
    """Wherever the noised steps before it have led the client: its parameters are the same for both records then."""
    points = scale * np.random.default_rng(seed).standard_normal((N, DIMENSION))
    sums = []
    for features in (record, other):
        shards = shards_of(N)
        x = shards["client-001"].x.copy()
        x[row] = features
        shards["client-001"] = Records(x, shards["client-001"].y)
        sums.append(a_query().sums(Clients(Bounded(), shards), points))
    moved = np.linalg.norm(sums[0] - sums[1], axis=1)
    one = MECHANISM.one_step
    assert moved[1] <= one.sensitivity + one.summation_error
    np.testing.assert_array_equal(moved[[0, 2, 3]], 0)


class Bounded(RowSum):
    """Clips as a task must: bad records contribute zero."""

    def clipped_sum(self, theta, records, clip):
        with np.errstate(over="ignore", invalid="ignore"):
            return clip_rows(records.x - theta, clip).sum(axis=0)


def test_the_price_is_that_of_k_releases():
    assert MECHANISM.sensitivity == pytest.approx(2 * CLIP * math.sqrt(STEPS))
    one = ClippedSum(CLIP, Unit.RECORD, DIMENSION, 5 * N)
    noise = MECHANISM.noise(0.5)
    # K releases of μ_k: μ = √K·μ_k
    assert noise.sigma == pytest.approx(one.noise(0.5 / math.sqrt(STEPS)).sigma, rel=1e-12)
    assert noise.sigma >= one.noise(0.5 / math.sqrt(STEPS)).sigma
    assert MECHANISM.mu(noise.sigma) <= 0.5
    assert LocalSteps(CLIP, 1, DIMENSION, N, 5 * N).sensitivity == one.sensitivity
    assert MECHANISM.dimension == N * DIMENSION


def test_shares_of_the_noise_are_refused():
    with pytest.raises(ValueError, match="whole noise at every client"):
        MECHANISM.noise(0.5, noisers=3)


def test_noise_is_fresh_for_each_step_client_and_release(make_host):
    """Of a seeded source: the same key gives the same message, and no two draws are alike."""
    drawn = []

    class Listening(NoiseSource):
        def draw(self, noise, shape, *key):
            drawn.append(super().draw(noise, shape, *key).tobytes())
            return np.frombuffer(drawn[-1], dtype=np.int64)

    host = make_host(shards_of(N), noise=Listening(5))
    for step in (0, 1):
        asked = request()
        message(host, replace(asked, key=ReleaseKey("training", "gradients", step)))
    assert len(drawn) == len(set(drawn)) == 2 * N * STEPS


def test_every_step_has_its_noise(make_host):
    """Records without a gradient: a message is K draws of std σ; χ² at a false-alarm rate of 1e-6."""

    class Flat(RowSum):
        def clipped_sum(self, theta, records, clip):
            return np.zeros(DIMENSION)

    host, noise = make_host(shards_of(N), task=Flat()), MECHANISM.noise(request().mu)
    values = []
    for step in range(200):
        asked = replace(request(), key=ReleaseKey("training", "gradients", step))
        values.append(message(host, asked) * noise.grid)
    energy, low_high = np.sum(np.square(values)), chi2.ppf([5e-7, 1 - 5e-7], np.size(values))
    assert low_high[0] < energy / (STEPS * noise.sigma**2) < low_high[1]
    assert not low_high[0] < energy / ((STEPS - 1) * noise.sigma**2) < low_high[1]  # a step without noise would show


def test_a_message_is_revealed_once_and_repeated_byte_for_byte(make_host):
    host, asked = make_host(shards_of(N)), request()
    first = message(host, asked)
    again = message(host, asked)
    np.testing.assert_array_equal(first, again)
    with pytest.raises(JournalRefused, match="another request"):
        host.prepare(replace(asked, query=a_query(rate=0.2)))


@pytest.mark.parametrize("regime", [Regime.CENTRAL, Regime.DISTRIBUTED])
def test_other_regimes_are_refused_by_the_clients_too(make_host, regime):
    host, asked = make_host(shards_of(N), n_min=1), request(regime)
    with pytest.raises(CohortError, match="private in regime `local` only"):
        host.contribute(asked) if regime is Regime.CENTRAL else host.prepare(asked)
    with pytest.raises(CohortError, match="no messages without"):
        a_query().messages(None)


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_code_that_fails_sends_noise_as_any_other(make_host, kind):
    def misbehave(label, records):
        if label == 1:
            raise ValueError("no")
        return np.full(DIMENSION, np.nan) if label == 2 else np.zeros(1)

    shards = shards_of(N)
    shards["client-002"] = Records(shards["client-002"].x, np.full(5, kind))
    steps = message(make_host(shards, task=RowSum(misbehave)), request()).reshape(N, DIMENSION)
    assert np.all(steps != 0)


@pytest.mark.parametrize(
    ("query", "mechanism", "sentence"),
    [
        (a_query(), gradient_mechanism(), "LocalSteps"),
        (a_query(steps=4), MECHANISM, "steps=4"),
        (a_query(clip=1.0), MECHANISM, "clip=1.0"),
        (a_query(), LocalSteps(CLIP, STEPS, DIMENSION, N + 1, 20), "clients=4"),
        (a_query(), LocalSteps(CLIP, STEPS, DIMENSION, N, 19), "19 summands"),
        (a_query(theta=np.full(DIMENSION, np.nan)), MECHANISM, "diverged"),
        (a_query(control=np.full(DIMENSION, np.inf)), MECHANISM, "diverged"),
        (a_query(controls=np.zeros((N, 2))), MECHANISM, "a row of 6 numbers"),
        (a_query(clients=("a",)), MECHANISM, "each of 4 clients"),
    ],
)
def test_what_does_not_fit_is_refused(query, mechanism, sentence):
    with pytest.raises(CohortError, match=sentence):
        query.check(mechanism, TERMS)


def test_clients_that_the_query_does_not_name_are_refused(make_host):
    asked = replace(request(), query=a_query(clients=tuple("abcd")))
    with pytest.raises(CohortError, match="does not name 'client-000'"):
        make_host(shards_of(N)).prepare(asked)


def test_a_steps_time_limit_is_a_part_of_the_clients(make_host):
    """K calls take no longer than one would: what the driver waits for does not grow with the data."""
    limits = []

    class Watching(RowSum):
        def clipped_sum(self, theta, records, clip):
            limits.append(signal.getitimer(signal.ITIMER_REAL)[0])
            return super().clipped_sum(theta, records, clip)

    message(make_host(shards_of(N), task=Watching(), limit=60.0), request())
    assert len(limits) == N * STEPS
    assert 15 < max(limits) <= 60 / STEPS
