"""Eight processes charge one population at once, until nothing is left: never over the budget, no charge lost."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROCESSES, FIT = 8, 200
CHARGER = """
import sys
import numpy as np
from dpray.platform.privacy.ledger import BudgetExceeded, Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Unit
url, name, quanta, values = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
mechanism = ClippedSum(1.0, Unit.RECORD, 2, 10)
run = Ledger(url, values_dir=values).population("people").run(name)
print("ready", flush=True)
sys.stdin.readline()
charged = 0
while True:
    key = ReleaseKey("training", "sum", charged)
    try:
        run.release(key, {"step": charged}, mechanism, quanta, lambda attempt: np.zeros(2))
    except BudgetExceeded:
        break
    charged += 1
print(charged, flush=True)
"""


@pytest.fixture
def url(request, tmp_path):
    """An empty ledger's address."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed: pip install 'dpray[postgres]'")
    server = PostgresServer.installed()
    if server is None:
        pytest.skip("no PostgreSQL here (Debian: postgresql): no initdb found, or nobody it agrees to run as")
    try:
        server.start()
        yield server.url
    finally:
        server.close()


@pytest.mark.fault("8 processes charge at once")
@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_processes_that_charge_at_once_share_the_budget_to_the_last_release(url, row, tmp_path):
    with Ledger(url, values_dir=tmp_path / "values") as ledger:
        account = ledger.population("people").account("record", Budget(6, 1e-5))
        quanta = account.budget.quanta // FIT
        place = [url.removeprefix("sqlite:///"), tmp_path]
        observer = _python(str(Path(__file__).with_name("observer.py")), *place)
        arguments = [(url, f"run-{number}", quanta, tmp_path / "values") for number in range(PROCESSES)]
        children = [_python("-c", CHARGER, *given) for given in arguments]
        try:
            assert [child.stdout.readline() for child in children] == ["ready\n"] * PROCESSES
            begun = time.monotonic()
            for child in children:
                child.stdin.write("\n")
                child.stdin.flush()
            charged = [int(child.stdout.readline()) for child in children]
            seconds = time.monotonic() - begun
        finally:
            for child in children:
                child.communicate()
            seen = json.loads(observer.communicate()[0])
        kinds = [entry.kind for entry in account.history()]
        row.runs, row.faults, row.looks = PROCESSES, sum(charged), seen["looks"]
        row.completed = sum(child.returncode == 0 for child in children)
        row.overspent += account.spent > account.budget.quanta
        row.lost_charges += kinds.count("charge") - sum(charged)
        row.notes.append(f"{url.split(':')[0]}: {sum(charged) / seconds:.0f} releases/s ({charged} by process)")
        assert seen["problems"] == []
        assert sum(charged) == kinds.count("charge") == FIT
        assert account.spent == FIT * quanta <= account.budget.quanta
        assert ledger.verify() == ()


def _python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
