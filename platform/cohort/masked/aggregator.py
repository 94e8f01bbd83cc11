"""The server's side of the masked sum: passes messages on, opens what the survivors' sum needs, and nothing else.

| symbol  | code          | meaning                                                                              |
|---------|---------------|--------------------------------------------------------------------------------------|
| U_1     | `_keys`       | parties that advertised keys                                                          |
| U_2     | `_shared`     | … and shared their secrets                                                            |
| U_3     | `_inputs`     | … and sent a masked input: the survivors, whose sum it is                             |
| U_5     | `_answers`    | … and gave shares to unmask it; at least t around each secret that is needed          |

    Σ_{u∈U_3} x_u = Σ_{u∈U_3} y_u − Σ_{u∈U_3} PRG(b_u) + Σ_{v∈U_2∖U_3} Σ_{u∈U_3∩N(v)} ±PRG(s_uv)

Two calls a phase: `receive` takes one party's message, or refuses it and stays as it was; the call named after what is
sent next closes the phase and leaves out whoever has not answered (`TooFew` below the quorum). *Guarantee:* that of
`party`, which trusts this side only to follow the protocol.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dpray.platform.cohort.masked import primitives
from dpray.platform.cohort.masked.messages import (
    Advertisement,
    Agreement,
    Agreements,
    MaskedInput,
    Members,
    Parcel,
    ProtocolRefused,
    Roster,
    Session,
    Shares,
    Survivors,
    TooFew,
    Unmasking,
)
from dpray.platform.cohort.masked.parameters import Parameters, neighbours
from dpray.platform.cohort.masked.party import session_parameters
from dpray.platform.cohort.masked.ring import IntArray, Ring, decode, kind

Answer = Advertisement | Shares | MaskedInput | Agreement | Unmasking
_AWAITED: dict[str, type[Any]] = {
    "advertise": Advertisement,
    "share": Shares,
    "mask": MaskedInput,
    "agree": Agreement,
    "unmask": Unmasking,
}


class Aggregator:
    """The server in one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._phase = "advertise"
        self._keys: dict[int, Advertisement] = {}
        self._taken: set[bytes] = set()
        self._around: dict[int, tuple[int, ...]] = {}
        self._parameters: Parameters | None = None
        self._shared: dict[int, Shares] = {}
        self._inputs: dict[int, MaskedInput] = {}
        self._agreements: dict[int, Agreement] = {}
        self._answers: dict[int, Unmasking] = {}

    def receive(self, message: Answer) -> None:
        """Take a party's message of this phase.

        Raises:
            ProtocolRefused: of another session or phase, from a party that is not in it, a second one, or malformed.
        """
        known, into, fits = self._expected()
        name = type(message).__name__
        if not isinstance(message, _AWAITED[self._phase]):
            raise ProtocolRefused(f"A message {name} does not belong into the phase {self._phase!r}.")
        if message.session != self.session.digest:
            raise ProtocolRefused(f"A message {name} of another session, run, lease or try.")
        if message.sender not in known or message.sender in into:
            raise ProtocolRefused(f"A message {name} from party {message.sender}, which sent one or is not awaited.")
        if not fits(message):
            raise ProtocolRefused(f"A message {name} from party {message.sender} is malformed.")
        into[message.sender] = message
        if isinstance(message, Advertisement):
            self._taken |= {message.seal_key, message.mask_key}

    def rosters(self) -> dict[int, Roster]:
        """Close *advertise*: draw the graph, and tell each party its neighbours."""
        self._close("advertise", self._keys, "share")
        self._parameters = session_parameters(self.session, len(self._keys))
        order = sorted(self._keys)
        random.SystemRandom().shuffle(order)
        self._around = neighbours(order, self._parameters.degree)
        members = Members.of(self._keys, self.session.clients)
        return {
            party: Roster(self.session.digest, members, tuple(self._keys[other] for other in others))
            for party, others in self._around.items()
        }

    def parcels(self) -> dict[int, Parcel]:
        """Close *share*: pass the sealed shares on to whom they are for."""
        self._close("share", self._shared, "mask")
        sealed: dict[int, list[tuple[int, bytes]]] = {party: [] for party in self._shared}
        for sender, message in self._shared.items():
            for recipient, content in message.sealed:
                if recipient in sealed:
                    sealed[recipient].append((sender, content))
        return {party: Parcel(self.session.digest, tuple(content)) for party, content in sealed.items()}

    def survivors(self) -> Survivors:
        """Close *mask*: whose inputs there are, and will be opened, together."""
        self._close("mask", self._inputs, "agree" if self.session.active else "unmask")
        return Survivors(self.session.digest, Members.of(self._inputs, self.session.clients))

    def agreements(self) -> Agreements:
        """Close *agree*: the signatures under the survivor set."""
        self._close("agree", self._agreements, "unmask", needed=self._given.threshold)
        return Agreements(self.session.digest, tuple(self._agreements.values()))

    def total(self) -> IntArray:
        """Close *unmask*: the sum over the survivors, (d,) int64.

        Raises:
            TooFew: a secret that is needed has fewer shares than the threshold; nothing was opened.
            ProtocolRefused: shares that do not give the secret they are said to be of.
        """
        self._at("unmask")
        threshold, lost = self._given.threshold, self._shared.keys() - self._inputs.keys()
        seeds, keys = self._pooled(lambda answer: answer.seeds), self._pooled(lambda answer: answer.keys)
        dangling = {party: [other for other in self._around[party] if other in self._inputs] for party in lost}
        wanted = [seeds.get(party, {}) for party in self._inputs]
        wanted += [keys.get(party, {}) for party, others in dangling.items() if others]
        fewest = min(len(shares) for shares in wanted)
        if fewest < threshold:
            raise TooFew(
                f"A secret that the sum needs has {fewest} shares, and {threshold} open it: too many parties were lost "
                "while it was unmasked.",
                fewest,
                threshold,
            )
        ring, dimension = kind(self.session.bits), self.session.dimension
        total = np.zeros(dimension, dtype=ring)
        for party, message in self._inputs.items():
            total += np.frombuffer(message.data, dtype=ring)
            total -= self._self_mask(party, seeds[party], threshold)
        for party, others in dangling.items():
            if others:
                total += self._dangling(party, others, keys[party], threshold)
        self._phase = "over"
        return decode(total, self.session.bits)

    @property
    def threshold(self) -> int:
        """t."""
        return self._given.threshold

    @property
    def inputs(self) -> frozenset[int]:
        """Parties whose masked input there is."""
        return frozenset(self._inputs)

    def _self_mask(self, party: int, shares: dict[int, bytes], threshold: int) -> Ring:
        session = self.session
        seed = primitives.combine(list(shares.items())[:threshold])
        if primitives.commitment(seed, session.digest) != self._shared[party].commitment:
            raise ProtocolRefused(f"The shares of party {party}'s self mask do not give the secret it committed to.")
        return primitives.self_mask(seed, session.digest, party, session.dimension, session.bits)

    def _dangling(self, party: int, others: Iterable[int], shares: dict[int, bytes], threshold: int) -> Ring:
        """What a lost party would have added: the sum of its pairwise masks with survivors."""
        session = self.session
        key = primitives.mask_key(primitives.combine(list(shares.items())[:threshold]), session.digest)
        if primitives.public(key) != self._keys[party].mask_key:
            raise ProtocolRefused(f"The shares of party {party}'s mask key do not give the key it advertised.")
        total = np.zeros(session.dimension, dtype=kind(session.bits))
        for other in others:
            agreed = primitives.agree(key, self._keys[other].mask_key)
            mask = primitives.pair_mask(agreed, session.digest, party, other, session.dimension, session.bits)
            total = total + mask if party < other else total - mask
        return total

    def _pooled(self, of: Callable[[Unmasking], tuple[tuple[int, int, bytes], ...]]) -> dict[int, dict[int, bytes]]:
        """Shares by owner and index."""
        pooled: dict[int, dict[int, bytes]] = {}
        for answer in self._answers.values():
            for owner, index, share in of(answer):
                pooled.setdefault(owner, {})[index] = share
        return pooled

    def _expected(self) -> tuple[Iterable[int], dict[int, Any], Callable[[Any], bool]]:
        """Whose messages this phase takes, where they go, and what they must look like."""
        if self._phase == "advertise":
            return range(self.session.clients), self._keys, self._proper_keys
        if self._phase == "share":
            return self._keys, self._shared, self._proper_shares
        if self._phase == "mask":
            size = self.session.dimension * self.session.bits // 8
            return self._shared, self._inputs, lambda message: len(message.data) == size
        if self._phase == "agree":
            return self._inputs, self._agreements, lambda message: len(message.signature) == 2 * primitives.KEY
        if self._phase == "unmask":
            return self._inputs, self._answers, self._proper_answer
        raise ProtocolRefused("This session is over.")

    def _proper_keys(self, message: Advertisement) -> bool:
        given = {message.seal_key, message.mask_key}
        return len(given) == 2 and all(len(key) == primitives.KEY for key in given) and self._taken.isdisjoint(given)

    def _proper_shares(self, message: Shares) -> bool:
        return (
            tuple(recipient for recipient, _ in message.sealed) == self._around[message.sender]
            and len(message.commitment) == primitives.KEY
        )

    def _proper_answer(self, message: Unmasking) -> bool:
        """One share each of the sender's own secrets and its sharing neighbours', of the kind that was asked for."""
        holds = {other for other in self._around[message.sender] if other in self._shared} | {message.sender}
        seeds, keys = [owner for owner, *_ in message.seeds], [owner for owner, *_ in message.keys]
        return (
            sorted(seeds) == sorted(holds & self._inputs.keys())
            and sorted(keys) == sorted(holds - self._inputs.keys())
            and all(len(share) == primitives.SECRET and index > 0 for _, index, share in message.seeds + message.keys)
        )

    @property
    def _given(self) -> Parameters:
        if self._parameters is None:  # pragma: no cover - phases come in order
            raise ProtocolRefused("The graph is not drawn yet.")
        return self._parameters

    def _at(self, phase: str) -> None:
        if self._phase != phase:
            raise ProtocolRefused(f"The phase {phase!r} cannot be closed: the session is in {self._phase!r}.")

    def _close(self, phase: str, answers: dict[int, Any], after: str, needed: int | None = None) -> None:
        self._at(phase)
        needed = self.session.quorum if needed is None else needed
        if len(answers) < needed:
            raise TooFew(
                f"{len(answers)} parties are left after the phase {phase!r}, and {needed} are needed.",
                len(answers),
                needed,
            )
        self._phase = after
