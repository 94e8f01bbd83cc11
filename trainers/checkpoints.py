"""Round checkpoints: the server's state as plain arrays and JSON, whole or not there at all, the last two kept.

    <folder>/round-000012/state.npz       theta and the algorithm's slots, float64
    <folder>/round-000012/state.json      round, what is being trained, the rounds so far, SHA-256 of state.npz

Everything in them is made of releases. No pickles: reading one runs nobody's code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpray.trainers.models import FloatArray
from dpray.trainers.settings import ServerState

KEPT = 2
_FORMAT = 1
_ARRAYS, _MANIFEST = "state.npz", "state.json"


class CheckpointConflict(ValueError):  # noqa: N818 - an outcome that callers handle
    """A folder holds checkpoints of another training."""


@dataclass(frozen=True)
class Checkpoint:
    """The server after a round.

    Attributes:
        round: t.
        state: after round t.
        rows: the metrics of rounds 1 … t.
        path: its folder.
    """

    round: int
    state: ServerState
    rows: tuple[dict[str, Any], ...]
    path: Path


class Checkpoints:
    """Checkpoints of one training in one folder.

    Args:
        folder: made when the first one is saved.
        identity: what is being trained, as JSON values; a folder with another identity is refused.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = json.loads(json.dumps(identity))

    def save(self, t: int, state: ServerState, rows: tuple[dict[str, Any], ...]) -> Path:
        """Keep the state after round t, durably: a crash leaves the earlier ones and this one, or the earlier ones."""
        final = self._place(t)
        partial = self.folder / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with (partial / _ARRAYS).open("wb") as file:
            slots: dict[str, Any] = {f"slot.{name}": value for name, value in state.slots.items()}
            np.savez(file, theta=state.theta, **slots)
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "format": _FORMAT,
            "identity": self.identity,
            "round": t,
            "steps": state.steps,
            "rows": rows,
            "sha256": _digest(partial / _ARRAYS),
        }
        with (partial / _MANIFEST).open("w", encoding="utf-8") as text:
            json.dump(manifest, text)
            text.flush()
            os.fsync(text.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_folder(self.folder)
        for old in self._found()[KEPT:]:
            shutil.rmtree(self._place(old), ignore_errors=True)
        return final

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are passed over.

        Raises:
            CheckpointConflict: it belongs to another training.
        """
        for t in self._found():
            found = _read(self._place(t))
            if found is None:
                continue
            checkpoint, identity = found
            differing = [name for name in self.identity if identity.get(name) != self.identity[name]]
            if differing:
                raise CheckpointConflict(
                    f"{self.folder} holds checkpoints of another training (another {', '.join(differing)}). "
                    "Give this one a folder of its own, or the settings it was begun with."
                )
            return checkpoint
        return None

    @property
    def oldest_round(self) -> int:
        """Round of the oldest checkpoint kept; 0 without any."""
        return min(self._found(), default=0)

    def _place(self, t: int) -> Path:
        return self.folder / f"round-{t:06d}"

    def _found(self) -> list[int]:
        """Rounds with a checkpoint, newest first."""
        names = (place.name.removeprefix("round-") for place in self.folder.glob("round-*"))
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def load_parameters(path: Path | str) -> FloatArray:
    """θ of a checkpoint, (d,): of `Path(result.checkpoint.path)` after a training.

    Raises:
        ValueError: there is no whole checkpoint.
    """
    found = _read(Path(path))
    if found is None:
        raise ValueError(f"There is no whole checkpoint in {path}: a folder with {_ARRAYS} and {_MANIFEST} is one.")
    return found[0].state.theta


def _read(place: Path) -> tuple[Checkpoint, dict[str, Any]] | None:
    try:
        manifest = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or manifest["sha256"] != _digest(place / _ARRAYS):
            return None
        with np.load(place / _ARRAYS, allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays.files}
        slots = {name.removeprefix("slot."): value for name, value in values.items() if name.startswith("slot.")}
        state = ServerState(values["theta"], slots, manifest["steps"])
        return Checkpoint(manifest["round"], state, tuple(manifest["rows"]), place), manifest["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(place: Path) -> str:
    with place.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
