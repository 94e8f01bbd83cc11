"""The server's step of DP-FedSOFIM at d = 10⁷, against moving its vectors through memory once.

A step reads θ, M and G and writes θ and M. The yardstick reads three vectors of the same length and writes two: two
copies and one sum. Each is measured as the trainer uses it, with new arrays for the results, whose pages the system
must provide first, and in place, without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dpray.experiments.benchmarks.measure import Contestant, Round, Timing, race
from dpray.trainers.models import FloatArray
from dpray.trainers.sofim import SOFIMSettings, step

STEP, MOVED = "server step, new arrays", "its vectors moved once, new arrays"
STEP_IN_PLACE, MOVED_IN_PLACE = "server step in place", "its vectors moved once, in place"


def measure(dimension: int, *, rounds: int, wanted: int, cycles: int, patience: float = 0.0) -> dict[str, Timing]:
    """Seconds of each, by name."""
    generator = np.random.default_rng(0)
    settings = SOFIMSettings(rounds=1)
    gradient = generator.standard_normal(dimension)
    state = settings.initial_state(generator.standard_normal(dimension))
    theta, M = generator.standard_normal((2, dimension))
    targets = np.empty((2, dimension))
    rules = {"learning_rate": 0.1, "beta": 0.9, "rho": 0.5}
    contestants = [
        Contestant(STEP, _timed(lambda: settings.server_step(state, gradient, 1, 0.1))),
        Contestant(MOVED, _timed(lambda: (theta.copy(), M.copy(), gradient.sum()))),
        Contestant(STEP_IN_PLACE, _timed(lambda: step(theta, M, gradient, out=(theta, M), **rules))),  # type: ignore[arg-type]
        Contestant(MOVED_IN_PLACE, _timed(lambda: _moved(targets, (theta, M), gradient))),
    ]
    race(contestants, rounds=rounds, wanted=wanted, cycles=cycles, patience=patience)
    return {each.name: each.timing() for each in contestants}


def _moved(targets: FloatArray, sources: tuple[FloatArray, ...], gradient: FloatArray) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
    gradient.sum()


def _timed(call: Callable[[], object]) -> Callable[[int], list[Round]]:
    def rounds(count: int) -> list[Round]:
        made = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            made.append(Round(time.perf_counter() - began))
        return made

    return rounds
