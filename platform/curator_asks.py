"""What a search asks of the curator: frozen, public requests, refused before anything is charged if they are wrong.

| ask           | answer                                                            | mechanism     |
|---------------|-------------------------------------------------------------------|---------------|
| `GradientAsk` | ĝ, clipped mean of the users' gradients plus noise, (d,)          | `ClippedMean` |
| `ScoreAsk`    | mean loss, clipped to [0, c], plus noise                          | `ClippedMean` |
| `WinnerAsk`   | index of the location with the lowest mean loss, report-noisy-max | `NoisyMax`    |

Symbols and *Guarantee* as in `curator`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy import checks, gdp
from dpray.platform.privacy.mechanisms import ClippedMean, NoisyMax
from dpray.platform.privacy.noise import NoiseSource

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Attempt

FloatArray = NDArray[np.float64]


class CuratorError(RuntimeError):
    """A curator cannot answer. Holds public facts only."""


NoiseKey = tuple[str | int, ...]
"""Names a release: population, run, label, mechanism, step."""


@dataclass(frozen=True, eq=False)
class GradientAsk:
    """Asks for ĝ. Public, but for the seed.

    Args:
        rows: m distinct ids of evaluated locations, in the order of W's columns.
        weights: W, (d, m), finite.
        mechanism: `ClippedMean` for n users and dimension d; None: plain mean, neither clipped nor noised.
        mu: μ of this release; ∞: no noise, the only choice without a mechanism.
        key: names the release; the noise under it is drawn once.
        seed: for simulation and tests: not private.
        exact: draw with OpenDP's exact discrete Gaussian.
        centre: subtract each user's mean over the m locations first.

    Raises:
        ValueError: any of it is not so.
    """

    rows: tuple[str, ...]
    weights: FloatArray
    mechanism: ClippedMean | None
    mu: float
    key: NoiseKey
    seed: int | None = field(default=None, repr=False)
    exact: bool = False
    centre: bool = True

    def __post_init__(self) -> None:
        _set(self, rows=distinct_rows(self.rows), key=_key(self.key), mu=checks.positive("mu", self.mu, infinite=True))
        weights = np.array(self.weights, dtype=np.float64)
        if weights.ndim != 2 or weights.shape[1] != len(self.rows) or not np.all(np.isfinite(weights)):
            raise ValueError(
                f"The weights must be a finite matrix with one column for each of {len(self.rows)} locations, but an "
                f"array {weights.shape} was given."
            )
        weights.setflags(write=False)
        _set(self, weights=weights)
        if self.mechanism is None and not math.isinf(self.mu):
            raise ValueError(f"Without a mechanism nothing is clipped or noised: mu must be infinite, not {self.mu}.")
        if self.mechanism is not None and self.mechanism.dimension != len(weights):
            raise ValueError(
                f"The mechanism is for dimension {self.mechanism.dimension}, the weights for {len(weights)}."
            )
        _check_noise(self)


@dataclass(frozen=True, eq=False)
class ScoreAsk:
    """Asks for the mean over users of their losses clipped to [0, c], at one location: a release of its own.

    Args:
        row: id of the location.
        mechanism: `score_mechanism(c, n)`.
        mu, key, seed, exact: as `GradientAsk`.

    Raises:
        ValueError: the mechanism is not for one dimension; others as `GradientAsk`.
    """

    row: str
    mechanism: ClippedMean
    mu: float
    key: NoiseKey
    seed: int | None = field(default=None, repr=False)
    exact: bool = False

    def __post_init__(self) -> None:
        distinct_rows((self.row,))
        _set(self, key=_key(self.key), mu=checks.positive("mu", self.mu, infinite=True))
        if self.mechanism.dimension != 1:
            raise ValueError(f"A score has dimension 1, but the mechanism's is {self.mechanism.dimension}.")
        _check_noise(self)


@dataclass(frozen=True, eq=False)
class WinnerAsk:
    """Asks which location has the lowest mean loss, losses clipped to [0, c], by report-noisy-max.

    Args:
        rows: distinct ids of the candidates.
        mechanism: `NoisyMax` for n users and as many candidates.
        epsilon: ε of this release, pure; ∞: no noise.
        key, seed: as `GradientAsk`.

    Raises:
        ValueError: any of it is not so.
    """

    rows: tuple[str, ...]
    mechanism: NoisyMax
    epsilon: float
    key: NoiseKey
    seed: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        epsilon = checks.positive("epsilon", self.epsilon, infinite=True)
        _set(self, rows=distinct_rows(self.rows), key=_key(self.key), epsilon=epsilon)
        if self.mechanism.candidates != len(self.rows):
            raise ValueError(
                f"The mechanism is for {self.mechanism.candidates} candidates, but {len(self.rows)} were given."
            )
        NoiseSource(self.seed)


Ask = GradientAsk | ScoreAsk | WinnerAsk


def require_paid(ask: Ask, attempt: Attempt) -> None:
    """Refuse to release anything but what was charged.

    Raises:
        KeyConflict: another mechanism or trust mode was charged; CuratorError: another release, a larger spend, or
            something without a mechanism on an attempt that was charged for noise.
    """
    if attempt.quanta is None:
        return
    if ask.mechanism is None:
        raise CuratorError(f"Release {attempt.key} was charged for noise, and a mean without any is asked for.")
    charged = ask.mechanism
    if isinstance(ask, WinnerAsk):  # candidates that could not be evaluated may be missing
        most = json.loads(attempt.mechanism)["mechanism"].get("candidates", 1)
        charged = replace(ask.mechanism, candidates=max(most, len(ask.rows)))
    attempt.check(charged, "central")
    mu = gdp.mu_from_pure(ask.epsilon) if isinstance(ask, WinnerAsk) else ask.mu
    key = attempt.key.label, attempt.key.mechanism, attempt.key.step
    if mu > attempt.mu or ask.key[-3:] != key:
        raise CuratorError(
            f"Release {attempt.key} was charged with mu = {attempt.mu:.6g}, and {ask.key} with mu = {mu:.6g} is asked "
            "for: charge what is released."
        )


def score_mechanism(bound: float, users: int) -> ClippedMean:
    """Mechanism of a score: losses in [0, c] are at most c/2 from c/2, so that one user moves their mean by c/n."""
    return ClippedMean(clip=checks.positive("The bound of a score", bound) / 2, users=users, dimension=1)


def digest(ask: Ask) -> bytes:
    """What an ask is about, in 32 bytes."""
    parts: dict[str, Any] = {each.name: getattr(ask, each.name) for each in fields(ask)}
    weights = parts.pop("weights", np.empty(0))
    parts["mechanism"] = None if ask.mechanism is None else ask.mechanism.describe()
    text = json.dumps([type(ask).__name__, parts, weights.shape], sort_keys=True)
    return hashlib.sha256(text.encode() + weights.tobytes()).digest()


def distinct_rows(rows: Any, *, none: bool = False) -> tuple[str, ...]:
    """Names of locations, checked (ValueError); `none`: there may be no location at all."""
    names = () if isinstance(rows, str) else tuple(rows)
    if not (names or none) or not all(isinstance(row, str) and row for row in names) or len({*names}) < len(names):
        raise ValueError(f"Locations are named by distinct texts, at least one of them; {rows!r} was given.")
    return names


def _key(key: Any) -> NoiseKey:
    if not isinstance(key, tuple) or not key or not all(isinstance(part, str) or type(part) is int for part in key):
        raise ValueError(
            f"A noise key is a tuple of texts and whole numbers that names one release; {key!r} was given."
        )
    return key


def _check_noise(ask: GradientAsk | ScoreAsk) -> None:
    """Refuse (ValueError) what could not be drawn, before it is charged."""
    if ask.mechanism is not None:
        ask.mechanism.noise(ask.mu)
    NoiseSource(ask.seed, exact=ask.exact)


def _set(ask: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(ask, name, value)
