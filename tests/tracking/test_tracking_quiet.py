"""Tracking says nothing on the console and calls nobody outside the machine."""

import os
import subprocess
import sys
import textwrap

import pytest

# Variables by which MLflow takes a process for a test and keeps its telemetry off by itself.
_TEST_SIGNS = ("CI", "GITHUB_ACTIONS", "PYTEST_CURRENT_TEST", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK")

_WATCH = """
import socket, sys, time
called = []
def watched(name, address_of):
    original = getattr(socket.socket, name) if name.startswith("connect") else getattr(socket, name)
    def watch(*args, **kwargs):
        address = address_of(args)
        if isinstance(address, tuple):
            address = address[0]
        if str(address) not in ("127.0.0.1", "::1", "localhost"):
            print("CALLED", address, flush=True)
            called.append(address)
            raise OSError("no way out")
        return original(*args, **kwargs)
    setattr(socket.socket if name.startswith("connect") else socket, name, watch)
watched("connect", lambda args: args[1])
watched("connect_ex", lambda args: args[1])
watched("getaddrinfo", lambda args: args[0])
"""

_RUN = """
from pathlib import Path
from dpray.platform.tracking import Tracker
with Tracker(Path(folder) / "spool", "quiet", uri=f"sqlite:///{folder}/mlflow.db") as tracker:
    tracker.child("training").public({"round/clients": 1}, 0)
    tracker.artifact_text("a.txt", "text")
    tracker.flush(60)
"""

# MLflow as it is used by default.
_LOUD = """
import mlflow
mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
mlflow.set_experiment("loud")
with mlflow.start_run():
    mlflow.log_metric("a", 1)
deadline = time.monotonic() + 60
while not called and time.monotonic() < deadline:
    time.sleep(0.1)
"""


def run(script, folder):
    environment = {name: value for name, value in os.environ.items() if name not in _TEST_SIGNS}
    command = [sys.executable, "-c", f"folder = {str(folder)!r}\n" + textwrap.dedent(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_calls_nobody_and_prints_nothing(tmp_path):
    done = run(_WATCH + _RUN, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_watch_would_have_seen_a_call(tmp_path):
    """Negative control: MLflow used as it comes does try to call, and prints."""
    done = run(_WATCH + _LOUD, tmp_path)
    assert "CALLED" in done.stdout
    assert "telemetry" in done.stdout
    assert "Creating initial MLflow database tables" in done.stderr


def test_importing_the_package_does_not_import_mlflow():
    done = run("import dpray.platform.tracking, sys; print([m for m in sys.modules if m.startswith('mlflow')])", ".")
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "kept"), [("MLFLOW_HTTP_REQUEST_TIMEOUT", "33"), ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")]
)
def test_settings_of_the_user_are_kept(name, kept, monkeypatch):
    from dpray.platform.tracking import quiet_environment

    monkeypatch.setenv(name, kept)
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    assert quiet_environment()[name] == kept
    assert os.environ["DO_NOT_TRACK"] == "true"
