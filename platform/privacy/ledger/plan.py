"""What a run says before it spends, and how a release is named: plans, keys and digests of public requests."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dpray.platform.privacy import pld
from dpray.platform.privacy.ledger.chain import canonical
from dpray.platform.privacy.ledger.errors import LedgerError
from dpray.platform.privacy.mechanisms import Unit

_LONGEST_NAME = 200
_MOST_STEPS = 2**63 - 1


class Releasable(Protocol):
    """What the ledger needs to know of a mechanism: whom it protects, and its public constants (plain JSON values).

    A mechanism that releases over a Poisson sample has a `sampling_probability` too (`pld.PoissonSampled`); its quanta
    are the μ² it would cost without sampling, σ = Δ/μ.
    """

    @property
    def unit(self) -> Unit:
        """The unit the release's sensitivity is stated for."""

    def describe(self) -> Mapping[str, Any]:
        """Name and constants of the mechanism: part of the request digest."""


@dataclass(frozen=True)
class ReleaseKey:
    """The name of a release within its run: (label, mechanism, step). Population and run come from the `Run`.

    Args:
        label: phase of the run, such as "search" or "training".
        mechanism: name of the mechanism.
        step: 0, 1, 2, … within (label, mechanism).
    """

    label: str
    mechanism: str
    step: int

    def __post_init__(self) -> None:
        checked_name("label", self.label)
        checked_name("mechanism", self.mechanism)
        object.__setattr__(self, "step", whole("step", self.step, least=0))

    def __str__(self) -> str:
        return f"{self.label}/{self.mechanism} step {self.step}"


@dataclass(frozen=True)
class PlannedRelease:
    """One line of a plan: `steps` releases that together spend `quanta` of μ².

    Args:
        label, mechanism: as in the `ReleaseKey`s that will use this line.
        unit: unit of the mechanism.
        quanta: total over all steps, in quanta of 2⁻⁶⁰; None for releases without noise.
        steps: number of releases.
        sampling_probability: of the mechanism, below 1 for Poisson-sampled releases (accounts of kind `pld`); `quanta`
            are then the μ² without sampling, and each step is set aside as ⌈quanta/steps⌉.
    """

    label: str
    mechanism: str
    unit: Unit
    quanta: int | None
    steps: int
    sampling_probability: float = 1.0

    def __post_init__(self) -> None:
        checked_name("label", self.label)
        checked_name("mechanism", self.mechanism)
        object.__setattr__(self, "unit", Unit(self.unit))
        object.__setattr__(self, "steps", whole("steps", self.steps, least=1))
        object.__setattr__(self, "quanta", spend(self.quanta))
        object.__setattr__(self, "sampling_probability", probability(self.sampling_probability))
        if self.quanta is not None and self.quanta < self.steps:
            raise LedgerError(
                f"{self.steps} planned releases of {self.label}/{self.mechanism} cannot share {self.quanta} quanta of "
                "μ²: every release costs at least one."
            )


@dataclass(frozen=True)
class Plan:
    """Everything a run means to release. No two lines share (label, mechanism, unit)."""

    releases: tuple[PlannedRelease, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", tuple(self.releases))
        if not self.releases:
            raise LedgerError("A plan without releases sets nothing aside: name at least one.")
        names = [(line.label, line.mechanism, line.unit) for line in self.releases]
        for name in names:
            if names.count(name) > 1:
                raise LedgerError(f"The plan names {name[0]}/{name[1]} ({name[2]}) twice: add the two lines up.")

    @property
    def quanta(self) -> int | None:
        """Total over all lines, each in its own unit's quanta; None if a line is without noise."""
        total = 0
        for line in self.releases:
            if line.quanta is None:
                return None
            total += line.quanta
        return total

    def text(self) -> str:
        """Canonical text, equal for equal plans whatever the order of their lines."""
        rows = sorted(
            [r.label, r.mechanism, str(r.unit), spend_text(r.quanta), r.steps, repr(r.sampling_probability)]
            for r in self.releases
        )
        return canonical(rows)


def request_digest(query: Mapping[str, Any], mechanism: Releasable, quanta: int | None, trust: str) -> str:
    """SHA-256 over the public request: query, mechanism, spend and trust mode.

    `query` may hold JSON values and NumPy arrays (digested by dtype, shape and bytes). It never holds data or losses:
    a digest of private values would reveal them to whoever can guess.
    """
    request: dict[str, Any] = {
        "query": query,
        "mechanism": mechanism.describe(),
        "unit": str(mechanism.unit),
        "quanta": spend_text(quanta),
        "trust": trust,
    }
    if (q := sampling_of(mechanism)) < 1:
        request["sampling"] = q
    try:
        return hashlib.sha256(canonical(plain(request)).encode()).hexdigest()
    except (TypeError, ValueError) as error:
        raise LedgerError(
            f"The query of a release is public and plain: JSON values and NumPy arrays of numbers ({error})."
        ) from error


def charged_text(mechanism: Releasable) -> str:
    """What is charged for, as an attempt keeps it: the mechanism's constants, its unit and its sampling."""
    parts = {"mechanism": plain(mechanism.describe()), "unit": str(Unit(mechanism.unit))}
    return canonical({**parts, "sampling": sampling_of(mechanism)})


def plain(value: Any) -> Any:
    """JSON value of a public constant; an array becomes its digest."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("keys must be text")
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} is not numbers")
        ordered = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        digest = hashlib.sha256(ordered.view(np.uint8).data if ordered.size else b"").hexdigest()
        return {"array": digest, "dtype": ordered.dtype.str, "shape": list(value.shape)}
    return value


def spend(quanta: int | None) -> int | None:
    """A spend as the ledger takes it: a whole number of quanta ≥ 1, or None where there is no noise."""
    return None if quanta is None else whole("quanta", quanta, least=1)


def sampling_of(mechanism: Releasable) -> float:
    """The sampling probability of a mechanism; 1 for those that do not sample."""
    return probability(getattr(mechanism, "sampling_probability", 1.0))


def probability(value: Any) -> float:
    """A sampling probability in (0, 1], or a sentence."""
    try:
        return pld.sampling(value)
    except ValueError as error:
        raise LedgerError(str(error)) from None


def spend_text(quanta: int | None) -> str:
    """A spend as the tables keep it: decimal, or `inf`."""
    return "inf" if quanta is None else str(quanta)


def spend_of(text: str) -> int | None:
    """Inverse of `spend_text`."""
    return None if text == "inf" else int(text)


def whole(name: str, value: Any, *, least: int) -> int:
    """A whole number ≥ least, or a sentence (NaN, infinity, fractions and booleans are none)."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise LedgerError(f"{name} is a whole number, at least {least}; {value!r} was given.") from None
    if number < least:
        raise LedgerError(f"{name} is at least {least}; {number} was given.")
    if name in {"step", "steps"} and number > _MOST_STEPS:
        raise LedgerError(f"{name} is at most {_MOST_STEPS}; {number} was given.")
    return number


def checked_name(what: str, name: Any) -> str:
    """A name of 1 to 200 printable characters, or a sentence."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _LONGEST_NAME
        or not name.isprintable()
        or name != name.strip()
    ):
        raise LedgerError(f"The {what} is a name of 1 to {_LONGEST_NAME} printable characters; {name!r} was given.")
    return name
