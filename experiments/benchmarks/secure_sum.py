"""The masked sum: seconds of a whole one, and what it costs each client as the cohort grows.

    python -m dpray.experiments.benchmarks.secure_sum [--flower FOLDER/bin/python] [--patience SECONDS] [--only cost]

| what           | how                                                                                              |
|----------------|--------------------------------------------------------------------------------------------------|
| vote on Ray    | the same by a cohort on all cores, from charge to stored value, journals and ledger on disk       |
| whole sum      | every client and the server in one process, one after the other: the sum of everybody's work      |
| cost a client  | k + 1 clients that are each other's neighbours, in a session of n: what each of them does and is   |
|                | sent is what it would be in the whole graph, which need not be run for it                         |
| degree         | neighbours a client masks with, k; it grows as log n: the ratio to log₂ n is printed              |
| ring           | bits of the vector's numbers, as a vote of n clients at ε = 1 with this quorum needs them         |
| KB             | keys, shares, vectors and sets as bytes, numbers as 4; no framing                                 |
| ms             | processor time of a client's calls; of the server's for it: putting its seed together, its mask   |

Flower's SecAgg+ workflow on the same vector, degree and threshold: see `flower_secagg`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dpray.experiments.benchmarks import machine
from dpray.experiments.benchmarks.measure import Contestant, Round, Timing, race
from dpray.experiments.benchmarks.pool import local_ray
from dpray.experiments.benchmarks.work import CLASSES, FEATURES, clients
from dpray.platform.cohort import Cohort, Votes
from dpray.platform.cohort.masked import primitives
from dpray.platform.cohort.masked.aggregator import Aggregator
from dpray.platform.cohort.masked.messages import Members, Parcel, Roster, Session, Survivors
from dpray.platform.cohort.masked.parameters import Parameters, parameters
from dpray.platform.cohort.masked.party import Party
from dpray.platform.cohort.masked.ring import largest_sum, ring_bits
from dpray.platform.cohort.secure_sum import Masked
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import Regime, TopKVotes, Unit
from dpray.platform.privacy.noise import counted_noisers
from dpray.trainers.models import LinearHead

T = TypeVar("T")

CLIENTS, CANDIDATES, DEGREE = 100, 100, 20
BOUND = 3.0
"""Seconds of a whole sum."""
SIZES = (100, 300, 1_000, 3_000, 10_000)
LOST = COLLUDERS = 0.05
"""Parts of the clients that a growing cohort is to bear losing, and colluding."""


def session(clients: int, quorum: int, colluders: int, degree: int | None, bits: int = 32) -> Session:
    """A vote's session."""
    key = "people", "run", "search", "top-k votes"
    return Session(*key, 0, 1, "0" * 64, os.urandom(16).hex(), clients, quorum, colluders, CANDIDATES, bits, degree)


def ring_of(clients: int, quorum: int, colluders: int) -> int:
    """Bits of the ring that a vote of so many clients is added up in."""
    noise = TopKVotes(5, CANDIDATES).noise(Budget(1.0, 1e-5).mu, noisers=counted_noisers(quorum, colluders))
    return ring_bits(largest_sum(clients, noise.share, noise.grid, clients))


def whole(quorum: int, lost: int, of: list[float] | None = None) -> Round:
    """One whole sum; `lost` clients share and then send no masked input, so that their masks have to be opened.

    Args:
        of: gets the seconds of each phase: keys, shares, masked inputs, unmasking and the sum.
    """
    asked = session(CLIENTS, quorum, 1, DEGREE)
    messages = np.random.default_rng().integers(-(2**20), 2**20, (CLIENTS, CANDIDATES))
    marks = [time.perf_counter()]
    parties, server = [Party(asked, number) for number in range(CLIENTS)], Aggregator(asked)
    for party in parties:
        server.receive(party.advertise())
    rosters = server.rosters()
    marks.append(time.perf_counter())
    for party in parties:
        server.receive(party.share(rosters[party.number]))
    parcels = server.parcels()
    marks.append(time.perf_counter())
    for party in parties[lost:]:
        server.receive(party.mask(parcels[party.number], messages[party.number]))
    survivors = server.survivors()
    marks.append(time.perf_counter())
    for party in parties[lost:]:
        server.receive(party.unmask(survivors))
    total = server.total()
    marks.append(time.perf_counter())
    if not np.array_equal(total, messages[lost:].sum(axis=0)):
        raise SystemExit("The masked sum is not the sum.")
    if of is not None:
        of[:] = np.diff(marks).tolist()
    return Round(marks[-1] - marks[0])


def _sums(quorum: int, lost: int, of: list[float], number: int) -> list[Round]:
    return [whole(quorum, lost, of) for _ in range(number)]


def votes_on_ray(number: int) -> list[Round]:
    """Votes of a cohort: a pool on all cores, clients' journals and ledger durable; the first is left out."""
    mechanism = TopKVotes(5, CANDIDATES)
    query, budget, made = Votes("search", CANDIDATES, 5), Budget(50.0, 1e-5), []
    with local_ray(2**28) as folder, Ledger(f"sqlite:///{folder}/masked.db") as ledger:
        population = ledger.population(f"votes {time.monotonic_ns()}")
        population.account(Unit.CLIENT, budget)
        run, quanta = population.run("votes"), (budget.quanta or 0) // (number + 1)
        records, masked = clients(CLIENTS, 2), Masked(degree=DEGREE)
        state = folder / f"sites {time.monotonic_ns()}"
        with Cohort(
            LinearHead(FEATURES, CLASSES), records, state_dir=state, quorum=CLIENTS - 5, secure_sum=masked
        ) as cohort:
            for step in range(number + 1):
                began = time.perf_counter()
                run.release(
                    ReleaseKey("search", mechanism.name, step),
                    query.describe(),
                    mechanism,
                    quanta,
                    lambda attempt: cohort.sum(attempt, query, mechanism, Regime.DISTRIBUTED).pack(),
                    trust=cohort.trust(Regime.DISTRIBUTED),
                )
                made.append(Round(time.perf_counter() - began))
    return made[1:]


@dataclass(frozen=True)
class Cost:
    """Of one client: KB up and down, ms of its own and of the server's for it; bits of the ring."""

    found: Parameters
    bits: int
    up: float
    down: float
    client: float
    server: float


def cost(number: int) -> Cost:
    """What one of n clients is sent, sends and computes."""
    quorum, colluders = number - int(LOST * number), max(1, int(COLLUDERS * number))
    bits, found = ring_of(number, quorum, colluders), parameters(number, quorum, colluders)
    asked = session(number, quorum, colluders, None, bits)
    everybody, message = Members.of(range(number), number), np.arange(CANDIDATES)
    group = range(found.degree + 1)
    meter = _Meter()
    parties = [meter.timed(partial(Party, asked, each)) for each in group]
    keys = [meter.timed(party.advertise) for party in parties]
    rosters = [Roster(asked.digest, everybody, tuple(key for key in keys if key.sender != own)) for own in group]
    shares = [meter.timed(partial(party.share, rosters[party.number])) for party in parties]
    sealed = {each.sender: dict(each.sealed) for each in shares}
    parcels = [Parcel(asked.digest, tuple((n, sealed[n][own]) for n in group if n != own)) for own in group]
    inputs = [meter.timed(partial(party.mask, parcels[party.number], message)) for party in parties]
    survivors = Survivors(asked.digest, everybody)
    answers = [meter.timed(partial(party.unmask, survivors)) for party in parties]
    began, opened = time.process_time(), 0
    for owner in list(group)[:8]:
        held = [(index, share) for each in answers for of, index, share in each.seeds if of == owner]
        seed = primitives.combine(held[: found.threshold])
        primitives.self_mask(seed, asked.digest, owner, CANDIDATES, bits)
        opened += 1
    server = (time.process_time() - began) / opened
    up = wire(keys[0]) + wire(shares[0]) + wire(inputs[0]) + wire(answers[0])
    down = wire(rosters[0]) + wire(parcels[0]) + wire(survivors)
    return Cost(found, bits, up / 1e3, down / 1e3, meter.seconds / len(group) * 1e3, server * 1e3)


class _Meter:
    """Adds up processor time."""

    seconds = 0.0

    def timed(self, call: Callable[[], T]) -> T:
        began = time.process_time()
        answer = call()
        self.seconds += time.process_time() - began
        return answer


def wire(message: Any) -> int:
    """Bytes of a message: its bytes, and 4 for a number."""
    if isinstance(message, bytes):
        return len(message)
    if isinstance(message, int):
        return 4
    if isinstance(message, tuple):
        return sum(map(wire, message))
    if is_dataclass(message):
        return sum(wire(getattr(message, each.name)) for each in fields(message))
    raise TypeError(type(message).__name__)


def flower(python: Path, found: Parameters, rounds: int) -> Sequence[float]:
    """Seconds of Flower's SecAgg+ rounds on the same vector, degree and threshold, the first left out."""
    script = Path(__file__).with_name("flower_secagg.py")
    words = [CLIENTS, CANDIDATES, found.degree + 1, found.threshold, rounds + 1, machine.cores()]
    with tempfile.TemporaryDirectory(prefix="dpf") as folder:
        environment = {**os.environ, "FLWR_HOME": folder, "FLWR_TELEMETRY_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        done = subprocess.run(
            [str(python), str(script), *map(str, words)],
            check=True,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return seconds


def report(python: Path | None, patience: float) -> None:
    """Measure and print."""
    found = parameters(CLIENTS, CLIENTS - 5, 1, DEGREE)
    phases: dict[int, list[float]] = {lost: [] for lost in (0, 5)}
    runs = {lost: Contestant(f"{lost} lost", partial(_sums, CLIENTS - 5, lost, phases[lost])) for lost in phases}
    race(list(runs.values()), rounds=3, wanted=3, cycles=6, patience=patience)
    print(f"## Masked sum: {CLIENTS} clients, p = {CANDIDATES}, degree {found.degree}, threshold {found.threshold}\n")
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(f"- {line}" for line in machine.describe(Path(folder))))
    print("- seconds of the work of all clients and the server, one after the other, in one process; no network")
    print("- quiet bursts: others used at most 0.25 cores meanwhile; only they count where there are three\n")
    print("| | whole sum, s (best) | keys | shares | masked inputs | unmasking, sum | quiet bursts |")
    print("|---|---|---|---|---|---|---|")
    for lost, run in runs.items():
        timing = run.timing()
        parts = " | ".join(f"{part:.2f}" for part in phases[lost])
        print(f"| {lost} lost after sharing | {_seconds(timing)} | {parts} | {timing.quiet} of {timing.bursts} |")
    pair = [Contestant("Ray", votes_on_ray)]
    if python is not None:
        pair.append(Contestant("Flower", lambda k: [Round(each) for each in flower(python, found, k)]))
    race(pair, rounds=3, wanted=1, cycles=2, patience=patience)
    timing = pair[0].timing()
    print(
        f"| a cohort's vote on Ray, journals, ledger | {_seconds(timing)} | | | | | {timing.quiet} of {timing.bursts} |"
    )
    ours = timing.seconds
    if python is not None:
        timing = pair[1].timing()
        print(
            f"| Flower's SecAgg+ workflow, a round | {_seconds(timing)} | | | | | {timing.quiet} of {timing.bursts} |"
        )
        print(f"\nA round of Flower takes {timing.seconds / ours:.1f} times as long as a vote on Ray (bound: longer).")
    worst = max(ours, *(run.timing().seconds for run in runs.values()))
    print(f"\nBound: {BOUND:g} s; {'held' if worst <= BOUND else 'NOT HELD'}.\n")
    print(f"## Cost of each client: p = {CANDIDATES}, {LOST:.0%} may be lost, {COLLUDERS:.0%} collude\n")
    costs()


def costs() -> None:
    """Print what a client costs as the cohort grows: a sample of clients, the whole of them would take half an hour."""
    print("One client and its neighbours are run, in a session of all n; the best of three runs. Processor time.\n")
    columns = [
        "clients",
        "degree",
        "/ log₂ n",
        "threshold",
        "ring",
        "KB up",
        "KB down",
        "client, ms",
        "server for it, ms",
    ]
    print("| " + " | ".join([*columns, "exposed", "stuck"]) + " |")
    print("|---" * 11 + "|")
    for number in SIZES:
        runs = [cost(number) for _ in range(3)]
        each, found = runs[0], runs[0].found
        client, server = min(run.client for run in runs), min(run.server for run in runs)
        graph = f"{found.degree} | {found.degree / math.log2(number):.1f} | {found.threshold} | {each.bits}"
        work = f"{each.up:.1f} | {each.down:.1f} | {client:.1f} | {server:.1f}"
        print(f"| {number} | {graph} | {work} | {found.exposed:.0e} | {found.stuck:.0e} |", flush=True)


def _seconds(timing: Timing) -> str:
    return f"{timing.seconds:.2f} ({timing.best:.2f})"


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description="The masked sum, whole and by client.")
    parser.add_argument("--flower", type=Path, help="a Python that has Flower")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--only", choices=["cost"], help="cost: of each client, against n")
    given = parser.parse_args()
    if given.only == "cost":
        costs()
    else:
        report(given.flower, given.patience)


if __name__ == "__main__":
    main()
