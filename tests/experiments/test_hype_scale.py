"""The streamed vote of many clients: exact in the ring, noise as stated, memory that does not grow with n."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from dpray.experiments.benchmarks import hype_scale
from dpray.experiments.benchmarks.hype_scale import BUDGET, CANDIDATES, VOTES, streamed
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.masked.ring import largest_sum
from dpray.platform.privacy.noise import NoiseSource

SEEDED = NoiseSource(2)


@pytest.fixture(scope="module")
def vote():
    return streamed(5_000, mu=BUDGET.mu, block=512, source=SEEDED)


def test_every_client_votes_for_k_candidates(vote):
    assert vote.counts.sum() == 5_000 * VOTES
    assert vote.counts.shape == (CANDIDATES,)


def test_noise_is_as_stated_and_half_of_it_or_twice_is_noticed(vote):
    """Chi-square on 100 counts, false alarms 10⁻⁶; the controls state another σ than was drawn."""
    assert not vote.alarm
    for factor in (0.5, 2.0):
        assert replace(vote, noise=replace(vote.noise, share=vote.noise.share * factor)).alarm


def test_a_clients_share_is_at_least_eight_grid_steps_and_less_is_refused():
    noise = streamed(10, mu=BUDGET.mu, source=SEEDED).noise
    assert noise.noisers == 10
    assert noise.share / noise.grid >= 8
    assert noise.residual_delta < 1e-200
    with pytest.raises(ValueError, match="rounding would remove noise"):
        streamed(1_000_000, mu=BUDGET.mu, grid=2.0**-3)  # "votes times ten"


def test_a_ring_that_would_wrap_is_refused_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw", lambda *asked: pytest.fail("noise was drawn"))
    with pytest.raises(CohortError, match="wrap around"):
        streamed(10**12, mu=1e-3, grid=2.0**-28)


def test_a_sum_that_has_wrapped_is_noticed(monkeypatch):
    """The negative control: a ring one bit too small for the sum that came out."""
    monkeypatch.setattr(hype_scale, "_ring", lambda clients, noise: 32)
    with pytest.raises(ArithmeticError, match="wrapped"):
        streamed(200, mu=BUDGET.mu, grid=2.0**-30, source=SEEDED)


def test_the_default_grid_of_a_million_clients_fits_64_bits():
    noise = hype_scale.TopKVotes(VOTES, CANDIDATES).noise(BUDGET.mu, noisers=10**6)
    assert noise.share / noise.grid >= 1024
    assert 2**31 < largest_sum(10**6, noise.share, noise.grid, 10**6) < 2**62


def test_memory_does_not_grow_with_the_clients():
    """Peak of all arrays, 2 and 20 blocks; without blocks, the negative control, it does."""
    peaks = []
    for clients, block in ((1_000, 500), (10_000, 500), (10_000, 10_000)):
        tracemalloc.start()
        streamed(clients, mu=BUDGET.mu, block=block, source=SEEDED)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[2] > 5 * peaks[0]


def test_what_a_process_measures_is_one_line(capsys):
    hype_scale.main(["--one", "streamed", "50"])
    found = hype_scale.Measured(**json.loads(capsys.readouterr().out))
    assert (found.clients, found.bits, found.alarm) == (50, 32, False)
    assert found.rss > 0.01
    assert found.seconds > 0


def test_ballots_are_drawn_alike_whatever_the_block():
    first, second = (streamed(300, mu=BUDGET.mu, block=block, source=SEEDED) for block in (300, 100))
    assert np.array_equal(first.counts, second.counts)
