"""A site's cable is taken out in the middle of a run and put in again, or its machine loses power for good.

The run is watched as in `tests/faults`: a process of its own reads the ledger and both sites' journals all the time,
and at the end every quantum and every round is accounted for.
"""

import time

import pytest
import servers
from watching import ROUNDS, SITES

from dpray.platform.cohort.dispatch import REPLACED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NOTICED = 30 + REPLACED
"""Seconds until a site without power is a dropout: Ray's health checks (see cluster.yaml), and for another machine."""
MOMENT = 15
"""Seconds that a round, or the end of a process, may take on a machine that plays four."""


def in_a_round(watched, process, dice):
    """Wait for a random round to be charged and not yet stored."""
    after = watched.stored + dice.randint(2, 6)
    there = watched.reach(process, lambda: watched.stored >= after and watched.newest() == "charged", 240)
    assert there, process.communicate()


def test_a_sites_network_is_cut_and_mended(sites, watch, dice):
    """No round ends without the site; after some seconds the run goes on by itself, as if nothing had been."""
    watched = watch("a site's network cut in a round, mended after seconds")
    process = watched.begin()
    for site in dice.sample(sorted(SITES), 2):
        in_a_round(watched, process, dice)
        sites.cut(site)
        watched.row.faults += 1
        time.sleep(dice.uniform(1, 2))  # what was on its way has arrived
        before = watched.stored
        time.sleep(dice.uniform(1, 5))
        assert watched.stored == before, "a round was made without one of two sites"
        sites.mend(site)
    ended = watched.ended(process, 400)
    assert ended.code == 0, ended.stderr
    watched.settle()


def test_a_site_without_power_leaves_no_quorum(sites, watch, dice):
    """The run stops with a sentence within the stated time, and goes on when the site is there again."""
    watched = watch("a site loses power: no quorum, back after the stop")
    process = watched.begin()
    in_a_round(watched, process, dice)
    began = power_off(sites["site-b"], watched)
    stopped = watched.ended(process, 3 * NOTICED)
    told(watched, began, "until the run had stopped")
    assert stopped.code == 3, stopped.stderr
    assert "quorum" in stopped.stderr
    assert "`dpray resume small` goes on" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert watched.stored < ROUNDS
    servers.start_worker(sites.add("site-b"), sites["head"])
    watched.settle()


def test_a_site_without_power_is_not_missed_by_a_quorum(sites, watch, dice):
    """Once it is a dropout the run goes on without it to its end; a driver that begins meanwhile does, too."""
    watched = watch("a site loses power: the quorum goes on, driver killed", quorum=1)
    process = watched.begin()
    in_a_round(watched, process, dice)
    began = power_off(sites["site-b"], watched)
    there = watched.stored + 2  # what was under way may still be stored with the site's part
    assert watched.reach(process, lambda: watched.stored >= there, 3 * NOTICED), process.communicate()
    told(watched, began, "until the second round without the site")
    watched.kill(process)
    assert watched.stored < ROUNDS
    watched.settle()


def power_off(site, watched):
    """When it happened."""
    site.power_off()
    watched.row.faults += 1
    return time.monotonic()


def told(watched, began, what):
    """Note the seconds since then, and hold them to what is stated."""
    seconds = time.monotonic() - began
    watched.row.notes.append(f"{seconds:.0f} {what}")
    assert seconds < NOTICED + MOMENT
