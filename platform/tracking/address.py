"""Where MLflow is: addresses that work, addresses that cannot, and a quick look whether one answers.

MLflow's own patience is long (an HTTP request: 120 s, seven retries; a database that does not answer: fifteen retries
with doubling pauses; a locked sqlite file: 20 s a statement). `probe` asks for two seconds before any of that starts.
"""

import os
import re
import socket
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

PROBE_SECONDS = 2.0
LOCKED = "the sqlite file is locked by another writer"
_LOCK_SECONDS = 0.5
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
_SQLITE = "sqlite:///"

# No telemetry leaves the machine, and a server that hangs costs seconds. A value the user has set is left as it is.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}


class TrackingAddressError(ValueError):
    """An address of MLflow that cannot work; the message says which one to use."""


def quiet_environment() -> dict[str, str]:
    """Set, before MLflow is imported, what keeps it silent and quick; returns what now holds.

    Telemetry is off and a request that hangs ends after 10 s without retries, unless the environment says otherwise.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return {name: os.environ[name] for name in _ENVIRONMENT}


def check_uri(uri: str, cluster: bool = False) -> str:
    """The address with a relative sqlite path made absolute.

    Args:
        uri: `sqlite:///PATH`, `http(s)://HOST:PORT` of an MLflow server, or a database address MLflow understands.
        cluster: whether the run uses more than one machine.

    Raises:
        TrackingAddressError: a file store (closed in MLflow 3), an sqlite store without a file, a relative sqlite path
            on a cluster, or no address at all.
    """
    scheme = uri.partition(":")[0].partition("+")[0].lower()
    if scheme == "file" or "://" not in uri:
        raise TrackingAddressError(
            f"{shown(uri)!r} is a folder, and MLflow 3 no longer writes its store into folders; "
            "use sqlite:///mlflow.db, or the http:// address of an MLflow server."
        )
    if scheme != "sqlite":
        if scheme not in _PORTS or not urlsplit(uri).hostname:
            raise TrackingAddressError(
                f"{shown(uri)!r} is no address of MLflow; use sqlite:///PATH, http://HOST:PORT or postgresql://HOST/NAME."
            )
        return uri
    path = uri.removeprefix(_SQLITE)
    if not uri.startswith(_SQLITE) or not path or path == ":memory:":
        raise TrackingAddressError(
            f"{uri!r} names no file; write sqlite:///mlflow.db, or sqlite:////absolute/path/mlflow.db."
        )
    if cluster and not Path(path).is_absolute():
        raise TrackingAddressError(
            f"{uri!r} is a relative path, which names another file on every node of a cluster; use the http:// address "
            "of an MLflow server, or an absolute path on the driver's node (four slashes: sqlite:////path/mlflow.db)."
        )
    return _SQLITE + str(Path(path).absolute())


def sqlite_path(uri: str) -> Path | None:
    """The file of a checked sqlite address; None for any other."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def shown(text: str) -> str:
    """The text without the passwords of addresses in it (`scheme://name:password@host`)."""
    return re.sub(r"(://[^:/@\s]*):[^@/\s]+@", r"\1:***@", text)


def probe(uri: str) -> None:
    """Return if the store would answer now.

    Raises:
        OSError: nothing listens there, the file cannot be written, or another process is writing in it (`LOCKED`).
    """
    path = sqlite_path(uri)
    if path is not None:
        _probe_sqlite(path)
        return
    parts = urlsplit(uri)
    scheme = parts.scheme.partition("+")[0]
    with socket.create_connection((str(parts.hostname), parts.port or _PORTS[scheme]), timeout=PROBE_SECONDS):
        return


def _probe_sqlite(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} is not writable")
        return
    connection = sqlite3.connect(path, timeout=_LOCK_SECONDS, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise OSError(LOCKED) from None
        raise OSError(str(error)) from None
    except sqlite3.DatabaseError as error:
        raise OSError(str(error)) from None
    finally:
        connection.close()
