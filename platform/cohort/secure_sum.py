"""How clients' messages become a sum: prepare → commit → reveal, and who sees what on the way.

| step    | where  | trusted                                | masked                                             |
|---------|--------|----------------------------------------|----------------------------------------------------|
| prepare | host   | a noised message is made and kept back | each client's is; keys and shares are exchanged,   |
|         |        |                                        | and the masked messages sent                       |
| commit  | server | the ledger records the participants    | the same: those whose masked message is there      |
| reveal  | host   | the message, once it is in the journal | shares that unmask the sum, once the message is in |
| total   | server | the exact integer sum over the set     | the same; nothing else can be opened               |

The reveal is the point of no return, in both: before it the participant set may change from try to try; after it a
client repeats its message for that set, or refuses the key. A sum that could wrap around is refused, from public
bounds, before it is made.

**The masking party is the client.** A real site is one client on one actor: its masks are made, and its message is, in
its own process. A pool's hosts hold many virtual clients, and run the protocol for each of them: a simulation of it,
message by message, that protects a client from the server's code and not from its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dpray.platform.cohort.client import IntArray
from dpray.platform.cohort.errors import CohortError

_LARGEST = 2**62


@dataclass(frozen=True)
class Sealed:
    """A message made ready: `sent` goes to the server at once, `kept` stays with the host until the commit."""

    sent: Any
    kept: IntArray


class SecureSum:
    """A protocol for adding up noised messages. Stateless: hosts and server each hold their own instance."""

    name: ClassVar[str]
    hides_shares: ClassVar[bool]
    """Whether the server's code sees the sum only. Without it `distributed` is shown as a simulation of it."""


class Trusted(SecureSum):
    """The server adds up the hosts' messages itself and is trusted not to look: a simulation of a masked sum.

    *Guarantee.* None against the server, in regime `distributed`: it sees each host's share, so every display says
    "central (aggregator trusted, shares simulated)". Against everybody else the sum is protected as the mechanism
    states. In regime `local` each message is private by itself and nothing is lost.
    """

    name: ClassVar[str] = "trusted"
    hides_shares: ClassVar[bool] = False

    def prepare(self, message: IntArray) -> Sealed:
        """Nothing is sent before the commit."""
        return Sealed(None, message)

    def reveal(self, kept: IntArray, participants: Sequence[str]) -> IntArray:
        """The message itself, whoever takes part."""
        return kept

    def total(self, sent: Sequence[Any], revealed: Sequence[IntArray], dimension: int) -> IntArray:
        """The exact integer sum of the messages."""
        return add(revealed, dimension)


@dataclass(frozen=True)
class Masked(SecureSum):
    """SecAgg+ between clients (`masked.party` has model and guarantee; `masked_sums` runs it).

    *Guarantee.* In regime `distributed` the server's code, following the protocol and pooling what it sees with the
    cohort's `colluders`, learns of the clients' messages their sum only. Against a server that deviates from the
    protocol nothing is promised here: a cohort's driver passes the keys on and ships the code that its actors run.
    Signed keys and agreement on the survivors (`Session.active`) are for parties that run code of their own.

    Args:
        degree: neighbours each client exchanges keys and shares with; None: as few as do for the cohort's size, quorum
            and colluders (`masked.parameters`), or everybody.
    """

    name: ClassVar[str] = "masked"
    hides_shares: ClassVar[bool] = True
    degree: int | None = None


def named(name: str | Masked) -> SecureSum:
    """The protocol of this name; a masked sum of one's own settings is itself.

    Raises:
        CohortError: there is none.
    """
    if isinstance(name, Masked):
        return name
    protocols: dict[str, SecureSum] = {"trusted": Trusted(), "masked": Masked()}
    if name not in protocols:
        raise CohortError(f"A secure sum is `trusted` or `masked`; {name!r} was given.")
    return protocols[name]


def add(messages: Sequence[IntArray], dimension: int) -> IntArray:
    """Exact sum of int64 vectors (d,).

    Raises:
        CohortError: the sum might not fit 62 bits: the grid is too fine for so many clients.
    """
    total = np.zeros(dimension, dtype=np.int64)
    bound = 0
    for message in messages:
        bound += max(abs(int(message.max(initial=0))), abs(int(message.min(initial=0))))
        if bound > _LARGEST:
            raise CohortError("The sum of the clients' messages might not fit 64-bit integers: use a coarser grid.")
        total += message
    return total
