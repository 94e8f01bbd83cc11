"""The work that is raced: per-record clipped gradient sums of a linear softmax head over many clients.

| symbol | meaning | here |
|---|---|---|
| n, m | clients, records of each | 100, 500 |
| f, K | features (a bias is added), classes | 64, 10 |
| C | clip bound | 1 |
| W | parameters | (f+1, K) |

`NumpyLoop` is the yardstick: what one writes for one process without any framework, client after client, in NumPy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from dpray.experiments.benchmarks.measure import Round
from dpray.platform.cohort import Records
from dpray.trainers.models import LinearHead

FEATURES, CLASSES, CLIP = 64, 10, 1.0
RATE, NOISE = 0.1, 0.1
_AGREEMENT = 1e-9


def clients(count: int, records: int, seed: int = 0) -> dict[str, Records]:
    """Random records, float64; clients are neighbouring views of one array, so that they exist once."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((count * records, FEATURES))
    y = generator.integers(0, CLASSES, count * records)
    rows = [slice(client * records, (client + 1) * records) for client in range(count)]
    return {f"client-{client:05d}": Records(x[each], y[each]) for client, each in enumerate(rows)}


class NumpyLoop:
    """The plain loop over clients.

    Args:
        shards: the clients.
        dtype: precision of data and arithmetic.
        threads: of the BLAS; None leaves its default.
        keep_norms: compute ‖x̃‖ once, not every round: what a careful author would do.
        shares: noise by every client instead of once.
    """

    def __init__(
        self, shards: Mapping[str, Records], dtype: Any, *, threads: int | None, keep_norms: bool = False, shares: bool
    ) -> None:
        self._dtype, self._threads, self._shares = np.dtype(dtype), threads, shares
        ones = [np.ones((len(shard), 1)) for shard in shards.values()]
        self._x = [np.hstack([shard.x, one]).astype(dtype) for shard, one in zip(shards.values(), ones, strict=True)]
        self._y = [shard.y for shard in shards.values()]
        self._norms = [np.linalg.norm(x, axis=1) for x in self._x] if keep_norms else None
        self._generator = np.random.default_rng(0)

    def rounds(self, count: int) -> list[Round]:
        """Make rounds from W = 0, after one to warm up."""
        W, made = np.zeros((FEATURES + 1, CLASSES), self._dtype), []
        step = self._dtype.type(RATE / sum(map(len, self._y)))
        with threadpool_limits(limits=self._threads):
            for _ in range(count + 1):
                began = time.perf_counter()
                total = self.total(W)
                if not self._shares:
                    total += self._noise(W.shape)
                W = W - step * total
                made.append(Round(time.perf_counter() - began))
        return made[1:]

    def total(self, W: NDArray[Any]) -> NDArray[Any]:
        """Σ over clients of their clipped sums, and of their noise with `shares`."""
        total = np.zeros_like(W)
        for client, (x, y) in enumerate(zip(self._x, self._y, strict=True)):
            A = x @ W
            A -= A.max(axis=1, keepdims=True)
            np.exp(A, out=A)
            A /= A.sum(axis=1, keepdims=True)
            A[np.arange(len(y)), y] -= 1
            norms = np.linalg.norm(x, axis=1) if self._norms is None else self._norms[client]
            A *= np.minimum(1, CLIP / (np.linalg.norm(A, axis=1) * norms))[:, None]
            total += x.T @ A
            if self._shares:
                total += self._noise(W.shape)
        return total

    def _noise(self, shape: tuple[int, ...]) -> NDArray[Any]:
        noise = self._generator.standard_normal(shape, dtype=self._dtype.type)
        noise *= self._dtype.type(NOISE)
        return noise


def same_work(shards: Mapping[str, Records], model: LinearHead) -> None:
    """Check that loop and model compute the same sum (ArithmeticError): a race between two different works is none."""
    W = np.random.default_rng(1).standard_normal((FEATURES + 1, CLASSES))
    loop = NumpyLoop(shards, np.float64, threads=1, shares=False).total(W).ravel()
    ours = sum(model.clipped_sum(W.ravel(), shard, CLIP) for shard in shards.values())
    if not np.allclose(loop, ours, rtol=_AGREEMENT, atol=_AGREEMENT):
        raise ArithmeticError("The NumPy loop and the model compute different sums: the benchmark would mean nothing.")
