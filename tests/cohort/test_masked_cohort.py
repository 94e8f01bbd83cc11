"""Masked sums on Ray, one actor a client: what the driver is sent, and actors that are killed in every phase."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from dpray.platform.cohort import ClientsRefused, Cohort, CohortError, GradientSum, QuorumLost, Site, Votes
from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.masked.aggregator import Aggregator
from dpray.platform.cohort.masked.messages import (
    Advertisement,
    MaskedInput,
    Members,
    ProtocolRefused,
    Shares,
    Survivors,
    Unmasking,
)
from dpray.platform.cohort.masked_journal import MaskedJournal
from dpray.platform.cohort.masking import MaskingHost, session_of
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.request import Prepared
from dpray.platform.cohort.secure_sum import Masked
from dpray.platform.cohort.ticket import JournalRefused
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.ledger import ReleaseKey, ReleaseLost
from dpray.platform.privacy.mechanisms import Regime, TopKVotes, Unit
from dpray.platform.privacy.noise import NoiseSource, from_grid, to_grid

from .conftest import (
    CLIP,
    DIMENSION,
    SEARCH,
    RowSum,
    ask,
    client_names,
    end_for_good,
    gradient_mechanism,
    records,
    shards_of,
)

THETA = np.zeros(DIMENSION)
QUERY = GradientSum(THETA, CLIP)
MASKED = Regime.DISTRIBUTED
NUMBER = 6


def site_records(seed):
    return lambda: records(seed)


def sites(number=NUMBER):
    return {name: Site(site_records(seed), 5) for seed, name in enumerate(client_names(number))}


def exact(clients, grid):
    """The un-noised sum on the grid over these clients, from the task alone."""
    every = shards_of(NUMBER)
    return sum(to_grid(RowSum().clipped_sum(THETA, every[client], CLIP), grid) for client in clients)


SIMULATED = "distributed (clients simulated)"


@pytest.fixture
def build(by_value, tmp_path):
    built = []

    def make(shards=None, **settings):
        given = {"state_dir": tmp_path / "state", "timeout": 60.0, "secure_sum": "masked", **settings}
        cohort = Cohort(RowSum(), sites() if shards is None else shards, **given)
        built.append(cohort)
        return cohort

    yield make
    for cohort in built:
        cohort.close()


@pytest.fixture
def open_attempt(ledger):
    """Attempts without noise, so that sums are known exactly; again: the attempt of a resumed computation."""
    population = ledger.population("open")
    population.account(Unit.RECORD, Budget(float("inf"), 1e-5, non_private=True))
    run = population.run("run")

    def charge(query=QUERY, mechanism=None, step=0, trust="distributed"):
        mechanism = mechanism or gradient_mechanism(NUMBER)
        key = ReleaseKey("training", mechanism.name, step)
        return run.charge(key, query.describe(), mechanism, None, trust)

    return charge


def kill(cohort, *clients):
    """End the processes of these clients' hosts, as a machine that loses power would."""
    for process, names in cohort.processes().items():
        if set(names) & set(clients):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def before_call(monkeypatch):
    """Do something once, before the driver makes its first call of a method to the hosts."""

    def arrange(**actions):
        call = Dispatch.call

        def watched(self, method, arguments, **options):
            action = actions.pop(method, None)
            if action is not None:
                action()
            return call(self, method, arguments, **options)

        monkeypatch.setattr(Dispatch, "call", watched)

    return arrange


def test_the_trust_mode_says_distributed(tmp_path):
    cohort = Cohort(RowSum(), sites(), state_dir=tmp_path, secure_sum="masked")
    assert cohort.trust(Regime.DISTRIBUTED) == "distributed"
    assert cohort.trust(Regime.CENTRAL) == "central"
    assert cohort.trust(Regime.LOCAL) == "local"
    pool = Cohort(RowSum(), shards_of(NUMBER), state_dir=tmp_path, secure_sum="masked")
    assert pool.trust(Regime.DISTRIBUTED) == SIMULATED


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"secure_sum": "magic"}, "`trusted` or `masked`; 'magic'"),
        ({"quorum": 3}, "needs 4 of them to open it, and the quorum is 3"),
        ({"colluders": 6}, "needs 7 of them"),
        ({"secure_sum": Masked(degree=1)}, "degree is at least 2"),
    ],
)
def test_what_cannot_be_masked_is_refused_at_construction(tmp_path, settings, sentence):
    with pytest.raises(CohortError, match=sentence):
        Cohort(RowSum(), sites(), state_dir=tmp_path, **{"secure_sum": "masked", **settings})


def test_noise_still_counts_on_the_quorum_without_its_colluders(tmp_path):
    cohort = Cohort(RowSum(), sites(), state_dir=tmp_path, quorum=5, colluders=2, secure_sum="masked")
    assert cohort.n_min == 3
    assert cohort.noise_for(gradient_mechanism(NUMBER), 0.5, MASKED).noisers == 3


def test_gradient_sums_and_votes_are_exact(build, open_attempt):
    cohort, mechanism = build(), gradient_mechanism(NUMBER)
    result = cohort.sum(open_attempt(), QUERY, mechanism, MASKED)
    np.testing.assert_array_equal(result.total, exact(result.participants, result.grid))
    assert (result.participants, result.records) == (client_names(NUMBER), 30)
    for candidate in range(3):
        cohort.evaluate(("open", "search"), candidate, {"target": 9.0 * (candidate != 1)})
    votes, mechanism = Votes("search", 3, 1), TopKVotes(1, 3)
    result = cohort.sum(open_attempt(votes, mechanism), votes, mechanism, MASKED)
    np.testing.assert_array_equal(result.value, [0, NUMBER, 0])


def test_a_sum_without_noise_is_shown_to_nobody(build, open_attempt):
    cohort, mechanism = build(), gradient_mechanism(NUMBER)
    with pytest.raises(CohortError, match="must not see a sum without noise"):
        cohort.sum(open_attempt(trust="central"), QUERY, mechanism, Regime.CENTRAL)


def test_a_pool_runs_the_same_protocol_for_each_of_its_clients(build, open_attempt):
    cohort = build(shards_of(NUMBER), actors=2)
    result = cohort.sum(open_attempt(trust=SIMULATED), QUERY, gradient_mechanism(NUMBER), MASKED)
    np.testing.assert_array_equal(result.total, exact(result.participants, result.grid))


def test_the_sum_holds_the_noise_of_its_shares(build, attempt, tmp_path):
    """60 × 6 values of a seeded pool in two layouts: the same sums; and variance σ²·n/n_min.

    Relative std of the variance √(2/360) = .075: five of them are passed once in 2 million runs. Negative control:
    half and twice that variance are not within them.
    """
    mechanism = gradient_mechanism(NUMBER)
    cohort = build(shards_of(NUMBER), actors=2, noise=NoiseSource(5))
    noise = cohort.noise_for(mechanism, 0.5, MASKED)
    values = []
    for step in range(60):
        result = cohort.sum(attempt(QUERY, mechanism, step, trust=SIMULATED), QUERY, mechanism, MASKED)
        values.append(result.total - exact(result.participants, result.grid))
    variance = np.mean(from_grid(np.array(values), noise.grid) ** 2) / noise.std(NUMBER) ** 2
    assert abs(variance - 1) < 0.375
    assert not any(abs(wrong * variance - 1) < 0.375 / 2 for wrong in (0.5, 2.0))


@pytest.mark.parametrize("phase", ["share", "mask"])
def test_an_actor_killed_before_its_masked_input_is_a_dropout(build, open_attempt, before_call, phase):
    cohort = build(quorum=4)
    cohort.start()
    before_call(**{phase: lambda: kill(cohort, "client-002")})
    result = cohort.sum(open_attempt(), QUERY, gradient_mechanism(NUMBER), MASKED)
    assert result.participants == tuple(name for name in client_names(NUMBER) if name != "client-002")
    np.testing.assert_array_equal(result.total, exact(result.participants, result.grid))


def test_one_killed_before_and_one_after_its_masked_input(build, open_attempt, before_call):
    """The first is not in the sum; the second is, opened by the others' shares."""
    cohort = build(quorum=4)
    cohort.start()
    before_call(mask=lambda: kill(cohort, "client-001"), unmask=lambda: kill(cohort, "client-004"))
    result = cohort.sum(open_attempt(), QUERY, gradient_mechanism(NUMBER), MASKED)
    assert result.participants == tuple(name for name in client_names(NUMBER) if name != "client-001")
    np.testing.assert_array_equal(result.total, exact(result.participants, result.grid))


def test_with_everybody_needed_a_host_that_was_killed_joins_the_next_try(build, open_attempt, before_call):
    cohort = build()
    cohort.start()
    before_call(mask=lambda: kill(cohort, "client-003"))
    result = cohort.sum(open_attempt(), QUERY, gradient_mechanism(NUMBER), MASKED)
    assert result.participants == client_names(NUMBER)
    np.testing.assert_array_equal(result.total, exact(result.participants, result.grid))


def test_below_the_quorum_nothing_is_committed_and_the_key_can_be_tried_again(build, by_value, attempt, run, tmp_path):
    """The budget is intact: however often the key is tried, account and clients' journals count one release."""
    cohort, mechanism, quanta = build(quorum=5), gradient_mechanism(NUMBER), floor_quanta(0.5)
    cohort.start()
    end_for_good(by_value, cohort._running.handles[:2])
    for _ in range(2):
        with pytest.raises(QuorumLost, match="4 clients answered, and the quorum is 5") as caught:
            cohort.sum(attempt(QUERY, mechanism, trust="distributed"), QUERY, mechanism, MASKED)
    assert (caught.value.answered, caught.value.quorum) == (4, 5)
    assert attempt(QUERY, mechanism, trust="distributed").participants is None
    assert spent(tmp_path, "client-005") == 0
    cohort.close()
    again = attempt(QUERY, mechanism, trust="distributed")
    assert len(build(quorum=5).sum(again, QUERY, mechanism, MASKED).participants) == NUMBER
    assert run.population.account(Unit.RECORD).spent == quanta
    assert [spent(tmp_path, client) for client in client_names(NUMBER)] == [quanta] * NUMBER


def spent(folder, client):
    """What the client's own journal has counted, in quanta."""
    journal = MaskedJournal(folder / "state" / client / "journal.db")
    try:
        return journal.spent(client)
    finally:
        journal.close()


def test_too_many_killed_after_their_masked_input_repeat_their_messages(build, attempt, before_call, monkeypatch):
    """Noised: the sum that is opened at last is over the messages that were in the journal before, byte for byte."""
    cohort, mechanism = build(quorum=4), gradient_mechanism(NUMBER)
    cohort.start()
    before_call(unmask=lambda: kill(cohort, "client-000", "client-001", "client-002"))
    first = cohort.sum(attempt(QUERY, mechanism, trust="distributed"), QUERY, mechanism, MASKED)
    assert first.participants == client_names(NUMBER)
    resumed = attempt(QUERY, mechanism, trust="distributed")
    assert resumed.participants == frozenset(first.participants)
    again = cohort.sum(resumed, QUERY, mechanism, MASKED)
    assert again.total.tobytes() == first.total.tobytes()


def test_a_committed_set_that_is_not_there_any_more_is_lost(build, by_value, attempt, before_call):
    cohort, mechanism = build(quorum=4), gradient_mechanism(NUMBER)
    cohort.start()

    def end():
        end_for_good(by_value, cohort._running.handles[:3])

    before_call(unmask=end)
    with pytest.raises(ReleaseLost, match="too few of them could unmask"):
        cohort.sum(attempt(QUERY, mechanism, trust="distributed"), QUERY, mechanism, MASKED)


def test_a_second_sum_over_other_survivors_is_refused_by_the_clients(build, attempt, by_value, monkeypatch):
    """A driver that ignores its own ledger and asks a key again without having committed to the first set."""
    cohort, mechanism = build(quorum=4), gradient_mechanism(NUMBER)
    charged = attempt(QUERY, mechanism, trust="distributed")
    cohort.sum(charged, QUERY, mechanism, MASKED)
    end_for_good(by_value, cohort._running.handles[:1])
    forged = attempt(QUERY, mechanism, trust="distributed")
    forged.participants = None
    monkeypatch.setattr(type(forged), "commit", lambda self, participants: self.head)
    with pytest.raises(ClientsRefused, match="for one set of participants and asked for another"):
        cohort.sum(forged, QUERY, mechanism, MASKED)


def test_two_runs_take_turns_and_do_not_mix(build, attempt, run):
    cohort, mechanism = build(), gradient_mechanism(NUMBER)
    other = run.population.run("other")
    for step in range(2):
        for of in (run, other):
            charged = attempt(QUERY, mechanism, step, of=of, trust="distributed")
            assert len(cohort.sum(charged, QUERY, mechanism, MASKED).participants) == NUMBER


def everything_received(monkeypatch):
    """Every answer of a host that reaches the driver, by method."""
    call, record = Dispatch.call, []

    def watched(self, method, arguments, **options):
        answers = call(self, method, arguments, **options)
        record.extend((method, answer) for answer in answers.values())
        return answers

    monkeypatch.setattr(Dispatch, "call", watched)
    return record


def test_the_driver_receives_keys_shares_uniform_vectors_and_nothing_else(build, open_attempt, monkeypatch):
    """Un-noised gradient sums, which would be plain to see; χ² over bytes, false alarm 10⁻⁶, and negative control."""
    cohort, mechanism = build(), gradient_mechanism(NUMBER)
    cohort.start()
    record = everything_received(monkeypatch)
    data = []
    for step in range(12):
        cohort.sum(open_attempt(step=step), QUERY, mechanism, MASKED)
    kinds = {"prepare": Advertisement, "share": Shares, "mask": MaskedInput, "unmask": Unmasking}
    assert {method for method, _ in record} == kinds.keys()
    for method, answer in record:
        messages = answer.sent if isinstance(answer, Prepared) else answer
        assert {type(message) for message in messages} == {kinds[method]}
        data += [message.data for message in messages if isinstance(message, MaskedInput)]
    plain = exact(client_names(NUMBER), cohort.noise_for(mechanism, float("inf"), MASKED).grid)
    assert len(data) == 12 * NUMBER
    assert not unlike_bytes(data)
    assert unlike_bytes([plain.astype("<i8").tobytes()] * 12 * NUMBER)


def unlike_bytes(vectors):
    counts = np.bincount(np.frombuffer(b"".join(vectors), dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() > chi2.isf(1e-6, 255))


# a host in this process


@pytest.fixture
def make_masking(make_host, monkeypatch):
    def build(**settings):
        from . import conftest

        monkeypatch.setattr(conftest, "Host", MaskingHost)
        names = client_names(4)
        return make_host(shards_of(4), quorum=3, n_min=2, masked=Masked(), everyone=names, **settings)

    return build


def test_a_host_does_not_contribute_without_noise(make_masking):
    with pytest.raises(CohortError, match="under a masked sum only"):
        make_masking().contribute(ask())


def test_a_host_has_no_part_in_a_try_it_does_not_know(make_masking):
    host = make_masking()
    request = replace(ask(), nonce="0" * 32)
    host.prepare(request)
    for call in (
        lambda: host.share("1" * 32, {0: None}),
        lambda: host.mask("1" * 32, {0: None}),
        lambda: host.unmask(replace(request, nonce="1" * 32, participants=client_names(4))),
        lambda: host.share("0" * 32, {9: None}),
    ):
        with pytest.raises(JournalRefused) as caught:
            call()
        assert caught.value.kind == "again"


def test_two_runs_at_the_same_time_do_not_mix(make_masking):
    """One host, the phases of two runs in turns: both sums exact; and a run's messages are refused in the other."""
    host, names = make_masking(), client_names(4)
    shards, servers, requests = shards_of(4), {}, {}
    for index, run in enumerate(("run", "other")):
        requests[run] = replace(ask(), run=run, nonce=f"{index:032x}", quanta=None)
        prepared = host.prepare(requests[run])
        session = session_of(requests[run], prepared.noise, Masked(), host._spec.terms, 3, 1)
        servers[run] = Aggregator(session)
        for message in prepared.sent:
            servers[run].receive(message)
    rosters = {run: server.rosters() for run, server in servers.items()}
    with pytest.raises(ProtocolRefused, match="another session"):
        host.share(requests["run"].nonce, rosters["other"])
    for method, told in (("share", lambda run: rosters[run]), ("mask", lambda run: servers[run].parcels())):
        said = {run: told(run) for run in servers}
        answers = {run: getattr(host, method)(requests[run].nonce, said[run]) for run in servers}
        with pytest.raises(ProtocolRefused, match="another session"):
            servers["run"].receive(answers["other"][0])
        for run, server in servers.items():
            for message in answers[run]:
                server.receive(message)
    for run, server in servers.items():
        server.survivors()
        for message in host.unmask(replace(requests[run], participants=names)):
            server.receive(message)
        noise = requests[run].mechanism.noise(float("inf"), noisers=2)
        every = [to_grid(RowSum().clipped_sum(THETA, shard, CLIP), noise.grid) for shard in shards.values()]
        np.testing.assert_array_equal(server.total(), sum(every))


def test_a_masking_host_does_not_answer_a_trusted_sum(make_masking):
    with pytest.raises(CohortError, match="masked sum only"):
        make_masking().prepare(ask())


def test_members_are_read_from_the_names_that_were_committed(make_masking):
    """Survivors are made by the host from the committed names; below the quorum it refuses before it notes anything."""
    host = make_masking()
    request = replace(ask(), nonce="0" * 32)
    host.prepare(request)
    with pytest.raises(CohortError):
        host.unmask(replace(request, participants=client_names(4)[:2]))
    assert host._journal.spent("client-000") == 0
    assert Members.of([0, 1], 4) == Survivors(b"", Members.of([1, 0], 4)).members


def test_scores_are_kept_as_by_any_host(make_masking):
    assert make_masking().evaluate(SEARCH, 0, {"target": 0.0}) == 4


def test_a_ring_that_would_wrap_is_refused_from_public_numbers():
    noise, terms = gradient_mechanism(NUMBER).noise(0.5, noisers=5), Terms(DIMENSION, 0.0, NUMBER, 2**60)
    with pytest.raises(CohortError, match="could wrap around"):
        session_of(ask(), noise, Masked(), terms, NUMBER, 1)
    assert session_of(ask(), noise, Masked(), replace(terms, records=30), NUMBER, 1).bits == 32
    assert session_of(ask(), noise, Masked(), replace(terms, records=2**30), NUMBER, 1).bits == 64


def test_a_release_is_charged_as_distributed(build, run):
    cohort, mechanism = build(), gradient_mechanism(NUMBER)
    release = run.release(
        ReleaseKey("training", mechanism.name, 0),
        QUERY.describe(),
        mechanism,
        floor_quanta(0.5),
        lambda charged: cohort.sum(charged, QUERY, mechanism, MASKED).pack(),
        trust=cohort.trust(MASKED),
    )
    assert release.value.shape == (DIMENSION + 2,)
    assert run.population.account(Unit.RECORD).statement().trust == ("distributed",)
