"""One run of MLflow as its driver writes to it: what can be shown, and under which names.

`RunView` is the interface; `tracker.Tracker` and its children are the implementation that reaches MLflow, `NullTracker`
the one that shows nothing.
"""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol, Self

from dpray.platform.privacy.budget import Budget, Quanta
from dpray.platform.tracking.address import shown
from dpray.platform.tracking.declared import DECLARED, Declared, Kind
from dpray.platform.tracking.delivery import ROOT, anchor_tags
from dpray.platform.tracking.spend import spend_entry
from dpray.platform.tracking.spool import Entry

ChildKind = Literal["search", "trial", "training"]

_VALUES_PER_ENTRY = 50
_NAME, _PARAM, _TAG = 250, 6000, 8000


class Status(StrEnum):
    """How a run ended, in MLflow's words."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


class HasHead(Protocol):
    """A head of the ledger's chain."""

    @property
    def sequence(self) -> int:
        """Number of its last entry."""

    @property
    def digest(self) -> str:
        """Digest of its last entry."""


class Statement(Protocol):
    """An account's statement."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""


class RunView(ABC):
    """One run of MLflow, written to by its driver. `part` is its place in the run: `experiment`, `search`, …"""

    def __init__(self, part: str, name: str, declared: Declared, at: int | None = None) -> None:
        self.part = part
        self.name = name
        self._declared = declared
        self._at = at
        self._children = 0

    def public(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Show public facts. Errors: `UndeclaredMetric`."""
        self._metrics("public", metrics, step)

    def released(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Show released values, or what follows from them and public data alone. Errors: `UndeclaredMetric`."""
        self._metrics("released", metrics, step)

    def spend(self, budget: Budget, spent: Quanta | None, run_spent: Quanta | None, *, step: int) -> None:
        """Show what the account has spent (`privacy/…`).

        Args:
            budget: of the account.
            spent: quanta charged over the account's lifetime; None: infinite, something was released without noise.
            run_spent: quanta charged by this run; None as above.
            step: round, or any counter that grows.
        """
        if spent is None or run_spent is None:
            self.stamps(["NOT PRIVATE (no noise)"])
            return
        self._record({**spend_entry(budget, spent, run_spent), "step": step, "time": self._now()})

    def tags(self, tags: Mapping[str, object]) -> None:
        """Set tags; a later value replaces an earlier one."""
        self._values("tags", {_key(name): _text(value, _TAG) for name, value in tags.items()})

    def params(self, params: Mapping[str, object], prefix: str = "") -> None:
        """Set parameters: nested mappings become `outer.inner`, long values are cut; a name's first value stays."""
        self._values("params", {_key(name): _text(value, _PARAM) for name, value in _flat(params, prefix)})

    def stamps(self, stamps: Sequence[str]) -> None:
        """Mark the run, where it cannot be overlooked (`NOT PRIVATE (seeded noise)`). Nothing for no stamps."""
        if stamps:
            text = "; ".join(dict.fromkeys(stamps))
            self.tags({"dpray.stamps": text, "mlflow.note.content": f"**{text}**"})

    def artifact_text(self, path: str, text: str) -> None:
        """Keep a text at `path`. Passwords in addresses are masked."""
        self._artifact(path, shown(text).encode())

    def artifact_json(self, path: str, value: object) -> None:
        """Keep a JSON-able value at `path`."""
        self.artifact_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def artifact(self, file: Path, path: str) -> None:
        """Keep a copy of a file (a plot) at `path`. Errors: FileNotFoundError."""
        if not file.is_file():
            raise FileNotFoundError(f"There is no file {str(file)!r} to keep as {path!r}.")
        self._artifact(path, file)

    def statement(self, statement: Statement, text: str, name: str = "statement") -> None:
        """Keep an account's statement as `privacy/NAME.json` and `privacy/NAME.txt`."""
        self.artifact_json(f"privacy/{name}.json", statement.as_dict())
        self.artifact_text(f"privacy/{name}.txt", text)

    def anchor(self, head: HasHead, ledger: str = "") -> None:
        """Leave the ledger's head where the ledger is not; `anchors` finds it again. Belongs on the parent run.

        Args:
            head: end of its chain.
            ledger: its identity.
        """
        self.tags(anchor_tags(head.sequence, head.digest, ledger))

    def child(self, kind: ChildKind, name: str | None = None, key: str | int | None = None) -> "RunView":
        """A run below this one, the same one whenever it is asked for.

        Args:
            kind: `search`, `trial` or `training`.
            name: what MLflow shows; by default the kind and the key.
            key: tells siblings of one kind apart.
        """
        last = kind if key is None else f"{kind}/{key}"
        part = last if self.part == ROOT else f"{self.part}/{last}"
        self._children += 1
        # A trial's start says nothing but its place in the order.
        at = (self._at or self._opened()) + self._children if kind == "trial" else None
        return self._open_child(kind, part, name or last.replace("/", " "), at)

    @abstractmethod
    def flush(self, timeout: float = 10.0) -> bool:
        """Send what waits; returns whether MLflow has everything after at most `timeout` seconds."""

    @abstractmethod
    def finish(self, status: Status | str = Status.FINISHED) -> bool:
        """End the run (and its children, if it is the parent); returns whether MLflow has everything so far."""

    @abstractmethod
    def _record(self, entry: Entry) -> None: ...

    @abstractmethod
    def _artifact(self, path: str, content: bytes | Path) -> None: ...

    @abstractmethod
    def _open_child(self, kind: str, part: str, name: str, at: int | None) -> "RunView": ...

    @abstractmethod
    def _opened(self) -> int: ...

    def _now(self) -> int:
        return milliseconds() if self._at is None else self._at

    def _metrics(self, kind: Kind, metrics: Mapping[str, float], step: int) -> None:
        self._values("metrics", self._declared.check(kind, metrics), step=int(step), time=self._now())

    def _values(self, operation: str, values: Mapping[str, Any], **rest: int) -> None:
        items = iter(values.items())
        while chunk := dict(islice(items, _VALUES_PER_ENTRY)):
            self._record({"op": operation, **rest, "values": chunk})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self.finish(Status.FINISHED if kind is None else Status.KILLED if interrupted else Status.FAILED)

    def __reduce__(self) -> NoReturn:
        raise TypeError("A tracker stays with the driver: return values from the worker and log them there.")


class NullTracker(RunView):
    """The same interface for a run that shows nothing; undeclared metrics are refused all the same."""

    def __init__(self, declared: Declared = DECLARED, part: str = ROOT, name: str = "") -> None:
        super().__init__(part, name, declared)

    def flush(self, timeout: float = 10.0) -> bool:
        """Nothing waits."""
        return True

    def finish(self, status: Status | str = Status.FINISHED, timeout: float = 30.0) -> bool:
        """Nothing ends."""
        Status(status)
        return True

    def _record(self, entry: Entry) -> None:
        pass

    def _artifact(self, path: str, content: bytes | Path) -> None:
        pass

    def _open_child(self, kind: str, part: str, name: str, at: int | None) -> RunView:
        return NullTracker(self._declared, part, name)

    def _opened(self) -> int:
        return 0


def milliseconds() -> int:
    """The time now, as MLflow counts it."""
    return time.time_ns() // 1_000_000


def _flat(values: Mapping[str, object], prefix: str) -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            flat += _flat(value, path)
        else:
            flat.append((path, value))
    return flat


def _key(name: str) -> str:
    """A name of a tag or parameter that MLflow takes."""
    return re.sub(r"[^\w.\- :/]", "_", name)[:_NAME]


def _text(value: object, limit: int) -> str:
    text = (
        json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, Mapping | list | tuple) else str(value)
    )
    text = shown(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
