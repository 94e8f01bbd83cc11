"""A small recipe and the `dpray` command as a child process, for tests of whole runs."""

import contextlib
import copy
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpray.experiments.reading import write_yaml
from dpray.platform.privacy.ledger import Ledger

SMALL = {
    "name": "small",
    "population": {"name": "people"},
    "budget": {"epsilon": 6, "delta": 1e-5},
    "shares": {"search": 0.3, "training": 0.7},
    "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.3}},
    "cohort": {"clients": 8, "partition": {"kind": "dirichlet", "alpha": 1.0, "minimum": 5}},
    "search": {
        "votes": 1,
        "folds": 3,
        "space": {"learning_rate": {"grid": [0.25, 1.0, 4.0]}, "clip": {"grid": [0.5, 1.0]}},
    },
    "training": {"algorithm": "dp_fedsofim", "rounds": 12},
    "noise": {"seed": 1},
}


@dataclass(frozen=True)
class Ended:
    """A finished command."""

    code: int
    stdout: str
    stderr: str


class Workspace:
    """A folder in which `dpray` runs as a child process, in a session of its own that can be ended as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = [sys.executable, "-c", "from dpray.experiments.cli import main; main()"]
        self.begun: list[subprocess.Popen] = []
        folder.mkdir()

    def recipe(self, **sections) -> Path:
        place = self.folder.with_suffix(".yaml")
        document = {**copy.deepcopy(SMALL), **sections}
        place.write_text(write_yaml({key: value for key, value in document.items() if value is not None}))
        return place

    def begin(self, *arguments) -> subprocess.Popen:
        command = [*self.program, *map(str, arguments)]
        environment = {**os.environ, "COLUMNS": "100", "PYTHONWARNINGS": "ignore"}
        environment.pop("RAY_ADDRESS", None)
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.begun.append(process)
        return process

    def run(self, *arguments, timeout=240) -> Ended:
        process = self.begin(*arguments)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill(process)
            raise
        return Ended(process.returncode, stdout, stderr)

    def path(self, run="small") -> Path:
        return self.folder / "dpray-runs" / run

    def outcome(self, run="small") -> dict:
        return json.loads((self.path(run) / "outcome.json").read_text())

    def kill(self, process: subprocess.Popen, patience=5.0) -> None:
        """SIGKILL to the driver alone; then, to what Ray has left behind in its session."""
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and members(process.pid):
            time.sleep(0.1)
        for pid in members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def listening(self, process: subprocess.Popen) -> set[str]:
        """Addresses on which the processes of a command listen."""
        sockets = set()
        for pid in members(process.pid):
            with contextlib.suppress(OSError):
                sockets |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    packed = bytes.fromhex(fields[1].split(":")[0])
                    words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                    address = ipaddress.ip_address(words)
                    found.add(str(getattr(address, "ipv4_mapped", None) or address))
        return found

    @contextlib.contextmanager
    def ledger(self):
        ledger = Ledger(f"sqlite:///{self.folder / 'dpray-ledger.db'}", create=False)
        try:
            yield ledger
        finally:
            ledger.close()


def members(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def make_workspace():
    """Make a workspace in a new folder; what its commands have left running is ended after the session."""
    made = []

    def make(folder: Path) -> Workspace:
        made.append(Workspace(folder))
        return made[-1]

    yield make
    for workspace in made:
        for process in workspace.begun:
            workspace.kill(process, patience=0)
