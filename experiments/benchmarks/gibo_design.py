"""Choosing a batch of DP-GIBO (part of `benchmarks.gibo`).

| part | question | bound |
|---|---|---|
| again | a batch at d = 103 without kept points, after the first one, with and without a new rotation | ≤ 5 ms |
| joint | d = 22, b = 23, 44 kept points, box: against 1 000 steps of Adam through torch autograd | ≥ 20 × faster |
| joint | its trace, against the best that Adam reaches with any of several rates | ≤ 1.01 × |

Adam minimises the same trace, written as one would for autograd (one dense Cholesky factor, distances by a product of
matrices), from the same closed form, clipped into the box after each step; it is also given the best iterate of the run
instead of the last. Both sides have one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from dpray.experiments.benchmarks.measure import QUIET, Contestant, Round, Timing, race
from dpray.searchers import design
from dpray.searchers.joint_design import FloatArray

NOISE = 0.01
RATES = (0.003, 0.01, 0.03, 0.1)
BOUND_AGAIN, BOUND_RATIO, BOUND_TRACE = 5e-3, 20.0, 1.01
JOINT, FIRST, PLAIN, TURNED = "joint design", "the first", "after the first", "after the first, a new rotation each"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    again: int = 103
    dimension: int = 22
    steps: int = 1_000
    rates: tuple[float, ...] = RATES
    rounds: int = 3
    wanted: int = 3
    cycles: int = 6
    patience: float = 0.0


FULL = Size()
LARGE = replace(FULL, dimension=103, rates=RATES[:2], rounds=1, wanted=1, cycles=1)
QUICK = Size(again=6, dimension=3, steps=20, rounds=1, wanted=1, cycles=1)


@dataclass(frozen=True)
class Problem:
    """A batch of d + 1 points beside kept ones, in a box with θ on the border of every fourth dimension.

    The kept points, two batches' worth, are turned simplices around two earlier iterates.
    """

    kept: FloatArray
    lower: FloatArray
    upper: FloatArray

    @classmethod
    def made(cls, d: int) -> Problem:
        """Always the same for one d."""
        generator = np.random.default_rng(0)
        simplex = design.simplex(d, NOISE).points[:d]
        steps = generator.standard_normal((2, d)) * (0.3 / np.sqrt(d))
        kept = [simplex @ design.rotation(d, generator) + step for step in np.cumsum(steps, axis=0)]
        lower = np.where(np.arange(d) % 4 == 0, 0.0, -1.0)
        return cls(np.concatenate(kept), lower, np.ones(d))

    @property
    def dimension(self) -> int:
        """d."""
        return len(self.lower)

    def start(self) -> FloatArray:
        """The closed form with a slight displacement, so that Adam, too, is not held by symmetry; clipped."""
        d = self.dimension
        displaced = design.simplex(d, NOISE).points + 0.02 * np.random.default_rng(1).standard_normal((d + 1, d))
        return np.clip(displaced, self.lower, self.upper)

    def joint(self) -> design.Design:
        """Ours."""
        d = self.dimension
        return design.joint(d, d + 1, NOISE, lower=self.lower, upper=self.upper, kept=self.kept)

    def same_objective(self) -> None:
        """Check that both sides minimise the same function (ArithmeticError): a race for different goals is none."""
        X = self.start()
        dense = autograd_trace(torch.from_numpy(X), torch.from_numpy(self.kept)).item()
        if not np.isclose(dense, design.trace(X, NOISE, kept=self.kept), rtol=1e-9):
            raise ArithmeticError(
                "Adam and the joint design minimise different functions: the race would mean nothing."
            )

    def adam(self, rate: float, steps: int) -> float:
        """Adam through autograd; the smallest trace on its way."""
        lower, upper, kept = map(torch.from_numpy, (self.lower, self.upper, self.kept))
        X, best = torch.tensor(self.start(), requires_grad=True), np.inf
        optimiser = torch.optim.Adam([X], lr=rate)
        for _ in range(steps):
            optimiser.zero_grad()
            trace = autograd_trace(X, kept)
            best = min(best, trace.item())
            trace.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            with torch.no_grad():
                X.clamp_(lower, upper)
        return min(best, autograd_trace(X.detach(), kept).item())


def autograd_trace(X: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Eq. 2 as one writes it for autograd: tr[I − C A⁻¹ Cᵀ], dense."""
    Z = torch.cat([kept, X])
    halves = (Z * Z).sum(dim=1) / 2
    A = torch.exp(Z @ Z.T - halves[:, None] - halves) + NOISE * torch.eye(len(Z), dtype=Z.dtype)
    C = Z * torch.exp(-halves)[:, None]
    V = torch.linalg.solve_triangular(torch.linalg.cholesky(A), C, upper=False)
    trace: torch.Tensor = X.shape[1] - (V * V).sum()
    return trace


def again(size: Size) -> list[str]:
    """Lines about choosing a batch without kept points; b = d + 1 and 2d."""
    d, generator = size.again, np.random.default_rng(0)
    rows = [
        f"## Choosing a batch, d = {d}, no kept points, box",
        "",
        f"Bound: {BOUND_AGAIN * 1e3:.0f} ms after the first.",
        "",
        "| milliseconds, median (best) | b = d + 1 | b = 2d | quiet bursts |",
        "|---|---|---|---|",
    ]
    edge = np.ones(d)
    choose = partial(design.design, d, noise=NOISE, lower=-edge, upper=edge)
    turns = [design.rotation(d, generator) for _ in range(size.rounds)]
    with threadpool_limits(limits=1):
        contestants = []
        first = []
        for b in (d + 1, 2 * d):
            began = time.perf_counter()
            choose(b=b)
            first.append(time.perf_counter() - began)
            contestants += [Contestant(PLAIN, _plain(choose, b)), Contestant(TURNED, _turned(choose, b, turns))]
        race(contestants, rounds=size.rounds, wanted=size.wanted, cycles=size.cycles, patience=size.patience)
    rows.append(f"| {FIRST} | {first[0] * 1e3:.2f} | {first[1] * 1e3:.2f} | |")
    plain, turned, plain_2d, turned_2d = (each.timing() for each in contestants)
    for name, left, right in ((PLAIN, plain, plain_2d), (TURNED, turned, turned_2d)):
        rows.append(f"| {name} | {_ms(left)} | {_ms(right)} | {_quiet(left, right)} |")
    return rows


def joint(size: Size) -> list[str]:
    """Lines about the joint design against Adam, best rate of several."""
    problem = Problem.made(size.dimension)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            problem.same_objective()
            ours = problem.joint().trace
            traces = {rate: problem.adam(rate, size.steps) for rate in size.rates}
            best = min(traces, key=lambda rate: traces[rate])
            contestants = [
                Contestant(JOINT, _timed(lambda _: problem.joint())),
                Contestant(_adam(best, size), _timed(lambda _: problem.adam(best, size.steps))),
            ]
            race(contestants, rounds=size.rounds, wanted=size.wanted, cycles=size.cycles, patience=size.patience)
    finally:
        torch.set_num_threads(threads)
    mine, theirs = (each.timing() for each in contestants)
    d = size.dimension
    rows = [
        f"## Joint design, d = {d}, b = {d + 1}, {len(problem.kept)} kept points, box",
        "",
        f"Bounds: {BOUND_RATIO:.0f} times as fast as Adam; trace at most {BOUND_TRACE} times Adam's.",
        "",
        "| | seconds, median (best) | ratio | trace | ratio | quiet bursts |",
        "|---|---|---|---|---|---|",
    ]
    for name, timing, trace in ((JOINT, mine, ours), (_adam(best, size), theirs, traces[best])):
        ratio = timing.seconds / mine.seconds
        rows.append(f"| {name} | {_s(timing)} | {ratio:.1f} | {trace:.5f} | {trace / ours:.4f} | {_quiet(timing)} |")
    others = ", ".join(f"{traces[rate]:.5f} with rate {rate}" for rate in size.rates)
    return [*rows, "", f"Adam's traces: {others}. The clipped closed form it starts from has {_started(problem):.5f}."]


def _plain(choose: Callable[..., object], b: int) -> Callable[[int], list[Round]]:
    return _timed(lambda _: choose(b=b))


def _turned(choose: Callable[..., object], b: int, turns: Sequence[FloatArray]) -> Callable[[int], list[Round]]:
    return _timed(lambda k: choose(b=b, rotation=turns[k]))


def _timed(call: Callable[[int], object]) -> Callable[[int], list[Round]]:
    """Rounds of `call(k)`; what is called has run before."""

    def rounds(count: int) -> list[Round]:
        made = []
        for k in range(count):
            began = time.perf_counter()
            call(k)
            made.append(Round(time.perf_counter() - began))
        return made

    return rounds


def _started(problem: Problem) -> float:
    return design.trace(problem.start(), NOISE, kept=problem.kept)


def _adam(rate: float, size: Size) -> str:
    return f"Adam, {size.steps} steps, rate {rate}"


def _ms(timing: Timing) -> str:
    return f"{timing.seconds * 1e3:.2f} ({timing.best * 1e3:.2f})"


def _s(timing: Timing) -> str:
    return f"{timing.seconds:.4f} ({timing.best:.4f})"


def _quiet(*timings: Timing) -> str:
    words = ", ".join(f"{each.quiet} of {each.bursts}" for each in timings)
    return f"{words} (others used more than {QUIET} cores)" if any(each.disturbed for each in timings) else words
