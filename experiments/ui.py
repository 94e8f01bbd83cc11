"""`dpray ui`: MLflow's pages over the store that runs are shown in.

The server is MLflow's own, one worker, without telemetry, on loopback unless told otherwise: it has no passwords, and
whoever reaches it can read and change every run in the store.
"""

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from dpray.platform.tracking import TrackingAddressError, check_uri, quiet_environment, shown

_STARTUP_SECONDS = 90.0
_STOP_SECONDS = 10.0


class UiError(RuntimeError):
    """MLflow's pages cannot be shown; the message says why."""


@contextlib.contextmanager
def running(uri: str, host: str = "127.0.0.1", port: int = 5000) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """MLflow's server over a store, for as long as the context lasts.

    Args:
        uri: address of a store that is a database; sqlite files must exist.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Yields:
        The address of the pages, which answer by then, and the server's process.

    Raises:
        UiError: no such store, the port is taken, or the server did not come up.
        TrackingAddressError: an address that cannot work.
    """
    uri = check_uri(uri)
    store = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite") and not store.exists():
        raise UiError(f"There is no MLflow store at {store}: run a recipe first, or name another store.")
    port = _free_port(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    folder = store.parent if uri.startswith("sqlite") else Path.cwd()
    quiet_environment()
    # The address goes through the environment: it may hold a password, and command lines are public.
    environment = {**os.environ, "MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--artifacts-destination", str(folder / "mlartifacts")],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _await(process, f"{_reachable(host, port)}/health")
        yield address, process
    finally:
        _stop(process)


def serve(uri: str, host: str = "127.0.0.1", port: int = 5000) -> None:
    """Show MLflow's pages until interrupted. An `http://` store has pages of its own: only its address is printed.

    Raises:
        UiError, TrackingAddressError: as `running`.
    """
    if uri.startswith("http"):
        print(f"This store is an MLflow server: open {shown(check_uri(uri))}")
        return
    if not _loopback(host):
        print(
            f"Warning: {host} can be reached from other machines. MLflow asks for no password: "
            "whoever reaches it reads and changes every run in the store.",
            file=sys.stderr,
        )
    # Ended by its process id, it must end the server too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running(uri, host, port) as (address, process):
            print(f"MLflow shows {shown(uri)} at {address}/#/experiments (Ctrl-C ends it)", flush=True)
            if process.wait() != 0:
                raise UiError("MLflow's server ended by itself.")
    except KeyboardInterrupt:
        print("MLflow's pages are closed; the store is as it was.")
    finally:
        signal.signal(signal.SIGTERM, before)


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _STARTUP_SECONDS
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UiError(f"MLflow's server ended while it started (exit code {process.returncode}).")
        with contextlib.suppress(urllib.error.URLError, OSError), direct.open(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise UiError(f"MLflow's server did not answer within {_STARTUP_SECONDS:g} s.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the workers it started (they share its process group)."""
    for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            if not _group_lives(process.pid):
                return


def _group_lives(group: int) -> bool:
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def _free_port(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UiError(f"Nothing can listen at {host} port {port} ({error.strerror}): name another port.") from None
        return int(listener.getsockname()[1])


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(host: str, port: int) -> str:
    """Where this machine itself reaches a server that listens on `host`."""
    wildcard = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return f"http://{wildcard.get(host, f'[{host}]' if ':' in host else host)}:{port}"


__all__ = ["TrackingAddressError", "UiError", "running", "serve"]
