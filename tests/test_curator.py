"""The curator: per-user gradients, releases over them, and nothing else.

False-alarm rate of each statistical test: at most 1e-6.
"""

from __future__ import annotations

import json
import math
import pickle
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from dpray.platform import curator as curator_module
from dpray.platform.curator import Curator, RowsMissing, user_gradients
from dpray.platform.curator_actor import CuratorActor, Refusal, open_curator
from dpray.platform.curator_asks import CuratorError, GradientAsk, ScoreAsk, WinnerAsk, score_mechanism
from dpray.platform.privacy.budget import Budget, ceil_quanta
from dpray.platform.privacy.clipping import clip_rows
from dpray.platform.privacy.ledger import Ledger, LedgerError, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedMean, NoisyMax

FREE = types.SimpleNamespace(quanta=None, hand_out=lambda: None)  # an attempt of an account that is not private
RELAXED = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
RATE = 1e-6
M, N, D, CLIP = 5, 7, 3, 0.5
ROWS = tuple(f"location-{index}" for index in range(M))
MECHANISM = ClippedMean(CLIP, N, D)
WEIGHTS = np.random.default_rng(1).standard_normal((D, M))
LOSSES = np.random.default_rng(2).standard_normal((M, N))


def filled(losses, users=None, names=ROWS):
    curator = Curator(users or losses.shape[1])
    curator.expect(names[: len(losses)])
    for row, each in zip(names, losses, strict=False):
        assert curator.submit(row, each)
    return curator


def ask(step=0, **changes):
    given_ = {"rows": ROWS, "weights": WEIGHTS, "mechanism": MECHANISM, "mu": math.inf, "key": ("run", step)}
    return GradientAsk(**{**given_, **changes})


def bits(array):
    return np.ascontiguousarray(array).view(np.int64)


# --- rows, and what is kept of them -----------------------------------------------------------------------------------


def test_expected_rows_are_kept_and_all_others_dropped():
    curator = Curator(3)
    assert curator.expect(["a", "b"]) == ["a", "b"]
    assert curator.submit("a", [1.0, 2.0, 3.0])
    assert not curator.submit("zombie", [1.0, 2.0, 3.0])
    assert curator.expect(["b", "a"]) == ["b"]
    assert curator.expect(["b", "c"]) == ["b", "c"]
    assert curator.expect(["a"]) == ["a"], "dropped meanwhile"
    assert curator.expect([]) == []
    assert not curator.submit("a", [1.0, 2.0, 3.0])


def test_the_first_losses_of_a_row_stay_and_are_a_copy():
    losses = LOSSES.copy()
    curator = filled(losses)
    losses[:] = 0
    assert curator.submit(ROWS[0], np.zeros(N))
    assert np.array_equal(curator.gradient(ask()), filled(LOSSES).gradient(ask()))


@pytest.mark.parametrize(
    "bad", [np.zeros(N + 1), np.zeros((N, 1)), 0.5, [None] * N, np.zeros(N, complex), ["0.123"] * N]
)
def test_losses_of_another_shape_are_refused_without_their_values(bad):
    with pytest.raises(ValueError, match=r"shape \(7,\)") as refused:
        Curator(N).submit(ROWS[0], bad)
    assert "0.123" not in str(refused.value)


def test_what_is_missing_is_named_and_nothing_is_drawn():
    curator = filled(LOSSES[:3])
    for asked, of in (
        (curator.gradient, ask(mu=1.0)),
        (curator.winner, WinnerAsk(ROWS, NoisyMax(1, N, M), 1.0, ("k",))),
    ):
        with pytest.raises(RowsMissing, match="2 locations") as missing:
            asked(of)
        assert missing.value.rows == ROWS[3:]
        assert pickle.loads(pickle.dumps(missing.value)).rows == ROWS[3:]
    assert curator._drawn == {}


def test_the_first_refusal_of_a_task_is_kept_for_the_owner():
    with open_curator(N, actor=False) as owner:
        assert owner.refusal() is None
        for sentence in ("Task.losses returned one number", "another"):
            owner.handle().refuse("0.0", sentence)
        assert owner.refusal() == "Task.losses returned one number"


def test_a_curator_is_not_pickled():
    with pytest.raises(TypeError, match="stay in its process"):
        pickle.dumps(filled(LOSSES))


def test_an_answer_of_the_actor_holds_no_value_whatever_goes_wrong(monkeypatch):
    monkeypatch.setattr("dpray.platform.curator_actor.silence", lambda: None)
    actor = CuratorActor(N)
    assert actor.ask("expect", ROWS) == list(ROWS)
    assert actor.ask("gradient", ask()) == Refusal(str(RowsMissing(ROWS)), ROWS)
    assert isinstance(actor.ask("submit", ROWS[0], np.full(N + 1, 0.731629)), Refusal)

    def failing(self, row, losses):
        raise MemoryError(f"{losses}")

    monkeypatch.setattr(Curator, "submit", failing)
    refusal = actor.ask("submit", ROWS[0], np.full(N, 0.731629))
    assert "MemoryError" in refusal.sentence
    assert "0.73" not in repr(refusal)


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centre", [True, False])
def test_the_mean_is_that_of_clipped_per_user_gradients(centre):
    expected = np.zeros(D)
    for losses in LOSSES.T:
        g = WEIGHTS @ (losses - losses.mean() * centre)
        expected += g * min(1, CLIP / np.linalg.norm(g)) / N
    assert filled(LOSSES).gradient(ask(centre=centre)) == pytest.approx(expected, abs=1e-7)


def test_without_a_mechanism_nothing_is_clipped_and_bad_users_count_as_zero():
    losses = LOSSES.copy()
    losses[2, 3] = np.nan
    expected = (np.delete(LOSSES - LOSSES.mean(axis=0), 3, axis=1).T @ WEIGHTS.T).sum(axis=0) / N
    assert filled(losses).gradient(ask(mechanism=None)) == pytest.approx(expected, rel=1e-12)


def test_losses_that_are_the_same_everywhere_say_nothing():
    losses = np.tile(np.random.default_rng(0).integers(0, 9, N), (M, 1)).astype(float)
    assert not filled(losses).gradient(ask(mechanism=None)).any()


def test_the_order_of_rows_is_that_of_the_weights_columns():
    order = np.random.default_rng(3).permutation(M)
    rows = tuple(ROWS[index] for index in order)
    given_ = filled(LOSSES[order], names=rows).gradient(ask(rows=rows, weights=WEIGHTS[:, order]))
    assert given_ == pytest.approx(filled(LOSSES).gradient(ask()), abs=1e-7)
    assert given_ != pytest.approx(filled(LOSSES).gradient(ask(weights=WEIGHTS[:, order])), abs=1e-3)


EXTREMES = st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 1.7e308, 5e-324, -5e-324, 1e-160, 0.0, -0.0])
ANYTHING = st.one_of(EXTREMES, st.floats(width=64), st.floats(-10, 10))
COLUMN = st.one_of(st.lists(ANYTHING, min_size=M, max_size=M), ANYTHING.map(lambda value: [value] * M))


def neighbours(seed, user, column, users=N):
    losses = np.random.default_rng(seed).standard_normal((M, users))
    other = losses.copy()
    other[:, user] = column
    return losses, other


def moved(first, second, mechanism, **changes):
    """How far apart the un-noised values on the grid are, in units of what the noise hides, Δ'."""
    values = [filled(losses).gradient(ask(mechanism=mechanism, **changes)) for losses in (first, second)]
    noise = mechanism.noise(math.inf)
    hidden = mechanism.sensitivity + mechanism.summation_error + noise.grid * math.sqrt(mechanism.dimension)
    return float(np.linalg.norm(values[0] - values[1])) / hidden


@RELAXED
@given(st.integers(0, 99), st.integers(0, N - 1), COLUMN, st.booleans())
@example(0, 3, [math.nan] * M, True)
@example(0, 3, [1e308, -1e308, 1e308, -1e308, 0.0], True)
@example(0, 3, [1.7e308] * M, True)
def test_one_users_losses_move_the_mean_by_at_most_two_clips(seed, user, column, centre):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moved(*neighbours(seed, user, column), MECHANISM, centre=centre) <= 1


def test_the_bound_is_attained_and_an_unclipped_mean_breaks_it(monkeypatch):
    opposite = np.array([[1.0], [-1.0]]) * np.array([[40.0, -10, 3, 7, -20]])
    first, second = (neighbours(0, 3, column)[1] for column in opposite)
    assert 0.999 < moved(first, second, MECHANISM) <= 1
    monkeypatch.setattr(curator_module, "clip_rows", lambda rows, bound: np.nan_to_num(rows))
    assert moved(first, second, MECHANISM) > 10


@pytest.mark.parametrize(
    ("users", "locations", "dimension"), [(7, 5, 3), (1, 1, 1), (64, 5, 1), (33, 1, 4), (1000, 104, 103)]
)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_users_row_is_a_function_of_its_losses_alone_bit_for_bit(users, locations, dimension, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    losses, weights = rng.standard_normal((locations, users)), rng.standard_normal((dimension, locations))
    user = data.draw(st.integers(0, users - 1))
    values = data.draw(st.lists(ANYTHING, min_size=1, max_size=3))
    other = losses.copy()
    other[:, user] = np.resize(values, locations)
    others = np.arange(users) != user
    for centre in (True, False):
        before, after = (
            clip_rows(user_gradients(each.copy(), weights, centre=centre), CLIP) for each in (losses, other)
        )
        assert np.array_equal(bits(before[others]), bits(after[others]))
        assert np.all(np.isfinite(after))


def test_a_shared_centre_would_be_noticed():
    """Negative control of the bit-for-bit test: the users' mean instead of each user's own."""
    first, second = neighbours(0, 3, [2.0] * M)
    before, after = ((each - each.mean()).T @ WEIGHTS.T for each in (first, second))
    assert not np.array_equal(np.delete(before, 3, axis=0), np.delete(after, 3, axis=0))


# --- noise ------------------------------------------------------------------------------------------------------------


def golden(section):
    return json.loads((Path(__file__).parent / "golden" / f"{section}.json").read_text())["rows"]


@pytest.mark.parametrize("case", golden("gibo_noise_std"))
def test_the_ideal_noise_is_that_of_the_paper(case):
    mechanism = ClippedMean(case["B"], case["n"], 22)
    mu = case["mu"] / math.sqrt(case["T"])
    assert mechanism.sigma(mu) == pytest.approx(case["sigma"], rel=1e-9)
    assert case["sigma"] == pytest.approx(2 * case["B"] * math.sqrt(case["T"]) / (case["n"] * case["mu"]), rel=1e-9)
    assert case["sigma"] < mechanism.noise(mu).sigma < case["sigma"] * (1 + 1e-5), "grid and rounding are paid for"


WIDE = ClippedMean(CLIP, N, 40)


def noise_of(keys, mu=0.7, seed=None):
    """(keys, 40) noise in units of its std, and the grid it lies on."""
    weights = np.random.default_rng(4).standard_normal((40, M))
    curator = filled(LOSSES)
    quiet = curator.gradient(ask("quiet", weights=weights, mechanism=WIDE))
    values = [curator.gradient(ask(key, weights=weights, mechanism=WIDE, mu=mu, seed=seed)) for key in range(keys)]
    noise = WIDE.noise(mu)
    assert np.all(np.asarray(values) / noise.grid == np.rint(np.asarray(values) / noise.grid))
    return (np.array(values) - quiet) / noise.sigma


def is_standard(samples):
    """χ² of the variance, and Kolmogorov-Smirnov of the whole distribution, each at half of the rate."""
    statistic, tail = float(np.sum(samples**2)), stats.chi2(samples.size)
    variance = 2 * min(tail.cdf(statistic), tail.sf(statistic))
    return min(variance, stats.kstest(np.ravel(samples), "norm").pvalue) > RATE / 2


def are_independent(samples):
    """All pairs of columns: the largest correlation, Bonferroni."""
    correlations = np.corrcoef(samples, rowvar=False)[np.triu_indices(samples.shape[1], 1)]
    return bool(np.max(np.abs(correlations)) * math.sqrt(len(samples)) < stats.norm.isf(RATE / 2 / correlations.size))


@pytest.mark.parametrize("seed", [None, 5])
def test_noise_has_the_calibrated_size_and_is_independent_over_coordinates_and_keys(seed):
    samples = noise_of(600, seed=seed)
    assert is_standard(samples)
    assert are_independent(samples)
    assert are_independent(samples[:40].T), "keys"


def test_half_the_noise_and_shared_noise_are_caught():
    samples = noise_of(600)
    assert not is_standard(samples / 2)
    assert not are_independent(np.column_stack([samples[:, 0], samples[:, 0] + 0.1 * samples[:, 1]]))


def test_the_same_key_gives_the_same_value_and_no_second_draw():
    curator = filled(LOSSES)
    first = curator.gradient(ask(mu=0.5))
    kept = first.copy()
    first[:] = 0
    curator.expect(["next"])
    assert np.array_equal(curator.gradient(ask(mu=0.5)), kept), "even after its rows are gone"
    assert not np.array_equal(filled(LOSSES).gradient(ask(mu=0.5)), kept), "another life, another draw"


@pytest.mark.parametrize("changes", [
    {"mu": 0.6}, {"weights": WEIGHTS + 1}, {"centre": False}, {"rows": ROWS[::-1]}, {"seed": 1},
    {"mechanism": ClippedMean(2 * CLIP, N, D)},
])  # fmt: skip
def test_a_key_is_used_for_one_release_only(changes):
    curator = filled(LOSSES)
    curator.gradient(ask(mu=0.5))
    with pytest.raises(CuratorError, match="one release"):
        curator.gradient(ask(**{"mu": 0.5, **changes}))


def test_seeded_noise_depends_on_seed_and_key_only():
    values = [filled(LOSSES).gradient(ask(step, mu=0.5, seed=seed)) for step, seed in ((0, 1), (0, 1), (1, 1), (0, 2))]
    assert np.array_equal(values[0], values[1])
    assert not np.array_equal(values[0], values[2])
    assert not np.array_equal(values[0], values[3])
    assert "seed" not in repr(ask(seed=314159))


def test_exact_noise_is_drawn_where_it_is_asked_for(monkeypatch):
    pytest.importorskip("opendp")
    drawn = []
    monkeypatch.setattr(
        "dpray.platform.privacy.exact.draw_exact",
        lambda noise, shape: drawn.append(shape) or np.zeros(shape, dtype=np.int64),
    )
    filled(LOSSES).gradient(ask(mu=0.5, exact=True))
    assert drawn == [D]


# --- bad questions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"rows": ROWS[:4]}, "one column for each of 4"),
    ({"rows": (ROWS[0],) * M}, "distinct"),
    ({"rows": ()}, "at least one"),
    ({"rows": "locations"}, "distinct texts"),
    ({"weights": np.full((D, M), np.nan)}, "finite"),
    ({"weights": np.ones(M)}, "matrix"),
    ({"mechanism": ClippedMean(CLIP, N, D + 1)}, "dimension 4"),
    ({"mechanism": None, "mu": 1.0}, "must be infinite"),
    ({"mu": 0.0}, "greater than zero"),
    ({"mu": math.nan}, "NaN"),
    ({"mu": 1e-30}, "too much for 64-bit"),
    ({"key": ()}, "tuple"),
    ({"key": ("run", 1.5)}, "tuple"),
    ({"seed": -1}, "seed"),
    ({"seed": 1, "exact": True}, "cannot be seeded"),
])  # fmt: skip
def test_a_question_that_could_not_be_answered_is_refused_before_it_is_charged(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ask(**changes)


def test_a_mechanism_for_other_users_is_refused():
    with pytest.raises(CuratorError, match="for 8 users, but here are the losses of 7"):
        filled(LOSSES).gradient(ask(mechanism=ClippedMean(CLIP, N + 1, D)))


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: WinnerAsk(ROWS, NoisyMax(1.0, N, M + 1), 1.0, ("k",)), "6 candidates, but 5"),
    (lambda: WinnerAsk(ROWS, NoisyMax(1.0, N, M), 0.0, ("k",)), "greater than zero"),
    (lambda: ScoreAsk(ROWS[0], ClippedMean(1.0, N, 2), 1.0, ("k",)), "dimension 1"),
    (lambda: score_mechanism(0.0, N), "greater than zero"),
    (lambda: open_curator(0, actor=False), "at least 1"),
])  # fmt: skip
def test_other_bad_questions(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# --- winner and score -------------------------------------------------------------------------------------------------

FEW = np.array([[0.2, 0.9, 3.0], [0.1, -5.0, 0.5], [np.nan, 0.4, np.inf]])
FEW_MEANS = np.array([0.2 + 0.9 + 1.0, 0.1 + 0.0 + 0.5, 1.0 + 0.4 + 1.0]) / 3
BEST = NoisyMax(1.0, 3, 3)


def winners(count, epsilon=2.0, mechanism=BEST):
    curator = filled(FEW)
    asks = (WinnerAsk(ROWS[:3], mechanism, epsilon, ("run", key)) for key in range(count))
    return np.bincount([curator.winner(each) for each in asks], minlength=3)


def is_exponential_mechanism(counts, epsilon):
    """χ² against probabilities ∝ exp(−ε n mean/(2c))."""
    weights = np.exp(-epsilon * 3 * FEW_MEANS / 2)
    return stats.chisquare(counts, counts.sum() * weights / weights.sum()).pvalue > RATE


def test_winners_are_those_of_the_exponential_mechanism():
    assert is_exponential_mechanism(winners(8000), 2.0)


def test_half_the_gumbel_noise_is_caught(monkeypatch):
    scale = NoisyMax.scale
    monkeypatch.setattr(NoisyMax, "scale", lambda self, epsilon: scale(self, epsilon) / 2)
    assert not is_exponential_mechanism(winners(8000), 2.0)


@pytest.mark.parametrize("bound", [1e-100, 0.5, 1e100])
def test_without_noise_the_lowest_mean_wins_at_every_scale(bound):
    losses = np.array([[0.5, 0.7], [0.5, 0.6], [0.2, np.nan]]) * bound
    assert filled(losses).winner(WinnerAsk(ROWS[:3], NoisyMax(bound, 2, 3), math.inf, ("k",))) == 1


def test_a_winner_is_drawn_once_per_key():
    curator = filled(FEW)
    asks = [WinnerAsk(ROWS[:3], BEST, 0.01, ("run", 0)) for _ in range(30)]
    assert len({curator.winner(each) for each in asks}) == 1


@RELAXED
@given(COLUMN.map(lambda column: column[:1] * 2), st.floats(0.1, 10))
def test_one_user_moves_a_score_by_at_most_the_bound_over_n(column, bound):
    losses = np.random.default_rng(0).uniform(-1, 11, (1, N))
    other, mechanism = losses.copy(), score_mechanism(bound, N)
    other[:, 2] = column[:1]
    scores = [filled(each).score(ScoreAsk(ROWS[0], mechanism, math.inf, ("k",))) for each in (losses, other)]
    slack = mechanism.summation_error + mechanism.noise(math.inf).grid + 1e-15 * bound
    assert abs(scores[0] - scores[1]) <= bound / N + slack


def test_a_score_is_the_mean_of_clipped_losses_with_its_own_noise():
    curator, mechanism = filled(FEW), score_mechanism(1.0, 3)
    assert mechanism.sensitivity == pytest.approx(1 / 3, rel=1e-15)
    for row, mean in enumerate(FEW_MEANS):
        assert curator.score(ScoreAsk(ROWS[row], mechanism, math.inf, ("quiet", row))) == pytest.approx(mean, abs=1e-6)
    drawn = np.array([curator.score(ScoreAsk(ROWS[0], mechanism, 0.5, ("run", key))) for key in range(4000)])
    samples = (drawn - FEW_MEANS[0]) / mechanism.noise(0.5).sigma
    assert is_standard(samples)
    assert not is_standard(samples / 2)
    assert mechanism.noise(0.5).sigma == pytest.approx(1 / (3 * 0.5), rel=1e-5)


def test_in_one_process_owner_and_handle_are_the_curator():
    with open_curator(N, actor=False) as owner:
        assert owner.expect(ROWS) == list(ROWS)
        for row, losses in zip(ROWS, LOSSES, strict=True):
            assert owner.handle().submit(row, losses)
        assert np.array_equal(owner.gradient(ask(), FREE), filled(LOSSES).gradient(ask()))
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(owner.handle())
    with pytest.raises(RowsMissing):
        owner.gradient(ask(1), FREE)


# What was charged ---------------------------------------------------------------------------------------------------


@pytest.fixture
def charged(tmp_path):
    """An attempt at a release of the users' mean gradient, charged with μ = ½."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        people = ledger.population("people")
        people.account("user", Budget(8.0, 1e-5))
        run = people.run("run")
        yield lambda mechanism, step=0: run.charge(
            ReleaseKey("search", "gradient", step), {}, mechanism, ceil_quanta(0.5)
        )


def asked(step=0, mu=0.5, mechanism=ClippedMean(1.0, 2, 1), rows=("a", "b"), centre=True):
    weights = np.array([[1.0, -1.0]])
    return GradientAsk(rows, weights, mechanism, mu, ("search", "gradient", step), centre=centre)


@pytest.fixture
def owner():
    with open_curator(2, actor=False) as owner:
        owner.expect(["a", "b"])
        owner.submit("a", [1.0, 2.0])
        owner.submit("b", [2.0, 0.0])
        yield owner


def test_what_was_charged_is_released_once(owner, charged):
    attempt = charged(ClippedMean(1.0, 2, 1))
    assert owner.gradient(asked(), attempt).shape == (1,)
    with pytest.raises(LedgerError, match="computed under this attempt already"):
        owner.gradient(asked(), attempt)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (asked(mu=0.6), r"charged with mu = 0\.5"),
        (asked(step=1), "charged with mu"),
        (asked(mechanism=ClippedMean(2.0, 2, 1)), "is to be computed"),
        (asked(mechanism=None, mu=math.inf), "without any is asked for"),
        (WinnerAsk(("a", "b"), NoisyMax(1.0, 2, 2), 0.1, ("search", "gradient", 0)), "is to be computed"),
        (ScoreAsk("a", score_mechanism(1.0, 2), 0.5, ("search", "gradient", 0)), "is to be computed"),
    ],
)
def test_nothing_else_is_released_for_that_charge(owner, charged, ask, says):
    attempt = charged(ClippedMean(1.0, 2, 1))
    release = {GradientAsk: owner.gradient, WinnerAsk: owner.winner, ScoreAsk: owner.score}[type(ask)]
    with pytest.raises((LedgerError, CuratorError), match=says):
        release(ask, attempt)


def test_a_winner_among_fewer_candidates_than_were_charged_is_paid_for(owner, charged):
    attempt = charged(NoisyMax(1.0, 2, 3))
    asks = [WinnerAsk(("a", "b"), NoisyMax(1.0, 2, 2), epsilon, ("search", "gradient", 0)) for epsilon in (0.4, 0.1)]
    with pytest.raises(CuratorError, match="charged with mu"):
        owner.winner(WinnerAsk(("a", "b"), NoisyMax(1.0, 2, 2), 0.5, ("search", "gradient", 0)), attempt)
    assert owner.winner(asks[1], attempt) in (0, 1)
