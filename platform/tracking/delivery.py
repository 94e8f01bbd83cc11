"""Entries of a spool → MLflow, through `MlflowClient` and explicit run ids.

Nothing fluent is used: no active run, no autologging, no system metrics. Everything sent may be sent again: a run is
found by its tags before one is made, a metric point carries the time it was spooled (MLflow drops an equal point), a
tag or artefact is overwritten by itself, a parameter is accepted if it is equal.

Tags that find a run: `dpray.id` (the spool's identity) and `dpray.part` (`experiment`, `search`, `search/trial/3`,
`training`); `dpray.run` is the run's name.
"""

import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dpray.platform.tracking.address import LOCKED, check_uri, probe, quiet_environment, sqlite_path
from dpray.platform.tracking.new_store import ensure_store
from dpray.platform.tracking.spend import expanded
from dpray.platform.tracking.spool import Entry

T = TypeVar("T")

ROOT = "experiment"
# MLflow's limits of one `log_batch`.
_METRICS, _OTHERS = 1000, 100
_REJECTED = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS"})
_MISSING = frozenset({"RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"})
_LEDGER_SEQUENCE, _LEDGER_DIGEST, _LEDGER = "dpray.ledger.sequence", "dpray.ledger.digest", "dpray.ledger"

log = logging.getLogger("dpray.tracking")


class Unreachable(ConnectionError):  # noqa: N818
    """MLflow does not take anything at the moment; try again later."""


class RunMissing(LookupError):  # noqa: N818
    """The store does not have a run that entries belong to: send the spool from its beginning."""


class _Rejected(ValueError):  # noqa: N818
    """MLflow will never take this entry."""


@dataclass
class _Batch:
    metrics: list[Any] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def fits(self, entry: Entry) -> bool:
        values = len(entry["values"])
        return (
            len(self.metrics) + (values if entry["op"] == "metrics" else 0) <= _METRICS - 2 * _OTHERS
            and len(self.params) + (values if entry["op"] == "params" else 0) <= _OTHERS
            and len(self.tags) + (values if entry["op"] == "tags" else 0) <= _OTHERS
        )


class Delivery:
    """One run's way into one store. Used by one thread at a time.

    Args:
        uri: address, checked.
        folder: the spool's folder, where artefacts are.
        experiment: name of MLflow's experiment.
        run: name of the run (tag `dpray.run`).
        identity: tag `dpray.id`.
        adopt: whether to continue the newest run of that name if none has the identity; `adopted` then is the
            identity found.
    """

    def __init__(self, uri: str, folder: Path, experiment: str, run: str, identity: str, adopt: bool = False) -> None:
        quiet_environment()
        # Here, not in the courier's thread: two threads importing at once can meet half-made modules.
        import mlflow

        if not uri.startswith("http"):
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

        self._uri = uri
        self._folder = folder
        self._experiment_name = experiment
        self._run = run
        self.identity = identity
        self._adopt = adopt
        self._client: Any = None
        self._experiment: str | None = None
        self._runs: dict[str, str] = {}
        self._warned: set[str] = set()

    @property
    def run_ids(self) -> dict[str, str]:
        """MLflow's run id of every part known so far."""
        return dict(self._runs)

    def connect(self) -> None:
        """Reach the store and learn which runs of this identity it has.

        Raises:
            Unreachable: nothing answers, or it does not let the experiment be used.
        """
        knock(self._uri)
        if self._experiment is not None:
            return
        path = sqlite_path(self._uri)
        if path is not None:
            _guarded(lambda: ensure_store(path))
        try:
            self._client = self._client or _guarded(lambda: _client(self._uri))
            self._experiment = _guarded(self._find_experiment)
            self._runs = _guarded(self._find_runs)
        except (_Rejected, RunMissing) as error:
            self.disconnect()
            raise Unreachable(str(error)) from None

    def disconnect(self) -> None:
        """Forget what is known of the store: it may be another when it is back."""
        self._experiment = None
        self._runs = {}

    @property
    def has_root(self) -> bool:
        """Whether the store has the run."""
        return ROOT in self._runs

    def deliver(self, entries: Sequence[Entry]) -> None:
        """Send the entries in order. Sending them again changes nothing.

        Raises:
            Unreachable: the store went away; some entries may have arrived.
            RunMissing: the store has lost a run.
        """
        try:
            self._deliver(entries)
        except _Rejected as error:
            parts = _halves(entries)
            if not parts:
                self._reject(entries[0], str(error))
            for part in parts:
                self.deliver(part)

    def _deliver(self, entries: Sequence[Entry]) -> None:
        batches: dict[str, _Batch] = {}
        for spooled in entries:
            entry = expanded(spooled) if spooled["op"] == "spend" else spooled
            operation, part = entry["op"], entry.get("part", ROOT)
            if operation in {"metrics", "tags", "params"}:
                batch = batches.setdefault(part, _Batch())
                if not batch.fits(entry):
                    self._send(part, batch)
                    batch = batches[part] = _Batch()
                self._collect(batch, entry)
                continue
            if operation in {"spool", "adopt"}:
                continue
            self._send_all(batches)
            if operation == "open":
                self._open(entry)
            elif operation == "artifact":
                self._artifact(self._id(part), entry)
            elif operation == "finish":
                run_id = self._id(part)
                self._on_run(run_id, partial(self._client.set_terminated, run_id, entry["status"], entry["time"]))
        self._send_all(batches)

    def _send_all(self, batches: dict[str, _Batch]) -> None:
        for part, batch in batches.items():
            self._send(part, batch)
        batches.clear()

    def _send(self, part: str, batch: _Batch) -> None:
        from mlflow.entities import Param, RunTag

        run_id = self._id(part)
        params = [Param(name, value) for name, value in batch.params.items()]
        tags = [RunTag(name, value) for name, value in batch.tags.items()]
        self._on_run(run_id, lambda: self._client.log_batch(run_id, batch.metrics, params, tags))

    def _collect(self, batch: _Batch, entry: Entry) -> None:
        from mlflow.entities import Metric

        if entry["op"] == "metrics":
            batch.metrics += [
                Metric(name, value, entry["time"], entry["step"]) for name, value in entry["values"].items()
            ]
        elif entry["op"] == "tags":
            batch.tags.update(entry["values"])
        else:
            batch.params.update(entry["values"])

    def _open(self, entry: Entry) -> None:
        part = entry["part"]
        if part in self._runs:
            run_id = self._runs[part]
            self._on_run(run_id, lambda: self._client.update_run(run_id, status="RUNNING"))
            return
        if entry["again"]:
            raise RunMissing(part)
        tags = {"dpray.run": self._run, "dpray.id": self.identity, "dpray.part": part, "dpray.kind": entry["kind"]}
        if entry["parent"] is not None:
            tags["mlflow.parentRunId"] = self._id(entry["parent"])
        created = _guarded(lambda: self._client.create_run(self._experiment, entry["time"], tags, entry["name"]))
        self._runs[part] = created.info.run_id

    def _artifact(self, run_id: str, entry: Entry) -> None:
        folder = str(Path(entry["path"]).parent)
        source = self._folder / entry["file"]
        if not source.exists():
            raise _Rejected("its file is gone from the spool")
        self._on_run(run_id, lambda: self._client.log_artifact(run_id, str(source), None if folder == "." else folder))

    def _id(self, part: str) -> str:
        if part not in self._runs:
            raise RunMissing(part)
        return self._runs[part]

    def _on_run(self, run_id: str, call: Callable[[], T]) -> T:
        """Call; a refusal because the run was deleted meanwhile is a missing run."""
        try:
            return _guarded(call)
        except _Rejected:
            if _guarded(lambda: self._client.get_run(run_id)).info.lifecycle_stage == "deleted":
                raise RunMissing(run_id) from None
            raise

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment_name)
        if found is not None:
            if found.lifecycle_stage == "deleted":
                raise Unreachable(f"its experiment {self._experiment_name!r} is deleted; restore it or name another")
            return str(found.experiment_id)
        path = sqlite_path(self._uri)
        # Beside the store's file, not in whichever folder the process happens to run in.
        location = (
            None if path is None else (path.parent / "mlartifacts" / _folder_name(self._experiment_name)).as_uri()
        )
        # Tells MLflow's pages to open the experiment as model training, not as work on language models.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        return str(self._client.create_experiment(self._experiment_name, location, tags))

    def _find_runs(self) -> dict[str, str]:
        if self._adopt:
            self._adopt_newest()
        found = self._search(f"tags.`dpray.id` = '{self.identity}'")
        return {run.data.tags["dpray.part"]: run.info.run_id for run in reversed(found)}

    def _adopt_newest(self) -> None:
        self._adopt = False
        if found := self._search(f"tags.`dpray.run` = '{self._run}' and tags.`dpray.part` = '{ROOT}'"):
            self.identity = found[0].data.tags["dpray.id"]

    def _search(self, query: str) -> list[Any]:
        return _search(self._client, str(self._experiment), query)

    def _reject(self, entry: Entry, reason: str) -> None:
        names: str = ", ".join(sorted(entry["values"])) if "values" in entry else str(entry.get("path", entry["op"]))
        if names not in self._warned:
            self._warned.add(names)
            log.warning("MLflow refused %s of %s (%s); it is left out.", names, entry.get("part", ROOT), reason)


def anchors(
    uri: str, experiment: str, runs: Iterable[str] = (), *, ledger: str | None = None
) -> tuple[tuple[int, str], ...]:
    """Heads of the ledger that runs left in MLflow: (sequence, digest), for `Ledger.verify`.

    Args:
        uri: address of the store.
        experiment: name of MLflow's experiment.
        runs: names of the ledger's runs; runs of another ledger must not be among them. Or
        ledger: its identity (`Ledger.identity`): all its runs, also those that an older copy knows nothing of.

    Raises:
        Unreachable: nothing answers.
    """
    uri = check_uri(uri)
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        return ()
    quiet_environment()
    knock(uri)
    client = _guarded(lambda: _client(uri))
    found = _guarded(lambda: client.get_experiment_by_name(experiment))
    if found is None:
        return ()
    wanted = set(runs)
    roots = _guarded(lambda: _search(client, found.experiment_id, f"tags.`dpray.part` = '{ROOT}'"))
    tags = [
        run.data.tags
        for run in roots
        if (run.data.tags.get("dpray.run") in wanted if ledger is None else run.data.tags.get(_LEDGER) == ledger)
    ]
    return tuple(
        (int(t[_LEDGER_SEQUENCE]), t[_LEDGER_DIGEST]) for t in tags if {_LEDGER_SEQUENCE, _LEDGER_DIGEST} <= set(t)
    )


def anchor_tags(sequence: int, digest: str, ledger: str) -> dict[str, str]:
    """The tags that `anchors` reads."""
    return {_LEDGER_SEQUENCE: str(sequence), _LEDGER_DIGEST: digest, **({_LEDGER: ledger} if ledger else {})}


def knock(uri: str) -> None:
    """Return if the store would answer now.

    Raises:
        Unreachable: with the reason in a few words.
    """
    try:
        probe(uri)
    except OSError as error:
        raise Unreachable(error.strerror or str(error) or type(error).__name__) from None


def _guarded(call: Callable[[], T]) -> T:
    """Call MLflow; what it raises becomes one of this module's three errors, without its message (it holds values)."""
    import requests
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as error:
        if error.error_code in _REJECTED:
            raise _Rejected(error.error_code) from None
        if error.error_code in _MISSING:
            raise RunMissing(error.error_code) from None
        locked = "database is locked" in str(error)
        raise Unreachable(LOCKED if locked else error.error_code) from None
    except (OSError, sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, requests.RequestException) as error:
        raise Unreachable(type(error).__name__) from None


def _halves(entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    """Smaller deliveries that together are this one; none if it is a single value."""
    if len(entries) > 1:
        middle = len(entries) // 2
        return [entries[:middle], entries[middle:]]
    values = entries[0].get("values", {})
    if len(values) > 1:
        return [[{**entries[0], "values": {name: value}} for name, value in values.items()]]
    return []


def _client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _search(client: Any, experiment: str, query: str) -> list[Any]:
    """Runs that match, newest first."""
    found: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment], query, max_results=1000, order_by=["start_time DESC"], page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def _folder_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".") or "experiment"
