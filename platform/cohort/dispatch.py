"""One call to every host: repeated a bounded number of times where an actor died, and a dropout after that.

| what happens                           | what is done                                                          |
|----------------------------------------|-----------------------------------------------------------------------|
| the actor's process dies in a call     | Ray rebuilds it; called again, as often as user code can kill it and  |
|                                        | `SPARE` times more                                                    |
| no answer within the time limit        | dropout; later it must answer a ping first, within `GRACE` seconds    |
| user code is slow, or kills the host   | waited for: the time limit is beyond the slowest it can be            |
| the node is lost, nowhere to rebuild   | waited for `REPLACED` seconds after Ray has noticed; then a dropout   |
| records cannot be loaded again, or     | dropout                                                               |
| have another shape than all others'    |                                                                       |
| a guard refuses                        | `ClientsRefused`, with its sentence                                   |

A repeated call is safe because nothing is seen before the journal has it. Who drops out must not depend on data, so
attempts and time limits follow from public numbers: a host whose *user code* is slow, hangs or keeps killing it answers
in the end (`confine.slowest`) and is no dropout. A lost node is none of user code's doing: how long it is waited for
follows from what nodes Ray says are alive. Ray itself notices a machine without power, or out of reach, by its health
checks: about a minute by default, half of that in the repository's `cluster.yaml`.

Not covered: user code that makes a whole machine swap until Ray takes it for lost, which depends on what it does with
the records; and, in a pool that has lost a node, a host that user code has killed competes with the lost ones for CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from dpray.platform.cohort.layout import CPU, without_place
from dpray.platform.cohort.request import Refusal
from dpray.platform.confine import deaths_at_most, rehearsal_deaths, slowest

SPARE = 3
"""Deaths of a host in one call that are not user code's doing, and still forgiven."""
_USER_CODE = frozenset({"contribute", "prepare", "evaluate_all"})
GRACE = 5.0
"""Seconds that a host which had dropped out gets to show that it is back."""
REPLACED = 30.0
"""Seconds that a host without a node to run on is waited for: its machine may be started again, or another one."""
_LOOK = 1.0
"""Seconds between two looks at the nodes, while a host does not answer."""
_LOST = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError, GetTimeoutError)


@dataclass
class _Pending:
    host: int
    ping: bool
    deadline: float | None
    without_node: float | None = None


@dataclass
class Dispatch:
    """Calls hosts by their actors' names; light and picklable, so that a trial can hold it.

    Attributes:
        namespace, names: where the hosts' actors are found.
        timeout: seconds to wait for an answer, on top of what user code may take.
        clients: number of clients of each host.
        limit: seconds that one call of user code may take.
        needs: resources of each host's actor.
        shape: of a record at every host; one that comes up later with others is a dropout. None: not known yet.
    """

    namespace: str
    names: tuple[str, ...]
    timeout: float
    clients: tuple[int, ...]
    limit: float
    needs: tuple[Mapping[str, float], ...]
    shape: tuple[int, ...] | None = None
    _handles: dict[int, Any] = field(default_factory=dict, repr=False)
    _absent: set[int] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}, "_absent": set(self._absent)}

    def adopt(self, handles: Sequence[Any]) -> None:
        """Use these actor handles instead of looking them up."""
        self._handles = dict(enumerate(handles))

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        patient: bool = False,
        candidates: int = 0,
        least: float = 0.0,
    ) -> dict[int, Any]:
        """Call `method` on the hosts of `arguments`; answers by host, dropouts left out.

        Args:
            patient: wait for a living host without limit (rehearsals: user code has a limit of its own); the limit is
                then for a dead one to come back.
            candidates: that a rehearsal asks for; each may kill its host as often as user code can.
            least: seconds that an answer is waited for at least, whatever the time limit.
        """
        answers: dict[int, Any] = {}
        attempts = dict.fromkeys(arguments, 0)
        pending = self._asked(method, arguments, patient, least)
        while pending:
            ready = self._next(pending)
            if not ready:
                self._note_nodes(pending)
            for reference in ready:
                state = pending.pop(reference)
                try:
                    answer = ray.get(reference)
                except _LOST as error:
                    attempts[state.host] += 1
                    gone = state.ping and isinstance(error, ActorDiedError)  # Ray repeats a ping while it can rebuild
                    if gone or attempts[state.host] > self._forgiven(state.host, candidates):
                        self._absent.add(state.host)
                        continue
                    self._submit(pending, state.host, None, state.deadline or time.monotonic() + self.timeout)
                    continue
                if not state.ping:
                    answers[state.host] = answer
                elif isinstance(answer, Refusal) or self.shape not in (None, answer.shape):
                    self._absent.add(state.host)
                else:
                    back = state.host in self._absent
                    self._absent.discard(state.host)
                    deadline = time.monotonic() + self._time(method, state.host) if back else state.deadline
                    again = (method, arguments[state.host])
                    self._submit(pending, state.host, again, None if patient else deadline)
            self._give_up(pending)
        for host in [host for host, answer in answers.items() if isinstance(answer, Refusal) and answer.kind == "load"]:
            self._absent.add(host)
            if method != "ready":
                del answers[host]
        return answers

    def _asked(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], patient: bool, least: float
    ) -> dict[Any, _Pending]:
        """The calls; pings instead to hosts that had dropped out, and nothing to those that have no node still."""
        pending, now = dict[Any, _Pending](), time.monotonic()
        nowhere = set[int]() if self._absent.isdisjoint(arguments) else self._without_node()
        for host in arguments:
            if host not in self._absent:
                deadline = None if patient else now + max(least, self._time(method, host))
                self._submit(pending, host, (method, arguments[host]), deadline)
            elif host not in nowhere or not self._pinned(host):
                self._submit(pending, host, None, now + min(GRACE, self.timeout))
        return pending

    def _forgiven(self, host: int, candidates: int) -> int:
        """Deaths of a host in one call after which it is asked again: by public numbers only."""
        clients = self.clients[host]
        return (rehearsal_deaths(clients, candidates) if candidates else deaths_at_most(clients)) + SPARE

    def _time(self, method: str, host: int) -> float:
        """Seconds to wait for an answer: by public numbers only."""
        user_code = slowest(self.clients[host], self.limit) if method in _USER_CODE else 0.0
        return self.timeout + user_code

    def _submit(
        self,
        pending: dict[Any, _Pending],
        host: int,
        call: tuple[str, tuple[Any, ...]] | None,
        deadline: float | None,
    ) -> None:
        """Send a call, or a ping that Ray repeats until the actor is there."""
        try:
            handle = self._handle(host)
            if call is None:
                reference = handle.ready.options(max_task_retries=-1).remote()
            else:
                reference = getattr(handle, call[0]).remote(*call[1])
        except (*_LOST, ValueError):  # no actor of this name (any more)
            self._absent.add(host)
            return
        pending[reference] = _Pending(host, call is None, deadline)

    def _handle(self, host: int) -> Any:
        if host not in self._handles:
            self._handles[host] = ray.get_actor(self.names[host], namespace=self.namespace)
        return self._handles[host]

    def _next(self, pending: dict[Any, _Pending]) -> list[Any]:
        """Answers that are there; none if there are none after a while."""
        deadlines = [state.deadline for state in pending.values() if state.deadline is not None]
        wait = min([_LOOK, *(deadline - time.monotonic() for deadline in deadlines)])
        ready, rest = ray.wait(list(pending), num_returns=1, timeout=max(0.0, wait))
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return list(ready)

    def _note_nodes(self, pending: dict[Any, _Pending]) -> None:
        """See which of the hosts that do not answer have no node to run on, and since when."""
        nowhere, now = self._without_node(), time.monotonic()
        for state in pending.values():
            # A pool's host that has not been lost is running, though all of them together would not find room any more.
            if state.host in nowhere and (state.ping or self._pinned(state.host)):
                state.without_node = now if state.without_node is None else state.without_node
            else:
                state.without_node = None

    def _pinned(self, host: int) -> bool:
        return CPU not in self.needs[host]

    def _without_node(self) -> set[int]:
        return without_place(self.needs, [node["Resources"] for node in ray.nodes() if node["Alive"]])

    def _give_up(self, pending: dict[Any, _Pending]) -> None:
        now = time.monotonic()
        for reference, state in list(pending.items()):
            late = state.deadline is not None and now >= state.deadline
            gone = state.without_node is not None and now >= state.without_node + min(REPLACED, self.timeout)
            if late or gone:
                self._absent.add(state.host)
                del pending[reference]
