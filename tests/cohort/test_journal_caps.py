"""What clients of a journal spend: their own count, their cap, and the populations that a site answers for."""

import re
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.platform.cohort import journal as module
from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.cohort.ticket import members_digest
from dpray.platform.privacy.budget import Budget

from .journals import ABC, ALL, MESSAGE, refused, reveal, ticket


def test_a_client_counts_what_it_spends_once_a_key(journal):
    reveal(journal, ticket())
    journal.prepare(ticket(), ABC)
    assert journal.spent("a") == 100
    journal.contribute(ticket(step=1, request="central"), ABC)
    journal.contribute(ticket(step=1, request="central"), ABC)
    assert journal.spent("a") == 200
    journal.contribute(ticket(step=1, request="central"), (*ABC[:1],))
    assert journal.spent("a") == 200


def test_clients_keep_accounts_of_their_own(journal):
    reveal(journal, ticket(), ("a",), members_digest(("a",)))
    assert [journal.spent(client) for client in ABC] == [100, 0, 0]


def test_an_infinite_spend_stays_infinite(journal):
    journal.contribute(ticket(quanta=None), ABC)
    journal.contribute(ticket(step=1), ABC)
    assert journal.spent("a") is None


def test_a_spend_beyond_the_cap_is_refused_before_anything_is_made(tmp_path):
    cap = Budget(1.0, 1e-5)
    journal = SiteJournal(tmp_path / "journal.db", cap)
    journal.enrol(ABC)
    most = cap.quanta
    reveal(journal, ticket(quanta=most - 10))
    assert "own cap" in refused("cap", journal.prepare, ticket(step=1, quanta=11), ABC)
    refused("cap", journal.contribute, ticket(step=1, quanta=None), ABC)
    reveal(journal, ticket(step=1, quanta=10))
    assert journal.spent("c") == most


def test_a_cap_stays_the_sites_whatever_a_later_recipe_says(tmp_path):
    place, cap = tmp_path / "journal.db", Budget(1.0, 1e-5)

    def asked(given, step, quanta):
        with closing(SiteJournal(place, given)) as journal:
            journal.enrol(ABC)
            journal.contribute(ticket(step, quanta=quanta), ABC)

    with closing(SiteJournal(place)) as running:  # a host that was started before there was a cap
        asked(cap, 0, cap.quanta)
        for later in (None, Budget(10.0, 1e-5)):
            refused("cap", asked, later, 1, 1)
        refused("cap", running.prepare, ticket(1, quanta=1), ABC)
        assert running.cap() == cap
    with closing(SiteJournal(place, Budget(0.5, 1e-5))) as smaller:
        assert smaller.cap() == Budget(0.5, 1e-5)
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("DELETE FROM meta WHERE name = 'cap'")
    asked(Budget(10.0, 1e-5), 1, 1)


TWINS = ("people", "People", "PEOPLE", "реople", "people ", "people-2", "peopIe")  # the р is Cyrillic


@settings(max_examples=20)
@given(asks=st.lists(st.tuples(st.sampled_from(TWINS), st.integers(10, 60), st.booleans()), max_size=8))
def test_a_site_spends_one_cap_under_whatever_names_it_is_asked(asks):
    """And answers under the first one only; hosts come and go between the asks, and some bring a larger cap."""
    cap = Budget(1.0, 1e-5)
    with tempfile.TemporaryDirectory() as folder:
        place, spent = Path(folder) / "journal.db", 0
        SiteJournal(place, cap, site=True).close()
        for step, (population, hundredths, larger) in enumerate(asks):
            quanta = hundredths * cap.quanta // 100
            with closing(SiteJournal(place, Budget(9.0, 1e-5) if larger else None, site=True)) as journal:
                journal.enrol(ABC)
                asked = ticket(step, population=population, run=str(step), quanta=quanta)
                first = population == asks[0][0]
                if first and spent + quanta <= cap.quanta:
                    journal.contribute(asked, ABC)
                    spent += quanta
                else:
                    refused("cap" if first else "population", journal.contribute, asked, ABC)
                assert journal.spent("a") == spent <= cap.quanta


def test_only_a_sites_operator_has_it_answer_for_other_people_too(tmp_path):
    place, cap = tmp_path / "journal.db", Budget(1.0, 1e-5)
    with closing(SiteJournal(place, cap, site=True)) as journal:
        journal.enrol(ABC)
        journal.contribute(ticket(quanta=cap.quanta - 1), ABC)
        other = ticket(population="staff", quanta=1)
        sentence = refused("population", journal.contribute, other, ABC)
        assert "answers for the population 'p' was asked for 'staff'" in sentence
        refused("population", journal.prepare, other, ABC)
        (statement,) = re.findall(r"sqlite3 journal.db \"(UPDATE .*)\"`", module.__doc__)
        with closing(sqlite3.connect(place)) as database, database:
            database.execute(statement)
        journal.contribute(other, ABC)
        assert journal.spent("a") == cap.quanta  # one count still
        refused("cap", journal.contribute, ticket(1, population="staff", quanta=1), ABC)
        refused("population", journal.contribute, ticket(1, population="others"), ABC)


def test_a_refused_first_request_binds_a_site_to_nobody(tmp_path):
    with closing(SiteJournal(tmp_path / "journal.db", Budget(1.0, 1e-5), site=True)) as journal:
        journal.enrol(ABC)
        refused("cap", journal.contribute, ticket(population="typo", quanta=None), ABC)
        journal.contribute(ticket(), ABC)


def test_a_request_that_is_prepared_and_never_seen_binds_a_site_to_nobody(tmp_path):
    with closing(SiteJournal(tmp_path / "journal.db", site=True)) as journal:
        journal.enrol(ABC)
        journal.prepare(ticket(population="typo"), ABC)
        reveal(journal, ticket())
        refused("population", journal.prepare, ticket(population="typo"), ABC)


def test_a_refused_request_does_not_lower_a_sites_cap(tmp_path):
    place = tmp_path / "journal.db"
    with closing(SiteJournal(place, Budget(1.0, 1e-5), site=True)) as journal:
        journal.enrol(ABC)
        journal.contribute(ticket(), ABC)
    with closing(SiteJournal(place, Budget(0.001, 1e-5), site=True)) as journal:
        refused("population", journal.contribute, ticket(population="Patients"), ABC)
        assert journal.cap() == Budget(1.0, 1e-5)
        journal.contribute(ticket(1), ABC)
        assert journal.cap() == Budget(0.001, 1e-5)  # asked for the right people, and admitted: now it holds


def test_populations_of_a_simulation_may_share_a_journal(journal):
    reveal(journal, ticket())
    reveal(journal, ticket(population="others"))
    assert journal.spent("a") == 200


def test_a_cap_is_checked_again_when_the_message_is_about_to_be_seen(tmp_path):
    cap = Budget(1.0, 1e-5)
    journal = SiteJournal(tmp_path / "journal.db", cap)
    journal.enrol(ABC)
    one, two = ticket(quanta=cap.quanta), ticket(run="another", quanta=cap.quanta)
    journal.prepare(one, ABC)
    journal.prepare(two, ABC)
    journal.reveal(one, ALL, ABC, MESSAGE)
    refused("cap", journal.reveal, two, ALL, ABC, MESSAGE)
