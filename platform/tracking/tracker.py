"""What a run shows in MLflow: one parent run, children for the search, each trial and the training.

    with Tracker(Path("dpray-runs/digits/tracking"), run="digits") as tracker:
        tracker.params(recipe)
        training = tracker.child("training")
        training.released({"round/gradient_norm": norm}, step=3)
        training.spend(account.budget, account.spent, run_spent, step=3)
        training.finish()

*Guarantee.* Metrics are declared public or released (`declared`), everything else is text its caller vouches for. Every
call is spooled and returns; MLflow hears of it later, if it can be reached (`courier`). A point (metric, step) is shown
once: what a resumed run logs again is dropped. A tracker stays in the driver's process; workers do not log. The runs of
trials carry no times of their own, since how long clients take depends on their data; a point's time is when it was
logged.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dpray.platform.tracking.address import check_uri
from dpray.platform.tracking.courier import Courier
from dpray.platform.tracking.declared import DECLARED, Declared
from dpray.platform.tracking.delivery import ROOT, Delivery
from dpray.platform.tracking.spool import Entry, Spool
from dpray.platform.tracking.view import RunView, Status, milliseconds
from dpray.platform.tracking.written import Written

_RUN_NAME = re.compile(r"[\w.,:;+=@()/ -]{1,200}")


class Tracker(RunView):
    """The parent run, and the way of all its parts to MLflow. Only `flush` and `finish` wait for MLflow.

    Args:
        spool: the run's own folder for what it shows (0700); the same one continues the same run of MLflow.
        run: name of the run, readable; tag `dpray.run`.
        uri: address of the store, see `check_uri`.
        experiment: name of MLflow's experiment.
        tags: of the parent run: unit, population, relation, delta, noise, trust.
        resume: the run has begun before; if its spool is gone, its newest run in MLflow is continued.
        cluster: whether the run uses more than one machine.
        declared: metric names the run may show.
        batch: entries after which MLflow is told at once.
        interval: seconds after which MLflow is told anyway.

    Raises:
        TrackingAddressError: an address that cannot work. An address that does not answer is no error.
        ValueError: a run name with characters MLflow cannot search for.
    """

    def __init__(
        self,
        spool: Path,
        run: str,
        *,
        uri: str = "sqlite:///mlflow.db",
        experiment: str = "dpray",
        tags: Mapping[str, object] | None = None,
        resume: bool = False,
        cluster: bool = False,
        declared: Declared = DECLARED,
        batch: int = 200,
        interval: float = 2.0,
    ) -> None:
        self.uri = check_uri(uri, cluster)
        if not _RUN_NAME.fullmatch(run):
            raise ValueError(f"{run!r} is no name for a run: use letters, digits, spaces and . , : ; + = @ ( ) / _ -.")
        super().__init__(ROOT, run, declared)
        self.experiment = experiment
        self._spool = Spool(spool, {"run": run, "experiment": experiment})
        self._written = Written()
        for entry in self._spool.entries():
            if "part" in entry:
                self._written.fresh(entry)
        adopt = resume and self._spool.fresh
        delivery = Delivery(self.uri, spool, experiment, run, self._spool.identity, adopt)
        self._closed = False
        opening = self._opening("experiment", ROOT, None, run, None)
        self._written.fresh(opening)
        self._spool.append(opening)
        self._courier = Courier(self._spool, delivery, self.uri, batch, interval)
        self.tags(tags or {})

    @property
    def delivered(self) -> bool:
        """Whether MLflow has everything that was logged."""
        return self._courier.delivered

    @property
    def run_ids(self) -> dict[str, str]:
        """MLflow's run ids by part, as far as they are known."""
        return self._courier.run_ids

    @property
    def spool_path(self) -> Path:
        """Where everything logged is kept."""
        return self._spool.path

    def flush(self, timeout: float = 10.0) -> bool:
        """Send what waits; returns whether MLflow has everything after at most `timeout` seconds."""
        return self._courier.delivered if self._closed else self._courier.flush(timeout)

    def finish(self, status: Status | str = Status.FINISHED, timeout: float = 30.0) -> bool:
        """End the run and every child still open. What MLflow does not have then stays in the spool.

        Returns:
            Whether MLflow has everything after at most `timeout` seconds.
        """
        if self._closed:
            return self._courier.delivered
        for part in sorted(self._written.unfinished - {ROOT}):
            self.record_for(part, {"op": "finish", "status": Status(status), "time": milliseconds()})
        self._record({"op": "finish", "status": Status(status), "time": milliseconds()})
        self._closed = True
        return self._courier.stop(timeout)

    def record_for(self, part: str, entry: Entry) -> None:
        """Spool an entry of one part, less what was said before."""
        if self._closed:
            raise RuntimeError(f"The run {self.name!r} is finished; nothing more can be shown in it.")
        news = self._written.fresh({**entry, "part": part})
        if news is not None:
            self._courier.record(news)

    def keep_for(self, part: str, path: str, content: bytes | Path) -> None:
        """Spool an artefact of one part."""
        place = PurePosixPath(path)
        if place.is_absolute() or ".." in place.parts or not place.name:
            raise ValueError(
                f"An artefact's path is relative to its run, like privacy/statement.txt, but {path!r} was given."
            )
        file, digest = self._spool.keep(place.name, content)
        self.record_for(part, {"op": "artifact", "path": str(place), "file": file, "digest": digest})

    def open_for(self, parent: str, kind: str, part: str, name: str, at: int | None) -> int:
        """Spool the beginning (or another beginning) of a child; returns when it first began, in milliseconds."""
        if part not in self._written.unfinished or part not in self._written.opened:
            opening = self._opening(kind, part, parent, name, at)
            self._written.fresh(opening)
            self._courier.record(opening)
        return self._written.opened[part]

    def opened_at(self, part: str) -> int:
        """When a part first began, in milliseconds."""
        return self._written.opened[part]

    def _opening(self, kind: str, part: str, parent: str | None, name: str, at: int | None) -> Entry:
        again = part in self._written.opened
        time = milliseconds() if at is None else at
        return {"op": "open", "kind": kind, "part": part, "parent": parent, "name": name, "again": again, "time": time}

    def _record(self, entry: Entry) -> None:
        self.record_for(ROOT, entry)

    def _artifact(self, path: str, content: bytes | Path) -> None:
        self.keep_for(ROOT, path, content)

    def _open_child(self, kind: str, part: str, name: str, at: int | None) -> RunView:
        return _Child(self, ROOT, kind, part, name, at)

    def _opened(self) -> int:
        return self._written.opened[ROOT]


class _Child(RunView):
    """A run below the parent."""

    def __init__(self, tracker: Tracker, parent: str, kind: str, part: str, name: str, at: int | None) -> None:
        opened = tracker.open_for(parent, kind, part, name, at)
        super().__init__(part, name, tracker._declared, opened if kind == "trial" else None)
        self._tracker = tracker

    def flush(self, timeout: float = 10.0) -> bool:
        return self._tracker.flush(timeout)

    def finish(self, status: Status | str = Status.FINISHED) -> bool:
        self._record({"op": "finish", "status": Status(status), "time": self._now()})
        return self._tracker.delivered

    def _record(self, entry: Entry) -> None:
        self._tracker.record_for(self.part, entry)

    def _artifact(self, path: str, content: bytes | Path) -> None:
        self._tracker.keep_for(self.part, path, content)

    def _open_child(self, kind: str, part: str, name: str, at: int | None) -> RunView:
        return _Child(self._tracker, self.part, kind, part, name, at)

    def _opened(self) -> int:
        return self._tracker.opened_at(self.part)
