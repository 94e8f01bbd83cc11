"""What clients answer: bounded messages, and nothing else that depends on their data."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.platform.cohort.client import Records, Stack
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.queries import ClientUpdate, GradientSum, Terms, Votes
from dpray.platform.confine import Confinement
from dpray.platform.privacy.mechanisms import ClippedSum, FeatureCovariance, TopKVotes, Unit

from .conftest import CLIP, DIMENSION, RowSum, gradient_mechanism, records, shards_of

TERMS = Terms(DIMENSION, 0.0, 4, 20)
THETA = np.zeros(DIMENSION)


class Clients:
    """A host's clients without a host."""

    def __init__(self, task, shards, scores=None):
        self.task, self.names, self.shards = task, tuple(shards), Stack.of(list(shards.values()))
        self.confinement = Confinement("key")
        self._scores = scores

    def scores(self, run, candidates):
        return self._scores

    def generator(self, client, *key):
        return np.random.default_rng([ord(letter) for letter in client])


def misbehave(kind, records):
    """Everything user code may do on private data short of killing the process."""
    values = records.x.sum(axis=0)
    match kind:
        case 1:
            raise ValueError(str(records.x))
        case 2:
            raise SystemExit(str(records.x))
        case 3:
            return values * np.nan
        case 4:
            return np.full(DIMENSION, np.inf)
        case 5:
            return values[:2]
        case 6:
            return "not numbers"
        case 7:
            return values * 1e200
        case 8:
            return np.full(DIMENSION, 1e308)
        case 9:
            records.x[:] = 0.0
        case 10:
            return values.astype(complex)
        case 11:
            return [[1.0] * DIMENSION]
        case 12:
            return np.where(np.arange(DIMENSION) == 2, np.nan, values)
    return None


KINDS = st.integers(0, 13)
SCALES = st.sampled_from([1.0, 1e150])
QUERIES = [
    (GradientSum(THETA, CLIP), 2 * CLIP * 5),
    (ClientUpdate(THETA, CLIP, {"rate": 10.0}), 2 * CLIP),
    (GradientSum(THETA, CLIP, floor=2), 2 * CLIP * 2),
]


@pytest.mark.parametrize(("query", "bound"), QUERIES)
@given(kinds=st.tuples(KINDS, KINDS), who=st.integers(0, 3), seed=st.integers(100, 10**6), scale=SCALES)
@settings(deadline=None, max_examples=60)
def test_replacing_a_client_and_what_its_code_does_moves_its_own_row_only(query, bound, kinds, who, seed, scale):
    """For unit client the bound is Δ; for record sums, of which all n_i records are replaced, it is n_i·Δ."""
    here = shards_of(4)
    name = list(here)[who]
    first = records(who, label=kinds[0])
    second = records(seed, label=kinds[1])
    second = Records(second.x * scale, second.y)
    rows = []
    for replaced in (first, second):
        rows.append(query.messages(Clients(RowSum(misbehave), {**here, name: replaced})))
    assert rows[0].shape == rows[1].shape == (4, DIMENSION)
    assert np.all(np.isfinite(rows[1]))
    same = [index for index in range(4) if index != who]
    np.testing.assert_array_equal(rows[0][same], rows[1][same])
    assert np.linalg.norm(rows[0].sum(0) - rows[1].sum(0)) <= bound * (1 + 1e-12)


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13])
def test_code_that_fails_is_a_zero_row(kind):
    clients = Clients(RowSum(misbehave), {"a": records(0), "b": records(1, label=kind)})
    rows = GradientSum(THETA, CLIP).messages(clients)
    np.testing.assert_array_equal(rows[1], np.zeros(DIMENSION))
    np.testing.assert_allclose(rows[0], RowSum().clipped_sum(THETA, records(0), CLIP))


def test_a_task_that_does_not_clip_is_held_to_its_records_times_the_bound():
    clients = Clients(RowSum(misbehave), {"a": records(0, rows=3, label=7)})
    row = GradientSum(THETA, CLIP).messages(clients)[0]
    assert np.linalg.norm(row) == pytest.approx(3 * CLIP)


def test_rows_within_their_bound_keep_their_bits():
    row = GradientSum(THETA, CLIP).messages(Clients(RowSum(), {"a": records(0)}))[0]
    assert row.tobytes() == RowSum().clipped_sum(THETA, records(0), CLIP).tobytes()


def test_an_update_is_clipped_as_a_whole():
    here = Clients(RowSum(), {"a": records(0)})
    long, short = (ClientUpdate(THETA, CLIP, {"rate": rate}).messages(here)[0] for rate in (100.0, 1e-3))
    assert np.linalg.norm(long) == pytest.approx(CLIP)
    np.testing.assert_array_equal(short, 1e-3 * records(0).x.sum(axis=0))


def test_weights_by_client_are_at_most_one():
    here = {"small": records(0, rows=2), "large": records(1, rows=8)}
    plain = GradientSum(THETA, CLIP).messages(Clients(RowSum(), here))
    weighted = GradientSum(THETA, CLIP, floor=2).messages(Clients(RowSum(), here))
    np.testing.assert_allclose(weighted, plain * [[1.0], [0.25]])


class Vectorised(RowSum):
    """One pass over all clients, in one of several ways."""

    def __init__(self, way):
        super().__init__(misbehave)
        self.way = way
        self.passes = 0

    def clipped_sums(self, theta, shards, clip):
        self.passes += 1
        rows = np.stack([RowSum().clipped_sum(theta, shard, clip) for shard in shards])
        match self.way:
            case "raises":
                raise ValueError("no")
            case "wrong shape":
                return rows[:1]
            case "one bad row":
                return np.where(np.arange(len(rows))[:, None] == 1, np.nan, rows)
            case "one huge row":
                return np.where(np.arange(len(rows))[:, None] == 1, 1e300, rows)
        return rows


@pytest.mark.parametrize("way", ["as it should", "raises", "wrong shape", "one bad row", "one huge row"])
def test_a_vectorised_pass_gives_what_one_by_one_gives_or_is_replaced_by_it(way):
    here = shards_of(4)
    rows = GradientSum(THETA, CLIP).messages(Clients(Vectorised(way), here))
    expected = GradientSum(THETA, CLIP).messages(Clients(RowSum(), here))
    others = [0, 2, 3]
    np.testing.assert_array_equal(rows[others], expected[others])
    if way == "one bad row":
        np.testing.assert_array_equal(rows[1], np.zeros(DIMENSION))
    elif way == "one huge row":
        assert np.linalg.norm(rows[1]) <= 5 * CLIP * (1 + 1e-12)
    else:
        np.testing.assert_array_equal(rows[1], expected[1])


def test_parameters_given_to_user_code_cannot_be_written_to():
    class Writes(RowSum):
        def clipped_sum(self, theta, records, clip):
            theta += 1.0
            return np.ones(DIMENSION)

    theta = np.zeros(DIMENSION)
    rows = GradientSum(theta, CLIP).messages(Clients(Writes(), shards_of(2)))
    np.testing.assert_array_equal(rows, np.zeros((2, DIMENSION)))
    np.testing.assert_array_equal(theta, np.zeros(DIMENSION))


def test_settings_changed_by_one_client_do_not_reach_the_next():
    class Changes(RowSum):
        def update(self, theta, records, settings):
            settings["rate"] *= 2
            return np.full(DIMENSION, settings["rate"] * 1e-3)

    rows = ClientUpdate(THETA, CLIP, {"rate": 1.0}).messages(Clients(Changes(), shards_of(2)))
    np.testing.assert_array_equal(rows[0], rows[1])


@given(
    scores=st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0, np.nan]), min_size=5, max_size=5), min_size=1, max_size=4),
    votes=st.integers(1, 4),
)
def test_a_ballot_has_exactly_k_ones_at_the_best_scores(scores, votes):
    here = {f"c{index}": records(index) for index in range(len(scores))}
    ballots = Votes("run", 5, votes).messages(Clients(RowSum(), here, np.array(scores)))
    assert ballots.dtype == np.int64
    np.testing.assert_array_equal(ballots.sum(axis=1), votes)
    for row, ballot in zip(np.nan_to_num(np.array(scores), nan=-1.0), ballots, strict=True):
        assert row[ballot == 1].min() >= row[ballot == 0].max()


def test_a_client_without_scores_votes_by_its_own_generator():
    here = {f"client-{index}": records(0) for index in range(200)}
    ballots = Votes("run", 4, 1).messages(Clients(RowSum(), here, np.full((200, 4), np.nan)))
    # Each candidate's count is Binomial(200, 1/4): 50 ± 6.1; beyond 5 std in 4 candidates once in 400 000 runs.
    assert np.all(np.abs(ballots.sum(axis=0) - 50) < 31)


@pytest.mark.parametrize(
    ("query", "mechanism", "sentence"),
    [
        (GradientSum(THETA, CLIP), gradient_mechanism(clip=1.0), "clip 1.5"),
        (GradientSum(THETA, CLIP), gradient_mechanism(unit=Unit.CLIENT), "record"),
        (GradientSum(THETA, CLIP), gradient_mechanism(dimension=5), "dimension 5"),
        (GradientSum(THETA, CLIP), gradient_mechanism(records=19), "19 summands"),
        (GradientSum(THETA[:5], CLIP), gradient_mechanism(), "dimension 6"),
        (GradientSum(THETA.astype(np.float32), CLIP), gradient_mechanism(), "float64"),
        (GradientSum(THETA * np.nan, CLIP), gradient_mechanism(), "diverged"),
        (GradientSum(THETA, CLIP, floor=0), gradient_mechanism(), "floor"),
        (GradientSum(THETA, CLIP), FeatureCovariance(CLIP, 3, 20), "ClippedSum"),
        (ClientUpdate(THETA, CLIP), gradient_mechanism(), "client"),
        (Votes("run", 5, 2), TopKVotes(2, 6), "candidates=5"),
        (Votes("run", 5, 2), gradient_mechanism(), "TopKVotes"),
    ],
)
def test_a_mechanism_that_states_another_sensitivity_is_refused(query, mechanism, sentence):
    with pytest.raises(CohortError, match=sentence):
        query.check(mechanism, TERMS)


def test_matching_mechanisms_are_accepted():
    GradientSum(THETA, CLIP).check(gradient_mechanism(), TERMS)
    ClientUpdate(THETA, CLIP).check(ClippedSum(CLIP, Unit.CLIENT, DIMENSION, 4), TERMS)
    Votes("run", 5, 2).check(TopKVotes(2, 5), TERMS)


def test_a_float32_task_needs_its_margin_in_the_mechanism():
    terms = Terms(DIMENSION, 1e-4, 4, 20)
    with pytest.raises(CohortError, match="relative_error"):
        GradientSum(THETA, CLIP).check(gradient_mechanism(), terms)
    GradientSum(THETA, CLIP).check(gradient_mechanism(relative_error=1e-4), terms)


class Descends(RowSum):
    """Steps on the very parameters it was given: torch does not mind that an array is read-only."""

    def clipped_sum(self, theta, records, clip):
        own = torch.from_numpy(theta)
        own.add_(torch.from_numpy(records.x).sum(0))
        return own.numpy() / np.maximum(np.linalg.norm(own.numpy()), 1)

    def update(self, theta, records, settings):
        return self.clipped_sum(theta, records, CLIP)


@pytest.mark.parametrize("query", [GradientSum(THETA, CLIP), ClientUpdate(THETA, CLIP)])
def test_what_a_client_writes_into_its_parameters_the_next_one_is_not_given(query):
    here = shards_of(4)
    there = {**here, "client-000": records(99)}
    one, other = (query.messages(Clients(Descends(), shards)) for shards in (here, there))
    assert (one[0] != other[0]).any()
    np.testing.assert_array_equal(one[1:], other[1:])
    assert not THETA.any()
