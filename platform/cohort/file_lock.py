"""One at a time over a file: among the processes of a node, and among the threads and opens of one process.

A POSIX record lock belongs to its process. A child that user code forks does not inherit it, so that one which outlives
a killed host keeps nobody waiting (a `flock` would be held until the child ends, too). Two things such a lock does not
do are done here:

| within one process, a record lock          | here                                                          |
|--------------------------------------------|---------------------------------------------------------------|
| does not keep two opens or threads apart   | they share a lock in memory, by the file's inode               |
| is dropped when *any* open is closed       | an open is closed while no other one of the process has it     |
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

_GUARD = threading.Lock()
_TURNS: WeakValueDictionary[tuple[int, int], _Turn] = WeakValueDictionary()


class _Turn:
    """Whose turn it is in this process, over one file."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class FileLock:
    """A lock on the file at `path`, which is made with mode 0600 if it is not there; not reentrant.

    A lock that was opened before a fork is not for the child: it opens its own.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        about = os.fstat(self._file)
        with _GUARD:
            self._turn = _TURNS.setdefault((about.st_dev, about.st_ino), _Turn())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the turn, without polling, and keep it within the block."""
        with self._turn.lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; again changes nothing."""
        with self._turn.lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def _forget() -> None:
    """In a forked child: turns may be held by threads that exist in the parent only."""
    _TURNS.clear()
    _GUARD.release()


os.register_at_fork(before=_GUARD.acquire, after_in_parent=_GUARD.release, after_in_child=_forget)
