"""A host in this process: noise, replay, guards, layouts, deaths."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from dpray.platform.cohort.client import Stack, site_stack
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.host import Host, HostSpec
from dpray.platform.cohort.queries import Votes
from dpray.platform.cohort.ticket import JournalRefused
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.ledger import Head, ReleaseKey
from dpray.platform.privacy.mechanisms import Regime, TopKVotes
from dpray.platform.privacy.noise import NoiseSource, from_grid, to_grid

from .conftest import CLIP, DIMENSION, SEARCH, RowSum, ask, client_names, gradient_mechanism, records, shards_of

EVERYONE = client_names(4)
RUN = ("people", "run")


def revealed(host, request, participants=EVERYONE, head=None):
    host.prepare(request)
    return host.reveal(RUN, request.key, participants, head or request.head)


def total(messages):
    return sum(message.steps for message in messages)


def exact(shards, grid):
    """The un-noised sum on the grid, from the task alone."""
    return sum(to_grid(RowSum().clipped_sum(np.zeros(DIMENSION), shard, CLIP), grid) for shard in shards.values())


def test_a_trusted_server_gets_the_exact_integer_sum(make_host):
    shards, request = shards_of(4), ask(regime=Regime.CENTRAL)
    message = make_host(shards).contribute(request)
    grid = request.mechanism.noise(request.mu).grid
    np.testing.assert_array_equal(message.steps, exact(shards, grid))
    assert message.clients == 4


def test_without_noise_the_shares_add_up_to_the_exact_sum(make_host):
    shards, request = shards_of(4), replace(ask(), quanta=None)
    host = make_host(shards)
    grid = host.prepare(request).noise.grid
    np.testing.assert_array_equal(total(host.reveal(RUN, request.key, EVERYONE, request.head)), exact(shards, grid))


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("regime", [Regime.DISTRIBUTED, Regime.LOCAL])
def test_the_sum_holds_the_noise_the_regime_says(make_host, regime, seed):
    """Per coordinate variance: σ² with n_min = n shares (distributed), n·σ² (local).

    300 × 6 values: the sample variance's relative std is √(2/1800) = .033; 5 of them, .17, are passed once in 2 million
    runs. Negative control: shares for half or twice as many clients fail the same bound.
    """
    shards = shards_of(4)
    host = make_host(shards, noise=NoiseSource(seed))
    values = []
    for step in range(300):
        request = ask(step, regime=regime)
        noise = host.prepare(request).noise
        values.append(total(host.reveal(RUN, request.key, EVERYONE, request.head)) - exact(shards, noise.grid))
    variance = np.mean(from_grid(np.array(values), noise.grid) ** 2)
    expected = noise.sigma**2 * (1 if regime is Regime.DISTRIBUTED else 4)
    assert abs(variance / expected - 1) < 0.17
    for wrong in (2, 8):
        assert abs(variance / (expected * wrong / 4) - 1) > 0.17


def test_n_min_below_n_makes_shares_larger(make_host):
    host = make_host(shards_of(4), quorum=3, n_min=2)
    noise = host.prepare(ask()).noise
    assert noise.noisers == 2
    assert noise.share == pytest.approx(noise.sigma / np.sqrt(2))


def correlation(first, second):
    return float(np.corrcoef(first, second)[0, 1])


@pytest.mark.parametrize("seed", [None, 11])
def test_noise_differs_between_clients_rounds_and_runs(make_host, seed):
    """Correlations of 6 × 200 independent values: std .029, 6 of them passed once in 500 million.

    Negative control: the same seed, client and key gives the same noise, correlation 1.
    """
    zero = {name: records(0) for name in EVERYONE}
    hosts = {name: make_host(zero, name=name, of=[name], noise=NoiseSource(seed)) for name in EVERYONE[:2]}
    noises = {}
    for name, host in hosts.items():
        for run in ("run", "other"):
            values = []
            for step in range(200):
                request = ask(step, run=run, head=Head(10, "a" * 64))
                host.prepare(request)
                message = host.reveal(("people", run), request.key, EVERYONE, request.head)
                values.append(total(message))
            noises[name, run] = np.ravel(values - np.mean(values, axis=0)).astype(float)
    series = list(noises.values())
    series.append(np.roll(series[0], DIMENSION))  # the next round of the same client
    for index, first in enumerate(series):
        for second in series[:index]:
            assert abs(correlation(first, second)) < 0.18
    assert correlation(series[0], series[0]) == pytest.approx(1.0)


def test_seeded_sums_do_not_depend_on_the_layout(make_host):
    """And unseeded ones do: the negative control."""
    for seed, same in ((3, True), (None, False)):
        shards, request, noise = shards_of(4), ask(), NoiseSource(seed)
        whole = total(revealed(make_host(shards, site=f"one-{seed}", noise=noise), request))
        parts = [make_host(shards, name=f"{i}", of=EVERYONE[i::2], noise=noise, site=f"two-{seed}") for i in (0, 1)]
        messages = [message for part in parts for message in revealed(part, request)]
        assert sum(message.clients for message in messages) == 4
        assert np.array_equal(whole, total(messages)) is same


def test_a_rebuilt_host_repeats_a_revealed_message_byte_for_byte(make_host):
    shards, request = shards_of(4), ask()
    first = total(revealed(make_host(shards), request))
    again = replace(request, participants=EVERYONE, epoch=2)
    second = total(revealed(make_host(shards, name="rebuilt"), again))
    assert first.tobytes() == second.tobytes()


def test_a_rebuilt_host_must_prepare_before_it_reveals(make_host):
    shards, request = shards_of(4), ask()
    make_host(shards).prepare(request)
    rebuilt = make_host(shards, name="rebuilt")
    with pytest.raises(JournalRefused) as caught:
        rebuilt.reveal(RUN, request.key, EVERYONE, request.head)
    assert caught.value.kind == "again"
    assert total(revealed(rebuilt, replace(request, participants=EVERYONE))).shape == (DIMENSION,)


def test_a_host_refuses_a_set_below_its_quorum(make_host):
    host = make_host(shards_of(4), of=EVERYONE[:3], quorum=4)
    host.prepare(ask())
    with pytest.raises(CohortError, match="fewer than the quorum of 4"):
        host.reveal(RUN, ask().key, EVERYONE[:3], ask().head)


def test_a_host_refuses_a_mechanism_with_another_bound(make_host):
    with pytest.raises(CohortError, match=r"clip 1\.5"):
        make_host(shards_of(4)).prepare(ask(mechanism=gradient_mechanism(clip=0.1)))


def test_a_key_answered_to_a_trusted_server_is_not_answered_with_shares_too(make_host):
    host = make_host(shards_of(4))
    host.contribute(ask(regime=Regime.CENTRAL))
    with pytest.raises(JournalRefused) as caught:
        host.prepare(ask())
    assert caught.value.kind == "conflict"


def test_a_key_is_not_answered_for_other_parameters(make_host):
    host = make_host(shards_of(4))
    revealed(host, ask())
    with pytest.raises(JournalRefused) as caught:
        host.prepare(ask(theta=np.ones(DIMENSION)))
    assert caught.value.kind == "conflict"


def test_clients_count_their_own_spend_up_to_their_own_cap(make_host):
    cap = Budget(1.0, 1e-5)
    each = cap.quanta // 2
    host = make_host(shards_of(4), cap=cap)
    for step in range(2):
        revealed(host, replace(ask(step), quanta=each))
    with pytest.raises(JournalRefused) as caught:
        host.prepare(replace(ask(2), quanta=each))
    assert caught.value.kind == "cap"


def test_records_that_cannot_be_loaded_are_reported_without_what_the_loader_said(tmp_path):
    def load():
        raise ValueError("canary-99")

    spec = HostSpec("h", ("a",), RowSum(), load, str(tmp_path), None, 1, 1, NoiseSource(), None, None)
    with pytest.raises(CohortError, match="'a' could not be loaded") as caught:
        Host(spec)
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_site_with_another_number_of_records_than_declared_does_not_say_which(tmp_path):
    spec = HostSpec(
        "h", ("a",), RowSum(), lambda: site_stack(records, 7), str(tmp_path), None, 1, 1, NoiseSource(), None, None
    )
    with pytest.raises(CohortError, match="not as many as declared") as caught:
        Host(spec)
    assert "5" not in str(caught.value)


class Counts(RowSum):
    """Counts how often it trains, by client."""

    def __init__(self):
        super().__init__()
        self.trained = []

    def fit_and_score(self, config, records, rng):
        self.trained.append(records.x[0, 0])
        if config.get("fails"):
            raise ValueError
        return super().fit_and_score(config, records, rng)


def test_a_score_is_computed_once_a_run_candidate_and_configuration(make_host):
    task = Counts()
    host = make_host(shards_of(4), task=task)
    assert host.evaluate(SEARCH, 0, {"target": 0.0}) == 4
    assert host.evaluate(SEARCH, 0, {"target": 0.0}) == 4
    assert len(task.trained) == 4
    host.evaluate(SEARCH, 0, {"target": 1.0})
    host.evaluate(SEARCH, 1, {"target": 1.0})
    host.evaluate(("people", "another"), 1, {"target": 1.0})
    assert len(task.trained) == 16


def test_a_failing_candidate_counts_as_answered_and_is_the_worst(make_host):
    host = make_host(shards_of(4), task=Counts())
    assert host.evaluate(SEARCH, 0, {"fails": True}) == 4
    assert np.all(np.isnan(host.scores(SEARCH, 1, EVERYONE)))


def test_the_same_client_and_candidate_train_with_the_same_private_generator(make_host):
    config = {"target": 0.0, "jitter": 1.0}
    first = make_host(shards_of(4))
    first.evaluate(SEARCH, 0, config)
    before = first.scores(SEARCH, 1, EVERYONE)
    first.forget(SEARCH)
    rebuilt = make_host(shards_of(4), name="rebuilt")
    rebuilt.evaluate(SEARCH, 0, config)
    np.testing.assert_array_equal(rebuilt.scores(SEARCH, 1, EVERYONE), before)
    draws = {rebuilt.generator(client, "score", "search", 0).random() for client in EVERYONE}
    draws |= {rebuilt.generator("client-000", "score", run, index).random() for run, index in [("s", 0), ("search", 1)]}
    assert len(draws) == 6


def test_a_configuration_changed_by_one_client_does_not_reach_the_next(make_host):
    class Changes(RowSum):
        def fit_and_score(self, config, records, rng):
            config["nested"]["rate"] *= 2
            return config["nested"]["rate"]

    host = make_host(shards_of(4), task=Changes())
    host.evaluate(SEARCH, 0, {"nested": {"rate": 1.0}})
    np.testing.assert_array_equal(host.scores(SEARCH, 1, EVERYONE), np.full((4, 1), 2.0))


def votes_request(votes=1, candidates=3, quanta=None):
    return replace(
        ask(),
        key=ReleaseKey("search", "top-k votes", 0),
        query=Votes("search", candidates, votes),
        mechanism=TopKVotes(votes, candidates),
        quanta=quanta,
    )


def test_votes_come_from_stored_scores_and_missing_ones_are_the_worst(make_host):
    shards = shards_of(4)
    host = make_host(shards)
    for candidate in (0, 2):
        host.evaluate(SEARCH, candidate, {"target": 0.0 if candidate == 2 else 50.0})
    request = votes_request()
    noise = host.prepare(request).noise
    messages = host.reveal(RUN, request.key, EVERYONE, request.head)
    np.testing.assert_array_equal(from_grid(total(messages), noise.grid), [0, 0, 4])


def test_a_vote_on_one_population_counts_no_scores_of_another(make_host):
    """Same node, same state folder, same run and candidates: only the population differs."""
    shards = shards_of(4)
    theirs, ours = make_host(shards, name="theirs"), make_host(shards, name="ours")
    for candidate in range(3):
        theirs.evaluate(("others", "search"), candidate, {"target": 0.0 if candidate == 0 else 50.0})
        ours.evaluate(SEARCH, candidate, {"target": 0.0 if candidate == 2 else 50.0})
    for host, population, counts in ((theirs, "others", [4, 0, 0]), (ours, "people", [0, 0, 4])):
        request = replace(votes_request(), population=population)
        noise = host.prepare(request).noise
        messages = host.reveal((population, "run"), request.key, EVERYONE, request.head)
        np.testing.assert_array_equal(from_grid(total(messages), noise.grid), counts)


@pytest.mark.parametrize("question", ["contribute", "prepare"])
def test_a_host_refuses_where_its_clients_hold_more_records_than_declared(make_host, question):
    host = make_host({**shards_of(3), "large": records(9, rows=6)})
    request = ask(regime=Regime.CENTRAL, rows=6)
    with pytest.raises(CohortError, match="at most 5 records a client, and a client holds 6"):
        getattr(host, question)(replace(request, records_per_client=5))
    getattr(host, question)(replace(request, records_per_client=6))
    getattr(host, question)(request)


def test_one_noised_ballot_is_k_ones_and_noise_of_the_stated_std(make_host):
    host = make_host(shards_of(4))
    request = votes_request(quanta=floor_quanta(0.5))
    noise = host.prepare(request).noise
    assert noise.sigma == pytest.approx(np.sqrt(2) / 0.5)
    assert total(host.reveal(RUN, request.key, EVERYONE, request.head)).dtype == np.int64


KILLER = """
import os, sys
sys.path.insert(0, {tests!r})
import numpy as np
from dpray.platform.cohort.client import Records, Stack
from dpray.platform.cohort.host import Host, HostSpec, Request
from dpray.platform.cohort.queries import GradientSum, Terms
from dpray.platform.cohort.client import ClientTask
from dpray.platform.privacy.ledger import Head, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Regime, Unit
from dpray.platform.privacy.noise import NoiseSource

class Task(ClientTask):
    dimension = 2
    def clipped_sum(self, theta, records, clip):
        if records.y[0]:
            os._exit(7)
        return records.x.sum(axis=0)
    def fit_and_score(self, config, records, rng):
        if records.y[0]:
            os._exit(7)
        return 1.0

shards = [Records(np.full((1, 2), .5), np.array([bad])) for bad in (0, 1, 0)]
stack = Stack.of(shards)
spec = HostSpec("h", ("a", "b", "c"), Task(), lambda: stack, {folder!r}, Terms(2, 0.0, 3, 3), 3, 3,
    NoiseSource(), None, None)
host = Host(spec)
query, mechanism = GradientSum(np.zeros(2), 1.0), ClippedSum(1.0, Unit.RECORD, 2, 3)
request = Request("p", "r", ReleaseKey("t", "clipped sum", 0), 1, Head(1, "0"), None, query, mechanism, Regime.CENTRAL)
if {what!r} == "sum":
    message = host.contribute(request)
    print(message.clients, *(message.steps * mechanism.noise(float("inf")).grid))
else:
    print(host.evaluate(("p", "s"), 0, {{}}), host.scores(("p", "s"), 1, ("a", "b", "c")).ravel().tolist())
"""


@pytest.mark.parametrize(("what", "answer"), [("sum", "3 1.0 1.0"), ("scores", "3 [1.0, nan, 1.0]")])
def test_a_client_whose_code_kills_the_process_is_answered_for_after_its_second_death(tmp_path, what, answer):
    code = KILLER.format(tests=".", folder=str(tmp_path / "site"), what=what)
    codes, said = [], ""
    for _ in range(6):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        codes.append(done.returncode)
        said = done.stdout.strip()
        if done.returncode == 0:
            break
    assert codes == [7, 7, 0]
    assert said == answer


def test_blocks_of_clients_do_not_change_the_sum(make_host, monkeypatch):
    shards, request = shards_of(4), ask(regime=Regime.CENTRAL)
    whole = make_host(shards).contribute(request).steps
    monkeypatch.setattr("dpray.platform.cohort.host._BLOCK", DIMENSION * 3)
    blocks = make_host(shards, name="blocks").contribute(replace(request, epoch=2)).steps
    np.testing.assert_array_equal(whole, blocks)


def test_the_anchor_is_the_newest_head_that_was_shown(make_host):
    host = make_host(shards_of(4))
    assert host.anchor() is None
    revealed(host, ask(), head=Head(77, "b" * 64))
    assert host.anchor() == Head(77, "b" * 64)


def test_stacks_are_views_for_neighbours(make_host):
    host = make_host(shards_of(4))
    assert isinstance(host.shards(EVERYONE[1:3]), Stack)
    assert np.shares_memory(host.shards(EVERYONE[1:3]).x, host.shards(EVERYONE).x)
