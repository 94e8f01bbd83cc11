"""How many neighbours a client has, and how many shares open a secret: what follows for dropouts and colluders.

| symbol | code          | meaning                                                                            |
|--------|---------------|------------------------------------------------------------------------------------|
| n      | `clients`     | parties of a session                                                               |
| q, d   | `quorum`      | fewest parties whose input may be opened; d = n − q, at least n/20, may be lost     |
| c      | `colluders`   | parties that pool what they know with the server                                    |
| k      | `degree`      | neighbours of a party: even, or n − 1 (everybody)                                   |
| t      | `threshold`   | shares that open a secret; a party's k + 1 *holders* are its neighbours and itself  |
| X, Y   |               | colluders, and lost parties, among the k neighbours of one party                    |

The graph is a ring in random order in which everybody is joined to the next k/2 on either side (Harary graph), drawn
after colluders are fixed and independently of who is lost (Bell et al. 2020, §3). Each party's neighbours are then a
uniform k-subset of the n − 1 others, so X ~ Hypergeometric(n − 1, c, k), Y ~ Hypergeometric(n − 1, d, k).

| event                                | happens only if                          | probability at most              |
|--------------------------------------|------------------------------------------|----------------------------------|
| both secrets of one can be opened    | k + 1 + X ≥ 2t (honest holders give one) | n · P(X ≥ 2t − k − 1)            |
| the sum falls into smaller sums      | two disjoint runs of k/2 parties on the  | n(n−1)/2 · Π_{i<k} (c+d−i)/(n−i) |
|                                      | ring, all of them lost or colluding      |                                  |
| a needed secret cannot be opened     | k − Y < t                                | n · P(Y > k − t)                 |

The second line is exact reasoning on the ring: with one such run at most, honest survivors in ring order, cut there,
are adjacent one to the next. The first two events break secrecy and together have probability ≤ 2⁻⁴⁰; the third loses
a release, and has probability ≤ 2⁻²⁰. With k = n − 1 nothing is left to chance: 2t > n + c, and q ≥ t.

Sources: Bonawitz et al. 2017 (k = n − 1, and its threshold against an active server), Bell et al. 2020 (Lemmas on
random Harary graphs; here the tails are summed exactly instead of bounded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from dpray.platform.cohort.errors import CohortError

SECRECY = 2.0**-40
"""Most that the chance of a graph which does not protect may be."""
SMALL = 50
"""Up to so many parties everybody is everybody's neighbour, unless a degree is given."""
LATE = 0.05
"""Part of the parties that a sparse graph bears to lose in all, even where the quorum is everybody."""
CORRECTNESS = 2.0**-20
"""Most that the chance of a graph in which a needed secret cannot be opened may be."""


@dataclass(frozen=True)
class Parameters:
    """Degree and threshold for n parties, and the chance that a random graph of them does not do.

    Attributes:
        clients, quorum, colluders: n, q, c.
        degree, threshold: k, t.
        exposed: bound on the probability that the graph does not protect.
        stuck: bound on the probability that d losses leave a secret closed.
    """

    clients: int
    quorum: int
    colluders: int
    degree: int
    threshold: int
    exposed: float
    stuck: float

    @property
    def complete(self) -> bool:
        """Whether everybody is everybody's neighbour."""
        return self.degree == self.clients - 1


@lru_cache(maxsize=256)
def parameters(
    clients: int, quorum: int, colluders: int, degree: int | None = None, active: bool = False
) -> Parameters:
    """Degree and threshold for n parties of which n − q may be lost and c collude: the smallest that do, or a refusal.

    Args:
        degree: k to use instead of the smallest that does (n − 1 up to `SMALL` parties); from n − 1 on, everybody.
        active: the server may deviate from the protocol; then only k = n − 1 is given. A server that chooses who is
            lost could cut a small group out of a sparse graph.

    Raises:
        CohortError: no threshold does for so many losses and colluders; the sentence says what would.
    """
    if not (2 <= quorum <= clients and colluders >= 1):
        raise CohortError(
            f"A masked sum needs a quorum of at least 2 of its clients and at least 1 colluder assumed; {clients} "
            f"clients, a quorum of {quorum} and {colluders} colluders were given."
        )
    if degree is not None and degree < 2:
        raise CohortError(f"A masked sum's degree is at least 2; {degree} was given.")
    if not active and (clients > SMALL or degree is not None):
        for k in range(2, clients - 1, 2) if degree is None else [degree + degree % 2]:
            if k >= clients - 1:
                break
            found = _sparse(clients, quorum, colluders, k)
            if isinstance(found, Parameters):
                return found
            if degree is not None:
                raise CohortError(
                    f"A masked sum with {k} neighbours each {found}: {clients} clients, quorum {quorum}, {colluders} "
                    "colluders. Give a larger degree, or none and the smallest that does is taken."
                )
    return _complete(clients, quorum, colluders)


def _complete(clients: int, quorum: int, colluders: int) -> Parameters:
    threshold = (clients + colluders) // 2 + 1
    if quorum < threshold:
        raise CohortError(
            f"A masked sum of {clients} clients, {colluders} of them colluding, needs {threshold} of them to "
            f"open it, and the quorum is {quorum}: with fewer, the server could open a single client's message. Raise "
            "the quorum, or assume fewer colluders."
        )
    return Parameters(clients, quorum, colluders, clients - 1, threshold, 0.0, 0.0)


def _sparse(clients: int, quorum: int, colluders: int, k: int) -> Parameters | str:
    others, lost = clients - 1, max(clients - quorum, math.ceil(LATE * clients))
    split = min(1.0, math.comb(clients, 2) * _all_of(clients, colluders + lost, k))
    if split > SECRECY / 2:
        return f"might fall apart (probability {split:.1e})"
    threshold = k // 2 + 1
    while (both := clients * _at_least(others, colluders, k, 2 * threshold - k - 1)) > SECRECY / 2:
        threshold += 1
    if threshold > k:
        return "leaves both secrets of a client to its colluding neighbours"
    stuck = min(1.0, clients * _at_least(others, lost, k, k - threshold + 1))
    if stuck > CORRECTNESS:
        return f"might not open after {lost} losses (probability {stuck:.1e})"
    return Parameters(clients, quorum, colluders, k, threshold, split + both, stuck)


def _all_of(total: int, marked: int, drawn: int) -> float:
    """P(`drawn` of `total` are all among the marked)."""
    marked = min(marked, total)
    return math.comb(marked, drawn) / math.comb(total, drawn)


def _at_least(total: int, marked: int, drawn: int, wanted: int) -> float:
    """P(at least `wanted` of the drawn are marked), hypergeometric; summed in integers."""
    marked = min(marked, total)
    ways = sum(
        math.comb(marked, i) * math.comb(total - marked, drawn - i)
        for i in range(max(wanted, 0), min(marked, drawn) + 1)
    )
    return ways / math.comb(total, drawn)


def neighbours(order: list[int], degree: int) -> dict[int, tuple[int, ...]]:
    """Neighbours of each party, sorted: `order` is a ring, everybody is joined to the next degree/2 on either side.

    Args:
        order: the parties, in random order.
        degree: even, or one less than there are parties.
    """
    number = len(order)
    if degree >= number - 1:
        return {party: tuple(sorted(other for other in order if other != party)) for party in order}
    steps = [step for step in range(-(degree // 2), degree // 2 + 1) if step]
    return {party: tuple(sorted(order[(place + step) % number] for step in steps)) for place, party in enumerate(order)}
