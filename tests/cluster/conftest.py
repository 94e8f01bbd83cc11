"""A cluster of three hosts for tests: `cluster` is started by hand, once; rows of its table are printed at the end.

def test_something(cluster):
    done = cluster.submit(cluster.site_recipe("people"), "--name", "first")
    cluster.network["site-a"].power_off()
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hosts
import servers

NAMES = ("head", "site-a", "site-b", "laptop")
_ROWS = pytest.StashKey[list[tuple[str, str, str]]]()


@pytest.fixture
def network() -> Iterator[hosts.Network]:
    """Four hosts that are switched on and do nothing."""
    _skip_without_hosts()
    with hosts.network(NAMES) as made:
        yield made


@pytest.fixture(scope="session")
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
