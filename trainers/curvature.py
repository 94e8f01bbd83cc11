"""Curvature of rank r from the last r released gradients: (ρI + WᵀW)⁻¹ v in O(rd), by Woodbury.

| symbol | meaning | shape |
|---|---|---|
| G_j | the last m ≤ r noised gradients | (…, r, d), zero where there is none yet |
| W | rows G_j/√m, so that WᵀW is the mean of G_jG_jᵀ | (…, r, d) |
| Λ, Q | WWᵀ = QΛQᵀ: the eigenvalues of WᵀW that are not zero | (…, r), (…, r, r) |
| f | what noise alone adds to each of them: d s²/m, public | scalar |
| Λ' | Λ, or max(Λ − f, 0) where noise is taken out | (…, r) |
| H | (ρI + Σ_j λ'_j u_ju_jᵀ)⁻¹, u_j = Wᵀq_j/√λ_j | never formed |

    H v = (v − WᵀQ diag(λ'_j/(λ_j (ρ + λ'_j))) QᵀW v) / ρ

With Λ' = Λ this is Woodbury's identity. Signals add up in a mean of outer products, and noises do not: f falls as 1/m.

Guarantee: everything here is post-processing of released gradients; it costs no privacy and gives none.
"""

from __future__ import annotations

import numpy as np

from dpray.trainers.models import FloatArray


def curved(v: FloatArray, W: FloatArray, rho: float, floor: float = 0.0) -> FloatArray:
    """H v, (…, d).

    Args:
        v: (…, d).
        W: (…, r, d).
        rho: ρ > 0.
        floor: f; 0 takes nothing out.
    """
    found, Q = eigen(W)
    kept = np.maximum(found - floor, 0.0)
    ratio = np.divide(kept, found, out=np.zeros_like(found), where=found > 0)
    along = np.einsum("...ji,...j->...i", Q, np.einsum("...jd,...d->...j", W, v))
    on_W = np.einsum("...ji,...i->...j", Q, along * ratio / (rho + kept))
    return np.asarray((v - np.einsum("...jd,...j->...d", W, on_W)) / rho)


def eigen(W: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Λ in ascending order, none below 0, and Q."""
    found, Q = np.linalg.eigh(W @ W.swapaxes(-1, -2))
    return np.maximum(found, 0.0), Q


def pushed(window: FloatArray, G: FloatArray, t: int) -> FloatArray:
    """The window (…, r, d) with G (…, d) of step t, from 1, in the place of the oldest gradient; a new array."""
    new = window.copy()
    new[..., (t - 1) % window.shape[-2], :] = G
    return new
