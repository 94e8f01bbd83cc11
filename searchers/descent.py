"""A private walk along released gradients: what DP-GIBO shares with its baselines (finite differences, SPSA).

| symbol | meaning                                                          | shape  | in the code            |
|--------|------------------------------------------------------------------|--------|------------------------|
| n, T   | validation users; most iterations                                |        | `users`, `iterations`  |
| θ_t    | iterate, in the coordinates of the box                           | (d,)   | `iterates[t]`          |
| z      | locations of step t: kept ones, then the b new ones              | (m, d) | `Locations.points`     |
| y_i    | user i's losses at z; at the curator only                        | (m,)   |                        |
| W      | linear map from losses to a gradient, from locations alone       | (d, m) | `weights`              |
| B      | bound on ‖g_i‖, g_i = W (y_i − its own mean)                     |        | `clip`                 |
| ĝ_t    | (1/n) Σ clip(g_i) + N(0, σ_DP² I): the only release              | (d,)   | `gradients[t]`         |
| σ_DP   | 2B√T/(nμ) (and what floating point adds), fixed before the loop  |        | `sigma`                |

One iteration: locations (`locate`) → Tune trials → ĝ_t (`advance`) → θ_{t+1} = Π_box(step(ĝ_0 … ĝ_t)). The result is a
function of the iterates, never "the best so far": which one is best is a private fact.

*Guarantee.* θ_0 … θ_T, hence the result, are μ-GDP together for one validation user replaced by another; locations, W
and b depend on released values and public constants only. Not protected: the records `fit` trains on (unless training
is private itself), n, which trials failed in `fit`, timing. Stopping early on released values costs nothing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy.mechanisms import ClippedMean
from dpray.searchers import steps
from dpray.searchers.batch import Batch, Config
from dpray.searchers.box import Box
from dpray.searchers.central import CentralSearch, whole
from dpray.searchers.errors import SearchError

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Attempt, Run
    from dpray.platform.user_losses import UserLosses

FloatArray = NDArray[np.float64]

MECHANISM = "gradient"
"""Name of the releases in the ledger: (label, "gradient", step t)."""


@dataclass(frozen=True, eq=False)
class Locations:
    """Where a step looks: kept points first, then the new ones.

    Attributes:
        theta: θ_t, (d,).
        points: (m, d), in the coordinates of the box.
        rows: their names at the curator, (m,).
        new: how many of them are new, b.
    """

    theta: FloatArray
    points: FloatArray
    rows: tuple[str, ...]
    new: int


@dataclass(frozen=True, eq=False)
class History:
    """What has been released: all that a stopping rule may look at.

    Attributes:
        iterates: θ_0 … θ_t, (t + 1, d).
        gradients: ĝ_0 … ĝ_{t−1}, (t, d).
        sigma: std of the noise on each coordinate of every ĝ.
    """

    iterates: FloatArray
    gradients: FloatArray
    sigma: float


class PrivateDescent(CentralSearch):
    """Base of the searches that release one private gradient per iteration.

    Args:
        clip: B, bound on a user's gradient, in losses per unit of θ; None only without noise: no clipping.
        iterations: T; σ_DP counts with all of them, and what an early stop leaves unspent stays in the account.
        start: θ_0 as a configuration, the center of the box, or drawn uniformly by `seed`.
        step: the step rule by name, or one of `searchers.steps`; `rate` is its rate where it has one.
        keep: how many earlier steps' points stay in W; their losses stay at the curator as long.
        stop: called after each step with the `History`; a returned sentence ends the search.
        others: see `CentralSearch`.
    """

    mechanism_name = MECHANISM

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        clip: float | None,
        iterations: int,
        start: Mapping[str, Any] | Literal["center", "random"] = "center",
        step: steps.Rule | str = "noise_aware",
        rate: float | None = None,
        keep: int = 0,
        stop: Callable[[History], str | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(task, run, iterations=iterations, **options)
        self.clip = _clip(clip, self.quanta)
        self.keep = whole("keep", keep, least=0)
        self.rule = steps.rule(step, rate)
        self.start, self.stop = start, stop
        self._box: Box | None = None
        self._thetas: list[FloatArray] = []
        self._gradients: list[FloatArray] = []
        self._found: dict[int, Locations] = {}
        if self._space is not None:
            self.define(None)

    # What a search supplies -------------------------------------------------------------------------------------

    @abstractmethod
    def locate(self, t: int, theta: FloatArray, kept: FloatArray) -> FloatArray:
        """New locations of step t in the box, (b, d); from θ_t, the kept points (k, d) and public constants only."""

    @abstractmethod
    def weights(self, theta: FloatArray, points: FloatArray) -> FloatArray:
        """W, (d, m), for the gradient at θ from losses at `points` (m, d)."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Public constants of the way locations are chosen, plain JSON."""

    def check_box(self, box: Box) -> None:
        """Refuse, with a sentence, a box that the search's constants do not fit; before anything is spent."""

    # The box ----------------------------------------------------------------------------------------------------

    def define(self, space: Mapping[str, Any] | None) -> None:
        """Fix the box and θ_0; refuse another one than before."""
        space = self._space if space is None and self._box is None else space
        if space is None:
            if self._box is None:
                raise SearchError("There is nothing to search: give space=, or the Tuner's param_space.")
            return
        box = Box.of(space)
        if self._box is not None:
            if box.describe() != self._box.describe():
                raise SearchError("The Tuner's param_space is another one than this search has: give the same.")
            return
        self.check_box(box)
        start = self._start(box)
        ClippedMean(self.clip, self.users, box.dimension)
        self._box, self._thetas = box, [start]

    def _start(self, box: Box) -> FloatArray:
        if isinstance(self.start, Mapping):
            return box.theta(self.start)
        if self.start == "center":
            return box.center
        if self.start == "random":
            drawn = np.random.default_rng([self.seed, 0]).random(box.dimension)
            return box.project(box.lower + drawn * (box.upper - box.lower))
        raise ValueError(f"start is {self.start!r}: give a configuration, 'center', or 'random' (drawn by seed).")

    @property
    def known(self) -> bool:
        """Whether the space is fixed."""
        return self._box is not None

    @property
    def box(self) -> Box:
        """The box; raises before the space is known."""
        if self._box is None:
            raise SearchError(
                "The space is not known before the Tuner hands param_space over: give the search space=param_space."
            )
        return self._box

    @property
    def mechanism(self) -> ClippedMean:
        """The release: mean over users of gradients of norm at most B."""
        return ClippedMean(self.clip, self.users, self.box.dimension)

    @property
    def sigma(self) -> float:
        """σ_DP: std of the noise on each coordinate of ĝ_t, in losses per unit of θ; 0 without noise."""
        return 0.0 if self.quanta is None else self.mechanism.noise(self.mu_of(self.iterations - 1)).sigma

    def begin(self) -> None:
        """Set the whole spend aside, and take up what an earlier process released."""
        self.set_aside()
        while len(self._gradients) < self.iterations and self.run.stored(self.key(len(self._gradients))) is not None:
            self._release(len(self._gradients), ())
        ended = self._ended()
        self.take_up(len(self._gradients))
        if ended is not None and not self.finished:
            self.finish(f"{ended} They were released before; nothing was spent now.")

    # An iteration: locations, trials, release, step --------------------------------------------------------------

    def locations(self, t: int) -> Locations:
        """Where step t looks; from public and released values only."""
        if t not in self._found:
            theta, dimension = self._thetas[t], self.box.dimension
            earlier = [self.locations(i) for i in range(max(0, t - self.keep), t)]
            kept = np.concatenate([np.empty((0, dimension)), *(each.points[-each.new :] for each in earlier)])
            new = self.box.project(self.locate(t, theta, kept))
            rows = [row for each in earlier for row in each.rows[-each.new :]]
            rows += [f"{t}.{j}" for j in range(len(new))]
            self._found[t] = Locations(theta, np.concatenate([kept, new]), tuple(rows), len(new))
            for old in [i for i in self._found if i < t - self.keep]:
                del self._found[old]
        return self._found[t]

    def points(self, step: int) -> Sequence[tuple[str, Config]]:
        """Rows and configurations of a step's locations."""
        found = self.locations(step)
        return [(row, self.box.config(z)) for row, z in zip(found.rows, found.points, strict=True)]

    def advance(self, step: int, batch: Batch) -> str | None:
        """The batch is settled: release ĝ_t from the locations that could be evaluated, and take the step."""
        used = self.usable(step, batch)
        if isinstance(used, str):
            return used
        self._release(step, used)
        return self._ended()

    def _release(self, t: int, used: Sequence[int]) -> None:
        """Charge, compute at the curator, store, step: once per run, label and t, however often this is called."""
        mechanism, quanta, found = self.mechanism, self.spends[t], self.locations(t)

        def compute(attempt: Attempt) -> NDArray[Any]:
            from dpray.platform.curator_asks import GradientAsk

            points = found.points[list(used)]
            ask = GradientAsk(
                rows=tuple(found.rows[j] for j in used),
                weights=self.weights(found.theta, points),
                mechanism=mechanism if self.quanta is not None else None,
                mu=self.mu_of(t),
                key=self.opened(attempt, mechanism),
                seed=self.noise_seed,
            )
            value: NDArray[Any] = self.released(t, lambda: self.curator.gradient(ask, attempt))
            return value

        # The earlier releases fix θ_t and the points. Their last bits may differ on another machine, and which points
        # failed may differ from one computation of an unstored release to the next: neither is part of the request.
        query = {**self.identity(), "step": t}
        released = self.run.release(self.key(t), query, mechanism, quanta, compute)
        self._releases.append(released)
        self._gradients.append(np.asarray(released.value, dtype=np.float64))
        context = steps.Context(self.sigma, self.box.lower, self.box.upper, self.iterations)
        following = self.rule.next(np.array(self._thetas), np.array(self._gradients), context)
        self._thetas.append(self.box.project(following))
        self.tell(t)

    def _ended(self) -> str | None:
        """Why there is nothing more to do; None while there is."""
        t = len(self._gradients)
        if t == self.iterations:
            return f"all {t} iterations are released."
        reason = self.stop(self.history) if self.stop is not None and t else None
        return None if reason is None else f"after {t} of {self.iterations} iterations: {reason}"

    # What users read --------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Everything released so far: public."""
        gradients = np.array(self._gradients).reshape(-1, self.box.dimension)
        return History(np.array(self._thetas), gradients, self.sigma)

    @property
    def path(self) -> tuple[Config, ...]:
        """Configurations of θ_0 … θ_t, as released."""
        return tuple(self.box.config(theta) for theta in self._thetas)

    @property
    def best_config(self) -> Config:
        """The result: the rule's function of the released iterates (the last one, or an average of late ones)."""
        if not self.finished or not self._gradients:
            raise self._result_missing()
        return self.box.config(self.rule.result(np.array(self._thetas)))

    def identity(self) -> dict[str, Any]:
        """Public constants of the search."""
        return {
            "search": type(self).__name__,
            "box": self.box.describe(),
            "start": dict(self.start) if isinstance(self.start, Mapping) else self.start,
            "iterations": self.iterations,
            "users": self.users,
            "clip": None if self.quanta is None else self.clip,
            "rule": self.rule.describe(),
            "keep": self.keep,
            "public_seed": self.seed,
            **self.describe(),
        }


def _clip(clip: float | None, quanta: int | None) -> float:
    if clip is None:
        if quanta is not None:
            raise ValueError("clip is missing: a private search bounds every user's gradient, in losses per unit of θ.")
        return 1.0
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf:
        raise ValueError(f"clip is {clip!r}; the bound on a user's gradient is finite and above 0.")
    return float(clip)
