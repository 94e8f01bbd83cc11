"""A release of DP-GIBO, against its one matrix product (part of `benchmarks.gibo`).

| symbol | meaning                                                               |
|--------|-----------------------------------------------------------------------|
| n      | users; 9 000 in the paper's kernel regression                         |
| b      | evaluated locations in a release; d + 1, a simplex                    |
| d      | dimension of the search; 103 there                                    |

A release centres the users' losses, multiplies them by W, clips each user's gradient, adds them up and draws noise, all
in the curator, on one BLAS thread. The yardstick is `Y.T @ W.T`, float64, n×b times b×d, in the same run, cycle by
cycle. Bound: the release takes at most 5 times as long. Beside it, what others do: a triangular solve for each user.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from threadpoolctl import threadpool_limits

from dpray.experiments.benchmarks.measure import QUIET, Contestant, Round, Timing, race
from dpray.platform.curator import Curator, FloatArray
from dpray.platform.curator_asks import GradientAsk
from dpray.platform.privacy.mechanisms import ClippedMean

PRODUCT, RELEASE, SOLVES = (
    "one product, n×b by b×d",
    "release in the curator",
    "a solve for each user, without the rest",
)
BOUND = 5.0


@dataclass(frozen=True)
class Size:
    """How much is measured; n, b and d as above."""

    users: int = 9_000
    locations: int = 104
    dimension: int = 103
    rounds: int = 10
    wanted: int = 6
    cycles: int = 12
    patience: float = 0.0


FULL = Size()
QUICK = Size(60, 4, 3, rounds=2, wanted=1, cycles=1)


def measure(size: Size) -> dict[str, Timing]:
    """Seconds of each contestant, by name, on one BLAS thread."""
    generator = np.random.default_rng(0)
    losses = generator.standard_normal((size.locations, size.users))
    weights = generator.standard_normal((size.dimension, size.locations))
    factor = generator.standard_normal((size.locations, size.locations))
    solver = cho_factor(factor @ factor.T + size.locations * np.eye(size.locations))
    names = tuple(f"{index}" for index in range(size.locations))
    curator, mechanism, step = Curator(size.users), ClippedMean(0.5, size.users, size.dimension), count()
    curator.expect(names)
    for row, each in zip(names, losses, strict=True):
        curator.submit(row, each)

    def release() -> FloatArray:
        # A new key each time: under an old one the curator would hand out what it has drawn.
        return curator.gradient(GradientAsk(names, weights, mechanism, 0.3, ("benchmark", next(step))))

    contestants = [
        Contestant(PRODUCT, _timed(lambda: losses.T @ weights.T)),
        Contestant(RELEASE, _timed(release)),
        Contestant(SOLVES, _timed(lambda: [weights @ cho_solve(solver, each) for each in losses.T])),
    ]
    with threadpool_limits(limits=1):
        race(contestants, rounds=size.rounds, wanted=size.wanted, cycles=size.cycles, patience=size.patience)
    return {each.name: each.timing() for each in contestants}


def rows(size: Size) -> list[str]:
    """The table, in Markdown."""
    found = measure(size)
    lines = [
        f"## A release, n = {size.users}, b = {size.locations}, d = {size.dimension}",
        "",
        f"Bound: {BOUND:g} times the product. Milliseconds, median of bursts of {size.rounds} (best in brackets), one",
        f"BLAS thread; only bursts in which others used at most {QUIET} cores count, where there are three of them.",
        "",
        "| | ms (best) | ratio | quiet bursts |",
        "|---|---|---|---|",
    ]
    for name, timing in found.items():
        ratio = timing.seconds / found[PRODUCT].seconds
        quiet = f"{timing.quiet} of {timing.bursts}{' (disturbed)' if timing.disturbed else ''}"
        lines.append(f"| {name} | {timing.seconds * 1e3:.2f} ({timing.best * 1e3:.2f}) | {ratio:.2f} | {quiet} |")
    return lines


def _timed(call: Callable[[], object]) -> Callable[[int], list[Round]]:
    def made(rounds: int) -> list[Round]:
        call()
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            call()
            seconds.append(Round(time.perf_counter() - began))
        return seconds

    return made
