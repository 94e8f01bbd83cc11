"""The curator: the only place where per-user losses of a central search are, and the door they leave by as releases.

| symbol | code                  | meaning                                                                  | shape  |
|--------|-----------------------|--------------------------------------------------------------------------|--------|
| n      | `users`               | protected validation users, public                                       |        |
| m, d   |                       | evaluated locations in a release; dimension of the search                |        |
| Y      | rows of `Curator`     | losses: one row per location, one column per user                        | (m, n) |
| W      | `GradientAsk.weights` | posterior-mean gradient, linear in a user's losses; public               | (d, m) |
| ȳ_i    |                       | mean of user i's m losses                                                | (n,)   |
| g_i    |                       | W (y_i − ȳ_i 1): user i's gradient; all of them: G = (Y − ȳ)ᵀ Wᵀ, one GEMM | (n, d) |
| B      | `ClippedMean.clip`    | bound on ‖g_i‖; a gradient with a non-finite entry counts as zero        |        |
| ĝ      | `gradient`            | (1/n) Σ clip(g_i) + N(0, σ² I), σ = Δ'/μ on a grid, Δ = 2B/n               | (d,)   |
| c      | `NoisyMax.bound`      | losses are clipped to [0, c] for a winner or a score; non-finite counts as c |    |

Source: DP-GIBO, lines 6-8 of its algorithm (per-user posterior gradient, clip, mean, noise); the centring is ours: a
zero-mean prior would let the level of a user's loss into the gradient. Here is plain Python; `curator_actor` puts it on
Ray.

*Guarantee.* What a method returns is a release of the stated mechanism over the users, unit `user`, under replace-one,
if entry i of every submitted vector depends on user i's record and public data only (`user_losses`). Row i of clip(G)
is a function of user i's losses alone, bit for bit: bad values are zeroed in their own column before the GEMM. Nothing
else leaves: no loss, norm, fraction of clipped users, or exception that holds a value. A value under one key is drawn
once in a curator's life; a curator that was lost starts empty, and it is the ledger that keeps the first stored value.
Not protected: records that models were trained on; n; which locations were evaluated, and whether they arrived; timing.
Whether a release was charged is not asked here. Seeded noise, an infinite μ and `mechanism=None` are **not private**.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpray.platform.curator_asks import (
    Ask,
    CuratorError,
    GradientAsk,
    NoiseKey,
    ScoreAsk,
    WinnerAsk,
    digest,
    distinct_rows,
)
from dpray.platform.privacy import checks
from dpray.platform.privacy.clipping import clip_rows
from dpray.platform.privacy.mechanisms import ClippedMean
from dpray.platform.privacy.noise import NoiseSource, from_grid, to_grid
from dpray.platform.privacy.selection import noisy_argmax

FloatArray = NDArray[np.float64]
PATIENCE = 2
"""Deaths of processes in one location's losses before that code is not run again for it."""
_LOSS_BITS = 30  # a clipped loss is rounded to c·2⁻³⁰ for a winner, so that sums over users are integers


class CuratorLost(CuratorError):  # noqa: N818
    """The curator's process is gone, and the rows with it: say again what is expected, and evaluate it again."""


class RowsMissing(CuratorError):  # noqa: N818
    """Losses that a release needs have not arrived. `rows`: of which locations."""

    def __init__(self, rows: Sequence[str]) -> None:
        self.rows = tuple(rows)
        some = ", ".join(repr(row) for row in self.rows[:3])
        super().__init__(
            f"The losses of {len(self.rows)} locations have not arrived ({some}{', …' if len(self.rows) > 3 else ''}), "
            "or were lost with the curator's process: evaluate them again. Nothing was drawn."
        )

    def __reduce__(self) -> tuple[type[RowsMissing], tuple[tuple[str, ...]]]:
        return RowsMissing, (self.rows,)


def user_gradients(losses: FloatArray, weights: FloatArray, *, centre: bool = True) -> FloatArray:
    """G: the users' posterior-mean gradients, one GEMM; `losses` is overwritten.

    Args:
        losses: Y, (m, n).
        weights: W, (d, m).
        centre: subtract each user's mean.

    Returns:
        (n, d) float64. Row i depends on column i of Y only; it is zero where that has a non-finite value, or overflows
        in the sum, and may have non-finite entries where it overflows later.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        means = losses.sum(axis=0)
        means /= len(losses)
        bad = ~np.isfinite(means)
        if bad.any():
            losses[:, bad], means[bad] = 0.0, 0.0
        if centre:
            losses -= means
        return np.asarray(losses.T @ weights.T)


class Curator:
    """Per-user losses of the locations that the next release needs, and the releases over them.

    Args:
        users: n.

    *Guarantee.* As at the top of this file. It cannot be pickled: losses stay in its process.
    """

    def __init__(self, users: int) -> None:
        self.users = checks.integer("users", users, at_least=1)
        self._losses: dict[str, FloatArray | None] = {}
        self._drawn: dict[NoiseKey, tuple[bytes, Any]] = {}
        self._refused: str | None = None
        self._begun: dict[str, int] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError("A curator cannot be pickled: its losses stay in its process. Hand out a CuratorHandle.")

    def expect(self, rows: Sequence[str]) -> list[str]:
        """Say which locations the next release needs; losses of all others are dropped. Returns those not yet here."""
        self._begun = {row: count for row, count in self._begun.items() if row in set(rows)}
        self._losses = {row: self._losses.get(row) for row in distinct_rows(tuple(rows), none=True)}
        return [row for row, losses in self._losses.items() if losses is None]

    def wanted(self, row: str) -> bool:
        """Whether a location is expected and its losses are not here yet."""
        return row in self._losses and self._losses[row] is None

    def begin(self, row: str) -> bool:
        """Say that a location's losses are about to be computed. False: `PATIENCE` processes died of it; send NaN."""
        self._begun[row] = self._begun.get(row, 0) + 1
        return self._begun[row] <= PATIENCE

    def begun(self, rows: Sequence[str]) -> bool:
        """Whether the losses of one of these locations were begun and have not come."""
        return any(row in self._begun for row in rows)

    def submit(self, row: str, losses: ArrayLike) -> bool:
        """Bring the losses of a location, (n,); the first ones stay. False: it is not expected, and was dropped.

        Raises:
            ValueError: not a real vector of length n; its shape is named, no value.
        """
        values = vector(losses, self.users)
        self._begun.pop(row, None)
        if row not in self._losses:
            return False
        if self._losses[row] is None:
            self._losses[row] = np.array(values)
        return True

    def refuse(self, row: str, sentence: str) -> None:
        """Keep why a trial refused its task's losses (a `ShapeRefused`: public facts); `refusal` tells the first."""
        self._begun.pop(row, None)
        self._refused = self._refused or sentence

    def refusal(self) -> str | None:  # noqa: D102
        return self._refused

    def gradient(self, ask: GradientAsk) -> FloatArray:
        """ĝ, (d,) float64; under the same key the same value.

        Raises:
            RowsMissing: before anything is drawn.
            CuratorError: the mechanism is for another number of users, or the key was used for something else.

        *Guarantee.* μ-GDP, as `ClippedMean` states it.
        """

        def release() -> FloatArray:
            rows = user_gradients(np.stack(self._here(ask.rows)), ask.weights, centre=ask.centre)
            if ask.mechanism is None:
                with np.errstate(over="ignore", invalid="ignore"):
                    rows[~np.isfinite(rows).all(axis=1)] = 0.0
                    return np.asarray(rows.mean(axis=0))
            return _noised_mean(rows, ask.mechanism, ask)

        return np.array(self._once(ask, release, ask.rows))

    def score(self, ask: ScoreAsk) -> float:
        """Noised mean of losses clipped to [0, c]; it may lie outside [0, c]. Errors as `gradient`.

        *Guarantee.* μ-GDP, as `ClippedMean` with clip c/2 states it.
        """

        def release() -> float:
            middle = ask.mechanism.clip
            losses = _bounded(self._here((ask.row,))[0], 2 * middle)
            return float(_noised_mean((losses - middle)[:, None], ask.mechanism, ask)[0]) + middle

        return float(self._once(ask, release, (ask.row,)))

    def winner(self, ask: WinnerAsk) -> int:
        """Index into `ask.rows` of the lowest mean loss plus Gumbel noise of scale 2c/(nε). Errors as `gradient`.

        Losses are rounded to multiples of c·2⁻³⁰ each and added up as integers, so that one user moves a sum by c
        exactly.

        *Guarantee.* ε-DP, as `NoisyMax` states it, for ideal Gumbel noise (`noisy_argmax` is drawn in float64).
        """

        def release() -> int:
            bits = min(_LOSS_BITS, 52 - self.users.bit_length())
            steps, c = math.ldexp(1.0, bits), ask.mechanism.bound
            whole = [np.rint(_bounded(losses, c) / c * steps).astype(np.int64) for losses in self._here(ask.rows)]
            sums = np.array([each.sum() for each in whole], dtype=np.float64)
            scale = ask.mechanism.scale(ask.epsilon) / c * self.users * steps * (1 + 2.0**-50)
            return noisy_argmax(-sums, scale, NoiseSource(ask.seed).generator(*ask.key, "winner"))

        return int(self._once(ask, release, ask.rows))

    def _here(self, rows: tuple[str, ...]) -> list[FloatArray]:
        found = {row: self._losses.get(row) for row in rows}
        missing = [row for row, losses in found.items() if losses is None]
        if missing:
            raise RowsMissing(missing)
        return [losses for losses in found.values() if losses is not None]

    def _once(self, ask: Ask, release: Any, rows: tuple[str, ...]) -> Any:
        """The value under the ask's key: drawn now, or what was drawn before."""
        about = digest(ask)
        if ask.key in self._drawn:
            before, value = self._drawn[ask.key]
            if before != about:
                raise CuratorError(f"The noise key {ask.key} was used for another release: a key names one release.")
            return value
        if ask.mechanism is not None and ask.mechanism.users != self.users:
            raise CuratorError(
                f"The mechanism is for {ask.mechanism.users} users, but here are the losses of {self.users}."
            )
        value = release()
        self._drawn[ask.key] = about, value
        return value


def vector(losses: ArrayLike, users: int) -> NDArray[Any]:
    """Losses as a real vector of length n; the sentence of a refusal (ValueError) holds the shape, no value."""
    values = np.asarray(losses)
    if values.shape != (users,) or values.dtype.kind not in "fiub":
        raise ValueError(
            f"Losses must be a real vector with one entry for each of {users} users, shape ({users},), but an array "
            f"{values.shape} was given. The number of users cannot change from one trial to the next."
        )
    return values.astype(np.float64, copy=False)


def _noised_mean(rows: FloatArray, mechanism: ClippedMean, ask: GradientAsk | ScoreAsk) -> FloatArray:
    """(1/n) Σ clip(row) on the grid, with noise; (d,)."""
    noise = mechanism.noise(ask.mu)
    steps = to_grid(clip_rows(rows, mechanism.clip).mean(axis=0), noise.grid)
    if noise.private:
        steps += NoiseSource(ask.seed, exact=ask.exact).draw(noise, mechanism.dimension, *ask.key, "curator")
    return from_grid(steps, noise.grid)


def _bounded(losses: FloatArray, bound: float) -> FloatArray:
    """Losses clipped to [0, c]; non-finite ones are c."""
    return np.clip(np.where(np.isfinite(losses), losses, bound), 0.0, bound)
