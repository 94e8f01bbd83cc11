"""An algorithm at the server: its settings, its state, and one pure step.

| symbol | meaning | shape |
|---|---|---|
| θ | parameters | (…, d) |
| G_t | noised mean gradient of round t: Σ u_i / N (unit `record`), mean of −(θ_i − θ) (unit `client`) | (…, d) |
| s | standard deviation of the noise on each coordinate of G_t; public | scalar |
| η, C, T | learning rate, clip bound, rounds | scalars |

Leading axes are independent runs: a rehearsal trains all its folds with the very step that the server will make, so a
step reduces over the last axis only.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from dpray.trainers.models import FloatArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Weighting = Literal["records", "clients"]
_Made = TypeVar("_Made", bound="DataclassInstance")


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between rounds; public, because it is made of releases.

    Attributes:
        theta: θ, (…, d).
        slots: the algorithm's own arrays by name.
        steps: server steps made so far; a round whose release was lost makes none.
    """

    theta: FloatArray
    slots: Mapping[str, FloatArray] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Settings(ABC):
    """Settings of one algorithm. A subclass adds its own and says what the server does with G_t.

    Attributes:
        learning_rate: η.
        rounds: T, at most this many gradient releases.
        clip: C, the bound on a record's gradient (unit `record`) or on a client's whole update (unit `client`).
        local_steps, local_rate: K and η_l of the clients' own descent; for unit `client` only. The defaults send the
            mean gradient.
        weighting: what clients' messages are averaged by: `records` (N = Σ|D_i|) or `clients` (a mean of client means).
            Left out, it follows from the unit; unit `client` knows `clients` only.

    Raises:
        ValueError: for a number that is not finite and positive, naming it.
    """

    algorithm: ClassVar[str]
    no_rehearsal: ClassVar[str] = ""
    """Why a client cannot rehearse it alone, in a sentence; empty if it can."""

    learning_rate: float
    rounds: int
    clip: float
    local_steps: int = 1
    local_rate: float = 1.0
    weighting: Weighting | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip", "local_rate"):
            self._require(name, positive(getattr(self, name)), "a finite number above 0")
        for name in ("rounds", "local_steps"):
            value = getattr(self, name)
            self._require(name, isinstance(value, int) and positive(value), "a whole number of at least 1")
        self._require("weighting", self.weighting in (None, "records", "clients"), "`records` or `clients`")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"`{name}` of {self.algorithm} must be {wanted}, and {getattr(self, name)!r} was given.")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Settings from a search candidate laid over defaults.

        Raises:
            ValueError: for a name that is no setting, with the nearest one; for one that is missing.
        """
        return from_names(cls, cls.algorithm, config, defaults)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name; what `from_config` takes."""
        return asdict(self)

    def initial_state(self, theta: FloatArray) -> ServerState:
        """State before the first round; theta (…, d)."""
        return ServerState(theta)

    @abstractmethod
    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """State after one step. Pure: neither argument is changed.

        Args:
            state: as it was before.
            gradient: G_t, (…, d).
            t: this step's number, from 1: `state.steps` + 1.
            noise: s, 0 without noise.
        """

    def diagnostics(self, state: ServerState, t: int) -> dict[str, float]:
        """Released values worth a curve, from the state after step t; names as in the tracker's allow-list."""
        return {}

    def warnings(self, noise: float, dimension: int) -> tuple[str, ...]:
        """What makes training with this noise hopeless, in sentences; from public numbers.

        Args:
            noise: s, as all clients together will make it; 0 without noise.
            dimension: d.
        """
        return ()


def from_names(kind: type[_Made], whose: str, config: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> _Made:
    """A dataclass from values by name, laid over defaults.

    Raises:
        ValueError: as `Settings.from_config`; `whose` settings they are is named.
    """
    merged = {**(defaults or {}), **config}
    known = {each.name: each for each in fields(kind)}
    for name in merged:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"`{name}` is not a setting of {whose}; did you mean `{nearest}`? Known: {', '.join(known)}."
            )
    missing = [name for name, each in known.items() if each.default is MISSING and name not in merged]
    if missing:
        raise ValueError(f"{whose} needs `{'`, `'.join(missing)}`, in the candidate or in the defaults.")
    return kind(**merged)


def positive(value: object) -> bool:
    """Whether a value is a finite number above 0, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def below_one(value: object) -> bool:
    """Whether a value is a number in [0, 1), and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
