"""The ring ℤ_{2^m} in which masked messages are added, and its size, from public bounds only.

| symbol  | code        | meaning                                                                        |
|---------|-------------|--------------------------------------------------------------------------------|
| m       | `bits`      | 32 or 64: the machine's own unsigned arithmetic is the ring's                   |
| g       | `grid`      | spacing of the release's grid                                                   |
| n       | `clients`   | clients that may answer, all of them                                            |
| B       | `bound`     | largest absolute coordinate that the un-noised sum can have, public             |
| σ_share | `share`     | std of one client's noise; σ√(n/n_min) = σ_share·√n is the noise's std if all answer |

A sum cannot wrap if 2^m > 2·(B + 12·σ_share·√n)/g + 2n: rounding adds at most half a step for each client's value and
for its noise, and Gaussian noise leaves 12 of its standard deviations with probability < 4·10⁻³³ a coordinate.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.errors import CohortError

IntArray = NDArray[np.int64]
Ring = NDArray[np.unsignedinteger]

SIZES = (32, 64)
_TAIL = 12


def largest_sum(bound: float, share: float, grid: float, clients: int) -> int:
    """Largest absolute value, in steps of the grid, that a coordinate of the noised sum over all clients can have."""
    return math.ceil((bound + _TAIL * share * math.sqrt(clients)) / grid) + clients


def ring_bits(largest: int) -> int:
    """Smallest m with 2^m > 2·largest.

    Raises:
        CohortError: none does. Nothing was asked of a client, and nothing depends on data.
    """
    for bits in SIZES:
        if largest < 1 << (bits - 1):
            return bits
    raise CohortError(
        f"The clients' sum may be up to {largest} grid steps, beyond ±2^63, the largest ring of a masked sum: it could "
        "wrap around. Use a coarser grid, fewer clients or a smaller clip."
    )


def kind(bits: int) -> np.dtype[np.unsignedinteger]:
    """The ring's numbers, little-endian on the wire."""
    return np.dtype(f"<u{bits // 8}")


def encode(steps: IntArray, bits: int) -> Ring:
    """Integers as elements of the ring, modulo 2^m; (d,)."""
    return np.asarray(steps, dtype="<i8").view("<u8").astype(kind(bits))


def decode(elements: Ring, bits: int) -> IntArray:
    """Elements of the ring as the integers in [−2^(m−1), 2^(m−1)) they stand for; (d,) int64."""
    return np.asarray(elements.astype(kind(bits), copy=False).view(f"<i{bits // 8}").astype(np.int64))
