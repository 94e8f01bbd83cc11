# ruff: noqa: N818 - the names are the outcomes that callers handle, and read as such
"""What parties and aggregator of a masked sum send each other: immutable, and bound to one session.

| phase     | party → aggregator | aggregator → party | what it holds                                                  |
|-----------|--------------------|--------------------|----------------------------------------------------------------|
| advertise | `Advertisement`    | `Roster`           | public keys; a party is told its neighbours'                   |
| share     | `Shares`           | `Parcel`           | sealed shares of both secrets, one for each neighbour          |
| mask      | `MaskedInput`      | `Survivors`        | masked messages; then, whose of them are to be opened          |
| agree     | `Agreement`        | `Agreements`       | signatures under the survivor set (against an active server)   |
| unmask    | `Unmasking`        |                    | of each neighbour one share: self-mask seed or mask-key seed   |

Parties are numbers from 0 to n − 1; sets of them are `Members`, one bit each. No message but `MaskedInput` is made
from a client's message at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

from dpray.platform.cohort.errors import CohortError


class ProtocolRefused(CohortError):
    """A message that does not belong here, or a step that would tell too much. Nothing was done because of it."""


class TooFew(CohortError):
    """Too few parties are left in a phase; nothing can be opened. `left` of the `needed`."""

    def __init__(self, message: str, left: int, needed: int) -> None:
        super().__init__(message)
        self.left, self.needed = left, needed


@dataclass(frozen=True)
class Session:
    """One try of one masked sum: everything its keys are bound to. Parties make it themselves, from what they know.

    Attributes:
        population, run, label, mechanism, step: the release key.
        epoch: lease of the run that asks.
        request: digest of the public request, noise included.
        nonce: drawn for this try; the same key tried again is another session.
        clients, quorum, colluders: n, q and c of the cohort (see `parameters`).
        dimension, bits: of the ring's vectors.
        degree: neighbours of a party; None: as few as do.
        active: whether keys are signed and survivors agreed on.
    """

    population: str
    run: str
    label: str
    mechanism: str
    step: int
    epoch: int
    request: str
    nonce: str
    clients: int
    quorum: int
    colluders: int
    dimension: int
    bits: int
    degree: int | None = None
    active: bool = False

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all of it: carried by every message, salt of every key."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class Members:
    """A set of parties: bit i of `bits` is party i; as long as the cohort asks for."""

    bits: bytes

    @classmethod
    def of(cls, parties: Iterable[int], clients: int) -> Members:
        """The set of these parties, of n."""
        number = sum(1 << party for party in set(parties))
        return cls(number.to_bytes((clients + 7) // 8, "little"))

    def fits(self, clients: int) -> bool:
        """Whether it is a set of parties from 0 to n − 1."""
        return len(self.bits) == (clients + 7) // 8 and not self._number >> clients

    def __contains__(self, party: int) -> bool:
        return party >= 0 and bool(self._number >> party & 1)

    def __len__(self) -> int:
        return self._number.bit_count()

    def __iter__(self) -> Iterator[int]:
        return (party for party in range(8 * len(self.bits)) if party in self)

    def __le__(self, other: Members) -> bool:
        return not self._number & ~other._number

    @cached_property
    def _number(self) -> int:
        return int.from_bytes(self.bits, "little")


@dataclass(frozen=True)
class Advertisement:
    """Public keys of a party: for sealing shares, and for pairwise masks. `signature` where keys are authenticated."""

    session: bytes
    sender: int
    seal_key: bytes
    mask_key: bytes
    signature: bytes = b""

    @property
    def content(self) -> bytes:
        """What the signature is under."""
        return self.sender.to_bytes(8, "little") + self.seal_key + self.mask_key


@dataclass(frozen=True)
class Roster:
    """To a party: who takes part, and its neighbours' keys."""

    session: bytes
    members: Members
    neighbours: tuple[Advertisement, ...]


@dataclass(frozen=True)
class Shares:
    """A party's secrets, shared: (recipient, sealed shares of both), and a commitment to the self-mask seed."""

    session: bytes
    sender: int
    commitment: bytes
    sealed: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Parcel:
    """To a party: (sender, sealed shares) of each neighbour that has shared."""

    session: bytes
    sealed: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class MaskedInput:
    """A message under all its masks: d elements of the ring, little-endian."""

    session: bytes
    sender: int
    data: bytes


@dataclass(frozen=True)
class Survivors:
    """To a party: whose masked inputs are to be opened, together."""

    session: bytes
    members: Members


@dataclass(frozen=True)
class Agreement:
    """A party's signature under the survivor set it was shown."""

    session: bytes
    sender: int
    signature: bytes


@dataclass(frozen=True)
class Agreements:
    """To a party: the signatures of others under the same set."""

    session: bytes
    signed: tuple[Agreement, ...]


@dataclass(frozen=True)
class Unmasking:
    """A party's shares, (owner, index, 16 bytes): of survivors' self-mask seeds and of lost parties' mask-key seeds."""

    session: bytes
    sender: int
    seeds: tuple[tuple[int, int, bytes], ...]
    keys: tuple[tuple[int, int, bytes], ...]
