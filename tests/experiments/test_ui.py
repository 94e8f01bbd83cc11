"""`dpray ui`: MLflow's pages come up on loopback and go away with everything they started."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from dpray.experiments.ui import UiError, serve
from dpray.platform.tracking import Tracker, TrackingAddressError

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(address):
    with _direct.open(address, timeout=30) as answer:
        return answer.status, answer.read()


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ui")
    with Tracker(folder / "spool", "shown", uri=f"sqlite:///{folder}/mlflow.db", experiment="shown") as tracker:
        tracker.public({"round/clients": 1})
    return tracker.uri


def group(pid):
    """Processes in a process group, zombies aside."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(pid) and not line.split()[1].startswith("Z")]


def test_the_pages_show_the_store_and_the_end_leaves_nobody(uri, tmp_path):
    """`serve` as the command line calls it, ended by SIGTERM: exit code 0, no process and no file left."""
    script = f"from dpray.experiments.ui import serve; serve({uri!r}, port=0)"
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    address = command.stdout.readline().split(" at ")[1].split("/#")[0]
    try:
        assert address.startswith("http://127.0.0.1:")
        status, page = get(address + "/")
        assert status == 200
        assert b"<title>MLflow</title>" in page
        _, answer = get(address + "/api/2.0/mlflow/experiments/get-by-name?experiment_name=shown")
        assert json.loads(answer)["experiment"]["name"] == "shown"
        _, answer = get(address + "/ajax-api/3.0/mlflow/ui-telemetry")
        assert json.loads(answer)["disable_ui_telemetry"] is True
        listed = ["ps", "-o", "pid=", "--ppid", str(command.pid)]
        server = int(subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()[0])
        assert group(server) != []
    finally:
        command.send_signal(signal.SIGTERM)
        ended = command.wait(60)
    assert ended == 0
    assert group(server) == []
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=2)


def test_a_store_that_is_not_there(tmp_path):
    with pytest.raises(UiError, match=r"no MLflow store at .*run a recipe first"):
        serve(f"sqlite:///{tmp_path}/none.db")
    assert os.listdir(tmp_path) == []


def test_a_port_that_is_taken(uri):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UiError, match="name another port"):
        serve(uri, port=taken.getsockname()[1])


def test_a_folder_is_no_store():
    with pytest.raises(TrackingAddressError, match="folder"):
        serve("mlruns")


def test_a_server_has_pages_of_its_own(capsys):
    serve("http://me:hunter2@mlflow.example.org:5000")
    printed = capsys.readouterr().out
    assert "open http://me:***@mlflow.example.org:5000" in printed


def test_other_machines_are_warned_of(uri, capsys, monkeypatch):
    def refuse(*_, **__):
        raise UiError("not started in this test")

    monkeypatch.setattr("dpray.experiments.ui.running", refuse)
    with pytest.raises(UiError):
        serve(uri, host="0.0.0.0")
    assert "can be reached from other machines" in capsys.readouterr().err
    with pytest.raises(UiError):
        serve(uri, host="127.0.0.1")
    assert capsys.readouterr().err == ""
