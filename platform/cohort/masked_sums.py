"""The masked sum over a cohort, seen from the driver: the aggregator's part, around the ledger's commit.

| step                 | call to the hosts  | whoever does not answer                                                  |
|----------------------|--------------------|--------------------------------------------------------------------------|
| advertise            | prepare            | takes no part in this try                                                |
| share                | share              | likewise                                                                 |
| masked input         | mask               | likewise; the others' shares take its masks out of the sum               |
| *commit*             |                    | from here on the set is fixed                                            |
| unmask               | unmask             | is in the sum all the same, if t of those around it answer               |
| too few could unmask | from the beginning | the same set, under fresh masks, each with the message it has written    |
|                      |                    | down; whoever is missing now makes the release lost                      |

Before the commit, too few clients are `QuorumLost`, with nothing revealed; a host that was rebuilt in the middle may
join the next try, of which there are a few. After it, a set that cannot be completed is `ReleaseLost`.

What this process receives of a client: keys, sealed shares, one vector under masks, and of the unmasking the shares
that the sum needs. It follows the protocol; whoever changes it is not covered (`masked.party`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpray.platform.cohort.client import IntArray
from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.errors import QuorumLost
from dpray.platform.cohort.lineage import Shown, shown_as
from dpray.platform.cohort.masked.aggregator import Aggregator
from dpray.platform.cohort.masked.messages import TooFew
from dpray.platform.cohort.masking import session_of
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.request import Refusal, Request
from dpray.platform.cohort.sampled import Sampled
from dpray.platform.cohort.secure_sum import Masked
from dpray.platform.cohort.sums import REVEALS, ClientSum, Members, accepted, asked
from dpray.platform.privacy.ledger import Attempt, ReleaseLost
from dpray.platform.privacy.noise import GridNoise

_TRIES = 3
"""Tries before the commit; another one only if a host was rebuilt in the middle of the last."""


@dataclass
class MaskedSum:
    """One masked sum: who is asked, for what.

    Attributes:
        dispatch, members, attempt, shown: as in `sums`.
        noise: calibrated, of the whole release.
        protocol, terms, colluders: what clients and server make the session from.
        rebuilt: whether a host said, in the last try, that it has no part in it any more.
    """

    dispatch: Dispatch
    members: Members
    attempt: Attempt
    noise: GridNoise
    protocol: Masked
    terms: Terms
    colluders: int
    shown: Shown
    rebuilt: bool = field(default=False, init=False)

    def run(self, request: Request) -> ClientSum:
        """The sum over whoever answers, or over the set that an earlier computation committed.

        Raises:
            QuorumLost, ReleaseLost, ClientsRefused, and the ledger's ParticipantsChanged and LeaseLost, as
            `sums.shared`; CohortError before anybody is asked if the sum could wrap around.
        """
        session_of(request, self.noise, self.protocol, self.terms, self.members.quorum, self.colluders)
        committed, server = self.attempt.participants, None
        if committed is None:
            server, request = self._masked(request)
            participants = self._survivors(server)
            self.members.require(participants)
            self.attempt.commit(participants, sample_inside=isinstance(request.query, Sampled))
        else:
            if not committed <= self.members.counts.keys():
                raise ReleaseLost(f"{self.attempt.key} was committed with clients that are not in this cohort.")
            participants = tuple(client for client in self.members.counts if client in committed)
            self.attempt.commit(committed, sample_inside=isinstance(request.query, Sampled))
        request = shown_as(replace(request, participants=participants), self.shown.ask(self.attempt))
        steps = self._opened(server, request)
        records = self.members.records(participants)
        return ClientSum(steps, self.noise.grid, participants, records, self.noise)

    def _masked(self, request: Request) -> tuple[Aggregator, Request]:
        """Up to the masked inputs, with as many tries as hosts were rebuilt in."""
        every = tuple(range(len(self.members.hosts)))
        for left in reversed(range(_TRIES)):
            try:
                return self._inputs(request, every)
            except TooFew as few:
                if not self.rebuilt or not left:
                    raise QuorumLost(
                        f"{few.left} clients answered, and the quorum is {self.members.quorum} of "
                        f"{len(self.members.counts)}: their noise would not be enough. Nothing was revealed; try again "
                        "when more are back.",
                        answered=few.left,
                        quorum=self.members.quorum,
                    ) from None
        raise AssertionError  # pragma: no cover - the last try returns or raises

    def _inputs(self, request: Request, hosts: Sequence[int]) -> tuple[Aggregator, Request]:
        """One try: keys, shares, masked inputs. Returns the aggregator and the request under the try's nonce."""
        self.rebuilt = False
        request = replace(request, nonce=secrets.token_hex(16))
        again = request.participants is not None
        server = Aggregator(
            session_of(request, self.noise, self.protocol, self.terms, self.members.quorum, self.colluders)
        )
        prepared = asked(self.dispatch, "prepare", hosts, self.attempt, request, self.shown)
        for answer in accepted(prepared, committed=again).values():
            _receive(server, answer.sent)
        _receive(server, self._phase("share", request, server.rosters()))
        _receive(server, self._phase("mask", request, server.parcels()))
        server.survivors()
        return server, request

    def _opened(self, server: Aggregator | None, request: Request) -> IntArray:
        """The sum over the committed set."""
        participants = request.participants or ()
        inside = set(participants)
        needed = [host for host, clients in enumerate(self.members.hosts) if not inside.isdisjoint(clients)]
        for _ in range(REVEALS):
            try:
                if server is None:
                    server, request = self._inputs(request, needed)
                    if self._survivors(server) != participants:
                        raise TooFew("Not all of the committed set are back.", len(inside) - 1, len(inside))
                answers = asked(self.dispatch, "unmask", needed, self.attempt, request, self.shown)
                for answer in self._there(answers, committed=True).values():
                    _receive(server, answer)
                return server.total()
            except TooFew:
                server, request = None, shown_as(request, self.shown.ask(self.attempt))
                if not self.rebuilt:
                    break
        raise ReleaseLost(
            f"{request.key} of run {request.run!r} was committed to {len(participants)} clients, and too few of them "
            "could unmask their sum: its charge stands, and its noise is never drawn again."
        )

    def _phase(self, method: str, request: Request, told: Mapping[int, Any]) -> list[Any]:
        """Tell parties what they are told, one call a host, and collect their messages."""
        numbers = {client: number for number, client in enumerate(self.members.counts)}
        calls: dict[int, tuple[Any, ...]] = {}
        for host, clients in enumerate(self.members.hosts):
            mine = {numbers[client]: told[numbers[client]] for client in clients if numbers[client] in told}
            if mine:
                calls[host] = request.nonce, mine
        answers = self._there(self.dispatch.call(method, calls), committed=request.participants is not None)
        return [message for answer in answers.values() for message in answer]

    def _there(self, answers: Mapping[int, Any], *, committed: bool) -> dict[int, Any]:
        """Answers of hosts that are still in the try."""
        gone = {host for host, each in answers.items() if isinstance(each, Refusal) and each.kind == "again"}
        self.rebuilt = self.rebuilt or bool(gone)
        return accepted({host: each for host, each in answers.items() if host not in gone}, committed=committed)

    def _survivors(self, server: Aggregator) -> tuple[str, ...]:
        """Names of those whose masked input there is, in the cohort's order."""
        inputs = server.inputs
        return tuple(client for number, client in enumerate(self.members.counts) if number in inputs)


def _receive(server: Aggregator, messages: Sequence[Any]) -> None:
    for message in messages:
        server.receive(message)
