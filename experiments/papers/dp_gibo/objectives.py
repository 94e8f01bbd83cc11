"""The paper's black boxes: what is tuned, one loss per validation user, vectorised over many points for simulations.

| symbol | meaning                                                     | shape  | in the code             |
|--------|-------------------------------------------------------------|--------|-------------------------|
| θ      | what is tuned, in the coordinates of the box (logs here)     | (d,)   | `theta`                 |
| n      | validation users                                            |        | `users`                 |
| f_i(θ) | ½ (y_i − ŷ_θ(x_i))²: loss of user i                         | (n,)   | `losses`                |

| class          | d            | θ                                                | box                      |
|----------------|--------------|--------------------------------------------------|--------------------------|
| `GroupLasso`   | 2, 10, 20    | log penalty of each group                        | [log 1e-6, 0]            |
| `GPRegression` | 2, 5, 10, 15 | log lengthscale of each input                    | [log .1, log 100]        |
| `KernelSVR`    | features + 3 | log lengthscales, log ε, log γ, log C            | see there                |

Losses are exact and public here. `fit` sees training records only, `losses` one row per user: row i depends on θ, the
training records and record i, and a bad record has a NaN of its own.

Settings the paper leaves open are ours, and are stated in each class.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpray.experiments.papers.dp_gibo.data import Split, regression
from dpray.experiments.papers.dp_gibo.group_lasso import group_lasso
from dpray.platform.user_losses import UserLosses

FloatArray = NDArray[np.float64]
People = tuple[ArrayLike, ArrayLike]
"""Records of the validation users: features (n, f) and targets (n,)."""


class Objective(UserLosses):
    """A black box on a box: every searched key is a log-float.

    Attributes:
        names: keys of a configuration, (d,), in the order of θ.
        lower, upper: the box, in the coordinates of θ (natural logs).
        start_lower, start_upper: the part of the box where searches start.
        users: n.
    """

    def __init__(self, names: tuple[str, ...], lower: FloatArray, upper: FloatArray, people: People) -> None:
        self.names, self.lower, self.upper = names, lower, upper
        self.start_lower, self.start_upper = lower, upper
        self._x, self._y = (np.asarray(part, dtype=np.float64) for part in people)
        self.users = len(self._y)

    @property
    def dimension(self) -> int:
        """d."""
        return len(self.names)

    def space(self) -> dict[str, Any]:
        """Tune search space."""
        from ray import tune

        return {
            name: tune.loguniform(math.exp(low), math.exp(high))
            for name, low, high in zip(self.names, self.lower, self.upper, strict=True)
        }

    def start(self, seed: int) -> dict[str, float]:
        """θ_0 as a configuration, drawn uniformly (in logs) from where searches start: the same for all methods."""
        drawn = np.random.default_rng([seed, 62]).random(self.dimension)
        return self.config(self.start_lower + drawn * (self.start_upper - self.start_lower))

    def config(self, theta: ArrayLike) -> dict[str, float]:
        """The configuration of a point."""
        return {name: math.exp(value) for name, value in zip(self.names, np.asarray(theta), strict=True)}

    def theta(self, config: Mapping[str, float]) -> FloatArray:
        """The point of a configuration, (d,)."""
        return np.log([float(config[name]) for name in self.names])

    def fit(self, config: dict[str, Any]) -> Any:
        """Train on the training records."""
        return self.models(self.theta(config)[None])[0]

    def losses(self, model: Any) -> FloatArray:
        """½ residual² of every user, (n,)."""
        return np.asarray(0.5 * (self._y - self.predictions(model)) ** 2)

    def losses_many(self, thetas: ArrayLike) -> FloatArray:
        """Losses at many points, (B, d) → (B, n): for simulations without Tune."""
        return np.array(
            [self.losses(model) for model in self.models(np.atleast_2d(np.asarray(thetas, dtype=np.float64)))]
        )

    @abstractmethod
    def models(self, thetas: FloatArray) -> Any:
        """One model for every row of θ, (B, d)."""

    @abstractmethod
    def predictions(self, model: Any) -> FloatArray:
        """ŷ of every user, (n,)."""


class GroupLasso(Objective):
    """Linear regression with a penalty for each of d groups of 5 features, one of which is informative.

    Features are N(0, 1), .9 correlated within a group and independent between groups; the informative group (drawn)
    has coefficients N(0, 1), targets have noise 1 and are divided by their true standard deviation. Searches start in
    [−6, 0]ᵈ, all of them.

    Args:
        groups: d.
        seed: of the data.
        train, users: records to train on, validation users.
        people: other validation records in their place (to test with).
    """

    size = 5
    correlation = 0.9

    def __init__(
        self, groups: int, seed: int = 0, *, train: int = 50, users: int = 150, people: People | None = None
    ) -> None:
        rng = np.random.default_rng([7, seed, groups])
        factor = np.linalg.cholesky(self.correlation + (1 - self.correlation) * np.eye(self.size))
        x = (rng.standard_normal((train + users, groups, self.size)) @ factor.T).reshape(train + users, -1)
        self.informative = int(rng.integers(groups))
        inside = np.arange(self.informative * self.size, (self.informative + 1) * self.size)
        coefficients = rng.standard_normal(self.size)
        spread = math.sqrt(float(((factor.T @ coefficients) ** 2).sum()) + 1.0)
        y = (x[:, inside] @ coefficients + rng.standard_normal(train + users)) / spread
        names = tuple(f"penalty_{group}" for group in range(groups))
        box = np.full(groups, math.log(1e-6)), np.zeros(groups)
        super().__init__(names, *box, people if people is not None else (x[train:], y[train:]))
        self.start_lower = np.full(groups, -6.0)
        self._x_train, self._y_train = x[:train], y[:train]

    def models(self, thetas: FloatArray) -> FloatArray:
        """Coefficients, (B, 5d)."""
        return group_lasso(self._x_train, self._y_train, np.exp(thetas), size=self.size)

    def predictions(self, model: FloatArray) -> FloatArray:
        """See `Objective.predictions`."""
        return np.asarray(np.einsum("nf,f->n", self._x, model))


class GPRegression(Objective):
    """Posterior mean of a Gaussian process with a lengthscale for each of d inputs, tuned by the users' loss.

    Settings (ours): inputs uniform in [−2, 2]ᵈ; the truth is a draw from a zero-mean GP of variance 1 with an RBF
    kernel of lengthscale 2 in the first ⌈d/3⌉ inputs, the others do not matter; noise .1. The model knows the variance
    and the noise. Box [log .1, log 100]; searches start in [log 1, log 10]ᵈ, all of them.

    Args: as `GroupLasso`, with `inputs` for d.
    """

    noise = 0.1
    lengthscale = 2.0

    def __init__(
        self, inputs: int, seed: int = 0, *, train: int = 100, users: int = 200, people: People | None = None
    ) -> None:
        rng = np.random.default_rng([15, seed, inputs])
        x = rng.uniform(-2.0, 2.0, (train + users, inputs))
        self.relevant = math.ceil(inputs / 3)
        precision = np.where(np.arange(inputs) < self.relevant, self.lengthscale**-2, 0.0)
        truth = np.linalg.cholesky(_rbf(x, x, precision) + 1e-8 * np.eye(len(x)))
        y = truth @ rng.standard_normal(len(x)) + self.noise * rng.standard_normal(len(x))
        names = tuple(f"lengthscale_{index}" for index in range(inputs))
        box = np.full(inputs, math.log(0.1)), np.full(inputs, math.log(100.0))
        super().__init__(names, *box, people if people is not None else (x[train:], y[train:]))
        self.start_lower, self.start_upper = np.zeros(inputs), np.full(inputs, math.log(10.0))
        self._x_train, self._y_train = x[:train], y[:train]

    def models(self, thetas: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
        """Precisions 1/ℓ² and dual coefficients, one pair for each point."""
        return [(precision, self._coefficients(precision)) for precision in np.exp(-2.0 * thetas)]

    def _coefficients(self, precision: FloatArray) -> FloatArray:
        from scipy.linalg import cho_factor, cho_solve

        kernel = _rbf(self._x_train, self._x_train, precision)
        kernel[np.diag_indices_from(kernel)] = 1.0 + self.noise**2
        return np.asarray(cho_solve(cho_factor(kernel, lower=True, check_finite=False), self._y_train))

    def predictions(self, model: tuple[FloatArray, FloatArray]) -> FloatArray:
        """See `Objective.predictions`."""
        precision, coefficients = model
        return np.asarray(np.einsum("nm,m->n", _rbf(self._x, self._x_train, precision), coefficients))


class KernelSVR(Objective):
    """Support vector regression with a lengthscale for every feature, on real data.

    Features are divided by their lengthscale, the kernel is RBF (scikit-learn's SVR). θ: log lengthscales in [−3, 3],
    log ε in [log .01, 0], log γ in [log .1, log 3], log C in [log .01, log 5]. Features and targets have standard
    deviation 1 over the training records. γ is divided by the number of features, as scikit-learn's "scale" does, so
    that the middle of the box is a sensible model for any d. Searches start anywhere in [−1, 1] for the lengthscales.

    Args:
        split: the records; see `of`.
        people: as `GroupLasso`.
    """

    def __init__(self, split: Split, *, people: People | None = None) -> None:
        features = split.x_train.shape[1]
        names = (*(f"lengthscale_{index}" for index in range(features)), "epsilon", "gamma", "C")
        lower = np.array([-3.0] * features + [math.log(0.01), math.log(0.1), math.log(0.01)])
        upper = np.array([3.0] * features + [0.0, math.log(3.0), math.log(5.0)])
        super().__init__(names, lower, upper, people if people is not None else (split.x_users, split.y_users))
        self.start_lower, self.start_upper = np.maximum(lower, -1.0), np.minimum(upper, 1.0)
        self._x_train, self._y_train, self.source = split.x_train, split.y_train, split.source

    @classmethod
    def of(
        cls,
        name: str = "gas",
        *,
        features: int = 100,
        train: int = 1_000,
        users: int = 9_000,
        seed: int = 0,
        folder: Path | str | None = None,
    ) -> KernelSVR:
        """The task on a named data set, d = features + 3; arguments as `data.regression`."""
        return cls(regression(name, features=features, train=train, users=users, seed=seed, folder=folder))

    def models(self, thetas: FloatArray) -> list[tuple[FloatArray, FloatArray, FloatArray, float]]:
        """Precisions, support vectors, dual coefficients and intercept, for each point."""
        return [self._model(theta) for theta in thetas]

    def _model(self, theta: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, float]:
        from sklearn.svm import SVR

        features = self._x_train.shape[1]
        epsilon, gamma, penalty = np.exp(theta[features:])
        precision = 2.0 * gamma / features * np.exp(-2.0 * theta[:features])
        machine = SVR(kernel="precomputed", epsilon=epsilon, C=penalty, cache_size=64)
        machine.fit(_rbf(self._x_train, self._x_train, precision), self._y_train)
        return precision, self._x_train[machine.support_], machine.dual_coef_[0], float(machine.intercept_[0])

    def predictions(self, model: tuple[FloatArray, FloatArray, FloatArray, float]) -> FloatArray:
        """See `Objective.predictions`."""
        precision, vectors, coefficients, intercept = model
        return np.asarray(np.einsum("nm,m->n", _rbf(self._x, vectors, precision), coefficients) + intercept)


def _rbf(x: FloatArray, z: FloatArray, precision: FloatArray) -> FloatArray:
    """exp(−½ Σ_k p_k (x_k − z_k)²), (n, f) and (m, f) → (n, m); row i from row i of x alone, NaN where that is bad."""
    root = np.sqrt(precision)
    left, right = x * root, z * root
    squares = left @ right.T
    squares -= 0.5 * np.einsum("nf,nf->n", left, left)[:, None]
    squares -= 0.5 * np.einsum("mf,mf->m", right, right)
    np.minimum(squares, 0.0, out=squares)
    return np.exp(squares, out=squares)
