"""A cohort on Ray: sums in every regime, refusals, handles."""

import sys

import numpy as np
import pytest
import threadpoolctl

from dpray.platform.cohort import ClientsRefused, ClientSum, Cohort, CohortError, GradientSum, QuorumLost, Site, Votes
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.ledger import Ledger, LedgerTampered, ReleaseKey, back_up, restore
from dpray.platform.privacy.mechanisms import Regime, TopKVotes, Unit
from dpray.platform.privacy.noise import NoiseSource, from_grid, to_grid

from .conftest import CLIP, DIMENSION, SEARCH, RowSum, end_for_good, gradient_mechanism, opened_run, records, shards_of

THETA = np.zeros(DIMENSION)
QUERY = GradientSum(THETA, CLIP)
QUANTA = floor_quanta(0.5)
REGIMES = list(Regime)


def exact(shards, grid):
    return sum(to_grid(RowSum().clipped_sum(THETA, shard, CLIP), grid) for shard in shards.values())


@pytest.fixture
def build(by_value, tmp_path):
    """Build cohorts that are closed afterwards; those of one test share the state folder."""
    built = []

    def make(shards, task=None, **settings):
        cohort = Cohort(task or RowSum(), shards, **{"state_dir": tmp_path / "state", "timeout": 60.0, **settings})
        built.append(cohort)
        return cohort

    yield make
    for cohort in built:
        cohort.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quorum": 5}, "quorum of 5 cannot be met by 4"),
        ({"quorum": 0}, "quorum"),
        ({"colluders": 0}, "colluders"),
        ({"actors": 0}, "actors"),
        ({"timeout": 0.0}, "timeout"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(tmp_path, settings, sentence):
    with pytest.raises(CohortError, match=sentence):
        Cohort(RowSum(), shards_of(4), state_dir=tmp_path, **settings)


def test_a_site_with_unknown_resources_is_refused_at_construction(by_value, tmp_path):
    sites = {"a": Site(records, 5, {"site:nowhere": 1})}
    with pytest.raises(CohortError, match="'site:nowhere'"):
        Cohort(RowSum(), sites, state_dir=tmp_path)


def test_a_site_whose_node_is_not_there_is_refused_only_if_the_others_are_no_quorum(by_value, tmp_path):
    sites = {"a": Site(records, 5), "b": Site(records, 5), "c": Site(records, 5, {"site:away": 1})}
    with pytest.raises(CohortError, match="'site:away'"):
        Cohort(RowSum(), sites, state_dir=tmp_path, quorum=3)
    assert Cohort(RowSum(), sites, state_dir=tmp_path, quorum=2).quorum == 2


@pytest.mark.parametrize(("quorum", "colluders", "n_min"), [(None, 1, 3), (3, 1, 2), (3, 2, 1), (2, 5, 1), (1, 1, 1)])
def test_noise_counts_on_the_quorum_without_its_colluders(tmp_path, quorum, colluders, n_min):
    cohort = Cohort(RowSum(), shards_of(4), state_dir=tmp_path, quorum=quorum, colluders=colluders)
    mechanism = gradient_mechanism()
    assert cohort.n_min == n_min
    assert cohort.noise_for(mechanism, 0.5, Regime.DISTRIBUTED).noisers == n_min
    assert cohort.noise_for(mechanism, 0.5, Regime.LOCAL).noisers == 1
    assert cohort.noise_for(mechanism, 0.5, Regime.CENTRAL).noisers == 1


def test_trust_says_what_is_simulated(tmp_path):
    pool = Cohort(RowSum(), shards_of(2), state_dir=tmp_path)
    sites = Cohort(RowSum(), {"a": Site(records, 5)}, state_dir=tmp_path)
    assert pool.trust(Regime.CENTRAL) == "central"
    assert pool.trust(Regime.DISTRIBUTED) == "central (aggregator trusted, shares simulated)"
    assert pool.trust(Regime.LOCAL) == "local (clients simulated)"
    assert sites.trust(Regime.LOCAL) == "local"


@pytest.mark.parametrize("regime", REGIMES)
def test_without_noise_every_regime_gives_the_exact_sum(build, ledger, regime):
    population = ledger.population("open")
    population.account(Unit.RECORD, Budget(float("inf"), 1e-5, non_private=True))
    shards, mechanism = shards_of(5), gradient_mechanism(5)
    cohort = build(shards, actors=2)
    key = ReleaseKey("t", "clipped sum", 0)
    charged = population.run("run").charge(key, QUERY.describe(), mechanism, None, cohort.trust(regime))
    result = cohort.sum(charged, QUERY, mechanism, regime)
    np.testing.assert_array_equal(result.total, exact(shards, result.grid))
    assert result.participants == tuple(shards)
    assert result.records == 25


@pytest.mark.parametrize("regime", REGIMES)
def test_a_seeded_sum_is_the_same_with_one_actor_and_with_two(build, attempt, regime, tmp_path):
    shards, mechanism, totals = shards_of(5), gradient_mechanism(5), []
    for actors in (1, 2):
        with Ledger(f"sqlite:///{tmp_path}/{actors}.db") as ledger:
            charged = attempt(QUERY, mechanism, of=opened_run(ledger), regime=regime)
            cohort = build(shards, actors=actors, noise=NoiseSource(3), state_dir=tmp_path / str(actors))
            assert cohort.reproducible
            totals.append(cohort.sum(charged, QUERY, mechanism, regime).total)
            cohort.close()
    np.testing.assert_array_equal(*totals)


def test_an_unseeded_release_holds_noise_and_is_packed_with_its_counts(build, run):
    shards, mechanism = shards_of(5), gradient_mechanism(5)
    cohort = build(shards, actors=2)
    assert not cohort.reproducible
    release = run.release(
        ReleaseKey("training", "clipped sum", 0),
        QUERY.describe(),
        mechanism,
        floor_quanta(0.5),
        lambda charged: cohort.sum(charged, QUERY, mechanism, Regime.DISTRIBUTED).pack(),
        trust=cohort.trust(Regime.DISTRIBUTED),
    )
    value, rows, clients = ClientSum.unpack(release.value)
    assert (value.shape, rows, clients) == ((DIMENSION,), 25, 5)
    noise = cohort.noise_for(mechanism, 0.5, Regime.DISTRIBUTED)
    assert not np.array_equal(value, from_grid(exact(shards, noise.grid), noise.grid))


def test_a_closed_cohort_leaves_its_journal_and_nothing_else(build, tmp_path):
    cohort = build(shards_of(5), actors=2)
    cohort.start()
    assert len(list((tmp_path / "state").glob("running-*"))) == 2
    cohort.close()
    left = {path.name.partition("-")[0] for path in (tmp_path / "state").iterdir()}
    assert left == {"journal.db", ".journal.db.lock"}


def test_a_sum_beyond_the_mechanism_is_refused_before_anybody_is_asked(build, attempt):
    cohort = build(shards_of(5))
    mechanism = gradient_mechanism(5, clip=1.0)
    with pytest.raises(CohortError, match=r"clip 1\.5"):
        cohort.sum(attempt(QUERY, mechanism, regime=Regime.CENTRAL), QUERY, mechanism, Regime.CENTRAL)
    assert cohort._running is None


def test_a_search_votes_on_scores_that_stay_with_the_clients(build, run):
    cohort = build(shards_of(5), actors=2)
    handle = cohort.handle()
    for candidate in range(3):
        assert handle.evaluate(SEARCH, candidate, {"target": 9.0 * candidate}) == 5
    query, mechanism = Votes("search", 3, 1), TopKVotes(1, 3)
    key, trust = ReleaseKey("search", mechanism.name, 0), cohort.trust(Regime.DISTRIBUTED)
    charged = run.charge(key, query.describe(), mechanism, floor_quanta(2.0), trust)
    result = cohort.sum(charged, query, mechanism, Regime.DISTRIBUTED)
    # Noise std √2/2 on each count, 5 to 0 votes: the difference is 5 std, passed once in 3 million runs.
    assert int(np.argmax(result.value)) == 0


def test_a_handle_works_from_another_process(build, by_value):
    cohort = build(shards_of(5), actors=2)

    @by_value.remote(num_cpus=0)
    def trial(handle):
        return handle.evaluate(SEARCH, 0, {"target": 0.0})

    assert by_value.get(trial.remote(cohort.handle())) == 5


def test_an_older_lease_is_refused_by_the_clients(build, attempt, run):
    mechanism = gradient_mechanism(4)
    old = attempt(QUERY, mechanism)
    new = attempt(QUERY, mechanism, of=run.population.run("run"))
    cohort = build(shards_of(4))
    cohort.sum(new, QUERY, mechanism, Regime.DISTRIBUTED)
    with pytest.raises(ClientsRefused, match="lease 1"):
        cohort.sum(old, QUERY, mechanism, Regime.DISTRIBUTED)


def test_another_ledger_is_refused_by_the_clients(build, ledger, attempt, tmp_path):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4))
    for step in range(3):
        cohort.sum(attempt(QUERY, mechanism, step), QUERY, mechanism, Regime.DISTRIBUTED)
    assert max(head.sequence for head in cohort.anchors()) == ledger.head().sequence
    assert ledger.verify(cohort.anchors()) == ()
    with Ledger(f"sqlite:///{tmp_path}/other.db") as other:
        population = other.population("people")
        population.account(Unit.RECORD, Budget(8.0, 1e-5))
        other_run = population.run("another run")
        for regime in (Regime.CENTRAL, Regime.DISTRIBUTED):
            charged = attempt(QUERY, mechanism, int(regime is Regime.CENTRAL), of=other_run, regime=regime)
            with pytest.raises(ClientsRefused, match="another ledger than the one these clients belong to"):
                cohort.sum(charged, QUERY, mechanism, regime)
        assert any("anchor" in problem.lower() or "copy" in problem for problem in other.verify(cohort.anchors()))


def test_a_copy_made_between_charge_and_store_is_refused_once_the_clients_saw_the_store(build, ledger, run, tmp_path):
    mechanism, cohort, asked, copy = gradient_mechanism(4), build(shards_of(4)), {"query": 1}, tmp_path / "copy.db"

    def compute(attempt):
        if not copy.exists():
            back_up(f"sqlite:///{tmp_path}/ledger.db", copy)
        return cohort.sum(attempt, QUERY, mechanism, Regime.CENTRAL).pack()

    run.release(ReleaseKey("training", "sum", 0), asked, mechanism, QUANTA, compute, trust="central")
    assert cohort.anchor(ledger) == cohort.clients
    assert set(cohort.anchors()) == {ledger.head()}
    with pytest.raises(LedgerTampered, match="not up to what its anchors have seen"):
        restore(copy, f"sqlite:///{tmp_path}/restored.db", cohort.anchors())
    with Ledger(f"sqlite:///{copy}") as restored:
        again = restored.population("people").run("run")
        with pytest.raises(ClientsRefused, match=r"older copy|went on otherwise"):
            again.release(ReleaseKey("training", "sum", 0), asked, mechanism, QUANTA, compute, trust="central")
        with pytest.raises(ClientsRefused, match=r"older copy|went on otherwise"):
            cohort.anchor(restored)


def test_two_runs_of_one_ledger_may_take_turns(build, attempt, run):
    """The ledger moves on between a run's charge and its sum; that alone is no reason to refuse."""
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4))
    other = run.population.run("other")
    for step, regime in enumerate([Regime.CENTRAL, Regime.DISTRIBUTED]):
        first = attempt(QUERY, mechanism, step, regime=regime)
        second = attempt(QUERY, mechanism, step, of=other, regime=regime)
        cohort.sum(second, QUERY, mechanism, regime)
        cohort.sum(first, QUERY, mechanism, regime)


def test_a_client_refuses_beyond_its_own_cap(build, attempt):
    mechanism = gradient_mechanism(4)
    cohort = build(shards_of(4), cap=Budget(1.0, 1e-5))
    each = Budget(1.0, 1e-5).quanta // 2
    for step in range(2):
        cohort.sum(attempt(QUERY, mechanism, step, quanta=each), QUERY, mechanism, Regime.DISTRIBUTED)
    with pytest.raises(ClientsRefused, match="own cap"):
        cohort.sum(attempt(QUERY, mechanism, 2, quanta=each), QUERY, mechanism, Regime.DISTRIBUTED)


class Looks(RowSum):
    """Reports on its process through its score."""

    def fit_and_score(self, config, records, rng):
        if config["look"] == "torch":
            return float("torch" in sys.modules)
        np.ones((8, 8)) @ np.ones((8, 8))
        return float(max(pool["num_threads"] for pool in threadpoolctl.threadpool_info()))


def stored_scores(path, run):
    import sqlite3

    with sqlite3.connect(path) as database:
        return dict(database.execute("SELECT candidate, max(score) FROM scores WHERE run = ? GROUP BY 1", (run,)))


def test_hosts_do_not_import_torch_and_use_one_thread(build, tmp_path):
    cohort = build(shards_of(2), Looks())
    cohort.evaluate(("people", "looks"), 0, {"look": "torch"})
    cohort.evaluate(("people", "looks"), 1, {"look": "threads"})
    assert stored_scores(tmp_path / "state" / "journal.db", "looks") == {0: 0.0, 1: 1.0}
    cohort.forget(("people", "looks"))
    assert stored_scores(tmp_path / "state" / "journal.db", "looks") == {}


def site_records(seed):
    return lambda: records(seed)


def test_sites_load_their_own_records_and_keep_their_own_files(build, attempt, tmp_path):
    sites = {f"hospital {seed}": Site(site_records(seed), 5) for seed in range(3)}
    cohort, mechanism = build(sites), gradient_mechanism(3)
    result = cohort.sum(attempt(QUERY, mechanism, trust="local"), QUERY, mechanism, Regime.LOCAL)
    assert result.participants == tuple(sites)
    assert len(cohort.processes()) == 3
    assert sorted(path.parent.name for path in (tmp_path / "state").glob("*/journal.db")) == [
        f"hospital%20{seed}" for seed in range(3)
    ]


def test_a_site_answers_for_one_population_whatever_a_driver_calls_it(build, attempt, ledger):
    """Through a whole release: charged under the other name, refused by the site, nothing of it seen."""
    mechanism = gradient_mechanism(2)
    sites = {f"hospital-{seed}": Site(site_records(seed), 5) for seed in range(2)}
    build(sites).sum(attempt(QUERY, mechanism, trust="local"), QUERY, mechanism, Regime.LOCAL)
    twin = ledger.population("People", records_per_client=50)
    twin.account(Unit.RECORD, Budget(30.0, 1e-5))
    charged = attempt(QUERY, mechanism, trust="local", of=twin.run("run"))
    with pytest.raises(ClientsRefused, match="answers for the population 'people' was asked for 'People'"):
        build(sites).sum(charged, QUERY, mechanism, Regime.LOCAL)


def test_a_site_that_cannot_load_is_named_without_what_its_loader_said(build):
    def load():
        raise ValueError("canary-31")

    cohort = build({"a": Site(site_records(0), 5), "b": Site(load, 5)})
    with pytest.raises(CohortError, match="'b' could not be loaded") as caught:
        cohort.start()
    assert "canary" not in str(caught.value)


def test_a_quorum_that_is_not_met_reveals_nothing_and_commits_to_nobody(build, by_value, attempt, tmp_path):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2)
    cohort.start()
    end_for_good(by_value, [cohort._running.handles[0]])
    with pytest.raises(QuorumLost, match="2 clients answered, and the quorum is 4") as caught:
        cohort.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED)
    assert (caught.value.answered, caught.value.quorum) == (2, 4)
    assert attempt(QUERY, mechanism).participants is None
    cohort.close()
    again = build(shards_of(4), actors=2)
    assert len(again.sum(attempt(QUERY, mechanism), QUERY, mechanism, Regime.DISTRIBUTED).participants) == 4


@pytest.mark.parametrize("regime", REGIMES)
def test_with_enough_clients_left_a_lost_host_is_a_dropout(build, by_value, attempt, regime):
    mechanism, cohort = gradient_mechanism(4), build(shards_of(4), actors=2, quorum=2)
    cohort.start()
    end_for_good(by_value, [cohort._running.handles[0]])
    result = cohort.sum(attempt(QUERY, mechanism, regime=regime), QUERY, mechanism, regime)
    assert result.participants == ("client-002", "client-003")
    assert result.records == 10
