"""A sum is what was charged, once, for the population and the ledger it was charged in."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from dpray.platform.cohort import ClientsRefused, Cohort, CohortError, GradientSum
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.ledger import KeyConflict, Ledger, LedgerError, ReleaseKey, ReleaseLost
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.noise import SEEDED, NoiseSource

from .conftest import CLIP, DIMENSION, TRUST, RowSum, end_for_good, gradient_mechanism, opened_run, records, shards_of

QUERY = GradientSum(np.zeros(DIMENSION), CLIP)
MECHANISM = gradient_mechanism(4)
CENTRAL, SHARED = Regime.CENTRAL, Regime.DISTRIBUTED


@pytest.fixture
def build(by_value, tmp_path):
    built = []

    def make(shards=None, **settings):
        settings = {"state_dir": tmp_path / "state", "timeout": 60.0, "actors": 1, **settings}
        built.append(Cohort(RowSum(), shards or shards_of(4), **settings))
        return built[-1]

    yield make
    for cohort in built:
        cohort.close()


def total(cohort, charged, regime=SHARED, mechanism=MECHANISM):
    return cohort.sum(charged, QUERY, mechanism, regime)


# which ledger


def copied(source: Path, target: Path) -> str:
    """A backup, as a careful administrator makes it."""
    with sqlite3.connect(source) as before, sqlite3.connect(target) as after:
        before.backup(after)
    return f"sqlite:///{target}"


@pytest.mark.parametrize("regime", [CENTRAL, SHARED])
def test_a_restored_copy_is_refused_however_much_longer_it_grew(build, attempt, ledger, run, tmp_path, regime):
    cohort = build()
    total(cohort, attempt(QUERY, MECHANISM, 0, regime=regime), regime)
    backup = copied(tmp_path / "ledger.db", tmp_path / "backup.db")
    total(cohort, attempt(QUERY, MECHANISM, 1, regime=regime), regime)
    with Ledger(backup) as copy:
        people = copy.population("people")
        for index in range(20):
            people.run(f"x{index}")
        assert copy.head().sequence > ledger.head().sequence
        forked = attempt(QUERY, MECHANISM, 5, of=people.run("later"), regime=regime)
        for again in (cohort, build()):  # one that has seen the true ledger, and one that has not
            with pytest.raises(ClientsRefused, match="restored from an older copy that went on otherwise"):
                total(again, forked, regime)
    total(cohort, attempt(QUERY, MECHANISM, 2, regime=regime), regime)  # the true one goes on


def test_a_copy_that_goes_on_where_the_ledger_ended_is_the_ledger(build, attempt, ledger, run, tmp_path):
    """Negative control: moved, not forked."""
    cohort = build()
    total(cohort, attempt(QUERY, MECHANISM, 0))
    with Ledger(copied(tmp_path / "ledger.db", tmp_path / "moved.db")) as moved:
        moved_run = moved.population("people").run("run")
        assert len(total(cohort, attempt(QUERY, MECHANISM, 1, of=moved_run)).participants) == 4


def test_another_ledger_is_refused_however_long_it_is(build, attempt, ledger, tmp_path):
    total(build(), attempt(QUERY, MECHANISM, 0))
    with Ledger(f"sqlite:///{tmp_path}/new.db") as new:
        for index in range(40):
            new.population(f"z{index}")
        assert new.head().sequence > ledger.head().sequence
        with pytest.raises(ClientsRefused, match="another ledger than the one these clients belong to"):
            total(build(), attempt(QUERY, MECHANISM, 0, of=opened_run(new)))


def test_a_cohort_whose_clients_have_seen_more_than_it_knows_of_asks_once_more(build, attempt, run):
    """Two cohorts of one ledger and one state folder take turns; neither is told of the other's entries."""
    one, two = build(), build()
    other = run.population.run("other")
    for step in range(2):
        for regime in (CENTRAL, SHARED):
            key = 2 * step + int(regime is SHARED)
            total(one, attempt(QUERY, MECHANISM, key, regime=regime), regime)
            total(two, attempt(QUERY, MECHANISM, key, of=other, regime=regime), regime)


@pytest.mark.parametrize(("regime", "calls"), [(CENTRAL, ["contribute"]), (SHARED, ["prepare", "reveal"])])
def test_a_usual_round_makes_one_call_a_phase(build, attempt, monkeypatch, regime, calls):
    cohort = build()
    total(cohort, attempt(QUERY, MECHANISM, 0, regime=regime), regime)
    dispatch, made = cohort._running.dispatch, []
    call = dispatch.call
    monkeypatch.setattr(dispatch, "call", lambda method, *rest: made.append(method) or call(method, *rest))
    total(cohort, attempt(QUERY, MECHANISM, 1, regime=regime), regime)
    assert made == calls


# what was charged


def test_clients_with_more_records_than_declared_are_refused_before_anybody_is_asked(build, attempt, ledger):
    small = ledger.population("small", records_per_client=5)
    small.account(Unit.RECORD, Budget(8.0, 1e-5))
    small.account(Unit.CLIENT, Budget(30.0, 1e-5))
    mechanism, shards = gradient_mechanism(4, rows=6), {**shards_of(3), "large": records(9, rows=6)}
    cohort = build(shards)
    charged = attempt(QUERY, mechanism, of=small.run("run"))
    with pytest.raises(CohortError, match="at most 5 records a client, and a client holds 6"):
        total(cohort, charged, mechanism=mechanism)
    assert cohort._running is None
    fits = build(shards_of(4), state_dir=cohort._folder.parent / "fits")
    assert len(total(fits, attempt(QUERY, mechanism, of=small.run("run")), mechanism=mechanism).participants) == 4


@pytest.mark.parametrize(
    "other",
    [
        gradient_mechanism(4, unit=Unit.CLIENT),
        gradient_mechanism(4, clip=CLIP / 2),
        gradient_mechanism(5),
    ],
)
def test_a_sum_of_another_mechanism_than_charged_is_refused(build, attempt, ledger, other):
    cohort = build()
    with pytest.raises(KeyConflict, match="its charge would not cover it"):
        total(cohort, attempt(QUERY, other))
    assert cohort._running is None


@pytest.mark.parametrize(("charged", "asked"), [(CENTRAL, SHARED), (SHARED, Regime.LOCAL), (Regime.LOCAL, CENTRAL)])
def test_a_sum_under_another_trust_mode_than_charged_is_refused(build, attempt, charged, asked):
    cohort = build()
    with pytest.raises(KeyConflict, match="charged under trust mode"):
        total(cohort, attempt(QUERY, MECHANISM, regime=charged), asked)
    assert cohort._running is None


@pytest.mark.parametrize("changes", [{"quanta": floor_quanta(5.0)}, {"quanta": None}, {"release": 1}])
def test_an_attempt_changed_after_its_charge_is_refused(build, attempt, changes):
    charged = attempt(QUERY, MECHANISM)
    for name, value in changes.items():
        setattr(charged, name, value)
    cohort = build()
    with pytest.raises(LedgerError, match=r"was not charged for this attempt|was charged for another unit, spend"):
        total(cohort, charged)
    assert cohort._running is None


def test_one_attempt_gives_one_value_and_a_stored_release_none(build, attempt, run):
    """Means of many values of one charge would lose their noise."""
    cohort = build()
    first = attempt(QUERY, MECHANISM, regime=CENTRAL)
    value = total(cohort, first, CENTRAL)
    with pytest.raises(LedgerError, match="store it"):
        total(cohort, first, CENTRAL)
    again = attempt(QUERY, MECHANISM, regime=CENTRAL)  # nothing was stored: computed anew, at no cost
    assert not np.array_equal(total(cohort, again, CENTRAL).total, value.total)
    unused = attempt(QUERY, MECHANISM, regime=CENTRAL)
    run.store(first, value.pack())
    for charged in (first, unused):
        with pytest.raises(CohortError, match="stored already"):
            total(cohort, charged, CENTRAL)


def test_a_sum_that_failed_may_be_made_again_by_the_same_attempt(build, by_value, attempt):
    cohort = build(actors=2, quorum=3)
    cohort.start()
    charged = attempt(QUERY, MECHANISM, regime=CENTRAL)
    end_for_good(by_value, [cohort._running.handles[0]])
    with pytest.raises(CohortError, match="quorum"):
        total(cohort, charged, CENTRAL)
    cohort.close()
    assert len(total(build(), charged, CENTRAL).participants) == 4


@pytest.mark.parametrize("regime", [CENTRAL, SHARED])
def test_a_lost_release_is_not_computed(build, attempt, run, regime):
    charged = attempt(QUERY, MECHANISM, regime=regime)
    run.lose(charged, "for the test")
    cohort = build()
    with pytest.raises(ReleaseLost, match="for the test"):
        total(cohort, charged, regime)
    assert cohort._running is None


# seeded noise


def stamps(ledger):
    return ledger.population("people").account(Unit.RECORD).statement().stamps


@pytest.mark.parametrize("regime", list(Regime))
def test_seeded_noise_stamps_its_releases_whoever_opened_the_run(build, ledger, run, regime):
    cohort = build(noise=NoiseSource(7))

    def compute(charged):
        return total(cohort, charged, regime).pack()

    key = ReleaseKey("training", "clipped sum", 0)
    run.release(key, QUERY.describe(), MECHANISM, floor_quanta(0.5), compute, trust=TRUST[regime])
    assert run.stamps == ()
    assert stamps(ledger) == (SEEDED,)
    assert ledger.verify() == ()


def test_under_noise_shares_the_stamp_is_there_before_anything_is_revealed(build, ledger, attempt):
    total(build(noise=NoiseSource(7)), attempt(QUERY, MECHANISM))  # not stored
    assert stamps(ledger) == (SEEDED,)


def test_noise_that_is_not_seeded_stamps_nothing(build, ledger, attempt, run):
    """Negative control."""
    charged = attempt(QUERY, MECHANISM, regime=CENTRAL)
    run.store(charged, total(build(), charged, CENTRAL).pack())
    assert stamps(ledger) == ()


def test_a_release_committed_to_real_noise_is_not_finished_with_seeded_noise(build, attempt):
    total(build(), attempt(QUERY, MECHANISM))
    with pytest.raises(CohortError, match="finish it with a cohort without a seed"):
        total(build(noise=NoiseSource(7)), attempt(QUERY, MECHANISM))


# whose scores


@pytest.mark.parametrize("run", ["search", ("search",), ("people", ""), ("people", 3)])
def test_scores_are_kept_under_population_and_search_only(build, run):
    cohort = build()
    for call in (lambda: cohort.evaluate(run, 0, {"target": 0.0}), lambda: cohort.forget(run)):
        with pytest.raises(CohortError, match=r"\(population, search\)"):
            call()
