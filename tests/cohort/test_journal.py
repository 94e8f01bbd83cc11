"""The journal: what clients remember and what they refuse because of it."""

import multiprocessing
import sqlite3
import stat

import numpy as np
import pytest

from dpray.platform.cohort.journal import KEPT_STEPS, SiteJournal
from dpray.platform.cohort.ticket import JournalRefused, LedgerEnd, members_digest
from dpray.platform.privacy.ledger import Head

from .journals import ABC, ALL, MESSAGE, SEARCH, refused, reopened, reveal, ticket


def test_all_files_are_readable_by_their_owner_only(journal, tmp_path):
    reveal(journal, ticket())
    files = list((tmp_path / "site").iterdir())
    assert {file.name for file in files} >= {"journal.db", "journal.db-wal"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "site").stat().st_mode) == 0o700


def test_a_full_disk_fails_the_release_and_leaves_the_journal_as_it_was(journal):
    """SQLite's own limit stands in for the disk's; once there is room again, the same journal goes on."""
    reveal(journal, ticket())
    (pages,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    large = np.arange(2**16)
    journal.prepare(ticket(1), ABC)
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            journal.reveal(ticket(1), ALL, ABC, large)
    assert journal.spent("a") == 100
    journal._database.execute("PRAGMA max_page_count = 100000")
    journal.reveal(ticket(1), ALL, ABC, large)
    assert journal.spent("a") == 200
    (kept,) = journal.revealed(ticket(1), ALL, ABC)
    np.testing.assert_array_equal(kept.message, large)


def test_what_is_about_to_be_seen_is_synced_to_disk_first(journal):
    full, normal = 2, 1
    journal.prepare(ticket(), ABC)
    assert journal._database.execute("PRAGMA synchronous").fetchone()[0] == normal
    journal.reveal(ticket(), ALL, ABC, MESSAGE)
    assert journal._database.execute("PRAGMA synchronous").fetchone()[0] == full
    journal.prepare(ticket(step=1), ABC)
    journal.contribute(ticket(step=2), ABC)
    assert journal._database.execute("PRAGMA synchronous").fetchone()[0] == full
    assert journal._database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_private_seeds_are_drawn_once_and_differ(journal):
    first = journal.enrol(ABC)
    assert len(set(first.values())) == 3
    assert {len(seed) for seed in first.values()} == {32}
    again = reopened(journal).enrol((*ABC, "d"))
    assert {client: again[client] for client in ABC} == first
    assert again["d"] not in first.values()


def test_a_revealed_message_is_repeated_byte_for_byte_after_a_restart(journal):
    reveal(journal, ticket())
    again = reopened(journal)
    assert again.prepare(ticket(committed=True), ABC) == ()
    (stored,) = again.revealed(ticket(), ALL, ABC)
    assert stored.members == ABC
    assert stored.message.tobytes() == MESSAGE.tobytes()


def test_a_revealed_key_is_refused_with_other_participants(journal):
    reveal(journal, ticket())
    other = members_digest(("a", "b"))
    assert "another" in refused("conflict", journal.revealed, ticket(), other, ABC)
    refused("conflict", journal.reveal, ticket(), other, ABC, MESSAGE)


def test_a_revealed_key_is_refused_with_another_request(journal):
    reveal(journal, ticket())
    refused("conflict", journal.prepare, ticket(request="other"), ABC)
    refused("conflict", journal.contribute, ticket(request="other"), ABC)
    refused("lost", journal.prepare, ticket(request="other", committed=True), ABC)


def test_two_processes_that_reveal_one_key_agree_on_the_first_message(journal, tmp_path):
    zombie = SiteJournal(tmp_path / "site" / "journal.db")
    journal.prepare(ticket(), ABC)
    zombie.prepare(ticket(), ABC)
    journal.reveal(ticket(), ALL, ABC, MESSAGE)
    refused("again", zombie.reveal, ticket(), ALL, ABC, MESSAGE + 1)
    (stored,) = zombie.revealed(ticket(), ALL, ABC)
    np.testing.assert_array_equal(stored.message, MESSAGE)
    zombie.close()


def test_before_the_commit_the_participants_may_change(journal):
    journal.prepare(ticket(), ABC)
    assert journal.prepare(ticket(), ("a", "b")) == ("a", "b")
    journal.reveal(ticket(), members_digest(("a", "b")), ("a", "b"), MESSAGE)


def test_a_committed_key_is_answered_by_clients_that_prepared_it_and_revealed_nothing(journal):
    journal.prepare(ticket(), ABC)
    again = reopened(journal)
    assert again.prepare(ticket(committed=True), ABC) == ABC


def test_a_client_without_its_journal_joins_new_keys_only(tmp_path):
    new = SiteJournal(tmp_path / "new" / "journal.db")
    new.enrol(ABC)
    assert "knows nothing of it" in refused("lost", new.prepare, ticket(committed=True), ABC)
    assert new.prepare(ticket(step=1), ABC) == ABC


def test_a_committed_key_is_not_finished_under_noise_for_another_number_of_clients(journal):
    journal.prepare(ticket(request="shares for 20"), ABC)
    refused("lost", journal.prepare, ticket(request="shares for 40", committed=True), ABC)


def test_preparations_that_came_to_nothing_do_not_stand_in_the_way(journal):
    journal.prepare(ticket(request="shares for 20"), ABC)
    journal.prepare(ticket(request="shares for 40"), ("a", "b"))
    assert journal.prepare(ticket(request="shares for 40", committed=True), ("a", "b")) == ("a", "b")


def test_clients_dealt_anew_repeat_each_message_once_and_draw_only_what_is_missing(journal):
    journal.prepare(ticket(), ("a", "b"))
    journal.prepare(ticket(), ("c",))
    journal.reveal(ticket(), ALL, ("a", "b"), MESSAGE)
    committed = ticket(committed=True)
    assert journal.prepare(committed, ("a",)) == ()
    assert journal.prepare(committed, ("b", "c")) == ("c",)
    assert [stored.members for stored in journal.revealed(committed, ALL, ("a",))] == [("a", "b")]
    assert journal.revealed(committed, ALL, ("b", "c")) == ()


def test_an_older_lease_is_refused_by_every_question(journal):
    journal.prepare(ticket(epoch=2), ABC)
    for call, arguments in [
        (journal.prepare, (ticket(), ABC)),
        (journal.reveal, (ticket(), ALL, ABC, MESSAGE)),
        (journal.contribute, (ticket(), ABC)),
    ]:
        assert "lease 1" in refused("stale", call, *arguments)
    assert journal.prepare(ticket(run="another"), ABC) == ABC


LONGER = Head(60, "f" * 64)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("head", {"head": Head(9, "d" * 64)}),  # older
        ("head", {"head": LONGER}),  # longer, and does not say what it has at the anchor
        ("head", {"head": LONGER, "lineage": {9: "d" * 64, 11: "d" * 64}}),
        ("ledger", {"head": Head(10, "e" * 64)}),  # rewritten at the anchor
        ("ledger", {"head": Head(10, "e" * 64), "lineage": {10: "d" * 64}}),
        ("ledger", {"head": LONGER, "lineage": {10: "e" * 64}}),  # a copy that went on otherwise
        ("ledger", {"head": LONGER, "lineage": {10: "d" * 64}, "ledger": "another"}),
        ("ledger", {"ledger": "another"}),
    ],
)
def test_an_older_a_forked_or_another_ledger_is_refused_by_every_question(journal, kind, changes):
    reveal(journal, ticket())
    asked = ticket(step=1, **changes)
    refused(kind, journal.contribute, asked, ABC)
    refused(kind, journal.prepare, asked, ABC)
    journal.prepare(ticket(step=1), ABC)
    refused(kind, journal.reveal, asked, ALL, ABC, MESSAGE)
    assert journal.anchor() == Head(10, "d" * 64)


def test_a_ledger_that_was_shown_after_a_release_refuses_a_copy_from_before_it(journal):
    reveal(journal, ticket())
    with pytest.raises(JournalRefused, match="were not told"):
        journal.advance(LedgerEnd(LONGER, "", {}))
    for other in (LedgerEnd(LONGER, "another", {10: "d" * 64}), LedgerEnd(LONGER, "", {10: "e" * 64})):
        with pytest.raises(JournalRefused, match=r"[Uu]se"):
            journal.advance(other)
    assert journal.anchor() == Head(10, "d" * 64)
    again = ticket(step=1)
    journal.advance(LedgerEnd(LONGER, "", {10: "d" * 64}))
    assert journal.anchor() == LONGER
    assert "older copy" in refused("head", journal.contribute, again, ABC)


def test_a_refused_ledger_leaves_no_lease_and_learns_the_anchor_by_number(journal):
    reveal(journal, ticket())
    with pytest.raises(JournalRefused) as caught:
        journal.prepare(ticket(step=1, epoch=9, head=LONGER), ABC)
    assert caught.value.seen == 10
    journal.prepare(ticket(step=1), ABC)  # lease 1 still holds


def test_a_ledger_that_went_on_from_the_anchor_is_accepted_and_becomes_the_anchor(journal):
    reveal(journal, ticket())
    reveal(journal, ticket(step=1, head=LONGER, lineage={10: "d" * 64}))
    again = reopened(journal)
    assert again.anchor() == LONGER
    refused("ledger", again.prepare, ticket(step=2, head=LONGER, ledger="another"), ABC)
    again.close()


def test_the_first_ledger_a_journal_meets_is_its_own_for_ever(tmp_path):
    new = SiteJournal(tmp_path / "new" / "journal.db")
    new.enrol(ABC)
    assert new.prepare(ticket(ledger="mine"), ABC) == ABC
    again = reopened(new)
    refused("ledger", again.prepare, ticket(step=1, ledger="", head=LONGER, lineage={10: "d" * 64}), ABC)
    assert again.prepare(ticket(step=1, ledger="mine"), ABC) == ABC
    again.close()


def test_a_refused_reveal_leaves_nothing_behind(journal):
    reveal(journal, ticket())
    spent = journal.spent("a")
    journal.prepare(ticket(step=1), ABC)
    refused("head", journal.reveal, ticket(step=1, head=Head(9, "d" * 64)), ALL, ABC, MESSAGE)
    assert journal.spent("a") == spent
    assert journal.revealed(ticket(step=1), ALL, ABC) == ()


def test_old_messages_are_dropped_and_cannot_be_asked_for_any_more(journal):
    for step in range(KEPT_STEPS + 1):
        reveal(journal, ticket(step=step))
    assert "too long ago" in refused("lost", journal.revealed, ticket(), ALL, ABC)
    assert len(journal.revealed(ticket(step=1), ALL, ABC)) == 1


def test_dropping_old_messages_does_not_read_the_earlier_steps_of_a_series(journal):
    for step in range(KEPT_STEPS + 1):
        reveal(journal, ticket(step=step))
    said = []
    journal.prepare(ticket(step=KEPT_STEPS + 1), ABC)
    journal._database.set_trace_callback(said.append)
    journal.reveal(ticket(step=KEPT_STEPS + 1), ALL, ABC, MESSAGE)
    journal._database.set_trace_callback(None)
    (dropping,) = [sql for sql in said if sql.startswith("UPDATE messages")]
    plan = [row[-1] for row in journal._database.execute(f"EXPLAIN QUERY PLAN {dropping}")]
    assert plan == ["SEARCH messages USING INDEX kept (series=? AND step<?)"]
    kept = journal._database.execute("SELECT step FROM messages WHERE message IS NOT NULL ORDER BY step").fetchall()
    assert [step for (step,) in kept] == [2, 3]


def test_a_file_of_before_gets_the_index(journal):
    journal._database.execute("DROP INDEX kept")
    again = reopened(journal)
    (name,) = again._database.execute("SELECT name FROM sqlite_master WHERE name = 'kept'").fetchone()
    assert name == "kept"
    again.close()


def test_scores_come_back_for_their_own_configuration_only(journal):
    journal.keep_scores(SEARCH, {3: "one"}, {"a": {3: 0.5}, "b": {3: float("nan")}})
    again = reopened(journal)
    found = again.scores(SEARCH, 3, "one")
    assert found["a"] == 0.5
    assert np.isnan(found["b"])
    assert again.scores(SEARCH, 3, "another") == {}
    assert again.scores(SEARCH, 4, "one") == {}
    again.forget_scores(SEARCH)
    assert list(again.all_scores(SEARCH)) == []


def test_scores_of_one_population_are_not_those_of_another(journal):
    journal.keep_scores(("one", "search"), {0: "same"}, {"a": {0: 0.5}})
    assert journal.scores(("two", "search"), 0, "same") == {}
    assert list(journal.all_scores(("two", "search"))) == []
    journal.keep_scores(("two", "search"), {0: "same"}, {"a": {0: 0.25}})
    journal.forget_scores(("two", "search"))
    assert list(journal.all_scores(("one", "search"))) == [(0, "a", 0.5)]


def test_a_file_whose_scores_name_no_population_is_taken_over_without_them(journal):
    journal._database.execute("DROP TABLE scores")
    journal._database.execute("CREATE TABLE scores (run TEXT, candidate INTEGER, client TEXT, config TEXT, score REAL)")
    journal._database.execute("INSERT INTO scores VALUES ('search', 0, 'same', 'a', 0.5)")
    seeds = journal.enrol(ABC)
    again = reopened(journal)
    assert list(again.all_scores(SEARCH)) == []
    again.keep_scores(SEARCH, {0: "same"}, {"a": {0: 0.5}})
    assert again.scores(SEARCH, 0, "same") == {"a": 0.5}
    assert again.enrol(ABC) == seeds
    again.close()


def test_deaths_are_counted_by_key_and_client(journal):
    journal.note_death("key", "a")
    journal.note_death("key", "a")
    journal.note_death("other", "b")
    assert reopened(journal).deaths("key") == {"a": 2}


def open_at_once(path, barrier):
    barrier.wait()
    SiteJournal(path).enrol(ABC)


def test_hosts_of_a_node_may_open_it_at_the_same_moment(tmp_path):
    # SQLite does not wait while another process turns the file to WAL: unguarded, one start in twelve failed here.
    fork = multiprocessing.get_context("fork")
    for attempt in range(40):
        barrier = fork.Barrier(6)
        hosts = [fork.Process(target=open_at_once, args=(tmp_path / str(attempt) / "j.db", barrier)) for _ in range(6)]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join()
        assert [host.exitcode for host in hosts] == [0] * 6
