"""A population's name is bound to its data, public part and clients at its first use, in the ledger itself."""

import pytest

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import LedgerError
from dpray.platform.privacy.ledger.declaring import LARGEST_CLIENT

DIGITS = {"data.dataset": "digits", "data.evaluation.fraction": 0.2, "data.evaluation.seed": 0, "cohort.clients": 20}


def test_a_declaration_is_recorded_once_and_survives_with_the_ledger(place, ledger):
    people = ledger.population("people")
    assert people.declaration is None
    ledger.population("people", declaration=DIGITS)
    head = ledger.head()
    ledger.population("people", declaration=dict(reversed(DIGITS.items())))
    ledger.population("people")
    assert people.declaration == DIGITS
    assert ledger.head() == head
    again = place.open(create=False)
    assert again.population("people", declaration=DIGITS).declaration == DIGITS
    assert again.verify([head]) == ()


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"data.evaluation.fraction": 0.3}, ["data.evaluation.fraction was 0.2 and is 0.3"]),
        ({"data.evaluation.seed": 1}, ["data.evaluation.seed was 0 and is 1"]),
        (
            {"data.dataset": "mnist", "cohort.clients": 4},
            ["was 'digits' and is 'mnist'", "cohort.clients was 20 and is 4"],
        ),
        ({"cohort.partition.seed": 3}, ["cohort.partition.seed was not declared and is 3"]),
    ],
)
def test_another_declaration_is_refused_with_what_differs_and_what_to_do(ledger, change, facts):
    people = ledger.population("people", declaration=DIGITS)
    head = ledger.head()
    for declare in (people.check, lambda declaration: ledger.population("people", declaration=declaration)):
        with pytest.raises(LedgerError, match="another population name") as refused:
            declare(declaration=DIGITS | change)
        assert [fact for fact in facts if fact not in str(refused.value)] == []
        assert "data.dataset" not in str(refused.value) or "data.dataset" in change
    assert (people.declaration, ledger.head()) == (DIGITS, head)
    people.check(declaration=DIGITS)
    ledger.population("other people", declaration=DIGITS | change)


def test_people_who_were_protected_without_a_declaration_cannot_be_declared_public_later(ledger, releases):
    people = ledger.population("people")
    people.account("record", Budget(6, 1e-5))
    releases.make(people.run("first"), 1000)
    head = ledger.head()
    for declare in (people.check, lambda declaration: ledger.population("people", declaration=declaration)):
        with pytest.raises(LedgerError, match="used before anything was declared"):
            declare(declaration=DIGITS)
    assert (people.declaration, ledger.head()) == (None, head)
    ledger.population("people")


@pytest.mark.parametrize("order", ["number first", "client first", "at once"])
def test_no_client_is_larger_than_the_declared_maximum(ledger, order):
    large, number = {"declaration": DIGITS | {LARGEST_CLIENT: 359}}, {"records_per_client": 1}
    if order == "at once":
        with pytest.raises(LedgerError, match=r"records_per_client = 1 .* holds 359"):
            ledger.population("people", **large, **number)
        assert ledger.populations() == ()
        return
    first, second = (number, large) if order == "number first" else (large, number)
    people = ledger.population("people", **first)
    for refuse in (people.check, lambda **given: ledger.population("people", **given)):
        with pytest.raises(LedgerError, match=r"records_per_client = 1 .* holds 359"):
            refuse(**second)
    if order == "client first":
        ledger.population("people", records_per_client=359)
        people.account("client", Budget(6, 1e-5))
    assert ledger.verify() == ()


@pytest.mark.parametrize("bad", [{"a": [1]}, {"a": {"b": 1}}, {"a": float("nan")}, {1: "a"}])
def test_a_declaration_is_flat_and_plain(ledger, bad):
    with pytest.raises(LedgerError, match="flat mapping"):
        ledger.population("people", declaration=bad)
    assert ledger.populations() == ()


def test_a_declaration_changed_behind_the_ledgers_back_is_found(place, ledger):
    ledger.population("people", declaration=DIGITS)
    place.sql("UPDATE populations SET declaration = '{}'")
    assert any("declaration is '{}'" in problem for problem in ledger.verify())
