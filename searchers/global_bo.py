"""Global Bayesian optimisation with BoTorch: NOT PRIVATE, the baseline for what a model of the whole box can do.

One step: fit a `SingleTaskGP` to all mean losses so far, propose q points that maximise log expected improvement
(`qLogExpectedImprovement`; Ament et al. 2023), evaluate them. The first step is a scrambled Sobol sequence.

*Guarantee.* None: every mean loss is released without noise, on an account that says `non_private`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy.units import Unit
from dpray.searchers.batch import Batch, Config
from dpray.searchers.box import Box, FloatArray
from dpray.searchers.central import CentralSearch, whole
from dpray.searchers.errors import SearchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpray.platform.privacy.ledger import Attempt, Run
    from dpray.platform.user_losses import UserLosses

MECHANISM = "mean losses"
"""Name of the releases in the ledger: (label, "mean losses", step)."""


@dataclass(frozen=True)
class MeanLosses:
    """Mean over users of their losses at some points, as they are: for accounts that say `non_private`."""

    users: int
    points: int
    unit: Unit = field(default=Unit.USER, init=False)

    def describe(self) -> dict[str, str | int]:
        """Name and constants."""
        return {"mechanism": "mean losses, NOT PRIVATE", "users": self.users, "points": self.points}


class GlobalBOSearch(CentralSearch):
    """Ray Tune searcher: expected improvement over the whole box. NOT PRIVATE.

    Args:
        iterations: steps, the first one included.
        batch_size: q, points of a step.
        first: points of the first step, by default q.
        others: see `CentralSearch`; the run's accounts must be `non_private`.

    Attributes:
        best_config: the point with the lowest mean loss.
    """

    mechanism_name = MECHANISM

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        iterations: int,
        batch_size: int,
        first: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(task, run, iterations=iterations, quanta=None, **options)
        self._size = whole("batch_size", batch_size)
        self.first = self._size if first is None else whole("first", first, least=2)
        self._box: Box | None = None
        self._points: dict[int, FloatArray] = {}
        self._means: list[FloatArray] = []
        if self._space is not None:
            self.define(None)

    def define(self, space: Mapping[str, Any] | None) -> None:
        """Fix the box; refuse another one than before."""
        space = self._space if space is None and self._box is None else space
        if space is None:
            if self._box is None:
                raise SearchError("There is nothing to search: give space=, or the Tuner's param_space.")
            return
        box = Box.of(space)
        if self._box is not None and box.describe() != self._box.describe():
            raise SearchError("The Tuner's param_space is another one than this search has: give the same.")
        self._box = box

    @property
    def box(self) -> Box:
        """The box; raises before the space is known."""
        if self._box is None:
            raise SearchError("The space is not known before the Tuner hands param_space over: give it as space=.")
        return self._box

    @property
    def known(self) -> bool:
        """Whether the space is fixed."""
        return self._box is not None

    @property
    def batch_size(self) -> int:
        """Most points of a step."""
        _ = self.box
        return max(self._size, self.first)

    def begin(self) -> None:
        """Take up what an earlier process released."""
        self.set_aside()
        while len(self._means) < self.iterations:
            stored = self.run.stored(self.key(len(self._means)))
            if stored is None:
                break
            self._take(np.asarray(stored))
        t = len(self._means)
        self.take_up(t)
        if t == self.iterations and not self.finished:
            self.finish(f"all {t} steps were released before.")

    def points(self, step: int) -> Sequence[tuple[str, Config]]:
        """Rows and configurations of a step's points."""
        if step not in self._points:
            self._points[step] = self.box.project(self._proposal(step))
        return [(f"{step}.{j}", self.box.config(z)) for j, z in enumerate(self._points[step])]

    def _proposal(self, step: int) -> FloatArray:
        width = self.box.upper - self.box.lower
        if step == 0:
            from scipy.stats import qmc

            unit = qmc.Sobol(self.box.dimension, seed=self.seed).random(self.first)
        else:
            known = np.concatenate([self._points[t] for t in range(step)])
            unit = _propose((known - self.box.lower) / width, np.concatenate(self._means), self._size, self.seed + step)
        return np.asarray(self.box.lower + width * unit, dtype=np.float64)

    def advance(self, step: int, batch: Batch) -> str | None:
        """The batch is settled: read the mean losses of its points."""
        used = self.usable(step, batch, least=1)
        if isinstance(used, str):
            return used
        points = self._points[step][used]
        mechanism = MeanLosses(self.users, len(self._points[step]))

        def compute(attempt: Attempt) -> NDArray[Any]:
            from dpray.platform.curator_asks import GradientAsk

            ask = GradientAsk(
                rows=tuple(f"{step}.{j}" for j in used),
                weights=np.eye(len(used)),
                mechanism=None,
                mu=np.inf,
                key=self.opened(attempt, mechanism),
                centre=False,
            )
            means = self.released(step, lambda: self.curator.gradient(ask, attempt))
            return np.concatenate([points, means[:, None]], axis=1)

        # Points depend on how an optimiser converged; the stored value tells them, the request does not.
        released = self.run.release(self.key(step), {**self.identity(), "step": step}, mechanism, None, compute)
        self._releases.append(released)
        self._take(np.asarray(released.value))
        return f"all {self.iterations} steps are released." if len(self._means) == self.iterations else None

    def _take(self, stored: FloatArray) -> None:
        self._points[len(self._means)] = stored[:, :-1]
        self._means.append(stored[:, -1])
        self.tell(len(self._means) - 1)

    @property
    def best_config(self) -> Config:
        """The point with the lowest mean loss."""
        if not self.finished:
            raise self._result_missing()
        return self.incumbent

    @property
    def incumbent(self) -> Config:
        """The point with the lowest mean loss so far."""
        if not self._means:
            raise self._result_missing()
        every = np.concatenate([self._points[t] for t in range(len(self._means))])
        return self.box.config(every[int(np.argmin(np.concatenate(self._means)))])

    def identity(self) -> dict[str, Any]:
        """Public constants of the search."""
        return {
            "search": type(self).__name__,
            "box": self.box.describe(),
            "iterations": self.iterations,
            "batch_size": self._size,
            "first": self.first,
            "users": self.users,
            "public_seed": self.seed,
        }


def _propose(known: FloatArray, losses: FloatArray, count: int, seed: int) -> FloatArray:
    """(count, d) points of the unit box with the largest log expected improvement over the known ones."""
    import torch
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim.optimize import optimize_acqf
    from botorch.sampling.normal import SobolQMCNormalSampler
    from gpytorch.mlls import ExactMarginalLogLikelihood  # type: ignore[import-untyped]

    x, y = torch.as_tensor(known), -torch.as_tensor(losses)[:, None]
    spread = float(y.std()) or 1.0
    y = (y - y.mean()) / spread
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        improvement = qLogExpectedImprovement(
            model, best_f=y.max(), sampler=SobolQMCNormalSampler(torch.Size([64]), seed=seed)
        )
        bounds = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).to(x)
        found, _ = optimize_acqf(improvement, bounds, q=count, num_restarts=4, raw_samples=128, sequential=True)
    return np.asarray(found.numpy(), dtype=np.float64)
