"""Noise without floating point: OpenDP's exact discrete Gaussian, for releases of few coordinates.

| symbol  | meaning                                                                             |
|---------|-------------------------------------------------------------------------------------|
| g       | grid of the release                                                                 |
| h       | finer grid on which the discrete Gaussian is drawn, g/2²⁰ where 64-bit integers allow |

The share is round(z·h/g) with z from the discrete Gaussian (Canonne, Kamath & Steinke 2020) of std σ_share/h, drawn
with exact rational arithmetic and the operating system's randomness. It takes 17-70 µs a coordinate, a thousand times
the float64 sampler, and does away with the assumption that the float64 sampler is ideal.

*Guarantee.* As `noise.draw`, with the total variation between z and a rounded ideal Gaussian, at most d·(h/σ_share)²/24
to leading order, in the place of the sampler's idealness: below 10⁻¹⁷·d for h = g/2²⁰ and σ_share/g ≥ 2⁸.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from dpray.platform.privacy.noise import GridNoise, IntArray

_LARGEST_BITS = 52


def load_opendp() -> Any:
    """The OpenDP library, an optional dependency. `ImportError` with what to install if it is not there."""
    try:
        opendp = importlib.import_module("opendp.prelude")
    except ImportError as error:
        raise ImportError(
            "Exact noise is drawn by OpenDP, which is not installed: `pip install opendp`, or use exact=False."
        ) from error
    opendp.enable_features("contrib")
    return opendp


def draw_exact(noise: GridNoise, shape: int | tuple[int, ...]) -> IntArray:
    """One noiser's share in grid steps, like `noise.draw`, without floating point in the sampler; int64.

    Raises:
        ValueError: the noise is wider than 2⁵² grid steps.
        ImportError: OpenDP is not installed.
    """
    opendp = load_opendp()
    if not noise.private:
        return np.zeros(shape, dtype=np.int64)
    ratio = noise.share / noise.grid
    spare = _LARGEST_BITS - math.frexp(ratio)[1]
    if spare < 0:
        raise ValueError(f"Exact noise can be 2**52 grid steps wide, but {ratio:.3g} were asked: use exact=False.")
    finer = min(spare, 20)
    domain = opendp.vector_domain(opendp.atom_domain(T="i64"))
    scale = math.ldexp(ratio, finer)
    measurement = opendp.m.make_gaussian(domain, opendp.l2_distance(T=float), scale=scale)
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    z = np.asarray(measurement([0] * count), dtype=np.int64)
    half = (1 << finer) >> 1
    return ((z + half) >> finer).reshape(shape)
