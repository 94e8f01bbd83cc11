"""One loss per user: what a search over a sensitive validation set asks its user to write, and how that is run.

| symbol | code         | meaning                                                          | shape |
|--------|--------------|------------------------------------------------------------------|-------|
| n      | `task.users` | protected validation users, public; their order never changes    |       |
| f_i(θ) | losses[i]    | loss of user i under configuration θ                             | (n,)  |

| step                      | what it may touch                          | if it fails                             |
|---------------------------|--------------------------------------------|-----------------------------------------|
| `fit(config) → model`     | the configuration, public or training data | visibly, as any program                 |
| `losses(model) → (n,)`    | the model and the protected users          | unseen: every user's loss counts as NaN |
| `evaluate(config) → (n,)` | everything at once, instead of these two   | unseen, training included               |

*Guarantee.* What `losses` raises (SystemExit and KeyboardInterrupt too), prints, warns or logs on protected users
leaves no trace, and what it changes in the process's random state, environment or signal handlers is put back (see
`confine`). The answer has length n and type float64 whatever happens. Until the first release of a run its *shape* is
visible, if it is wrong (`ShapeRefused`): it is taken for a matter of the program, not of the data.

Protected are the users whose losses these are, under replace-one, **if row i of the answer depends on the
configuration, public data and user i's record only**. Code that normalises by the whole batch, drops bad records, or
raises, hangs or dies because of one record (then all rows become NaN, which moves a mean by B and not by 2B/n) breaks
that without a trace: catch it inside, per record, and try the task with `check_losses_alone`. Not protected: records
that `fit` trains on; n; timing, and with it how often a process died; what a task that lives on keeps for itself from
one point to the next. The processes that evaluate are themselves inside the trust boundary, and so is Ray.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from dpray.platform.confine import Confinement, hushed
from dpray.platform.privacy import checks

FloatArray = NDArray[np.float64]


class ShapeRefused(ValueError):  # noqa: N818
    """An answer that is not one loss per user. Tells its shape, never a value, and has no cause attached."""


class UserLosses(ABC):
    """A black box with one loss per protected user. Implement `fit` and `losses`, or `evaluate` alone.

    Attributes:
        users: n, public: how many users `losses` answers for, always in the same order.

    Example:
        A ridge regression, validated on people whose records are sensitive::

            class Ridge(UserLosses):
                def __init__(self, train, people):
                    self.train, self.people, self.users = train, people, len(people[1])

                def fit(self, config):
                    x, y = self.train
                    return np.linalg.solve(x.T @ x + config["penalty"] * np.eye(x.shape[1]), x.T @ y)

                def losses(self, model):
                    x, y = self.people
                    return (x @ model - y) ** 2
    """

    users: int

    def fit(self, config: dict[str, Any]) -> Any:
        """Train on public or training data only. May fail visibly. Its model is seen by `losses` alone.

        Args:
            config: the point to evaluate; a copy of its own.
        """
        raise NotImplementedError

    def losses(self, model: Any) -> Any:
        """One loss per protected user: whatever NumPy makes a real vector of length n of; lower is better.

        Row i depends on the model and record i only. A user without an answer has NaN.
        """
        raise NotImplementedError

    def evaluate(self, config: dict[str, Any]) -> Any:
        """`losses(fit(config))`. Override it alone where the two cannot be told apart: then both are confined."""
        return self.losses(self.fit(config))


def check_task(task: object) -> int:
    """Refuse a task that cannot be evaluated, before anything is spent; returns n.

    Raises:
        ValueError: not a `UserLosses`; neither `fit` and `losses` nor `evaluate` written; or `users` not a whole number
            from 1.
    """
    name = type(task).__name__
    if not isinstance(task, UserLosses):
        raise ValueError(
            f"The task must be a UserLosses, but a {name} was given: derive from it, and write fit(config) and "
            "losses(model), which returns one loss per user."
        )
    if not _overrides(task, "evaluate"):
        missing = [method for method in ("fit", "losses") if not _overrides(task, method)]
        if missing:
            raise ValueError(
                f"{name} does not say how it is evaluated: write {' and '.join(missing)}, or evaluate alone."
            )
    return checks.integer(f"users of {name}", getattr(task, "users", None), at_least=1)


def evaluated(
    task: UserLosses,
    config: Mapping[str, Any],
    *,
    users: int | None = None,
    strict: bool = True,
    may_run: Callable[[], bool] = lambda: True,
    time_limit: float | None = None,
) -> FloatArray:
    """The losses of all users at one point: `fit` in the open, everything on protected users confined.

    Args:
        task: whose losses.
        config: the point; the task gets a copy, so that nothing it learns can travel back in it.
        users: n, as declared beforehand; None takes the task's word.
        strict: refuse a wrong shape in words. Only until the first release of a run; later the row counts as NaN.
        may_run: asked right before code runs on protected users; False: it is not run, and the answer is NaN.
        time_limit: seconds after which that code is taken to hang, and this process ends itself; None waits for ever.

    Returns:
        (n,) float64, fresh; NaN for all users where the task failed.

    Raises:
        ShapeRefused: the answer is not a real vector of length n, and `strict`.
        Exception: whatever `fit` raises; ValueError as `check_task`.

    *Guarantee.* See the top of this file.
    """
    told, own = check_task(task), deepcopy(dict(config))
    users = told if users is None else users
    if _overrides(task, "evaluate"):
        method, call = "evaluate", lambda: task.evaluate(own)
    else:
        model = task.fit(own)
        method, call = "losses", lambda: task.losses(model)
    if not may_run():
        return np.full(users, np.nan)
    with _limited(time_limit):
        return _confined(method, task, call, users, strict)


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """End this process if the block takes longer: code that hangs may hold the interpreter or catch any exception."""
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=_nowhere())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@cache
def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _confined(method: str, task: UserLosses, call: Callable[[], Any], users: int, strict: bool) -> FloatArray:
    with hushed():
        answer = Confinement(method).run(method, lambda: _vector(call(), users))
    if isinstance(answer, str) and strict:
        raise ShapeRefused(f"{type(task).__name__}.{method} {answer}")
    return answer if isinstance(answer, np.ndarray) else np.full(users, np.nan)


def _overrides(task: UserLosses, method: str) -> bool:
    return getattr(type(task), method) is not getattr(UserLosses, method)


# --- what counts as a vector ----------------------------------------------------------------------------------------


def _vector(answer: Any, users: int) -> FloatArray | str:
    """The answer as (n,) float64, or the end of a sentence that says why it is none. Runs confined."""
    array = _array(answer)
    if not _numeric(array) or (array.ndim == 0 and array.dtype == object):
        return f"returned something that is not a vector of real numbers: return {users} losses, one per user."
    if array.ndim == 0:
        return (
            f"returned one number, but one loss per user is needed, a vector of length {users}: each user's own loss "
            "is clipped, and a mean has mixed them already. Return the losses before averaging."
        )
    if array.shape != (users,):
        hint = "reduce the other axes." if array.ndim > 1 else "who cannot be scored has NaN, and nobody is left out."
        return f"returned an array of shape {array.shape}, but one loss per user is needed, shape ({users},): {hint}"
    if array.dtype == object:
        found = [_number(each) for each in array]
        return np.array([np.nan if each is None else each for each in found])
    return np.array(array, dtype=np.float64)


def _array(answer: Any) -> NDArray[Any]:
    """As a plain array: tensors detached, masked entries NaN, lists element by element."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(answer, torch.Tensor):
        answer = answer.detach().cpu()
        return np.asarray((answer if answer.is_complex() else answer.double()).numpy())
    if isinstance(answer, np.ma.MaskedArray) and answer.dtype.kind in "fiub":
        return np.asarray(np.ma.filled(answer.astype(np.float64), np.nan))
    if not isinstance(answer, list | tuple):
        return np.asarray(answer)
    try:
        # By itself NumPy makes two texts of [1.0, "?"]: one bad element must not spoil the others.
        return np.array(answer, dtype=object)
    except Exception:  # arrays that do not fit together, tensors that want to be detached
        array = np.empty(len(answer), dtype=object)
        for index, each in enumerate(answer):
            array[index] = each
        return array


def _numeric(array: NDArray[Any]) -> bool:
    """By type alone, never by value: what one user's element is must not decide for all."""
    return array.dtype == object or array.dtype.kind in "fiub"


def _number(value: Any) -> float | None:
    """A real number; None for texts, complex numbers, sequences, missing values."""
    if isinstance(value, str | bytes | complex | np.complexfloating):
        return None
    try:
        return float(value) if getattr(value, "ndim", 0) == 0 else None
    except Exception:  # whatever an element does is its own user's matter
        return None


# --- a check for tasks of one's own ---------------------------------------------------------------------------------

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]] | tuple[NDArray[Any], ...]
"""Records: one array, or several under names or in order; the first axis counts users."""


def check_losses_alone(
    make_task: Callable[[Any], UserLosses],
    records: Arrays,
    config: Mapping[str, Any],
    *,
    rows: Sequence[int] | None = None,
    refit: bool = True,
) -> None:
    """Poison one user's record after another: no other user's loss may move by a bit, and their number not at all.

    Poisons are NaN, infinite, huge, tiny and ordinary other values, whatever the arrays' types can hold, in the whole
    record and in one place of it. This shows mistakes; it is no proof that there are none.

    Args:
        make_task: builds the task for given protected records; everything else about it stays the same.
        records: of a few protected users, public or made up: what is wrong with them is told.
        config: a point to evaluate.
        rows: users to poison; None: the first, the middle and the last one.
        refit: fit anew for every poison, as a trial does. False fits once, where fitting is slow or not repeatable;
            a `fit` that looks at protected records is not noticed then.

    Raises:
        ValueError: naming user and poison; or the losses are not repeatable, or all NaN, so that nothing was checked.

    Example:
        `check_losses_alone(lambda people: Ridge(train, people), (x[:9], y[:9]), {"penalty": 0.1})` in the task's tests.
    """
    task = make_task(_copied(records))
    n, name = check_task(task), type(task).__name__
    answer = _answerer(task, config, refit)
    before, again = answer(task), answer(make_task(_copied(records)))
    if np.all(np.isnan(before)):
        raise ValueError(
            f"{name} has no loss for any of these records{_complaint(task, config)}: nothing was checked. Give records "
            "and a configuration that work."
        )
    if _moved(before, again).size:
        raise ValueError(
            f"{name} gives other losses when the same records are evaluated again: seed what it draws, or check with "
            "refit=False if only its fit is random."
        )
    for row in sorted({0, n // 2, n - 1} if rows is None else set(rows)):
        for what, poisoned in _poisons(records, row):
            other = make_task(poisoned)
            try:
                after = answer(other)
            except ShapeRefused as refused:
                raise ValueError(f"{name} answers in another shape if user {row} has {what}: {refused}") from None
            moved = [each for each in _moved(before, after) if each != row] if after.shape == before.shape else None
            if moved is None:
                raise ValueError(f"{name} has {after.size} users instead of {n} if user {row} has {what}.")
            if moved:
                raise ValueError(
                    f"{name} mixes users: with {what} for user {row}, the loss of user {moved[0]} moved, and of "
                    f"{len(moved)} of {n - 1} others in all{_complaint(other, config)}. Compute row i from the model "
                    "and record i alone, with public constants, and let a bad record have a NaN of its own."
                )


def _answerer(task: UserLosses, config: Mapping[str, Any], refit: bool) -> Callable[[UserLosses], FloatArray]:
    if refit or _overrides(task, "evaluate"):
        return lambda other: evaluated(other, config)
    model = task.fit(deepcopy(dict(config)))
    return lambda other: _confined("losses", other, lambda: other.losses(model), check_task(other), True)


def _moved(before: FloatArray, after: FloatArray) -> NDArray[np.int64]:
    """Places that differ in a bit; all NaNs are one."""
    same = (before.view(np.int64) == after.view(np.int64)) | (np.isnan(before) & np.isnan(after))
    return np.flatnonzero(~same)


def _complaint(task: UserLosses, config: Mapping[str, Any]) -> str:
    """What the task raises, in words: these records are public."""
    try:
        with hushed(), np.errstate(all="ignore"):
            task.evaluate(deepcopy(dict(config)))
    except Exception as error:
        return f" (it raised {type(error).__name__}: {error})"
    return ""


def _copied(records: Arrays) -> Any:
    if isinstance(records, Mapping):
        return {name: np.array(array) for name, array in records.items()}
    return tuple(np.array(array) for array in records) if isinstance(records, tuple) else np.array(records)


def _poisons(records: Arrays, row: int) -> Iterator[tuple[str, Any]]:
    """The records with one of them poisoned, and how."""
    named = dict(records.items() if isinstance(records, Mapping) else enumerate(_listed(records)))
    for name, array in named.items():
        for what, value in _values(array.dtype):
            for where, place in (("everywhere", slice(None)), ("in one place", slice(0, 1))):
                if where == "everywhere" or array[row].size > 1:
                    fresh = {each: np.array(other) for each, other in named.items()}
                    fresh[name][row : row + 1].reshape(1, -1)[:, place] = value
                    whole: Any = fresh if isinstance(records, Mapping) else tuple(fresh.values())
                    spot = "" if len(named) == 1 else f" of array {name!r}"
                    yield f"{what} {where}{spot}", whole if isinstance(records, Mapping | tuple) else whole[0]


def _listed(records: Any) -> tuple[NDArray[Any], ...]:
    return records if isinstance(records, tuple) else (records,)


def _values(dtype: np.dtype[Any]) -> list[tuple[str, Any]]:
    if dtype.kind == "b":
        return [("true", True), ("false", False)]
    if dtype.kind not in "fiu":
        return []
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    values: list[tuple[str, Any]] = [("the largest number", info.max), ("the smallest number", info.min), ("zero", 0)]
    values += [(f"{size}", size) for size in (-1, 1000) if info.min <= size <= info.max]
    if dtype.kind == "f":
        values += [("NaN", np.nan), ("infinity", np.inf), ("minus infinity", -np.inf), ("a half", 0.5)]
        values += [("the smallest subnormal number", info.smallest_subnormal)]
    return values
