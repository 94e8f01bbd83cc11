"""The benchmark: `python -m dpray.experiments.benchmarks.rounds [--quick] [--flower PYTHON] [--save FILE]`.

| part | question | bound |
|---|---|---|
| round | a round through the pool of actors, against the plain NumPy loop over clients in one process | ratio ≤ 1 |
| round | the ledger's share of it | stated |
| round | the same work on Flower's simulation, with `--flower PYTHON` (see `flower_round`) | ratio ≥ 100 |
| scale | 10 000 virtual clients × 50 records: PSS of all processes; rounds a second | ≤ 2.5 GB |
| step | the server's step at d = 10⁷, against moving its vectors through memory once | ratio ≤ 3 |

All figures of a table are of one run. Machines differ, and so do their disks: compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpray.experiments.benchmarks import machine, scale, server_step
from dpray.experiments.benchmarks.measure import QUIET, Contestant, Timing, race
from dpray.experiments.benchmarks.pool import Pool, local_ray, started
from dpray.experiments.benchmarks.work import CLASSES, FEATURES, NumpyLoop, clients, same_work
from dpray.platform.cohort import Cohort
from dpray.platform.privacy.mechanisms import Regime
from dpray.trainers.models import LinearHead

PARTS = ("round", "scale", "step")
YARDSTICK = "NumPy loop, float64, 1 thread"
WITHOUT, DURABLE, TRAINER = "pool without ledger", "pool, durable ledger", "trainer's round, durable ledger"
FLOWER = {"client": "Flower 1.42, NumPyClient", "message": "Flower 1.42, messages"}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    clients: int = 100
    records: int = 500
    many: int = 10_000
    few_records: int = 50
    dimension: int = 10**7
    rounds: int = 12
    wanted: int = 6
    cycles: int = 12
    patience: float = 0.0
    flower_rounds: int = 8


FULL = Size()
QUICK = Size(6, 20, 60, 5, 10_000, rounds=2, wanted=1, cycles=1, flower_rounds=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    asked = _parser().parse_args(arguments)
    size, lines = replace(QUICK if asked.quick else FULL, patience=asked.patience), list[str]()

    def say(text: str = "") -> None:
        lines.append(text)
        print(text, flush=True)

    measured: dict[str, Callable[[], list[str]]] = {
        "round": partial(_rounds, size, asked.flower),
        "scale": partial(_scale, size),
        "step": partial(_step, size),
    }
    for part in asked.only or PARTS:
        for line in [*measured[part](), ""]:
            say(line)
    if asked.save:
        asked.save.write_text("\n".join(lines), encoding="utf-8")


def _rounds(size: Size, flower: str | None) -> list[str]:
    shards = clients(size.clients, size.records)
    model = LinearHead(FEATURES, CLASSES)
    same_work(shards, model)
    with local_ray(object_store=2**28) as folder:
        about = machine.describe(folder)
        with started(Cohort(model, shards, state_dir=folder / "sites"), folder) as pool:
            table = {regime: _race(regime, pool, shards, size) for regime in scale.REGIMES}
    head = [
        f"## A round: {size.clients} clients × {size.records} records, linear head {FEATURES + 1}×{CLASSES}",
        "",
        *(f"- {line}" for line in about),
        f"- milliseconds, median of bursts of {size.rounds} rounds (best in brackets); `ratio`: to the {YARDSTICK}",
        f"- quiet bursts: others used at most {QUIET} cores meanwhile; only they count where there are three",
        "",
        "| | central | ratio | distributed | ratio | quiet bursts |",
        "|---|---|---|---|---|---|",
    ]
    central, distributed = (table[regime] for regime in scale.REGIMES)
    yardsticks = [each[YARDSTICK].seconds for each in (central, distributed)]
    rows = []
    for name in central:
        cells = [
            f"{_ms(each[name])} | {each[name].seconds / yardstick:.2f}"
            for each, yardstick in zip((central, distributed), yardsticks, strict=True)
        ]
        rows.append(f"| {name} | {' | '.join(cells)} | {_quiet(central[name], distributed[name])} |")
    shares = [f"{each[name].ledger:.0%}" for name in (DURABLE, TRAINER) for each in (central, distributed)]
    rows += [
        "",
        "Bound: the pool's ratio is at most 1.",
        f"Ledger's share of a round: {shares[0]} central, {shares[1]} distributed; trainer {shares[2]}, {shares[3]}.",
    ]
    if flower:
        rows += ["", *_flower(flower, size, {WITHOUT: (central, distributed), DURABLE: (central, distributed)})]
    return head + rows


def _race(regime: Regime, pool: Pool, shards: Any, size: Size) -> dict[str, Timing]:
    loop = partial(NumpyLoop, shards, shares=regime is Regime.DISTRIBUTED)
    contestants = [
        Contestant(YARDSTICK, loop(np.float64, threads=1).rounds),
        Contestant("NumPy loop, float64, default threads", loop(np.float64, threads=None).rounds),
        Contestant("NumPy loop, float64, 1 thread, ‖x‖ kept", loop(np.float64, threads=1, keep_norms=True).rounds),
        Contestant("NumPy loop, float32, 1 thread", loop(np.float32, threads=1).rounds),
        Contestant("NumPy loop, float32, default threads", loop(np.float32, threads=None).rounds),
        Contestant(WITHOUT, partial(pool.without_ledger, regime)),
        Contestant(DURABLE, partial(pool.with_ledger, regime)),
        Contestant(TRAINER, partial(pool.trainer, regime)),
    ]
    race(contestants, rounds=size.rounds, wanted=size.wanted, cycles=size.cycles, patience=size.patience)
    return {each.name: each.timing() for each in contestants}


def _flower(python: str, size: Size, pools: dict[str, tuple[dict[str, Timing], ...]]) -> list[str]:
    script = Path(__file__).with_name("flower_round.py")
    sizes = (size.clients, size.records, FEATURES, CLASSES, size.flower_rounds, machine.cores())
    rows = [
        "The same work, seconds a round, and how many rounds of dpray fit into one (bound: 100):",
        "",
        "| | seconds | first round | pool, central | distributed | durable ledger, central | distributed |",
        "|---|---|---|---|---|---|---|",
    ]
    for api, name in FLOWER.items():
        done = subprocess.run([python, str(script), api, *map(str, sizes)], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        seconds = float(np.median(found["seconds"]))
        ratios = [f"{seconds / each[pool].seconds:.0f}" for pool, regimes in pools.items() for each in regimes]
        rows.append(f"| {name} | {seconds:.2f} | {found['first']:.1f} | {' | '.join(ratios)} |")
    return rows


def _scale(size: Size) -> list[str]:
    found = scale.measured_apart(size.many, size.few_records, size.rounds, size.patience)
    rows = [
        f"## Many clients: {size.many} × {size.few_records} records ({found['records']:.2f} GB in float64)",
        "",
        "Bound: 2.5 GB, all processes together.",
        "",
        "| PSS, GB | driver | hosts | Ray | all |",
        "|---|---|---|---|---|",
    ]
    for phase, kinds in found["pss"].items():
        rows.append(f"| {phase} | {' | '.join(f'{each:.2f}' for each in [*kinds.values(), sum(kinds.values())])} |")
    rows += [
        "",
        "| durable ledger | seconds a round | rounds a second | ledger's share | quiet bursts |",
        "|---|---|---|---|---|",
    ]
    for regime, cells in found["rounds"].items():
        timing = Timing(**cells)
        rows.append(
            f"| {regime} | {timing.seconds:.3f} | {1 / timing.seconds:.1f} | {timing.ledger:.0%} | {_quiet(timing)} |"
        )
    return rows


def _step(size: Size) -> list[str]:
    found = server_step.measure(
        size.dimension, rounds=size.rounds, wanted=size.wanted, cycles=size.cycles, patience=size.patience
    )
    rows = [
        f"## Server step of DP-FedSOFIM, d = {size.dimension:.0e}",
        "",
        "Bound: 3 times as long as moving its vectors through memory once (read θ, M, G; write θ, M).",
        "",
        "| | ms (best) | ratio | quiet bursts |",
        "|---|---|---|---|",
    ]
    pairs = ((server_step.STEP, server_step.MOVED), (server_step.STEP_IN_PLACE, server_step.MOVED_IN_PLACE))
    for name, yardstick in pairs:
        for each in (yardstick, name):
            ratio = found[each].seconds / found[yardstick].seconds
            rows.append(f"| {each} | {_ms(found[each])} | {ratio:.2f} | {_quiet(found[each])} |")
    return rows


def _ms(timing: Timing) -> str:
    return f"{timing.seconds * 1e3:.2f} ({timing.best * 1e3:.2f})"


def _quiet(*timings: Timing) -> str:
    words = ", ".join(f"{each.quiet} of {each.bursts}" for each in timings)
    return words + (" (disturbed)" if any(each.disturbed for each in timings) else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dpray.experiments.benchmarks.rounds", description="See the file's top."
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part only; may be repeated")
    parser.add_argument(
        "--flower", metavar="PYTHON", help="a Python with flwr[simulation] 1.42, to run Flower beside it"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="wait up to S seconds before a burst for a quiet machine",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the tables to a file, too")
    return parser


if __name__ == "__main__":
    main()
