"""One evaluation of a search in the central model: per-user losses go to the curator, bookkeeping goes to Tune.

trial ── losses (n,) ──▶ curator          trial ── {"evaluated": 1} ──▶ Tune
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dpray.searchers.batch import Config
from dpray.searchers.errors import SearchError
from dpray.searchers.trial import MORE, SEARCH, EvaluationTrial

if TYPE_CHECKING:
    from dpray.platform.curator_actor import CuratorHandle
    from dpray.platform.user_losses import UserLosses


@dataclass(frozen=True)
class TaskSource:
    """Where a trial gets its task from: the object store, or a function that makes it on the trial's own node."""

    reference: Any = field(repr=False)
    made: bool

    @classmethod
    def of(cls, task: UserLosses | Callable[[], UserLosses]) -> TaskSource:
        """Put a task where trials can fetch it; one that is a function is not called here."""
        import ray

        if isinstance(task, type) or not hasattr(task, "losses"):
            return cls(task, made=False)
        return cls(ray.put(task) if ray.is_initialized() else task, made=True)

    def get(self) -> UserLosses:
        """The task, fetched or made once per process."""
        return _task(self)

    def __hash__(self) -> int:
        return id(self.reference)


@functools.lru_cache(maxsize=1)
def _task(source: TaskSource) -> UserLosses:
    if not source.made:
        try:
            made: UserLosses = source.reference()
        except Exception as error:  # its text may quote the records it could not read
            raise SearchError(
                f"The task could not be made where the trial runs ({type(error).__name__}): try it there by hand."
            ) from None
        return made
    import ray

    if isinstance(source.reference, ray.ObjectRef):
        fetched: UserLosses = ray.get(source.reference)
        return fetched
    given: UserLosses = source.reference
    return given


class LossesTrial(EvaluationTrial):
    """Evaluates the points of one suggestion and sends every user's loss to the curator. Needs a CPU of its own.

    Code on protected users that kills its process is not run for that point again after a few deaths: the point then
    counts as NaN for all, like one whose code raised. How often trials died is seen by Tune.
    """

    source: ClassVar[TaskSource]
    handle: ClassVar[CuratorHandle]
    time_limit: ClassVar[float | None]

    def evaluate(self, candidate: int, config: Config, mark: str) -> dict[str, int]:
        """Nothing but bookkeeping comes back; before the first release a wrong shape of the losses is refused."""
        from dpray.platform.user_losses import ShapeRefused, evaluated

        more: Sequence[Config] = self.config.get(MORE) or ()
        for row, point in zip(rows_of(mark), (config, *more), strict=True):
            try:
                begin = functools.partial(self.handle.begin, row)
                losses = evaluated(
                    self.source.get(),
                    point,
                    users=self.handle.users,
                    strict=is_first(row),
                    may_run=begin,
                    time_limit=self.time_limit,
                )
            except ShapeRefused as refusal:
                self.handle.refuse(row, str(refusal))
                raise
            self.handle.submit(row, losses)
        return {}


def suggestion(points: Sequence[Config], rows: Sequence[str]) -> Config:
    """The configuration of one trial that evaluates several points; `rows` are their names at the curator."""
    first, *more = points
    return {**first, SEARCH: " ".join(rows), **({MORE: list(more)} if more else {})}


def rows_of(mark: str) -> tuple[str, ...]:
    """The rows a trial's mark names."""
    return tuple(mark.split(" "))


def is_first(row: str) -> bool:
    """Whether a row belongs to the first step, before which nothing can have been released."""
    return row.startswith("0.")
