"""How clients' messages become a sum: prepare → commit → reveal, and who sees what on the way.

| step      | where  | what happens                                                                               |
|-----------|--------|--------------------------------------------------------------------------------------------|
| prepare   | host   | a noised message is made and split into what the server may have now and what is kept back |
| commit    | server | the ledger records the set of participants, durably                                        |
| reveal    | host   | what was kept back, for exactly that set; written to the journal before it is sent         |
| total     | server | the sum over the set, exact in integers                                                    |

`Trusted` keeps the whole message back until the commit. A masked sum sends a masked message in `prepare` (after its own
exchange of keys and shares) and keeps back its unmask shares; the point of no return is the same: the reveal.

Messages are int64 multiples of the grid of the release. They are added modulo 2⁶⁴ nowhere: a sum that could wrap is
refused, from public bounds, before it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class SecureSum(ABC):
    """A protocol for adding up messages. Stateless: hosts and server each hold their own instance."""

    name: ClassVar[str]
    hides_shares: ClassVar[bool]
    """Whether the server's code sees the sum only. Without it `distributed` is shown as a simulation of it."""

    @abstractmethod
    def prepare(self, message: IntArray) -> Sealed:
        """At the host: split a noised message (d,) into what is sent now and what is kept back."""

    @abstractmethod
    def reveal(self, kept: IntArray, participants: Sequence[str]) -> IntArray:
        """At the host, after the commit: what completes the sum over these participants. Deterministic."""

    @abstractmethod
    def total(self, sent: Sequence[Any], revealed: Sequence[IntArray], dimension: int) -> IntArray:
        """At the server: the sum, (d,) int64."""


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
