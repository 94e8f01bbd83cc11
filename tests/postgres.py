"""A PostgreSQL server of the tests' own, from the machine's binaries: it can be stopped and started again."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import sqlalchemy


class PostgresServer:
    """A server on a socket in a folder of its own; not on the network.

    Attributes:
        url: of its database, for SQLAlchemy.
        folder: with its data and log; removed by `close`.
    """

    def __init__(self, binaries: Path, account: dict) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dpray-pg-", dir="/tmp"))
        self.url = f"postgresql://dpray@/postgres?host={self.folder}"
        self._binaries, self._account, self._process = binaries, account, None
        if account:
            os.chown(self.folder, account["user"], account["group"])
        initdb = [binaries / "initdb", "-D", self._data, "-U", "dpray", "-A", "trust", "-N", "-E", "UTF8", "--locale=C"]
        subprocess.run(initdb, check=True, capture_output=True, cwd=self.folder, **account)

    @classmethod
    def installed(cls):
        """A server, not started; None where there are no binaries, or nobody PostgreSQL agrees to run as."""
        binaries, account = _binaries(), _account()
        return None if binaries is None or account is None else cls(binaries, account)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["-c", "listen_addresses=", "-c", "max_connections=60"]
        with (self.folder / "log").open("ab") as log:
            command = [self._binaries / "postgres", "-D", self._data, "-k", self.folder, *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, **self._account)
        engine = sqlalchemy.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        deadline = time.monotonic() + 30
        while True:
            try:
                engine.connect().close()
                engine.dispose()
                return
            except sqlalchemy.exc.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def stop(self, how=signal.SIGINT) -> None:
        """End it, its connections too. SIGINT: in order; SIGQUIT: as a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def close(self) -> None:
        """End it and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _binaries():
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    found = shutil.which("initdb")
    folders += [Path(found).parent] if found else []
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


def _account():
    """Arguments that start a process as somebody PostgreSQL agrees to run as."""
    if os.geteuid() != 0:
        return {}
    import pwd

    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    return None
