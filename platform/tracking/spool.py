"""A run's own record of what it shows, written before MLflow hears of it.

One folder per run: `spool.jsonl` (one entry a line, append only), `cursor` (bytes of it that MLflow has), `files/`
(artefacts). Nothing is dropped when MLflow has it, so that a store that was lost is filled again from the spool.
Files are 0600, the folder 0700. A line is written in one call and survives the death of the process; a torn last line
(full disk, power cut) is cut off when the spool is opened.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

_FORMAT = 1


class Spool:
    """The entries of one run, in order, and how many of them MLflow has.

    Args:
        folder: the run's own folder for this; made if it is not there.
        header: facts kept in the first line of a new spool (names of run and experiment).

    Raises:
        ValueError: the folder holds a spool of another format.
    """

    def __init__(self, folder: Path, header: Entry | None = None) -> None:
        self.folder = folder
        self.path = folder / "spool.jsonl"
        self._cursor_path = folder / "cursor"
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(self._file, 0o600)
        self._end = self._cut_torn_line()
        self.fresh = self._end == 0
        if self.fresh:
            self.append({"op": "spool", "format": _FORMAT, "identity": uuid.uuid4().hex, **(header or {})})
            self.advance(self._end)
        self.header = self._read_header()
        self._cursor = self._read_cursor()

    @property
    def identity(self) -> str:
        """What tells this run from another of the same name, in one store."""
        return str(self.header["identity"])

    @property
    def end(self) -> int:
        """Bytes written."""
        return self._end

    @property
    def cursor(self) -> int:
        """Bytes that MLflow has."""
        return self._cursor

    def append(self, entry: Entry) -> None:
        """Write one entry."""
        line = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            written = os.write(self._file, line)
            if written != len(line):
                os.ftruncate(self._file, self._end)
                raise OSError(f"The disk is full: {self.path} could not be written.")
            self._end += written

    def adopt(self, identity: str) -> None:
        """Continue a run that another, lost spool began."""
        self.append({"op": "adopt", "identity": identity})
        self.header = {**self.header, "identity": identity}

    def entries(self) -> Iterator[Entry]:
        """Every entry, from the first."""
        with self.path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield json.loads(line)

    def read(self, limit: int) -> tuple[list[Entry], int]:
        """Up to `limit` entries that MLflow does not have yet, and where they end."""
        entries: list[Entry] = []
        position = self._cursor
        with self.path.open("rb") as lines:
            lines.seek(position)
            while len(entries) < limit and (line := lines.readline()).endswith(b"\n"):
                position += len(line)
                entries.append(json.loads(line))
        return entries, position

    def advance(self, position: int) -> None:
        """Note that MLflow has everything up to `position` (0: nothing, start over)."""
        temporary = self._cursor_path.with_suffix(".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(str(position))
        temporary.replace(self._cursor_path)
        self._cursor = position

    def keep(self, name: str, content: bytes | Path) -> tuple[str, str]:
        """Keep an artefact; returns its place below the folder and its digest.

        Args:
            name: the file name it will have in MLflow.
            content: bytes, or a file to copy.
        """
        digest = (hashlib.sha256(content) if isinstance(content, bytes) else _file_digest(content)).hexdigest()[:32]
        place = Path("files") / digest / name
        target = self.folder / place
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = target.with_name(target.name + ".new")
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            shutil.copyfile(content, temporary)
        temporary.chmod(0o600)
        temporary.replace(target)
        return str(place), digest

    def close(self) -> None:
        """Close the file; the entries stay."""
        with self._lock, contextlib.suppress(OSError):
            os.close(self._file)

    def _cut_torn_line(self) -> int:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.ftruncate(self._file, whole)
        return whole

    def _read_header(self) -> Entry:
        entries = self.entries()
        header = next(entries)
        if header.get("op") != "spool" or header.get("format") != _FORMAT:
            raise ValueError(f"{self.path} is not a spool this version can read; move it away to start a new one.")
        for entry in entries:
            if entry["op"] == "adopt":
                header = {**header, "identity": entry["identity"]}
        return header

    def _read_cursor(self) -> int:
        try:
            cursor = int(self._cursor_path.read_text())
        except (OSError, ValueError):
            return 0
        return cursor if 0 <= cursor <= self._end else 0


def _file_digest(path: Path) -> "hashlib._Hash":
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")
