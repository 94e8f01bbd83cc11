"""A vote's winner alone: exact counts meet at the trusted server, and one index comes out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpray.platform.cohort import Cohort, CohortError, Votes
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.request import noise_of
from dpray.platform.privacy.budget import Budget, ceil_quanta, floor_quanta
from dpray.platform.privacy.gdp import mu_from_pure
from dpray.platform.privacy.ledger import LedgerError, ReleaseKey
from dpray.platform.privacy.mechanisms import Regime, TopKVotes, VoteWinner
from dpray.platform.privacy.noise import SEEDED, NoiseSource

from .conftest import DIMENSION, SEARCH, RowSum, ask, client_names, records, shards_of

P, K = 4, 1
QUERY, WINNER = Votes("search", P, K), VoteWinner(K, P)
EVERYONE = client_names(4)


def asking(step=0, **changes):
    request = ask(step, regime=Regime.CENTRAL, query=QUERY, mechanism=WINNER, quanta=floor_quanta(2.0))
    return replace(request, key=ReleaseKey("search", "winner", step), **changes)


def anything(kind, records):
    """Scores that user code may come up with, and what it may do instead."""
    match kind:
        case 1:
            raise ValueError(str(records.x))
        case 2:
            raise SystemExit(str(records.x))
        case 3:
            return float("nan")
        case 4:
            return float("inf")
        case 5:
            return "not a number"
        case 6:
            return records.x
        case 7:
            return 1e308
    return None


def evaluated(host):
    for candidate in range(P):
        host.evaluate(SEARCH, candidate, {"target": float(candidate)})
    return host


class TestAtTheHosts:
    def test_counts_are_whole_and_without_noise(self, make_host):
        """Everybody's records have mean near 0: all like candidate 0 best."""
        message = evaluated(make_host(shards_of(4))).contribute(asking())

        assert message.steps.tolist() == [4, 0, 0, 0]
        assert message.clients == 4

    @given(kinds=st.tuples(st.integers(0, 8), st.integers(0, 8)), who=st.integers(0, 3), seed=st.integers(100, 999))
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_replacing_a_client_by_anything_moves_every_count_by_one_at_most(self, make_host, kinds, who, seed):
        counts = []
        for kind, source in zip(kinds, (who, seed), strict=True):
            here = {**shards_of(4), EVERYONE[who]: records(source, label=kind)}
            site = f"{kinds} {who} {seed} {source}"
            host = evaluated(make_host(here, task=RowSum(anything), site=site, noise=NoiseSource(3)))
            counts.append(host.contribute(asking()).steps)
        moved = counts[0] - counts[1]
        assert np.max(np.abs(moved)) <= WINNER.sensitivity
        assert moved.sum() == 0
        assert all(each.sum() == 4 * K for each in counts)

    @pytest.mark.parametrize("regime", [Regime.DISTRIBUTED, Regime.LOCAL])
    def test_clients_refuse_a_winner_without_a_trusted_server(self, make_host, regime):
        host = evaluated(make_host(shards_of(4)))

        with pytest.raises(CohortError, match="trusted aggregator"):
            host.prepare(asking(regime=regime))
        assert host._journal.spent(EVERYONE[0]) == 0

    def test_each_client_notes_what_is_charged(self, make_host):
        host = evaluated(make_host(shards_of(4), cap=Budget(30.0, 1e-5)))
        host.contribute(asking())

        assert host._journal.spent(EVERYONE[0]) == floor_quanta(2.0)

    def test_another_mechanism_is_refused(self):
        terms = Terms(DIMENSION, 0.0, 4, 20)
        QUERY.check(WINNER, terms)
        for wrong in (VoteWinner(2, P), VoteWinner(K, P + 1)):
            with pytest.raises(CohortError, match="VoteWinner"):
                QUERY.check(wrong, terms)


def test_a_winner_has_no_noise_in_its_sum_and_a_vote_has():
    assert not noise_of(WINNER, 0.5, Regime.CENTRAL, 4).private
    assert noise_of(TopKVotes(K, P), 0.5, Regime.CENTRAL, 4).private


class TestOnRay:
    @pytest.fixture
    def build(self, by_value, tmp_path):
        built = []

        def make(shards, **changes):
            cohort = Cohort(RowSum(), shards, **{"state_dir": tmp_path / "state", "timeout": 60.0, **changes})
            built.append(cohort)
            return cohort

        yield make
        for cohort in built:
            cohort.close()

    def charged(self, run, quanta, mechanism=WINNER, step=0):
        return run.charge(ReleaseKey("search", "winner", step), QUERY.describe(), mechanism, quanta)

    def test_a_cohort_names_the_winner_once_per_attempt(self, build, run):
        """ε = 4, 10 votes to 0: another one wins with probability 3e⁻²⁰."""
        cohort = build(shards_of(10), actors=2, noise=NoiseSource(3))
        for candidate in range(P):
            cohort.evaluate(SEARCH, candidate, {"target": float(candidate)})
        attempt = self.charged(run, ceil_quanta(mu_from_pure(4.0)))

        assert cohort.winner(attempt, QUERY, WINNER) == 0
        with pytest.raises(LedgerError, match="not drawn a second time"):
            cohort.winner(attempt, QUERY, WINNER)
        assert attempt.stamps == (SEEDED,)

    def test_its_counts_come_out_as_no_sum(self, build, run):
        """Through `sum` they would be released without noise."""
        cohort = build(shards_of(4), actors=1)
        attempt = self.charged(run, floor_quanta(0.5))

        for regime in Regime:
            with pytest.raises(CohortError, match=r"Cohort\.winner"):
                cohort.sum(attempt, QUERY, WINNER, regime)
        assert cohort._running is None

    def test_noisy_votes_are_not_released_as_a_winner(self, build, run):
        cohort, votes = build(shards_of(4), actors=1), TopKVotes(K, P)

        with pytest.raises(CohortError, match="by a VoteWinner"):
            cohort.winner(self.charged(run, floor_quanta(0.5), votes), QUERY, votes)
        assert cohort._running is None

    def test_a_masked_cohort_refuses(self, run, tmp_path):
        cohort = Cohort(RowSum(), shards_of(9), state_dir=tmp_path, quorum=8, secure_sum="masked")

        assert cohort.masked
        with pytest.raises(CohortError, match="must not see"):
            cohort.winner(self.charged(run, floor_quanta(0.5)), QUERY, WINNER)
