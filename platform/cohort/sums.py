"""A sum over clients, seen from the driver: contribute and add noise once, or prepare → commit → reveal.

| regime        | clients send                       | noise                                      | noisers |
|---------------|------------------------------------|--------------------------------------------|---------|
| `central`     | their message, to a trusted server | once, by the server                        | 1       |
| `distributed` | message + a share of the noise     | at least σ as long as n_min clients answer | n_min   |
| `local`       | message + the whole noise          | σ in each message                          | 1       |

Under `distributed` and `local` the point of no return is a host's `reveal` (see `journal`): until the commit the
participant set may change from one try to the next; after it the sum is repeated over the same set, byte for byte, or
`ReleaseLost` is raised: its charge stands and its noise is never drawn again under that key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from dpray.platform.cohort.client import FloatArray, IntArray
from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.errors import ClientsRefused, QuorumLost
from dpray.platform.cohort.lineage import Shown, shown_as
from dpray.platform.cohort.request import Message, Refusal, Request
from dpray.platform.cohort.sampled import Sampled
from dpray.platform.cohort.secure_sum import Trusted, add
from dpray.platform.privacy.ledger import Attempt, ReleaseLost
from dpray.platform.privacy.mechanisms import VoteWinner
from dpray.platform.privacy.noise import GridNoise, NoiseSource, from_grid
from dpray.platform.privacy.selection import noisy_argmax

REVEALS = 6
"""Tries to complete a committed sum; a host that died in between prepares again."""
_INLINE = 100_000
"""Bytes of parameters above which a request is put into the object store once, instead of being sent to each host."""


@dataclass(frozen=True, eq=False)
class ClientSum:
    """A noised sum over clients: public.

    Attributes:
        total: (d,) int64, in steps of `grid`, noise included.
        grid: spacing g.
        participants: clients in it, in the cohort's order.
        records: number of their records, public.
        noise: what was calibrated; `noise.std(len(participants))` is the std of `value` under distributed noise.
    """

    total: IntArray
    grid: float
    participants: tuple[str, ...]
    records: int
    noise: GridNoise

    @property
    def value(self) -> FloatArray:
        """(d,) float64, total · g."""
        return from_grid(self.total, self.grid)

    def pack(self) -> FloatArray:
        """(d + 2,) float64: the value, then records and clients in it; what the ledger stores."""
        return np.concatenate([self.value, [self.records, len(self.participants)]])

    @staticmethod
    def unpack(stored: FloatArray) -> tuple[FloatArray, int, int]:
        """(value, records, clients) of a packed sum."""
        return np.asarray(stored[:-2], dtype=np.float64), int(stored[-2]), int(stored[-1])


@dataclass(frozen=True)
class Members:
    """Who is where: clients by host, and their public numbers of records."""

    hosts: tuple[tuple[str, ...], ...]
    counts: Mapping[str, int]
    quorum: int

    def of(self, hosts: Iterable[int]) -> tuple[str, ...]:
        """The clients of some hosts, in the cohort's order."""
        return tuple(client for host in sorted(hosts) for client in self.hosts[host])

    def records(self, clients: Iterable[str]) -> int:
        """Number of records of some clients."""
        return sum(self.counts[client] for client in clients)

    def require(self, clients: Sequence[str]) -> None:
        """Refuse fewer than the quorum (QuorumLost)."""
        if len(clients) < self.quorum:
            raise QuorumLost(
                f"{len(clients)} clients answered, and the quorum is {self.quorum} of {len(self.counts)}: their noise "
                "would not be enough. Nothing was revealed; try again when more are back.",
                answered=len(clients),
                quorum=self.quorum,
            )


def central(
    dispatch: Dispatch,
    members: Members,
    attempt: Attempt,
    request: Request,
    noise: GridNoise,
    source: NoiseSource,
    shown: Shown,
) -> ClientSum:
    """Regime central: exact integer sums from the hosts, noise drawn once by the trusted server.

    A release that was not stored may be charged again, at no cost, and computed over whoever answers then: only the
    server has seen the value. One attempt gives one value.
    """
    total, participants = _contributed(dispatch, members, attempt, request, shown)
    attempt.hand_out()
    if noise.private:
        total += source.draw(noise, request.mechanism.dimension, *_server(request))
    return ClientSum(total, noise.grid, participants, members.records(participants), noise)


def winner(
    dispatch: Dispatch,
    members: Members,
    attempt: Attempt,
    request: Request,
    mechanism: VoteWinner,
    source: NoiseSource,
    shown: Shown,
) -> int:
    """Regime central: the index of the most votes under Gumbel noise. Counts and noise end here; as `central` else."""
    scale = mechanism.scale(mechanism.epsilon_of(request.mu))
    counts, _ = _contributed(dispatch, members, attempt, request, shown)
    attempt.hand_out()
    return noisy_argmax(counts, scale, source.generator(*_server(request)))


def _contributed(
    dispatch: Dispatch, members: Members, attempt: Attempt, request: Request, shown: Shown
) -> tuple[IntArray, tuple[str, ...]]:
    """The exact sum of the hosts' un-noised messages, and whose they are."""
    every = tuple(range(len(members.hosts)))
    answers = accepted(asked(dispatch, "contribute", every, attempt, request, shown))
    participants = members.of(answers)
    members.require(participants)
    return add([answer.steps for answer in answers.values()], request.mechanism.dimension), participants


def _server(request: Request) -> tuple[str | int, ...]:
    """Names the server's noise of a release."""
    key = request.key
    return request.population, request.run, key.label, key.mechanism, key.step, "server"


def shared(
    dispatch: Dispatch,
    members: Members,
    attempt: Attempt,
    request: Request,
    noise: GridNoise,
    protocol: Trusted,
    shown: Shown,
) -> ClientSum:
    """Regimes distributed and local: noise by the clients, two phases around `attempt.commit`.

    Raises:
        QuorumLost: too few answered; nothing was committed.
        ReleaseLost: a committed set cannot be repeated byte for byte.
        ClientsRefused: a client's guard; ParticipantsChanged, LeaseLost: the ledger's.
    """
    committed = attempt.participants
    if committed is None:
        sent = accepted(asked(dispatch, "prepare", tuple(range(len(members.hosts))), attempt, request, shown))
        participants = members.of(sent)
        members.require(participants)
        # From here on the set is fixed. The hosts' messages are revealed only under it.
        attempt.commit(participants, sample_inside=isinstance(request.query, Sampled))
    else:
        if not committed <= members.counts.keys():
            raise ReleaseLost(f"{attempt.key} was committed with clients that are not in this cohort.")
        participants = tuple(client for client in members.counts if client in committed)
        sent = {}
        attempt.commit(committed, sample_inside=isinstance(request.query, Sampled))
    request = shown_as(replace(request, participants=participants), shown.ask(attempt))
    steps = _completed(dispatch, members, attempt, request, protocol, sent, shown)
    return ClientSum(steps, noise.grid, participants, members.records(participants), noise)


def _completed(
    dispatch: Dispatch,
    members: Members,
    attempt: Attempt,
    request: Request,
    protocol: Trusted,
    sent: dict[int, Any],
    shown: Shown,
) -> IntArray:
    """Reveal over the committed set; hosts that hold no message any more prepare again for the same set."""
    participants = request.participants or ()
    inside = set(participants)
    needed = [host for host, clients in enumerate(members.hosts) if not inside.isdisjoint(clients)]
    run = request.population, request.run
    revealed: dict[int, list[Message]] = {}
    behind: Refusal | None = None
    for _ in range(REVEALS):
        missing = [host for host in needed if host not in revealed]
        unprepared = [host for host in missing if host not in sent]
        if unprepared:
            again = asked(dispatch, "prepare", unprepared, attempt, request, shown)
            sent.update(accepted(again, committed=True))
        ready = [host for host in missing if host in sent]
        under = request.head, request.lineage
        answers = dispatch.call("reveal", dict.fromkeys(ready, (run, request.key, participants, *under)))
        shown.note(answers, request.head.sequence)
        behind = None
        for host, answer in answers.items():
            if isinstance(answer, Refusal) and answer.kind == "again":
                del sent[host]
            elif isinstance(answer, Refusal) and answer.kind == "head":
                behind = answer
            else:
                revealed.update(accepted({host: answer}, committed=True))
        if behind is not None:
            request = shown_as(request, shown.ask(attempt))
        if len(revealed) == len(needed) or len(answers) < len(ready) or len(ready) < len(missing):
            break
    if behind is not None:
        raise ClientsRefused(behind.sentence)
    messages = [message for answer in revealed.values() for message in answer]
    if len(revealed) < len(needed) or sum(message.clients for message in messages) != len(participants):
        raise ReleaseLost(
            f"{request.key} of run {request.run!r} was committed to {len(participants)} clients, and not all of them "
            "could reveal their message: its charge stands, and its noise is never drawn again."
        )
    shares = [sent[host].sent for host in needed]
    return protocol.total(shares, [message.steps for message in messages], request.mechanism.dimension)


def asked(
    dispatch: Dispatch, method: str, hosts: Sequence[int], attempt: Attempt, request: Request, shown: Shown
) -> dict[int, Any]:
    """Ask hosts; again under the ledger's newest head where another run of the ledger was faster in between."""
    answers: dict[int, Any] = {}
    for _ in range(REVEALS):
        asked = [host for host in hosts if host not in answers or _is_behind(answers[host])]
        if answers:
            request = shown_as(request, shown.ask(attempt))
        new = dispatch.call(method, dict.fromkeys(asked, (_shipped(request),)))
        shown.note(new, request.head.sequence)
        answers = {host: answer for host, answer in answers.items() if host not in asked} | new
        if not any(_is_behind(answer) for answer in new.values()):
            break
    return answers


def _is_behind(answer: Any) -> bool:
    return isinstance(answer, Refusal) and answer.kind == "head"


def accepted(answers: Mapping[int, Any], *, committed: bool = False) -> dict[int, Any]:
    """Answers without refusals; a refusal is raised, as ReleaseLost where a committed set cannot be repeated."""
    for answer in answers.values():
        if isinstance(answer, Refusal):
            if answer.kind == "lost" or (committed and answer.kind == "conflict"):
                raise ReleaseLost(answer.sentence)
            raise ClientsRefused(answer.sentence)
    return dict(answers)


def _shipped(request: Request) -> Any:
    theta = getattr(request.query, "theta", None)
    return ray.put(request) if theta is not None and theta.nbytes > _INLINE else request
