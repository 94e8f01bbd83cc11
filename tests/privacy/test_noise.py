"""Grid noise: membership, size, shape, independence, aliasing. Every statistical check has a control that must fail.

False-alarm rate of each statistical test: at most 1e-6.
"""

from __future__ import annotations

import importlib
import json
import math
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from randomgen import AESCounter
from scipy import stats
from scipy.special import ndtr

from dpray.platform.privacy import noise as noise_module
from dpray.platform.privacy.exact import draw_exact
from dpray.platform.privacy.noise import GridNoise, NoiseSource, calibrate, draw, from_grid, to_grid

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared

RATE = 1e-6


def has_std(samples: np.ndarray, std: float) -> bool:
    """Two-sided χ² test of the variance around zero, level 1e-6."""
    statistic = float(np.sum(np.square(samples / std)))
    tail = stats.chi2(samples.size)
    return min(tail.cdf(statistic), tail.sf(statistic)) > RATE / 2


def is_gaussian(samples: np.ndarray, std: float) -> bool:
    """Kolmogorov-Smirnov test of the whole distribution, level 1e-6."""
    return float(stats.kstest(samples, "norm", args=(0, std)).pvalue) > RATE


def are_independent(first: np.ndarray, second: np.ndarray) -> bool:
    """Correlation of values and of squares, level 1e-6 together."""
    size = math.sqrt(first.size)
    limit = stats.norm.isf(RATE / 4)
    pairs = ((first, second), (first**2, second**2))
    return all(abs(np.corrcoef(x, y)[0, 1]) * size < limit for x, y in pairs)


def same_distribution(first: np.ndarray, second: np.ndarray) -> bool:
    """Two-sample χ² of integers over some 40 about equally filled bins, level 1e-6."""
    quantiles = np.quantile(np.concatenate([first, second]), np.linspace(0, 1, 41)[1:-1])
    edges = np.unique(np.floor(quantiles)) + 0.5
    table = [np.bincount(np.searchsorted(edges, each), minlength=edges.size + 1) for each in (first, second)]
    return float(stats.chi2_contingency(table).pvalue) > RATE


# --- calibration ------------------------------------------------------------------------------------------------------

CASES = [
    (2.0, 0.3, 5130, 1, 0.0),
    (2.0, 0.3, 5130, 80, 1e-9),
    (1e-3, 5.0, 1, 1, 0.0),
    (20.0, 1e-3, 10**7, 1, 1e-6),
    (1.0, 1e-3, 7, 10**6, 0.0),
]


@pytest.mark.parametrize(("sensitivity", "mu", "dimension", "noisers", "error"), CASES)
def test_applied_sigma_pays_for_grid_and_summation(sensitivity, mu, dimension, noisers, error):
    noise = calibrate(sensitivity, mu, dimension, noisers=noisers, summation_error=error)
    applied = sensitivity + noise.grid * math.sqrt(dimension) + error
    assert noise.sigma >= applied / mu
    assert noise.sigma == pytest.approx(applied / mu, rel=1e-13)
    assert Fraction(noise.share) ** 2 * noisers >= Fraction(noise.sigma) ** 2
    assert noise.share == pytest.approx(noise.sigma / math.sqrt(noisers), rel=1e-13)


@pytest.mark.parametrize(("sensitivity", "mu", "dimension", "noisers", "error"), CASES)
def test_grid_is_the_power_of_two_the_rule_asks_for(sensitivity, mu, dimension, noisers, error):
    noise = calibrate(sensitivity, mu, dimension, noisers=noisers, summation_error=error)
    bits = 20 if noisers == 1 else 10
    finest = min(sensitivity / mu / math.sqrt(noisers), sensitivity / math.sqrt(dimension)) / 2**bits
    assert math.log2(noise.grid).is_integer()
    assert noise.grid <= finest < 2 * noise.grid


def test_integers_lie_on_the_grid_and_cost_nothing():
    noise = calibrate(math.sqrt(10), 0.3, 100, noisers=80, integers=True)
    assert noise.sigma == pytest.approx(math.sqrt(10) / 0.3, rel=1e-14)
    assert (1 / noise.grid).is_integer()
    assert calibrate(1.0, 0.3, 100, noisers=80).sigma > 1 / 0.3 * (1 + 1e-6)
    with pytest.raises(ValueError, match="Integers lie on grids"):
        calibrate(1.0, 0.001, 10, integers=True, grid=2.0)


def test_a_ring_may_ask_for_a_coarser_grid_but_not_for_one_that_eats_the_noise():
    fine = calibrate(1.0, 0.1, 4, noisers=100)  # σ = 10, share = 1
    coarse = calibrate(1.0, 0.1, 4, noisers=100, grid=2.0**-4)
    assert coarse.sigma == pytest.approx((1 + 2 * 2.0**-4) / 0.1)
    assert coarse.sigma > fine.sigma
    with pytest.raises(ValueError, match="at least 8 are needed"):
        calibrate(1.0, 0.1, 4, noisers=100, grid=0.25)


def test_votes_times_ten_with_a_million_clients_are_refused():
    # Whole-vote grid: each share of σ = 33 over 10⁶ clients is .033 steps wide; all of it would be rounded to zero.
    with pytest.raises(ValueError, match="rounding would remove noise"):
        calibrate(math.sqrt(10), 0.1, 100, noisers=10**6, integers=True, grid=1.0)
    assert calibrate(math.sqrt(10), 0.1, 100, noisers=10**6, integers=True).share == pytest.approx(0.0316, rel=1e-2)


def test_noise_that_64_bits_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="too much for 64-bit integers"):
        calibrate(1.0, 1e-12, 10**6)
    assert calibrate(1.0, 1e-12, 10**6, grid=1.0).sigma > 1e12


def test_infinite_mu_means_no_noise():
    noise = calibrate(1.0, math.inf, 16)
    assert noise.sigma == noise.share == noise.residual_delta == 0.0
    assert not noise.private
    assert noise.grid == 2.0**-22
    assert not draw(noise, 100, NoiseSource().generator()).any()
    assert not calibrate(1.0, math.inf, 16, noisers=5).private


def test_more_answers_mean_more_noise_and_fewer_are_refused():
    noise = calibrate(1.0, 0.5, 3, noisers=16)
    assert noise.private
    assert noise.std(16) == pytest.approx(noise.sigma)
    assert noise.std(25) == pytest.approx(noise.sigma * 1.25)
    with pytest.raises(ValueError, match="but 15 answered"):
        noise.std(15)


GOOD = {"sensitivity": 1.0, "mu": 1.0, "dimension": 1, "noisers": 1, "summation_error": 0.0, "grid": 0.0625}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("bad", [math.nan, -1, -math.inf, True, "1"])
def test_bad_calibrations_are_refused(name, bad):
    with pytest.raises(ValueError, match="must"):
        calibrate(**{**GOOD, name: bad})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("sensitivity", 0.0),
        ("sensitivity", math.inf),
        ("sensitivity", 1e200),
        ("sensitivity", 1e-200),
        ("summation_error", math.inf),
        ("mu", 0.0),
        ("mu", 1e-150),
        ("dimension", 0),
        ("dimension", 1.0),
        ("noisers", 0),
        ("noisers", 2.0),
        ("grid", 0.0),
        ("grid", 0.3),
        ("grid", math.inf),
    ],
)
def test_calibrations_out_of_range_are_refused(name, bad):
    with pytest.raises(ValueError, match="must"):
        calibrate(**{**GOOD, name: bad})


# --- the grid ---------------------------------------------------------------------------------------------------------


@RELAXED
@given(x=st.floats(-1e6, 1e6), bits=st.integers(-10, 30))
def test_grid_points_are_nearest_and_exact(x, bits):
    grid = 2.0**-bits
    steps = to_grid([x], grid)
    assert steps.dtype == np.int64
    assert abs(Fraction(int(steps[0])) * Fraction(grid) - Fraction(x)) <= Fraction(grid) / 2
    assert Fraction(float(from_grid(steps, grid)[0])) == Fraction(int(steps[0])) * Fraction(grid)


@RELAXED
@given(x=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2))
def test_rounding_moves_neighbours_apart_by_one_step_at_most(x):
    grid = 2.0**-12
    moved = Fraction(int(np.subtract(*to_grid(x, grid)))) * Fraction(grid)
    assert abs(moved) <= abs(Fraction(x[0]) - Fraction(x[1])) + Fraction(grid)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, 2.0**63])
def test_values_that_do_not_fit_the_grid_are_refused(bad):
    with pytest.raises(ValueError, match="1 of 3 values are not finite or too large"):
        to_grid([0.0, bad, 1.0], 1.0)


def test_the_largest_value_does_fit():
    assert to_grid(2.0**62, 1.0) == 2**62


@pytest.mark.parametrize("bad", [0.0, 0.3, -0.5, math.nan, True])
def test_a_grid_is_a_power_of_two(bad):
    with pytest.raises(ValueError, match="grid"):
        to_grid([1.0], bad)
    with pytest.raises(ValueError, match="grid"):
        from_grid(np.array([1]), bad)


def test_what_can_be_released_does_not_depend_on_the_data():
    noise = calibrate(1.0, 1.0, 1)
    source = NoiseSource()
    for value in (0.0, 1 / 3, 1e-9):
        released = from_grid(
            to_grid(np.full(1000, value), noise.grid) + draw(noise, 1000, source.generator()), noise.grid
        )
        assert np.array_equal(np.rint(released / noise.grid) * noise.grid, released)
    # The control: a plain float sum leaves the grid, and by where it leaves tells the data.
    naive = 1 / 3 + noise.grid * draw(noise, 1000, source.generator())
    assert not np.array_equal(np.rint(naive / noise.grid) * noise.grid, naive)


# --- the noise itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noisers", [1, 9])
def test_one_share_has_the_std_and_shape_it_states(noisers):
    noise = calibrate(1.0, 0.7, 50, noisers=noisers)
    samples = from_grid(draw(noise, 200_000, NoiseSource().generator()), noise.grid)
    assert has_std(samples, noise.share)
    assert is_gaussian(samples, noise.share)
    assert not has_std(samples / 2, noise.share)
    assert not is_gaussian(samples / 2, noise.share)
    laplace = np.random.default_rng(1).laplace(scale=noise.share / math.sqrt(2), size=200_000)
    assert not is_gaussian(laplace, noise.share)


def test_shares_of_all_noisers_add_up_to_the_noise():
    noise = calibrate(1.0, 0.7, 50, noisers=9)
    source = NoiseSource()
    shares = [draw(noise, 100_000, source.generator(i)) for i in range(9)]
    total = from_grid(np.sum(shares, axis=0), noise.grid)
    assert has_std(total, noise.sigma)
    assert is_gaussian(total, noise.sigma)
    assert not has_std(from_grid(np.sum(shares[:4], axis=0), noise.grid), noise.sigma)
    assert not has_std(from_grid(9 * shares[0], noise.grid), noise.sigma)  # one generator for all clients


@pytest.mark.parametrize("seed", [None, 7], ids=["operating system", "seeded"])
def test_noise_of_clients_rounds_and_coordinates_is_independent(seed):
    noise = calibrate(1.0, 1.0, 10)
    source = NoiseSource(seed)
    first, second, third = (
        draw(noise, 100_000, source.generator("run", step, client)).astype(float)
        for step, client in ((0, "a"), (0, "b"), (1, "a"))
    )
    assert are_independent(first, second)
    assert are_independent(first, third)
    assert are_independent(first[:-1], first[1:])
    assert not are_independent(first, first)
    assert not are_independent(first, second * np.abs(first))


def test_noise_is_drawn_in_the_shape_asked_for_as_integers():
    noise = calibrate(1.0, 1.0, 6)
    drawn = draw(noise, (2, 3), NoiseSource().generator())
    assert drawn.shape == (2, 3)
    assert drawn.dtype == np.int64


def sum_of_rounded(noisers: int, ratio: float, reach: int) -> np.ndarray:
    """Law of Σ round(z_i), z_i ~ N(0, ratio²), on −reach … reach, by convolution."""
    k = np.arange(-reach, reach + 1)
    single = ndtr((k + 0.5) / ratio) - ndtr((k - 0.5) / ratio)
    total = single
    for _ in range(noisers - 1):
        total = np.convolve(total, single)
    middle = total.size // 2
    return total[middle - reach : middle + reach + 1]


def post_processed_ideal(noisers: int, ratio: float, reach: int) -> np.ndarray:
    """Law of Z − Σ f_i, Z ~ N(0, n·ratio²), f_i uniform but for Σ f_i ≡ Z mod 1: never sees the single z_i.

    Given Z, Z − Σ f_i is k with probability density Irwin-Hall_n(Z − k); the integral over Z is taken on the
    characteristic function.
    """
    t = np.linspace(-60, 60, 240_001)
    characteristic = np.exp(-noisers * (ratio * t) ** 2 / 2) * np.sinc(t / (2 * np.pi)) ** noisers
    k = np.arange(-reach, reach + 1)
    return np.array([np.trapezoid(characteristic * np.cos(t * each), t) / (2 * np.pi) for each in k])


@pytest.mark.parametrize(("noisers", "ratio"), [(2, 0.35), (2, 0.7), (3, 0.5), (4, 0.35), (4, 0.5), (4, 1.5), (8, 0.5)])
def test_aliasing_stays_below_the_stated_bound(noisers, ratio):
    reach = int(12 * ratio * math.sqrt(noisers) + 8)
    apart = np.abs(sum_of_rounded(noisers, ratio, reach) - post_processed_ideal(noisers, ratio, reach)).sum() / 2
    assert apart <= noise_module._aliasing(ratio, 1, noisers)
    if ratio < 0.5:
        assert apart > 0.1  # the effect is real where shares are narrow


def test_residual_is_stated_and_negligible_where_shares_are_allowed():
    noise = calibrate(0.78, 0.1, 4, noisers=100, grid=2.0**-3)
    assert 8 <= noise.share / noise.grid < 8.5
    assert noise.residual_delta == pytest.approx(400 * math.exp(-((math.pi * noise.share / noise.grid) ** 2)))
    assert 0 < noise.residual_delta < 1e-250
    assert calibrate(1.0, 0.1, 4).residual_delta == 0.0
    assert noise_module._aliasing(0.01, 100, 100) == 1.0


def test_two_noisers_match_opendp_s_exact_discrete_gaussian():
    opendp = pytest.importorskip("opendp.prelude")
    opendp.enable_features("contrib")
    share = GridNoise(sigma=8 * math.sqrt(2), share=8.0, grid=1.0, noisers=2, residual_delta=0.0)
    source = NoiseSource()
    ours = draw(share, 20_000, source.generator()) + draw(share, 20_000, source.generator())
    domain = opendp.vector_domain(opendp.atom_domain(T="i64"))
    exact = opendp.m.make_gaussian(domain, opendp.l2_distance(T=float), scale=share.sigma)
    oracle = np.array(exact([0] * 20_000))
    assert same_distribution(ours, oracle)
    assert not same_distribution(draw(share, 20_000, source.generator()), oracle)
    assert not same_distribution(ours // 2, oracle)


# --- randomness -------------------------------------------------------------------------------------------------------


def test_the_generator_is_aes_128_in_counter_mode():
    # NIST SP 800-38A, F.1.1: AES-128, first block.
    key, block = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c"), bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")
    stream = AESCounter(key=int.from_bytes(key, "little"), counter=int.from_bytes(block, "little"))
    assert stream.random_raw(2).astype("<u8").tobytes().hex() == "3ad77bb40d7a3660a89ecaf32466ef97"
    assert isinstance(NoiseSource().generator().bit_generator, AESCounter)
    assert isinstance(NoiseSource(1).generator("a").bit_generator, AESCounter)


def test_unseeded_generators_are_keyed_by_the_operating_system(monkeypatch):
    assert not NoiseSource().reproducible
    asked = []
    monkeypatch.setattr(noise_module.os, "urandom", lambda n: asked.append(n) or b"\x01" * n)
    first = NoiseSource().generator("same", 1).random(4)
    assert asked == [16]
    assert np.array_equal(NoiseSource().generator("other", 2).random(4), first)  # nothing but the system's bytes counts
    monkeypatch.undo()
    assert not np.array_equal(NoiseSource().generator("same", 1).random(4), first)


def test_unseeded_noise_never_repeats_and_never_touches_the_global_generator():
    source = NoiseSource()
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    assert not np.array_equal(source.generator("k").random(8), source.generator("k").random(8))
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_seeded_noise_depends_on_seed_and_key_and_not_on_what_was_drawn_before():
    source = NoiseSource(5)
    assert source.reproducible
    uninterrupted = [source.generator("run", step).random(3) for step in range(4)]
    resumed = NoiseSource(5).generator("run", 3).random(3)
    assert np.array_equal(uninterrupted[3], resumed)
    assert np.array_equal(pickle.loads(pickle.dumps(source)).generator("run", 3).random(3), resumed)
    assert not np.array_equal(NoiseSource(6).generator("run", 3).random(3), resumed)


def test_seeded_noise_is_the_same_in_every_release_of_this_library():
    # BLAKE2b and AES are standards: this number was derived from them by hand (see the test above for AES).
    import hashlib

    message = b"i" + (1).to_bytes(8, "little") + b"\x05" + b"s" + (3).to_bytes(8, "little") + b"run"
    secret = hashlib.blake2b(message, digest_size=16, person=b"dpray noise").digest()
    expected = AESCounter(key=int.from_bytes(secret, "little")).random_raw(2)
    assert np.array_equal(NoiseSource(5).generator("run").bit_generator.random_raw(2), expected)


def test_keys_that_look_alike_are_different_keys():
    keys = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("1",),
        (1,),
        (1, 0),
        (256,),
        (-1,),
        ("", "abc"),
        ("run", 1),
        ("run", "1"),
    ]
    streams = {NoiseSource(1).generator(*key).bit_generator.random_raw(2).tobytes() for key in keys}
    assert len(streams) == len(keys)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "7", math.nan])
def test_bad_seeds_are_refused(bad):
    with pytest.raises(ValueError, match="seed must"):
        NoiseSource(bad)


@pytest.mark.parametrize("source", [NoiseSource(), NoiseSource(1)], ids=repr)
@pytest.mark.parametrize("bad", [1.5, None, True, b"x"])
def test_bad_keys_are_refused(source, bad):
    with pytest.raises(ValueError, match="noise key"):
        source.generator("run", bad)


def test_a_seeded_source_without_a_key_is_refused():
    with pytest.raises(ValueError, match="needs a key"):
        NoiseSource(1).generator()


def test_the_seed_does_not_show():
    assert "12345" not in repr(NoiseSource(12345))
    assert "NOT PRIVATE" in repr(NoiseSource(12345))
    assert "NOT PRIVATE" not in repr(NoiseSource())


# --- exact noise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [None, 2.0**-4], ids=["fine grid", "coarse grid"])
def test_exact_noise_has_the_std_and_shape_it_states(grid):
    pytest.importorskip("opendp")
    noise = calibrate(1.0, 0.7, 2, grid=grid)
    drawn = NoiseSource(exact=True).draw(noise, (10_000, 2), "any", 1)
    assert drawn.shape == (10_000, 2)
    assert drawn.dtype == np.int64
    samples = from_grid(drawn, noise.grid).ravel()
    assert has_std(samples, noise.sigma)
    assert not has_std(samples / 2, noise.sigma)
    assert abs(samples.mean()) < stats.norm.isf(RATE / 2) * noise.sigma / math.sqrt(
        samples.size
    )  # no drift in rounding


def test_exact_noise_at_the_edges():
    pytest.importorskip("opendp")
    assert not draw_exact(calibrate(1.0, math.inf, 4), 4).any()
    widest = calibrate(1.0, 1.0, 1, grid=2.0**-51)
    assert draw_exact(widest, 3).shape == (3,)
    with pytest.raises(ValueError, match="2\\*\\*52 grid steps wide"):
        draw_exact(calibrate(1.0, 1.0, 1, grid=2.0**-54), 3)
    with pytest.raises(ValueError, match="cannot be seeded"):
        NoiseSource(3, exact=True)
    assert repr(NoiseSource(exact=True)) == "NoiseSource(exact=True)"


def test_exact_noise_without_opendp_says_what_to_install(monkeypatch):
    real_import = importlib.import_module

    def without_opendp(name: str, package: str | None = None):
        if name.startswith("opendp"):
            raise ImportError(name)
        return real_import(name, package)

    monkeypatch.setattr(importlib, "import_module", without_opendp)
    with pytest.raises(ImportError, match="pip install opendp"):
        NoiseSource(exact=True)


def test_draw_of_a_source_is_the_draw_of_its_generator():
    noise = calibrate(1.0, 1.0, 5)
    source = NoiseSource(3)
    assert np.array_equal(source.draw(noise, 5, "run", 1), draw(noise, 5, source.generator("run", 1)))


def test_votes_golden_sigma_is_what_votes_get():
    rows = json.loads((Path(__file__).parents[1] / "golden" / "hype_sigma.json").read_text())["rows"]
    for row in rows:
        noise = calibrate(row["sensitivity"], row["sensitivity"] / row["sigma"], row["p"], noisers=20, integers=True)
        assert noise.sigma == pytest.approx(row["sigma"], rel=1e-9)
