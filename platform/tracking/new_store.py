"""A new sqlite store of MLflow, made whole or not at all.

MLflow makes the tables of a new store in many commits. Killed among them, it leaves a file that it refuses to open ever
after ("table … already exists"), and so does a second process that opens the file meanwhile. Here the store is made
under another name and takes its own when it is complete; a store that is there is left as it is, whatever is in it.

    lock the folder ─▶ there by now? ─▶ remove what a killed maker left ─▶ make `.NAME.new` ─▶ link it to NAME ─▶ unlock
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpray.platform.tracking.address import LOCKED, quiet_environment

_WAIT_SECONDS, _PAUSE_SECONDS = 60.0, 0.05


def ensure_store(path: Path) -> None:
    """Make the store unless the file is there.

    Raises:
        OSError: the folder cannot be written, or another process has been making the store for a minute (`LOCKED`).
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        if not path.exists():
            _make(path)


def _make(path: Path) -> None:
    partial = path.with_name(f".{path.name}.new")
    leftovers = [partial, *(partial.with_name(partial.name + suffix) for suffix in ("-journal", "-wal", "-shm"))]
    try:
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        _fill(partial)
        with suppress(FileExistsError):  # made by MLflow itself meanwhile, without this lock: that one stays
            _name(partial, path)
    finally:
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)


def _fill(partial: Path) -> None:
    """The tables, and the first experiment, as MLflow makes them."""
    quiet_environment()
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # Not through a client: MLflow keeps a client's store by its address, and would take a later one for made.
    store = SqlAlchemyStore(f"sqlite:///{partial}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    store.engine.dispose()


def _name(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        partial.rename(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder against other makers; the kernel lets go of it when the process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(LOCKED) from None
                time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(handle)
