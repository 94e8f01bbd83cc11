"""A cluster of three hosts for tests: `cluster` is started by hand, once; rows of its table are printed at the end.

def test_something(cluster):
    done = cluster.submit("digits_quickstart", "--name", "first")
    cluster.network["site-a"].power_off()
"""

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hosts
import servers
import watching

NAMES = ("head", "site-a", "site-b", "laptop")
_ROWS = pytest.StashKey[list[tuple[str, str, str]]]()


@pytest.fixture
def network() -> Iterator[hosts.Network]:
    """Four hosts that are switched on and do nothing."""
    _skip_without_hosts()
    with hosts.network(NAMES) as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[servers.Cluster]:
    """Ray with a token on three of the hosts, PostgreSQL and MLflow on the head; the laptop only submits."""
    _skip_without_hosts()
    if servers.postgres_binaries() is None:
        pytest.skip("no PostgreSQL here (Debian: postgresql), or no user `postgres` to run it as")
    with hosts.network(NAMES) as made, ThreadPoolExecutor() as pool:
        found = servers.Cluster(made, http=f"http://{made['head'].address}:{servers.DASHBOARD}")
        books = pool.submit(found.start_books)
        servers.by_hand(made)
        books.result()
        yield found


@pytest.fixture
def row(request: pytest.FixtureRequest):
    """Adds a row to the table of what was seen on the cluster: how it was started, what, and the figure."""
    return lambda *cells: request.config.stash.setdefault(_ROWS, []).append(cells)


@pytest.fixture
def sites(network: hosts.Network) -> hosts.Network:
    """Ray on the head and two sites, and real records at each site."""
    watching.give_records(network)
    servers.by_hand(network)
    return network


@pytest.fixture
def watch(sites: hosts.Network, row):
    """Begin to watch a run of them under a fault; what came of it is a row of the table."""
    made = []

    def begin(fault, driver=watching.OnHead, **cohort):
        made.append(watching.watched(sites, fault, driver, **cohort))
        return made[-1]

    yield begin
    for watched in made:
        watched.close()
        row("by hand", watched.row.fault, watching.cells(watched.row))
        for note in watched.row.notes:
            row("by hand", f"{watched.row.fault}: seconds", note)


@pytest.fixture
def dice() -> random.Random:
    """Random moments, after a seed that is printed."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the faults' moments: {seed}")
    return random.Random(seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section("seen on three hosts")
        for cells in [("started", "what", "seen"), *rows]:
            terminalreporter.write_line(f"{cells[0]:<9} {cells[1]:<62} {cells[2]}")


def _skip_without_hosts() -> None:
    reason = hosts.missing()
    if reason is not None:
        pytest.skip(reason)
