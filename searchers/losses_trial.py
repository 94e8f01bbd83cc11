"""One evaluation of a search in the central model: per-user losses go to the curator, bookkeeping goes to Tune.

    trial ── points ──▶ evaluator ── losses (n,) ──▶ curator          trial ── {"evaluated": 1} ──▶ Tune

The user's code runs in a process of its own, the evaluator. If code on protected users kills it, the trial starts
another one and Tune sees nothing; after `PATIENCE` deaths at a point its losses count as NaN for all, like those of
code that raises. If it dies in `fit`, the trial fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpray.platform.curator import PATIENCE
from dpray.searchers.batch import Config
from dpray.searchers.errors import SearchError
from dpray.searchers.trial import MORE, SEARCH, EvaluationTrial

if TYPE_CHECKING:
    from dpray.platform.curator_actor import CuratorHandle
    from dpray.platform.user_losses import UserLosses

_STRICT = "first"


@dataclass(frozen=True)
class TaskSource:
    """Where an evaluator gets its task from: the object store, or a function that makes it on the trial's own node."""

    reference: Any = field(repr=False)
    made: bool

    @classmethod
    def of(cls, task: UserLosses | Callable[[], UserLosses]) -> TaskSource:
        """Put a task where evaluators can fetch it; one that is a function is not called here."""
        import ray

        if isinstance(task, type) or not hasattr(task, "losses"):
            return cls(task, made=False)
        return cls(ray.put(task) if ray.is_initialized() else task, made=True)

    def get(self) -> UserLosses:
        """The task, fetched or made.

        Raises:
            SearchError: it could not be; only the kind of error is told, for its text may quote records.
        """
        from dpray.platform.confine import hushed
        from dpray.platform.user_losses import check_task

        try:
            with hushed():
                task = self._get()
                check_task(task)
        except BaseException as error:  # SystemExit, too
            raise SearchError(
                f"The task could not be made where the trial runs ({type(error).__name__}): try it there by hand."
            ) from None
        return task

    def _get(self) -> UserLosses:
        import ray

        found: UserLosses
        if not self.made:
            found = self.reference()
        else:
            found = ray.get(self.reference) if isinstance(self.reference, ray.ObjectRef) else self.reference
        return found


class Evaluator:
    """Where user code runs. One task for all points: what it keeps for itself stays from one point to the next."""

    def __init__(self, source: TaskSource, handle: CuratorHandle, time_limit: float | None) -> None:
        self._source, self._handle, self._time_limit = source, handle, time_limit
        self._task: UserLosses | None = None

    def run(self, rows: Sequence[str], points: Sequence[Config], strict: bool) -> str | None:
        """Evaluate the points whose losses the curator wants. Returns the sentence of a refusal, if there is one.

        Errors: whatever `fit` raises; SearchError where the task cannot be made; if not `strict`, the answer is NaN.
        """
        from dpray.platform.user_losses import ShapeRefused, evaluated

        for row, point in zip(rows, points, strict=True):
            if not self._handle.wanted(row):
                continue
            try:
                self._task = self._task or self._source.get()
            except SearchError:
                if strict:
                    raise
                self._handle.submit(row, np.full(self._handle.users, np.nan))
                continue
            try:
                losses = evaluated(
                    self._task,
                    point,
                    users=self._handle.users,
                    strict=strict,
                    may_run=functools.partial(self._handle.begin, row),
                    time_limit=self._time_limit,
                )
            except ShapeRefused as refusal:
                self._handle.refuse(row, str(refusal))
                return str(refusal)
            self._handle.submit(row, losses)
        return None


class EvaluatorProcess(Evaluator):
    """An evaluator as a Ray actor: whatever its process prints, late or early, is said to nobody."""

    def run(self, rows: Sequence[str], points: Sequence[Config], strict: bool) -> str | None:
        """See `Evaluator.run`."""
        from dpray.platform.confine import silence

        silence()
        return super().run(rows, points, strict)


class LossesTrial(EvaluationTrial):
    """Has the points of one suggestion evaluated. Needs a CPU of its own."""

    source: ClassVar[TaskSource]
    handle: ClassVar[CuratorHandle]
    time_limit: ClassVar[float | None]
    _running: ClassVar[dict[type, Any]] = {}  # at most one evaluator in a trial's process

    def evaluate(self, candidate: int, config: Config, mark: str) -> dict[str, int]:
        """Nothing but bookkeeping comes back.

        Raises:
            ShapeRefused: the losses have the wrong shape, and nothing has been released yet.
            SearchError: the evaluator died in `fit`, or the task cannot be made.
        """
        from dpray.platform.user_losses import ShapeRefused

        rows, strict = rows_of(mark), is_first(mark)
        points = (config, *(self.config.get(MORE) or ()))
        refused = self._survived(rows, points, strict) if not self.handle.local else None
        if self.handle.local:
            refused = Evaluator(self.source, self.handle, self.time_limit).run(rows, points, strict)
        if refused is not None:
            raise ShapeRefused(refused)
        return {}

    def _survived(self, rows: Sequence[str], points: Sequence[Config], strict: bool) -> str | None:
        """What the evaluator says; another one is started where code on protected users killed it."""
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, WorkerCrashedError

        for _ in range((PATIENCE + 1) * len(rows) + 1):
            try:
                said: str | None = ray.get(self._evaluator().run.remote(rows, points, strict))
            except (RayActorError, OutOfMemoryError, WorkerCrashedError):
                self._running.clear()
                if not self.handle.begun(rows):
                    break
            else:
                return said
        raise SearchError("The process that evaluates this point died before it came to the protected users: in `fit`.")

    def _evaluator(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = type(self)
        if kind not in self._running:
            for process in self._running.values():
                ray.kill(process)
            self._running.clear()
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(EvaluatorProcess).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
            self._running[kind] = actor.remote(self.source, self.handle, self.time_limit)
        return self._running[kind]


def suggestion(points: Sequence[Config], rows: Sequence[str], *, strict: bool) -> Config:
    """The configuration of one trial that evaluates several points; `rows` are their names at the curator.

    `strict`: nothing has been charged yet, so that a wrong shape of the losses may be refused in words.
    """
    first, *more = points
    mark = " ".join([_STRICT, *rows] if strict else rows)
    return {**first, SEARCH: mark, **({MORE: list(more)} if more else {})}


def rows_of(mark: str) -> tuple[str, ...]:
    """The rows a trial's mark names."""
    return tuple(word for word in mark.split(" ") if word != _STRICT)


def is_first(mark: str) -> bool:
    """Whether a trial ran before anything was charged."""
    return mark.startswith(f"{_STRICT} ")
