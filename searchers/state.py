"""Saved state of a search on disk: plain JSON, versioned, written atomically.

The state is public by construction (`PrivateSearcher.get_state`): points and bookkeeping, no noise, no seeds of noise,
no private values. The truth about privacy is the ledger's; this file only saves repeating finished trials.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpray.searchers.errors import SearchError

FORMAT = "dpray-search"
VERSION = 1


def header(search: str) -> dict[str, Any]:
    """What every state begins with: format, version and the class of the search."""
    return {"format": FORMAT, "version": VERSION, "search": search}


def check(state: Mapping[str, Any], search: str) -> None:
    """Refuse, with a `SearchError`, what is no state, of another version or of another search."""
    if state.get("format") != FORMAT:
        raise SearchError("This is not the saved state of a dpray search.")
    if state.get("version") != VERSION:
        raise SearchError(f"The saved state has version {state.get('version')}; this release reads version {VERSION}.")
    if state.get("search") != search:
        raise SearchError(f"The saved state is of a {state.get('search')}, not of a {search}.")


def write(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write a state; the file is the old one or the whole new one, whatever happens meanwhile."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".search-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(state, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | Path) -> dict[str, Any]:
    """Read what `write` wrote; `SearchError` if it is anything else."""
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SearchError(f"{path} is not the saved state of a search: it is no JSON.") from error
    if not isinstance(state, dict):
        raise SearchError(f"{path} is not the saved state of a search.")
    return state
