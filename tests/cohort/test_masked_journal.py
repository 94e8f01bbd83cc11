"""What clients that mask write down, and refuse because of it."""

import numpy as np
import pytest

from dpray.platform.cohort.masked_journal import MaskedJournal
from dpray.platform.cohort.ticket import JournalRefused, Ticket, members_digest
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Head

EVERYONE = ("a", "b", "c")
SET, NOBODY = members_digest(EVERYONE), members_digest(())
MESSAGES = {client: np.array([number, -number]) for number, client in enumerate(EVERYONE)}


def ticket(step=0, **changes):
    given = {
        "population": "people",
        "run": "run",
        "label": "training",
        "mechanism": "clipped sum",
        "step": step,
        "epoch": 1,
        "request": "r",
        "share": 1.0,
        "quanta": 1000,
        "head": Head(10 + step, "a" * 64),
        "ledger": "1" * 64,
        "lineage": dict.fromkeys(range(100), "a" * 64),
        **changes,
    }
    return Ticket(**given)


@pytest.fixture
def journal(tmp_path):
    opened = []

    def build(cap=None):
        each = MaskedJournal(tmp_path / "journal.db", cap)
        each.enrol(EVERYONE)
        opened.append(each)
        return each

    yield build
    for each in opened:
        each.close()


def test_a_message_is_repeated_for_a_committed_set_and_drawn_anew_before(journal):
    first = journal()
    assert first.enter(ticket(), EVERYONE, NOBODY) == {}
    first.keep(ticket(), MESSAGES)
    assert first.enter(ticket(), EVERYONE, NOBODY) == {}
    again = journal().enter(ticket(committed=True), EVERYONE, SET)
    assert {client: message.tolist() for client, message in again.items()} == {"a": [0, 0], "b": [1, -1], "c": [2, -2]}


def test_one_that_sent_no_masked_message_draws_one_for_the_committed_set(journal):
    each = journal()
    each.enter(ticket(), EVERYONE, NOBODY)
    each.keep(ticket(), {"a": MESSAGES["a"]})
    assert set(each.enter(ticket(committed=True), EVERYONE, SET)) == {"a"}


def refused(kind, call, *arguments):
    with pytest.raises(JournalRefused) as caught:
        call(*arguments)
    assert caught.value.kind == kind


def test_once_opened_a_key_is_answered_for_its_set_and_request_only(journal):
    each = journal()
    each.enter(ticket(), EVERYONE, NOBODY)
    each.keep(ticket(), MESSAGES)
    each.open(ticket(), SET, MESSAGES)
    fewer = members_digest(("a", "b"))
    refused("conflict", each.enter, ticket(), EVERYONE, NOBODY)
    refused("conflict", each.enter, ticket(committed=True), ("a", "b"), fewer)
    refused("conflict", each.open, ticket(), fewer, {"a": MESSAGES["a"]})
    refused("conflict", each.enter, ticket(request="other"), EVERYONE, SET)
    each.open(ticket(), SET, MESSAGES)
    assert set(each.enter(ticket(committed=True), EVERYONE, SET)) == set(EVERYONE)


def test_a_message_is_charged_once_before_it_is_sent(journal):
    each = journal()
    each.enter(ticket(), EVERYONE, NOBODY)
    assert each.spent("a") == 0
    for _ in range(2):
        each.enter(ticket(), EVERYONE, NOBODY)
        each.keep(ticket(), MESSAGES)
        assert each.spent("a") == 1000
    each.open(ticket(), SET, MESSAGES)
    each.keep(ticket(), MESSAGES)
    assert [each.spent(client) for client in EVERYONE] == [1000] * 3


def test_beyond_the_cap_nothing_is_entered_or_kept(journal):
    cap = Budget(1.0, 1e-5)
    each = journal(cap)
    half = cap.quanta // 2 + 1
    each.enter(ticket(quanta=half), EVERYONE, NOBODY)
    each.keep(ticket(quanta=half), MESSAGES)
    refused("cap", each.enter, ticket(1, quanta=half), EVERYONE, NOBODY)
    refused("cap", each.keep, ticket(1, quanta=half), MESSAGES)


def test_a_message_that_was_not_kept_cannot_be_opened(journal):
    each = journal()
    each.enter(ticket(), EVERYONE, NOBODY)
    refused("again", each.open, ticket(), SET, MESSAGES)
    each.keep(ticket(), {client: message + 1 for client, message in MESSAGES.items()})
    refused("again", each.open, ticket(), SET, MESSAGES)


def test_a_journal_that_did_not_take_part_refuses_a_committed_key(journal):
    refused("lost", journal().enter, ticket(committed=True), EVERYONE, SET)


def test_an_older_lease_is_refused_in_every_step(journal):
    each = journal()
    each.enter(ticket(epoch=2), EVERYONE, NOBODY)
    refused("stale", each.enter, ticket(), EVERYONE, NOBODY)
    refused("stale", each.keep, ticket(), MESSAGES)
    refused("stale", each.open, ticket(), SET, MESSAGES)


def test_a_message_of_several_clients_is_not_repeated_under_masks(journal):
    each = journal()
    each.prepare(ticket(), EVERYONE)
    each.reveal(ticket(), SET, EVERYONE, MESSAGES["a"])
    refused("lost", each.enter, ticket(committed=True), EVERYONE, SET)


def test_messages_of_old_steps_are_dropped(journal):
    each = journal()
    for step in range(3):
        each.enter(ticket(step), EVERYONE, NOBODY)
        each.keep(ticket(step), MESSAGES)
        each.open(ticket(step), SET, MESSAGES)
    refused("lost", each.enter, ticket(committed=True, head=Head(12, "a" * 64)), EVERYONE, SET)
