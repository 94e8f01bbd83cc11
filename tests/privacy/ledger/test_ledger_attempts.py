"""What an attempt knows of its charge, and how a release and its ledger stand before it is computed."""

import numpy as np
import pytest

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Head, KeyConflict, LedgerError

from .conftest import CLIENT, RECORD, Constants


def test_an_attempt_is_for_what_was_charged_only(run, releases):
    charged = releases.charge(run)
    charged.check(Constants(RECORD.unit), "central")
    for other in (CLIENT, Constants(RECORD.unit, clip=2.0)):
        with pytest.raises(KeyConflict, match="would not cover it"):
            charged.check(other, "central")
    with pytest.raises(KeyConflict, match="trust mode 'central'"):
        charged.check(RECORD, "local")


def test_an_attempt_hands_out_one_value(run, releases):
    charged = releases.charge(run)
    charged.hand_out()
    with pytest.raises(LedgerError, match="not drawn a second time"):
        charged.hand_out()
    releases.charge(run).hand_out()  # nothing is stored: the computation may begin again


@pytest.mark.parametrize("commit", [True, False])
def test_stamps_of_an_attempt_are_kept_with_its_commit_or_its_value(ledger, account, run, releases, commit):
    charged = releases.charge(run)
    charged.stamp("seeded", "tried out")
    charged.stamp("seeded")
    assert account.statement().stamps == ()
    if commit:
        charged.commit(["a"])
        assert account.statement().stamps == ("seeded", "tried out")
    run.store(charged, np.array([1.0]))
    assert account.statement().stamps == ("seeded", "tried out")
    assert ledger.verify() == ()
    with pytest.raises(LedgerError, match="stamp"):
        charged.stamp("")


def test_standing_follows_a_release(ledger, population, account, run, releases):
    charged = releases.charge(run)
    heads = [ledger.head()]
    before = run.standing(charged)
    assert (before.state, before.stamps, before.records_per_client) == ("charged", (), population.records_per_client)
    assert before.head == heads[0]
    charged.commit(["a"])
    heads.append(ledger.head())
    passed = run.standing(charged, [head.sequence for head in heads] + [10_000])
    assert passed.state == "committed"
    assert [Head(*item) for item in passed.lineage.items()] == heads
    assert passed.ledger == before.ledger
    assert dict(run.standing(charged, [1]).lineage) == {1: before.ledger}
    run.lose(charged, "for the test")
    assert (run.standing(charged).state, run.standing(charged).reason) == ("lost", "for the test")


def test_every_ledger_has_a_name_of_its_own(new_place, releases):
    named = set()
    for _ in range(2):
        ledger = new_place().open()
        population = ledger.population("same")
        population.account("record", Budget(8.0, 1e-5))
        run = population.run("same")
        named.add(run.standing(releases.charge(run)).ledger)
    assert len(named) == 2


def releases_budget():
    from dpray.platform.privacy.budget import Budget

    return Budget(8.0, 1e-5)


@pytest.mark.parametrize(
    ("field", "value"), [("quanta", 2000), ("quanta", None), ("trust", "local"), ("unit", CLIENT.unit)]
)
def test_an_attempt_changed_by_hand_has_no_standing(run, account, releases, field, value):
    charged = releases.charge(run)
    setattr(charged, field, value)
    with pytest.raises(KeyConflict, match="charged for another"):
        run.standing(charged)
