"""Several noised gradient sums of each client in one release: what local steps cost.

| symbol | code | meaning |
|---|---|---|
| C | `clip` | bound on a record's gradient, L2 |
| K | `steps` | local steps, each with a noised sum of its own |
| d | `width` | parameters |
| n | `clients` | clients; each has a block of d numbers in the release |
| σ | | noise std on each coordinate of one step's sum, at every client |
| μ | | GDP parameter of the whole release, all K steps |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from dpray.platform.privacy import checks
from dpray.platform.privacy.mechanisms import ClippedSum, Mechanism
from dpray.platform.privacy.noise import GridNoise
from dpray.platform.privacy.units import Unit


@dataclass(frozen=True)
class LocalSteps(Mechanism):
    """K clipped sums of record gradients at each of n clients, each with the whole noise: regime `local` only.

    Sensitivity: a record is held by one client. Given all earlier *noised* sums of that client, its next sum is
    Σ_x clip(g_x) at a point that these and public values determine, so that replacing a record moves it by at most 2C.
    Each step is therefore (2C/σ)-GDP, and K of them, each chosen after seeing the earlier ones, are (2C√K/σ)-GDP
    together (adaptive composition, Dong, Roth & Su 2022, Theorem 4): Δ = 2C√K stands for all of them. Other clients'
    blocks do not depend on the record within a release.

    *Guarantee.* With noise of std σ = √K·(2C)'/μ on every coordinate of every step, all noised sums, and the client's
    message made of them, are μ-GDP for the unit `record` under replace-one, against whoever sees single messages. A
    step must use no un-noised value of an earlier one. Shares of the noise are not enough: a message of several steps
    is not linear in it, so that no sum over clients would complete it.

    Args:
        clip: C.
        steps: K.
        width: d.
        clients: n, public.
        records: public upper bound on the records of all clients; it only enters through the error of float64 sums.
        relative_error: the task's, as in `ClippedSum`.

    Raises:
        ValueError: as `ClippedSum`, or steps or clients that are no whole numbers from 1.
    """

    name: ClassVar[str] = "clipped sums of local steps"
    clip: float
    steps: int
    width: int
    clients: int
    records: int
    relative_error: float = 0.0
    unit: Unit = field(default=Unit.RECORD, init=False)
    dimension: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in ("steps", "clients"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), at_least=1))
        object.__setattr__(self, "dimension", self.clients * self.one_step.dimension)

    @cached_property
    def one_step(self) -> ClippedSum:
        """The mechanism of one step of one client."""
        return ClippedSum(self.clip, Unit.RECORD, self.width, self.records, self.relative_error)

    @property
    def sensitivity(self) -> float:
        """Δ = 2C√K, of the K sums together."""
        return self.one_step.sensitivity * math.sqrt(self.steps)

    @property
    def summation_error(self) -> float:
        """√K times one step's."""
        return self.one_step.summation_error * math.sqrt(self.steps)

    def noise(self, mu: float, *, noisers: int = 1, grid: float | None = None) -> GridNoise:
        """Noise of each step at each client: that of a (μ/√K)-GDP sum.

        Raises:
            ValueError: as `noise.calibrate`; more noisers than one.
        """
        if noisers != 1:
            raise ValueError(
                f"Several local steps need the whole noise at every client, and shares of {noisers} were asked for: "
                "train in regime `local`, or with one local step."
            )
        each = mu if math.isinf(mu) else mu / math.sqrt(self.steps) * (1 - 2.0**-50)
        return self.one_step.noise(each, grid=grid)
