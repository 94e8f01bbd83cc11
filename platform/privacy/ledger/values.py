"""Stored values: small ones in their row, large ones in a file that is on disk before the row names it.

Notation
    digest   SHA-256 of dtype, shape and bytes
    place    `row`, `file:<name>` or `pruned`
    large    above 1 MiB: a file, if the ledger has a folder for values (SQLite: `<database>.values/`)

A value is a float64 or int64 array; what comes back is read-only and bit for bit what was stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy.ledger.errors import LedgerError, LedgerTampered
from dpray.platform.privacy.ledger.storage import sync_folder

LARGE = 2**20
ROW, PRUNED, _FILE = "row", "pruned", "file:"
_DTYPES = {"float64": np.dtype("<f8"), "int64": np.dtype("<i8")}


@dataclass(frozen=True)
class Encoded:
    """A value as the ledger keeps it."""

    dtype: str
    shape: str
    data: bytes
    digest: str

    @property
    def large(self) -> bool:
        """Above 1 MiB."""
        return len(self.data) > LARGE


def encode(value: Any) -> Encoded:
    """Bytes and digest of a float64 or int64 array; LedgerError for anything else."""
    if not isinstance(value, np.ndarray) or value.dtype.name not in _DTYPES:
        given = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise LedgerError(f"A released value is a float64 or int64 array; {given} was given.")
    dtype, shape = value.dtype.name, json.dumps(list(value.shape))
    data = value.astype(_DTYPES[dtype], copy=False).tobytes()
    return Encoded(dtype, shape, data, value_digest(dtype, shape, data))


def decode(dtype: str, shape: str, data: bytes) -> NDArray[Any]:
    """The read-only array with these bytes."""
    return np.frombuffer(data, dtype=_DTYPES[dtype]).reshape(json.loads(shape))


def value_digest(dtype: str, shape: str, data: bytes) -> str:
    """SHA-256 over dtype, shape and bytes, in hexadecimal."""
    digest = hashlib.sha256(f"{dtype} {shape}\n".encode())
    digest.update(data)
    return digest.hexdigest()


def in_file(place: str) -> str | None:
    """Name of the file a place points to, or None."""
    return place.removeprefix(_FILE) if place.startswith(_FILE) else None


class ValueFiles:
    """The folder of large values: mode 0700, files 0600, written once under a name no other computation uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, data: bytes) -> str:
        """Write and sync a file; returns its place. A half-written file never has its final name."""
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.folder.parent)
        handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=self.folder)  # 0600 by itself
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):  # a new lease has removed it: `store` sees that, and stores nothing
                os.replace(temporary, self.folder / name)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        sync_folder(self.folder)
        return _FILE + name

    def read(self, name: str) -> bytes:
        """The bytes of a file; LedgerTampered if it is gone."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise LedgerTampered(f"The value file {self.folder / name} is gone, and the ledger names it.") from None

    def there(self, name: str) -> bool:
        """Whether the file exists."""
        return (self.folder / name).is_file()

    def size(self, name: str) -> int | None:
        """Bytes of the file, or None if it is gone."""
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            (self.folder / name).unlink()

    def starting_with(self, prefix: str) -> tuple[str, ...]:
        """Names of the files, finished or not, that begin so."""
        if not self.folder.is_dir():
            return ()
        return tuple(sorted(path.name for path in self.folder.iterdir() if path.name.startswith(prefix)))
