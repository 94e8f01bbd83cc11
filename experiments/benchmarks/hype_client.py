"""One client's local search, raced: p candidates on an Adult-sized client, stacked against the plain loop.

| symbol | meaning                                                  | here              |
|--------|----------------------------------------------------------|-------------------|
| p      | candidates (learning rate, momentum)                     | 100               |
| n, f   | records of the client (a fifth held out), features       | 260, 108          |
| B, E   | minibatch, epochs                                        | 64, 5             |
|        | model: f-64-64-1, ReLU, dropout .2, binary cross-entropy |                   |

The plain loop is what one writes: for every candidate a `torch.nn.Sequential` and a `torch.optim.SGD`, minibatches as
slices of a permuted tensor (a `DataLoader` takes half as long again). Every process computes with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.benchmarks.measure import Contestant, Round, Timing, race
from dpray.platform.cohort import Records
from dpray.trainers.local_search import LocalSearchTask, StackedMLP, StackedModel, StackedModule, Validation

if TYPE_CHECKING:
    from torch import nn

FEATURES, WIDTH, DROPOUT, HELD_OUT = 108, 64, 0.2, 0.2
PLAIN, KERNELS, MODULE, TWO = (
    "plain loop over candidates, 1 process",
    "stacked MLP, kernels by hand, 1 process",
    "any module by `torch.func`, 1 process",
    "stacked MLP, 2 processes",
)
BOUNDS = {KERNELS: 4.5, MODULE: 3.5, TWO: 9.0}
AGREEMENT = 1e-4
_SEED = 7


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    candidates: int = 100
    records: int = 260
    epochs: int = 5
    wanted: int = 4
    cycles: int = 8
    patience: float = 0.0


FULL = Size()
QUICK = Size(candidates=4, records=70, epochs=1, wanted=1, cycles=1)


def client(records: int) -> Records:
    """One-hot-like features and a noisy linear label, as Adult's are shaped."""
    rng = np.random.default_rng(0)
    x = (rng.random((records, FEATURES)) < 0.15).astype(np.float64)
    x[:, :6] = rng.standard_normal((records, 6))
    score = x @ rng.standard_normal(FEATURES) + rng.standard_normal(records)
    return Records(x, (score > np.median(score)).astype(np.int64))


def candidates(count: int) -> list[dict[str, float]]:
    """Sane rates, so that none diverges and none is dropped."""
    rng = np.random.default_rng(1)
    rates, momenta = 10 ** rng.uniform(-3, -0.5, count), rng.uniform(0, 0.95, count)
    return [{"learning_rate": float(eta), "momentum": float(beta)} for eta, beta in zip(rates, momenta, strict=True)]


def perceptron(dropout: float = DROPOUT) -> nn.Module:
    """The model, as a module."""
    from torch import nn

    left_out = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        *(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *left_out),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), *left_out),
        nn.Linear(WIDTH, 1),
    )


class PlainLoop:
    """The yardstick: candidate after candidate; the client's generator decides what it decides for stacks.

    Args:
        dropout: 0 leaves the layers out.
        score: `accuracy` or `loss`, on the held-out records.
    """

    def __init__(self, records: Records, epochs: int, *, dropout: float = DROPOUT, score: str = "accuracy") -> None:
        self._records, self._epochs, self._dropout, self._score = records, epochs, dropout, score

    def scores(self, configs: Sequence[dict[str, float]]) -> NDArray[np.float64]:
        """(p,), higher is better."""
        import torch
        from torch.nn import functional

        from dpray.trainers.local_search.split import judges

        rng = np.random.default_rng(_SEED)
        x, y = torch.from_numpy(self._records.x).float(), torch.from_numpy(self._records.y).float()
        usable = np.ones(len(self._records), dtype=np.bool_)
        (held_out,) = judges(self._records.y, usable, HELD_OUT, None, rng)
        seed, rows = int(rng.integers(1 << 63)), torch.from_numpy(held_out)
        orders = [
            torch.from_numpy(np.random.default_rng([seed, 1 + e]).permutation(int((~rows).sum())))
            for e in range(self._epochs)
        ]
        start = StackedMLP(FEATURES, 2, (WIDTH, WIDTH)).initial(int(np.random.default_rng([seed, 0]).integers(1 << 63)))
        found = []
        for config in configs:
            net = perceptron(self._dropout)
            with torch.no_grad():
                for parameter, value in zip(net.parameters(), start, strict=True):
                    parameter.copy_(value.T if parameter.ndim == 2 else value[0])
            optimiser = torch.optim.SGD(net.parameters(), lr=config["learning_rate"], momentum=config["momentum"])
            net.train()
            for order in orders:
                x_train, y_train = x[~rows][order], y[~rows][order]
                for i in range(0, len(order), 64):
                    optimiser.zero_grad()
                    z = net(x_train[i : i + 64]).squeeze(1)
                    functional.binary_cross_entropy_with_logits(z, y_train[i : i + 64]).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            net.eval()
            with torch.no_grad():
                z = net(x[rows]).squeeze(1)
                right = ((z > 0).float() == y[rows]).double().mean()
                loss = functional.binary_cross_entropy_with_logits(z, y[rows])
            found.append(float(right if self._score == "accuracy" else -loss))
        return np.asarray(found)


def stacked(model: StackedModel, epochs: int, **options: Any) -> LocalSearchTask:
    """The task of the same work; `options` as `LocalSearchTask` has them."""
    return LocalSearchTask(model, training={"epochs": epochs, **options.pop("training", {})}, **options)


def same_work(size: Size) -> None:
    """Check that the contestants' losses agree where nothing is left out (ArithmeticError): else there is no race."""
    records, configs = client(size.records), candidates(min(size.candidates, 8))
    expected = PlainLoop(records, size.epochs, dropout=0.0, score="loss").scores(configs)
    task = stacked(StackedMLP(FEATURES), size.epochs, validation=Validation(score="loss"))
    found = task.fit_and_scores(configs, records, np.random.default_rng(_SEED))
    if not np.allclose(found, expected, rtol=0, atol=AGREEMENT):
        raise ArithmeticError(
            f"The stack's losses differ from the plain loop's by {np.abs(found - expected).max():.2g}."
        )


def measure(size: Size) -> dict[str, tuple[Timing, float]]:
    """Wall time of a search of all candidates, and its least CPU seconds (of all its processes), by contestant."""
    same_work(size)
    records, configs = client(size.records), candidates(size.candidates)
    kernels = stacked(StackedMLP(FEATURES), size.epochs, training={"dropout": DROPOUT})
    module = stacked(StackedModule(perceptron, 2), size.epochs)
    plain, least = PlainLoop(records, size.epochs), dict[str, float]()

    def timed(name: str, search: Callable[[], float]) -> Contestant:
        def rounds(count: int) -> list[Round]:
            search()
            made = []
            for _ in range(count):
                began = time.perf_counter()
                seconds = search()
                made.append(Round(time.perf_counter() - began))
                least[name] = min(seconds, least.get(name, seconds))
            return made

        return Contestant(name, rounds)

    with one_thread(), _two_processes() as apart:
        contestants = [
            timed(PLAIN, lambda: _cpu(lambda: plain.scores(configs))),
            timed(
                KERNELS, lambda: _cpu(lambda: kernels.fit_and_scores(configs, records, np.random.default_rng(_SEED)))
            ),
            timed(MODULE, lambda: _cpu(lambda: module.fit_and_scores(configs, records, np.random.default_rng(_SEED)))),
            timed(TWO, lambda: apart(kernels, configs, records)),
        ]
        race(contestants, rounds=1, wanted=size.wanted, cycles=size.cycles, patience=size.patience)
    return {each.name: (each.timing(), least[each.name]) for each in contestants}


def rows(size: Size) -> list[str]:
    """The table, in Markdown."""
    found = measure(size)
    (yardstick, cpu), lines = found[PLAIN], []
    for name, (timing, seconds) in found.items():
        bound = f"≥ {BOUNDS[name]}" if name in BOUNDS else ""
        quiet = f"{timing.quiet} of {timing.bursts}" + (" (disturbed)" if timing.disturbed else "")
        ratios = f"{yardstick.seconds / timing.seconds:.1f} | {yardstick.best / timing.best:.1f} | {cpu / seconds:.1f}"
        cells = f"{timing.seconds:.3f} ({timing.best:.3f}) | {seconds:.3f} | {ratios} | {bound} | {quiet}"
        lines.append(f"| {name} | {cells} |")
    return [
        f"## Local search of {size.candidates} candidates on a client of {size.records} records, {size.epochs} epochs",
        "",
        f"MLP {FEATURES}-{WIDTH}-{WIDTH}-1, dropout {DROPOUT}. Times faster: wall time (median, best), CPU time.",
        "",
        "| | seconds (best) | CPU seconds | faster | best | CPU | bound | quiet bursts |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
    ]


def _cpu(search: Callable[[], Any]) -> float:
    """CPU seconds of a search in this process."""
    began = time.process_time()
    search()
    return time.process_time() - began


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch and BLAS with one thread each."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _two_processes() -> Iterator[Callable[..., float]]:
    """A function that splits the candidates between two processes, and returns their CPU seconds."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:

        def apart(task: LocalSearchTask, configs: Sequence[dict[str, float]], records: Records) -> float:
            half = len(configs) // 2
            asked = [pool.submit(_part, task, part, records) for part in (configs[:half], configs[half:])]
            return sum(each.result() for each in asked)

        yield apart


def _part(task: LocalSearchTask, configs: Sequence[dict[str, float]], records: Records) -> float:
    with one_thread():
        return _cpu(lambda: task.fit_and_scores(configs, records, np.random.default_rng(_SEED)))
