"""Covariances of clients' features: what one record can do to them, and whom they are refused."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from dpray.platform.cohort.client import Records, Stack
from dpray.platform.cohort.covariance import CovarianceSum
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.queries import Terms
from dpray.platform.privacy.mechanisms import ClippedSum, FeatureCovariance, Regime, Unit, unpack_symmetric
from dpray.platform.privacy.noise import NoiseSource, from_grid

from .conftest import DIMENSION, ask
from .conftest import shards_of as client_shards

F, C = 3, 2.0
TERMS = Terms(8, 0.0, 3, 15)
QUERY, MECHANISM = CovarianceSum(C, F + 1), FeatureCovariance(C, F + 1, 15)
ANYTHING = st.sampled_from([0.0, 1.0, -1.0, 1e-320, 1e30, -1e300, np.nan, np.inf, -np.inf]) | st.floats(width=64)


@dataclass
class Clients:
    """As much of some clients as a covariance needs."""

    shards: Stack


def shards_of(seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [Records((3 * rng.standard_normal((5, F))).astype(dtype), rng.integers(0, 2, 5)) for _ in range(3)]


def summed(shards):
    return QUERY.messages(Clients(Stack.of(shards))).sum(axis=0)


@given(
    record=st.lists(ANYTHING, min_size=F, max_size=F),
    other=st.lists(ANYTHING, min_size=F, max_size=F),
    label=ANYTHING,
    client=st.integers(0, 2),
    row=st.integers(0, 4),
)
def test_a_record_replaced_by_anything_moves_the_sum_within_its_sensitivity(record, other, label, client, row):
    totals = []
    for features in (record, other):
        shards = shards_of()
        x, y = shards[client].x.copy(), shards[client].y.astype(float)
        x[row], y[row] = features, label
        shards[client] = Records(x, y)
        rows = QUERY.messages(Clients(Stack.of(shards)))
        assert np.isfinite(rows).all()
        totals.append(rows.sum(axis=0))
    assert np.linalg.norm(totals[0] - totals[1]) <= MECHANISM.sensitivity + MECHANISM.summation_error


def test_the_sensitivity_is_reached_by_records_at_right_angles():
    """√2·C²: [100, 0, 0, 1] and [0, 100, 0, 1] are almost at right angles, and longer than C."""
    totals = []
    for features in ([1e6, 0, 0], [0, 1e6, 0]):
        shards = shards_of()
        shards[0].x[0] = features
        totals.append(summed(shards))
    moved = np.linalg.norm(totals[0] - totals[1])
    assert moved == pytest.approx(math.sqrt(2) * C**2, rel=1e-9)


def test_without_the_packing_the_sensitivity_would_be_passed():
    """Negative control: the plain upper triangle times √2 everywhere is longer than the matrix."""
    upper = np.triu_indices(F + 1)
    totals = []
    for features in ([1e6, 0, 0], [0, 1e6, 0]):
        shards = shards_of()
        shards[0].x[0] = features
        totals.append(math.sqrt(2) * unpack_symmetric(summed(shards), F + 1)[upper])
    assert np.linalg.norm(totals[0] - totals[1]) > MECHANISM.sensitivity + MECHANISM.summation_error


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.int8, bool])
def test_it_is_the_sum_of_outer_products_of_clipped_features_with_a_one(dtype):
    shards = shards_of(dtype=dtype)
    expected = np.zeros((F + 1, F + 1))
    for shard in shards:
        for features in shard.x.astype(float):
            row = np.append(features, 1.0)
            row *= min(1, C / np.linalg.norm(row))
            expected += np.outer(row, row)
    np.testing.assert_allclose(unpack_symmetric(summed(shards), F + 1), expected, rtol=1e-12, atol=1e-12)


def test_a_bad_record_contributes_nothing_not_even_its_one():
    shards = shards_of()
    expected = summed([*shards[:2], Records(shards[2].x[1:], shards[2].y[1:])])
    shards[2].x[0, 1] = np.nan
    np.testing.assert_allclose(summed(shards), expected, rtol=1e-12)


def test_no_entry_of_the_sum_passes_what_sizes_a_mask():
    shards = [Records(np.tile([1e9, 0, 0], (5, 1)), np.zeros(5)) for _ in range(3)]
    assert np.abs(summed(shards)).max() <= QUERY.largest(TERMS) * (1 + 1e-12)
    assert np.abs(summed(shards)).max() >= 0.99 * QUERY.largest(TERMS)


def noise_lies_within(matrices, s, false_alarm=1e-6):
    """Whether the diagonal has variance s², and the rest s²/2: χ², rate 1e-6 each."""
    on, off = np.diagonal(matrices, axis1=1, axis2=2), matrices[:, *np.triu_indices(F + 1, 1)]
    for values, variance in ((on, s**2), (off, s**2 / 2)):
        low, high = chi2.ppf([false_alarm / 2, 1 - false_alarm / 2], values.size)
        if not low < np.sum(values**2) / variance < high:
            return False
    return True


def test_shares_of_a_vectors_noise_are_a_symmetric_matrix_of_noise():
    """As a cohort adds it under `distributed`: three shares on the packed vector, unpacked after the sum."""
    noise = MECHANISM.noise(0.5, noisers=3)
    source = NoiseSource(1)
    steps = sum(source.draw(noise, (4000, MECHANISM.dimension), "share", party) for party in range(3))
    matrices = np.array([unpack_symmetric(row, F + 1) for row in from_grid(steps, noise.grid)])
    np.testing.assert_array_equal(matrices, matrices.swapaxes(1, 2))
    assert noise_lies_within(matrices, noise.sigma)
    assert not noise_lies_within(matrices, 1.1 * noise.sigma)
    assert not noise_lies_within(matrices * np.sqrt([[1, 2, 2, 2], [2, 1, 2, 2], [2, 2, 1, 2], [2, 2, 2, 1]]), 1.0)


@pytest.mark.parametrize(
    ("mechanism", "sentence"),
    [
        (FeatureCovariance(3.0, F + 1, 15), "clip=2.0"),
        (FeatureCovariance(C, F, 15), "features=4"),
        (FeatureCovariance(C, F + 1, 14), "14 records"),
        (ClippedSum(C, Unit.RECORD, 10, 15), "FeatureCovariance"),
    ],
)
def test_a_mechanism_that_states_another_sensitivity_is_refused(mechanism, sentence):
    with pytest.raises(CohortError, match=sentence):
        QUERY.check(mechanism, TERMS)


def test_the_matching_mechanism_is_accepted():
    QUERY.check(MECHANISM, TERMS)
    assert (MECHANISM.unit, MECHANISM.dimension) == (Unit.RECORD, 10)


@pytest.mark.parametrize("shape", [(5, F + 1), (5, F, 2)])
def test_records_of_another_schema_are_refused_with_a_sentence(shape):
    with pytest.raises(CohortError, match="3 in a row are needed"):
        QUERY.messages(Clients(Stack.of([Records(np.zeros(shape), np.zeros(5))])))


@pytest.mark.parametrize("regime", list(Regime))
def test_a_host_answers_it_in_every_regime(regime, make_host):
    everyone = client_shards(4)
    host = make_host(everyone)
    query, mechanism = CovarianceSum(C, DIMENSION + 1), FeatureCovariance(C, DIMENSION + 1, 20)
    request = replace(ask(regime=regime), query=query, mechanism=mechanism, quanta=None)
    if regime is Regime.CENTRAL:
        steps = host.contribute(request).steps
    else:
        host.prepare(request)
        steps = host.reveal(("people", "run"), request.key, tuple(everyone), request.head)[0].steps
    expected = query.messages(Clients(Stack.of(everyone.values()))).sum(axis=0)
    noise = mechanism.noise(math.inf, noisers=4 if regime is Regime.DISTRIBUTED else 1)
    np.testing.assert_allclose(steps * noise.grid, expected, atol=2 * noise.grid)  # four roundings
