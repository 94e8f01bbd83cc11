"""The curator on Ray: who owns it, who may send it losses, and what is heard when its process dies.

| part                 | where                       | may                                             |
|----------------------|-----------------------------|-------------------------------------------------|
| `CuratorOwner`       | the driver: one per search  | expect, gradient, score, winner, close; submit  |
| `CuratorHandle`      | trials, by pickle           | submit                                          |
| `CuratorActor`       | a process of its own        | hold losses; it answers, and never raises       |

Ray rebuilds a dead actor (`max_restarts=-1`): it comes back without losses, expecting nothing. `expect` and `submit`
are repeated while it is away, for they change nothing when they come twice; a release is not, for it draws noise
(`max_task_retries=0`): the owner is told `CuratorLost` or `RowsMissing`, says again what it expects, and has it
evaluated again. A release that is lost on its way out was seen by nobody.

*Guarantee.* As `curator`: besides releases, whether rows arrived, and refusals made of public facts, nothing leaves the
actor; an exception's text is never put into Ray's hands, and its standard streams lead nowhere. Ray itself is inside
the trust boundary: losses travel through its shared memory, which it may spill to the hosts' disks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpray.platform.confine import silence
from dpray.platform.curator import Curator, CuratorLost, RowsMissing, vector
from dpray.platform.curator_asks import Ask, CuratorError, GradientAsk, ScoreAsk, WinnerAsk, require_paid
from dpray.platform.privacy import checks

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Attempt

_AWAY = 120.0
"""Seconds a dead curator may take to come back."""
_PAUSE = 0.2
_METHODS = frozenset(
    {"expect", "wanted", "begin", "begun", "submit", "refuse", "refusal", "gradient", "score", "winner"}
)


@dataclass(frozen=True)
class Refusal:
    """An answer that is none: a sentence made of public facts, and the rows that are missing, if that is why."""

    sentence: str
    rows: tuple[str, ...] = ()

    def error(self) -> CuratorError:
        """What the asker raises."""
        return RowsMissing(self.rows) if self.rows else CuratorError(self.sentence)


class CuratorActor:
    """The Ray actor around a `Curator`. Its constructor cannot fail; `ask` answers, or says why not."""

    def __init__(self, users: int) -> None:
        self._users = users
        self._curator: Curator | None = None

    def ask(self, method: str, *arguments: Any) -> Any:
        """A method of the curator; a `Refusal` instead of an exception."""
        try:
            if self._curator is None:
                self._curator = self._open()
            if method not in _METHODS:
                return Refusal(f"A curator does not answer {method!r}.")
            return getattr(self._curator, method)(*arguments)
        except RowsMissing as missing:
            return Refusal(str(missing), missing.rows)
        except (CuratorError, ValueError) as refused:  # sentences of the curator's own, without values
            return Refusal(str(refused))
        except BaseException as error:  # its text may hold values
            return Refusal(f"The curator failed ({type(error).__name__}), and released nothing.")

    def process(self) -> int:
        """Its process id."""
        return os.getpid()

    def _open(self) -> Curator:
        from threadpoolctl import threadpool_limits

        silence()
        threadpool_limits(limits=1)
        return Curator(self._users)


class CuratorHandle:
    """Lets a trial send losses; picklable where the curator is an actor. Made by `CuratorOwner.handle`."""

    def __init__(self, users: int, curator: Any) -> None:
        self.users, self._curator = users, curator

    def submit(self, row: str, losses: ArrayLike) -> bool:
        """Send the losses of a location, (n,). Waits until they are there.

        Returns:
            Whether they were expected; if not they were dropped, and nothing has to be done about it.

        Raises:
            ValueError: not a real vector of length n; the shape is named, no value.
            CuratorLost: the curator is closed, or did not come back.
        """
        sent = np.array(vector(losses, self.users))  # of its own: Ray would pickle a view's whole base
        return bool(_asked(self._curator, "submit", row, sent, again=True))

    @property
    def local(self) -> bool:
        """Whether the curator is in this process."""
        return isinstance(self._curator, Curator)

    def wanted(self, row: str) -> bool:
        """`Curator.wanted`. Raises CuratorLost."""
        return bool(_asked(self._curator, "wanted", row, again=True))

    def begin(self, row: str) -> bool:
        """`Curator.begin`: whether to compute the losses of a location. Raises CuratorLost."""
        return bool(_asked(self._curator, "begin", row, again=True))

    def begun(self, rows: Sequence[str]) -> bool:
        """`Curator.begun`. Raises CuratorLost."""
        return bool(_asked(self._curator, "begun", tuple(rows), again=True))

    def refuse(self, row: str, sentence: str) -> None:
        """Say why the task's losses were refused: the sentence of a `ShapeRefused`. Raises CuratorLost."""
        _asked(self._curator, "refuse", row, sentence, again=True)


class CuratorOwner:
    """A running curator, for the search that releases from it. Made by `open_curator`; a context manager.

    After `CuratorLost` or `RowsMissing`, call `expect` again: it says which locations to evaluate anew.
    """

    def __init__(self, users: int, curator: Any) -> None:
        self.users, self._curator = users, curator

    def handle(self) -> CuratorHandle:
        """For trials."""
        return CuratorHandle(self.users, self._curator)

    def expect(self, rows: Sequence[str]) -> list[str]:
        """`Curator.expect`. Raises CuratorLost if the curator did not come back."""
        return list(_asked(self._curator, "expect", tuple(rows), again=True))

    def submit(self, row: str, losses: ArrayLike) -> bool:
        """As a trial does; for a location that is given up, NaN for all."""
        return self.handle().submit(row, losses)

    def refusal(self) -> str | None:
        """`Curator.refusal`. Raises CuratorLost."""
        sentence = _asked(self._curator, "refusal", again=True)
        return None if sentence is None else str(sentence)

    def gradient(self, ask: GradientAsk, attempt: Attempt) -> NDArray[np.float64]:
        """`Curator.gradient`, for a release that was charged. Raises also CuratorLost."""
        return np.array(self._paid("gradient", ask, attempt), dtype=np.float64)

    def score(self, ask: ScoreAsk, attempt: Attempt) -> float:
        """`Curator.score`, for a release that was charged. Raises also CuratorLost."""
        return float(self._paid("score", ask, attempt))

    def winner(self, ask: WinnerAsk, attempt: Attempt) -> int:
        """`Curator.winner`, for a release that was charged. Raises also CuratorLost."""
        return int(self._paid("winner", ask, attempt))

    def _paid(self, method: str, ask: Ask, attempt: Attempt) -> Any:
        require_paid(ask, attempt)
        value = _asked(self._curator, method, ask)
        attempt.hand_out()
        return value

    @property
    def process(self) -> int:
        """Process id of the curator, on its host."""
        if isinstance(self._curator, Curator):
            return os.getpid()
        import ray

        return int(ray.get(self._curator.process.remote()))

    def close(self) -> None:
        """End the curator; its losses are gone. Closing twice changes nothing."""
        if isinstance(self._curator, Curator):
            self._curator.expect(())
            return
        import ray

        if ray.is_initialized():
            ray.kill(self._curator)

    def __enter__(self) -> CuratorOwner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_curator(users: int, *, actor: bool = True, resources: Mapping[str, float] | None = None) -> CuratorOwner:
    """Start a curator.

    Args:
        users: n, public.
        actor: as a Ray actor, which dies with the job; False keeps it in this process, for tests and simulations whose
            trials run there, too (its handle cannot be pickled).
        resources: Ray resources that say where it is placed; None: on the driver's node. It takes no CPU.

    Raises:
        ValueError: `users` is not a whole number from 1.
        CuratorLost: it did not start.
    """
    users = checks.integer("users", users, at_least=1)
    if not actor:
        return CuratorOwner(users, Curator(users))
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    placed: dict[str, Any] = {"resources": dict(resources)} if resources is not None else {}
    if resources is None:
        here = ray.get_runtime_context().get_node_id()
        placed["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, **placed}
    owner = CuratorOwner(users, ray.remote(CuratorActor).options(**options).remote(users))
    owner.expect(())
    return owner


def _asked(curator: Any, method: str, *arguments: Any, again: bool = False) -> Any:
    """The curator's answer; `again`: a call that may be repeated while the actor is being rebuilt."""
    if isinstance(curator, Curator):
        return getattr(curator, method)(*arguments)
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

    deadline = time.monotonic() + _AWAY
    while True:
        try:
            answer = ray.get(curator.ask.remote(method, *arguments), timeout=_AWAY)
            break
        except (RayActorError, GetTimeoutError) as error:
            gone = not (again and isinstance(error, ActorUnavailableError) and time.monotonic() < deadline)
        if gone:
            raise CuratorLost(
                "The curator's process is gone or does not answer, and the losses it held are lost: say again what is "
                "expected, and evaluate that again. Nothing of it was seen, and what was charged stays charged."
            )
        time.sleep(_PAUSE)
    if isinstance(answer, Refusal):
        raise answer.error()
    return answer
