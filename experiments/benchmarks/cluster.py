"""What a cluster costs: the ledger, a lost client actor, rounds over three hosts, submission.

    python -m dpray.experiments.benchmarks.cluster ledger
    python -m dpray.experiments.benchmarks.cluster recovery
    python -m dpray.experiments.benchmarks.cluster rounds --address auto --save three.json      on the head
    python -m dpray.experiments.benchmarks.cluster rounds --save one.json                       on one of the hosts
    python -m dpray.experiments.benchmarks.cluster compare three.json one.json
    python -m dpray.experiments.benchmarks.cluster submission --address http://HEAD:8265

`tests/cluster/speed.py` makes three hosts on one machine and measures the last two there.

| figure | bound |
|---|---|
| what the ledger adds to a release, SQLite with full sync, median | 5 ms |
| its share of a round of 100 clients | 25 % |
| a client actor killed → the second round after it is stored | 10 s |
| a round of two sites on three hosts, over the same round on one host, d = 10⁵ | 2 |
| submission to the first trial's end | 20 s |

Rounds are whole releases in the distributed regime: charge, ask the sites, commit, reveal, store. Each burst is a few
rounds; the smallest burst counts, since everything else that runs can only add to it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dpray.experiments import engine
from dpray.experiments.benchmarks import scale
from dpray.experiments.benchmarks.measure import Contestant, race
from dpray.experiments.benchmarks.pool import local_ray, started
from dpray.experiments.benchmarks.work import CLASSES, FEATURES, clients
from dpray.platform.cohort import ClientTask, Cohort, GradientSum, Records, Site
from dpray.platform.privacy import Budget, ClippedSum, Regime, Unit
from dpray.platform.privacy.ledger import Ledger, ReleaseKey, Run
from dpray.platform.privacy.noise import NoiseSource
from dpray.trainers.models import LinearHead

DIMENSION, SITES, RECORDS = 100_000, ("site-a", "site-b"), 200
_BURSTS, _ROUNDS = 6, 5
_QUANTA = 2**40
_BURST = 20
_CLIENTS, _OF_EACH, _KILLS = 100, 500, 6


@dataclass(frozen=True)
class MadeUp:
    """Loads made-up records at a site: few features, since what a round moves is the dimension of the message."""

    seed: int

    def __call__(self) -> Records:
        """The records."""
        rng = np.random.default_rng(self.seed)
        return Records(rng.normal(size=(RECORDS, 8)), np.zeros(RECORDS))


class Wide(ClientTask):
    """A message of d coordinates that costs next to nothing to compute."""

    dimension = DIMENSION

    def clipped_sum(self, theta: np.ndarray, records: Records, clip: float) -> np.ndarray:
        """One fixed direction a record."""
        return np.full(DIMENSION, clip * len(records) / np.sqrt(DIMENSION))


def rounds(address: str | None) -> dict[str, float]:
    """Seconds of a round of two sites: smallest and median over bursts."""
    engine.prepare(address)
    sites = {
        name: Site(MadeUp(seed), RECORDS, {f"site:{name}": 1} if address else {}) for seed, name in enumerate(SITES)
    }
    mechanism = ClippedSum(1.0, Unit.RECORD, DIMENSION, RECORDS * len(SITES))
    with tempfile.TemporaryDirectory(prefix="dpray-bench-") as folder, engine.ray_running(address, "auto"):
        # On a cluster a folder of the driver's name exists nowhere else: every site keeps its journals at home.
        state = f"~/.dpray-bench/{time.time_ns()}" if address else Path(folder) / "sites"
        ledger = Ledger(f"sqlite:///{folder}/ledger.db")
        people = ledger.population("benchmark")
        people.account("record", Budget(10, 1e-5))
        run, theta, bursts = people.run("rounds"), np.zeros(DIMENSION), []
        with Cohort(Wide(), sites, state_dir=state, noise=NoiseSource()) as cohort:

            def one(step: int) -> None:
                query = GradientSum(theta, 1.0)
                run.release(
                    ReleaseKey("training", "gradients", step),
                    query.describe(),
                    mechanism,
                    _QUANTA,
                    lambda attempt: cohort.sum(attempt, query, mechanism, Regime.DISTRIBUTED).pack(),
                    trust=cohort.trust(Regime.DISTRIBUTED),
                )

            one(0)
            for burst in range(_BURSTS):
                first = 1 + burst * _ROUNDS
                bursts.append(_seconds([partial(one, step) for step in range(first, first + _ROUNDS)]))
        ledger.close()
    return {"smallest": float(min(bursts)), "median": float(np.median(bursts))}


def ledger(releases: int = 200) -> dict[str, float]:
    """Milliseconds that the ledger adds to a release of 1000 coordinates, SQLite with full sync."""
    mechanism = ClippedSum(1.0, Unit.RECORD, 1000, 1000)
    value, bursts = np.zeros(1000), []
    with tempfile.TemporaryDirectory(prefix="dpray-bench-") as folder:
        book = Ledger(f"sqlite:///{folder}/ledger.db")
        people = book.population("benchmark")
        people.account("record", Budget(10, 1e-5))
        run = people.run("overhead")
        for first in range(0, releases, _BURST):
            bursts.append([_release(run, mechanism, step, value) for step in range(first, first + _BURST)])
        book.close()
    medians = [float(np.median(burst)) for burst in bursts]
    return {"smallest_median_ms": 1e3 * min(medians), "median_ms": 1e3 * float(np.median(bursts))}


def shares(number: int = _CLIENTS, records: int = _OF_EACH, cycles: int = 6) -> dict[str, float]:
    """The ledger's share of a round through a pool, by regime: median over rounds."""
    found = {}
    with local_ray(object_store=2**28) as folder:
        cohort = Cohort(LinearHead(FEATURES, CLASSES), clients(number, records), state_dir=folder / "sites")
        with started(cohort, folder) as pool:
            for regime in scale.REGIMES:
                rounds = Contestant(regime.value, partial(pool.with_ledger, regime))
                race([rounds], rounds=12, wanted=cycles, cycles=cycles)
                found[f"share_of_a_round_{regime.value}"] = rounds.timing().ledger
    return found


def recovery(number: int = _CLIENTS, records: int = _OF_EACH, kills: int = _KILLS) -> dict[str, float]:
    """Seconds from the SIGKILL of a client actor to the store of the second round after it, of a pool."""
    regime, seconds = Regime.DISTRIBUTED, []
    with local_ray(object_store=2**28) as folder:
        cohort = Cohort(LinearHead(FEATURES, CLASSES), clients(number, records), state_dir=folder / "sites")
        with started(cohort, folder) as pool:
            usual = _seconds([partial(pool.with_ledger, regime, 1)] * 2)
            for kill in range(kills):
                process = sorted(cohort.processes())[kill % 2]
                began = time.perf_counter()
                os.kill(process, signal.SIGKILL)
                pool.with_ledger(regime, 1)
                seconds.append(time.perf_counter() - began)
    return {"largest": max(seconds), "median": float(np.median(seconds)), "without_a_kill": usual}


def _release(run: Run, mechanism: ClippedSum, step: int, value: np.ndarray) -> float:
    began = time.perf_counter()
    run.release(ReleaseKey("training", "sum", step), {"step": step}, mechanism, _QUANTA, lambda attempt: value)
    return time.perf_counter() - began


def submission(address: str, ledger_url: str | None, tracking: str | None) -> dict[str, float]:
    """Seconds from `dpray submit` of the quickstart to its steps, as its log tells them; it is stopped after the first.

    "trial" is the end of the first trial: every client has trained its candidates.
    """
    from dpray.experiments import places, submit
    from dpray.experiments.runs import find_recipe

    name = f"benchmark-{time.time_ns():x}"
    found = find_recipe("digits_quickstart")
    recipe = places.placed(found, ledger_url, tracking).model_copy(
        update={"name": name, "population": found.population.model_copy(update={"name": name})}
    )
    marks = dict[str, float]()
    began = time.perf_counter()
    job = submit.submit(recipe, submit.Where("~/dpray", name), address)
    marks["accepted"] = time.perf_counter() - began

    def note(text: str) -> None:
        for mark, words in (("begun", "Run "), ("clients", "Starting Ray"), ("nodes", "Nodes "), ("trial", "search ")):
            if words in text:
                marks.setdefault(mark, time.perf_counter() - began)
        if "trial" in marks:
            submit.stop(job, address)

    submit.follow(job, address, note)
    return marks


def _seconds(calls: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def main() -> None:
    """See the file's top."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.benchmarks.cluster")
    parser.add_argument("what", choices=("ledger", "recovery", "rounds", "compare", "submission"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--ledger")
    parser.add_argument("--tracking")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    if given.what == "compare":
        three, one = (json.loads(path.read_text()) for path in given.files)
        print(f"three hosts / one host: {three['smallest'] / one['smallest']:.2f} (bound 2)")
        return
    if given.what == "submission" and given.address is None:
        parser.error("submission needs --address http://HEAD:8265")
    if given.what == "rounds":
        found = rounds(given.address)
    elif given.what == "ledger":
        found = {**ledger(), **shares()}
    elif given.what == "recovery":
        found = recovery()
    else:
        found = submission(given.address, given.ledger, given.tracking)
    print(json.dumps(found))
    if given.save is not None:
        given.save.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
