"""What clients' gradients cost: `python -m dpray.experiments.benchmarks.training [--quick] [--opacus PYTHON] …`.

| part | question | bound |
|---|---|---|
| head | clipped sum of a linear head, against its non-private gradient; both float64 | ratio ≤ 1.1 |
| cnn | clipped sum of a convolutional network, against its non-private gradient; both float32 | ratio ≤ 1.4 |
| cnn | the same by Opacus 1.6, ghost clipping, with `--opacus PYTHON` (see `opacus_sum`) | ratio ≥ 1.7 |
| round | 100 × 500 records on pfl-research 0.6, two processes, with `--pfl PYTHON` (see `pfl_round`) | ratio ≥ 3 |
| many | 1 000 × 50 records on the same | ratio ≥ 15 |
| flower | 100 × 500 records on Flower's simulation, with `--flower PYTHON` (see `flower_round`) | ratio ≥ 150 |

Bounds of rounds are about the pool as it is used, durable ledger and all, its noise added once; the other kinds stand
beside it. Bursts of all contestants of a table take turns, and no turn begins after `--limit` seconds. A peer whose
Python is not given is left out, and the table says so.
The server's step is measured by `rounds --only step`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from dpray.experiments.benchmarks import machine
from dpray.experiments.benchmarks.measure import QUIET, Contestant, Round, Timing, race
from dpray.experiments.benchmarks.pool import local_ray, started
from dpray.experiments.benchmarks.work import CLASSES, CLIP, FEATURES, clients
from dpray.platform.cohort import Cohort, Records
from dpray.platform.privacy.mechanisms import Regime
from dpray.trainers.models import FloatArray, LinearHead
from dpray.trainers.torch_module import TorchModule

PARTS = ("head", "cnn", "round", "many", "flower")
PLAIN, OURS = "non-private gradient", "clipped sum"
OPACUS, FLOWER, PFL = "Opacus 1.6, ghost clipping", "Flower 1.42, NumPyClient", "pfl-research 0.6, two processes"
THREADS = 2
_PATIENCE = 240.0
"""Seconds for a burst of a peer's; one that hangs ends the benchmark, after the tables before it are printed."""
_AGREEMENT = 1e-3
"""How far norms of the same sum may be apart: Opacus clips to C/(1 + 10⁻⁶/‖g‖), dpray to C/(1 + 10⁻⁴)."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    head_records: int = 10_000
    head_features: int = 256
    images: int = 256
    few: tuple[int, int] = (100, 500)
    many: tuple[int, int] = (1000, 50)
    rounds: int = 5
    flower_rounds: int = 20  # its rounds differ by half, so that the median of a few says little
    wanted: int = 3
    cycles: int = 6
    patience: float = 0.0
    limit: float = 60.0
    flower_limit: float = 150.0


FULL = Size()
QUICK = Size(200, 8, 5, (6, 20), (12, 5), rounds=2, flower_rounds=2, wanted=1, cycles=1)


@dataclass(frozen=True)
class Peers:
    """Pythons of the peers; None where a peer is left out."""

    opacus: str | None = None
    pfl: str | None = None
    flower: str | None = None


@dataclass(frozen=True)
class Peer:
    """Whose rounds are raced: its name, the bound, the option that gives its Python, and the command, if it does."""

    name: str
    bound: int
    option: str
    command: list[str] | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    asked = _parser().parse_args(arguments)
    size = replace(QUICK if asked.quick else FULL, patience=asked.patience, limit=asked.limit)
    peers, lines = Peers(asked.opacus, asked.pfl, asked.flower), list[str]()
    longer = replace(size, rounds=size.flower_rounds, limit=size.flower_limit)
    measured: dict[str, Callable[[], list[str]]] = {
        "head": partial(_head, size),
        "cnn": partial(_cnn, size, peers),
        "round": partial(_rounds, size, size.few, Peer(PFL, 3, "pfl", _pfl(peers, size.few))),
        "many": partial(_rounds, size, size.many, Peer(PFL, 15, "pfl", _pfl(peers, size.many))),
        "flower": partial(_rounds, longer, size.few, Peer(FLOWER, 150, "flower", _flower(peers, size.few))),
    }
    for part in asked.only or PARTS:
        found = [*measured[part](), ""]
        lines += found
        print("\n".join(found), flush=True)
    if asked.save:
        asked.save.write_text("\n".join(lines), encoding="utf-8")


def _head(size: Size) -> list[str]:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((size.head_records, size.head_features)) * 4 / size.head_features**0.5
    records = Records(x, generator.integers(0, CLASSES, size.head_records))
    model = LinearHead(size.head_features, CLASSES)
    theta = generator.standard_normal(model.dimension) / 10
    stack = [records]
    if not np.allclose(_plain_gradient(theta, records), model.clipped_sum(theta, records, 1e9)):
        raise ArithmeticError("The plain gradient and the model's differ: the benchmark would mean nothing.")
    found = _raced(
        size,
        {
            PLAIN: _timed(lambda: _plain_gradient(theta, records), threads=1),
            OURS: _timed(lambda: model.clipped_sums(theta, stack, CLIP), threads=1),
        },
    )
    title = f"## Linear head, {size.head_records} × {size.head_features} features, {CLASSES} classes, float64, 1 thread"
    return _table(title, found, PLAIN, ["Bound: at most 1.1 times the non-private gradient."])


def _plain_gradient(theta: FloatArray, records: Records) -> FloatArray:
    """Σ of the records' gradients, unclipped: what one writes without privacy."""
    W = theta.reshape(-1, CLASSES)
    A = records.x @ W[:-1] + W[-1]
    A -= A.max(axis=1, keepdims=True)
    np.exp(A, out=A)
    A /= A.sum(axis=1, keepdims=True)
    A[np.arange(len(A)), records.y] -= 1
    return np.vstack([records.x.T @ A, A.sum(axis=0)]).ravel()


def _cnn(size: Size, peers: Peers) -> list[str]:
    import torch

    from dpray.experiments.benchmarks import opacus_sum

    x, y = opacus_sum.images(size.images)
    records, plain = Records(x.numpy(), y.numpy()), opacus_sum.network()
    model = TorchModule(opacus_sum.network, CLASSES)
    theta, threads = model.initial(), torch.get_num_threads()

    def gradient() -> None:
        plain.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y, reduction="sum").backward()  # type: ignore[no-untyped-call]

    contestants = {PLAIN: _timed(gradient), OURS: _timed(lambda: model.clipped_sum(theta, records, CLIP))}
    notes = ["Bounds: at most 1.4 times the non-private gradient; Opacus at least 1.7 times the clipped sum."]
    if peers.opacus:
        norm = float(np.linalg.norm(model.clipped_sum(theta, records, CLIP)))
        opacus = _command(peers.opacus, "opacus_sum.py", size.images)
        contestants[OPACUS] = partial(_peer, [*opacus, "{}", str(THREADS)], norm)
    else:
        notes.append(_left_out(OPACUS, "opacus"))
    torch.set_num_threads(THREADS)
    try:
        found = _raced(size, contestants)
    finally:
        torch.set_num_threads(threads)
    if peers.opacus:
        notes.append(f"Opacus: {found[OPACUS].seconds / found[OURS].seconds:.2f} times the clipped sum.")
    title = f"## Convolutional network, {model.dimension} parameters, {size.images} records, float32, {THREADS} threads"
    return _table(title, found, PLAIN, notes)


def _rounds(size: Size, cohort: tuple[int, int], peer: Peer) -> list[str]:
    shards = clients(*cohort)
    with (
        local_ray(object_store=2**28) as folder,
        started(Cohort(LinearHead(FEATURES, CLASSES), shards, state_dir=folder / "sites"), folder) as pool,
    ):
        kinds: dict[str, Callable[[int], Sequence[Round]]] = {
            f"pool, {what}, {regime}": partial(rounds, regime)
            for what, rounds in (("durable ledger", pool.with_ledger), ("no ledger", pool.without_ledger))
            for regime in (Regime.CENTRAL, Regime.DISTRIBUTED)
        }
        racing = kinds | ({peer.name: partial(_peer, peer.command, None)} if peer.command else {})
        found = _raced(size, racing)
    bound = next(iter(kinds))
    notes = [f"Bound: a round of {peer.name} takes at least {peer.bound} times as long as one of the {bound}."]
    if peer.command:
        times = [f"{found[peer.name].seconds / found[kind].seconds:.1f} ({kind})" for kind in kinds]
        notes.append(f"It takes, of the medians: {', '.join(times)}.")
    else:
        notes.append(_left_out(peer.name, peer.option))
    title = f"## A round: {cohort[0]} clients × {cohort[1]} records, linear head {FEATURES + 1}×{CLASSES}"
    return _table(title, found, bound, notes)


def _pfl(peers: Peers, cohort: tuple[int, int]) -> list[str] | None:
    if peers.pfl is None:
        return None
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={THREADS}")
    return [peers.pfl, *launch, *_command("", "pfl_round.py", *cohort, FEATURES, CLASSES)[1:], "{}"]


def _flower(peers: Peers, cohort: tuple[int, int]) -> list[str] | None:
    if peers.flower is None:
        return None
    command = _command(peers.flower, "flower_round.py", "client", *cohort, FEATURES, CLASSES)
    return [*command, "{}", str(machine.cores())]


def _raced(size: Size, contestants: dict[str, Callable[[int], Sequence[Round]]]) -> dict[str, Timing]:
    racing = [Contestant(name, rounds) for name, rounds in contestants.items()]
    race(
        racing,
        rounds=size.rounds,
        wanted=size.wanted,
        cycles=size.cycles,
        patience=size.patience,
        limit=size.limit,
    )
    return {each.name: each.timing() for each in racing}


def _timed(call: Callable[[], object], threads: int | None = None) -> Callable[[int], Sequence[Round]]:
    def rounds(count: int) -> list[Round]:
        made = []
        with threadpool_limits(limits=threads):
            for _ in range(count + 1):
                began = time.perf_counter()
                call()
                made.append(Round(time.perf_counter() - began))
        return made[1:]

    return rounds


def _peer(command: list[str], norm: float | None, count: int) -> list[Round]:
    """Rounds of a peer's script in a process of its own, `{}` being their number; it must find the norm, if any."""
    words = [word.replace("{}", str(count)) for word in command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=_PATIENCE)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if norm is not None and not np.isclose(found["norm"], norm, rtol=_AGREEMENT):
        raise ArithmeticError(f"A peer's sum has norm {found['norm']}, ours {norm}: the benchmark would mean nothing.")
    return [Round(seconds) for seconds in found["seconds"]]


def _command(python: str, script: str, *words: object) -> list[str]:
    return [python, str(Path(__file__).with_name(script)), *map(str, words)]


def _left_out(peer: str, option: str) -> str:
    return f"{peer}: left out, because `--{option} PYTHON` was not given."


def _table(title: str, found: dict[str, Timing], yardstick: str, notes: list[str]) -> list[str]:
    rows = [
        title,
        "",
        f"Ratio: to the {yardstick}; best of both in brackets. Quiet: others used at most {QUIET} cores.",
    ]
    rows += ["", "| | ms (best) | ratio | quiet bursts |", "|---|---|---|---|"]
    floor = found[yardstick]
    for name, timing in found.items():
        quiet = f"{timing.quiet} of {timing.bursts}{' (disturbed)' if timing.disturbed else ''}"
        ratio = f"{timing.seconds / floor.seconds:.2f} ({timing.best / floor.best:.2f})"
        rows.append(f"| {name} | {timing.seconds * 1e3:.2f} ({timing.best * 1e3:.2f}) | {ratio} | {quiet} |")
    return [*rows, "", *notes]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dpray.experiments.benchmarks.training", description="See the file's top."
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part only; may be repeated")
    parser.add_argument("--opacus", metavar="PYTHON", help="a Python with opacus 1.6")
    parser.add_argument("--pfl", metavar="PYTHON", help="a Python with pfl 0.6")
    parser.add_argument("--flower", metavar="PYTHON", help="a Python with flwr[simulation] 1.42")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="wait up to S seconds before a burst for a quiet machine",
    )
    parser.add_argument(
        "--limit", type=float, default=FULL.limit, metavar="S", help="seconds of a table after which no turn begins"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the tables to a file, too")
    return parser


if __name__ == "__main__":
    main()
