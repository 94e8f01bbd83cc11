"""Many small clients in a pool: rounds a second, and the memory of all processes together.

Runs in a process of its own, so that nothing else is in its memory, and prints one line of JSON:
`python -m dpray.experiments.benchmarks.scale CLIENTS RECORDS ROUNDS [PATIENCE]`.

Memory is the largest PSS seen (every .2 s) over the driver, its hosts and all of Ray's processes, while records are
made and the cohort starts, and in rounds of both regimes; rounds are timed afterwards, unwatched. The records are in it
twice: the driver's arrays, and Ray's object store, which the hosts read without copying.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from dpray.experiments.benchmarks.measure import Contestant, race, watched_pss
from dpray.experiments.benchmarks.pool import local_ray, started
from dpray.experiments.benchmarks.work import CLASSES, FEATURES, clients
from dpray.platform.cohort import Cohort
from dpray.platform.privacy.mechanisms import Regime
from dpray.trainers.models import LinearHead

WANTED, CYCLES = 3, 6
REGIMES = (Regime.CENTRAL, Regime.DISTRIBUTED)


def measure(count: int, records: int, rounds: int, patience: float = 0.0) -> dict[str, Any]:
    """`pss` in GB by phase and kind of process, `records` in GB, timings of a round with a durable ledger by regime.

    Args:
        count: clients.
        records: of each.
        rounds: in a burst.
        patience: seconds to wait for a quiet machine before a burst.
    """
    size = count * records * (FEATURES + 1) * 8  # features and a label
    with local_ray(object_store=2 * size + 2**28) as folder:
        with watched_pss() as starting:
            cohort = Cohort(LinearHead(FEATURES, CLASSES), clients(count, records), state_dir=folder / "sites")
            cohort.start()
        with started(cohort, folder) as pool:
            contestants = [Contestant(str(regime), partial(pool.with_ledger, regime)) for regime in REGIMES]
            with watched_pss() as in_rounds:
                race(contestants, rounds=rounds, wanted=1, cycles=1)
            timed = [Contestant(each.name, each.rounds) for each in contestants]
            race(timed, rounds=rounds, wanted=WANTED, cycles=CYCLES, patience=patience)
    return {
        "pss": {"starting": starting, "in rounds": in_rounds},
        "records": size / 1e9,
        "rounds": {each.name: asdict(each.timing()) for each in timed},
    }


def measured_apart(count: int, records: int, rounds: int, patience: float) -> dict[str, Any]:
    """`measure` in a fresh process."""
    words = [sys.executable, "-m", __name__, *map(str, (count, records, rounds, patience))]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:4]), *map(float, sys.argv[4:]))))
