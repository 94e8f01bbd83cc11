"""The vote of a million clients on one machine, with flat memory: seconds and peak memory against n.

    python -m dpray.experiments.benchmarks.hype_scale [--clients 10000 100000 1000000] [--cohort 10000 100000 1000000]

| contestant | what is done                                                                                          |
|------------|-------------------------------------------------------------------------------------------------------|
| streamed   | clients in blocks: ballots, `to_grid`, shares of `NoiseSource.draw` for n_min = n, exact sums (`add`),  |
|            | and the same sum in the ring of a masked sum, which has to agree                                      |
| cohort     | `Cohort` and ledger: charge, every client's ballot and share on two actors, journals on disk, store   |

The stream holds one block whatever n is. A cohort knows its clients: names, private seeds and a journal's row for each
of them are what its memory and files grow by, and a release commits to all names.

Before a ballot is made: σ_share/g ≥ 8 (`calibrate` refuses less) and a ring that the sum of all n cannot wrap
(`ring_bits`). Afterwards: Σ_j noise_j²/σ_S² of the p counts is χ²_p for the σ_S that was stated; both tails together
raise a false alarm in one run of 10⁶, and half the noise (p = 100) goes unnoticed about as rarely.

Each number of clients is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.stats import chi2

from dpray.experiments.benchmarks import machine
from dpray.experiments.benchmarks.measure import watched_pss
from dpray.platform.cohort.masked.ring import decode, encode, largest_sum, ring_bits
from dpray.platform.cohort.secure_sum import add
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.mechanisms import Regime, TopKVotes, Unit
from dpray.platform.privacy.noise import GridNoise, IntArray, NoiseSource, from_grid, to_grid

SIZES = (10_000, 100_000, 1_000_000)
CANDIDATES, VOTES = 100, 5
BUDGET = Budget(1.0, 1e-5)
BLOCK = 1 << 13
"""Clients that are in memory at once."""
FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class Vote:
    """A noisy vote and what is known of it, because its clients are made up.

    Attributes:
        total, counts: sum with noise in steps of the grid, and without in votes, (p,).
        noise: as calibrated, for n_min = n.
    """

    total: IntArray
    counts: IntArray
    noise: GridNoise

    @property
    def chi_square(self) -> float:
        """Σ_j noise_j²/σ_S²."""
        error = from_grid(self.total, self.noise.grid) - self.counts
        return float(np.sum(error**2)) / self.noise.std(self.noise.noisers) ** 2

    @property
    def alarm(self) -> bool:
        """Whether the noise is not what is stated, by a two-sided test at `FALSE_ALARM`."""
        degrees = len(self.counts)
        tails = chi2.cdf(self.chi_square, degrees), chi2.sf(self.chi_square, degrees)
        return bool(min(tails) < FALSE_ALARM / 2)


def streamed(
    clients: int, *, mu: float, block: int = BLOCK, grid: float | None = None, source: NoiseSource | None = None
) -> Vote:
    """The vote of so many clients, block by block.

    Args:
        clients: n, and n_min.
        mu: of the release.
        block: clients in memory at once.
        grid: coarser than the default; refused where a client's share of the noise would be rounded away.
        source: of noise; None: the operating system's.

    Raises:
        ValueError: σ_share/g < 8. CohortError: no ring is large enough. Before anything is drawn.
    """
    noise = TopKVotes(VOTES, CANDIDATES).noise(mu, noisers=clients, grid=grid)
    bits = _ring(clients, noise)
    source, public = source or NoiseSource(), np.random.default_rng(0)
    total = counts = np.zeros(CANDIDATES, dtype=np.int64)
    masked = encode(total, bits)
    for start in range(0, clients, block):
        ballots = _ballots(min(block, clients - start), public)
        rows = to_grid(ballots, noise.grid) + source.draw(noise, ballots.shape, "vote", start)
        masked = masked + encode(rows.sum(axis=0), bits)
        total, counts = add([total, rows.sum(axis=0)], CANDIDATES), counts + ballots.sum(axis=0)
    if not np.array_equal(decode(masked, bits), total):
        raise ArithmeticError("The sum in the ring is not the sum: it has wrapped around.")
    return Vote(total, counts, noise)


def _ring(clients: int, noise: GridNoise) -> int:
    """Bits of the smallest ring that the sum of all ballots and shares cannot wrap around in."""
    return ring_bits(largest_sum(clients, noise.share, noise.grid, clients))


def _ballots(clients: int, generator: np.random.Generator) -> IntArray:
    """Ballots with k ones each, (clients, p): low indices are liked better."""
    liking = generator.random((clients, CANDIDATES)) - np.arange(CANDIDATES) / (4 * CANDIDATES)
    ballots = np.zeros((clients, CANDIDATES), dtype=np.int64)
    np.put_along_axis(ballots, np.argpartition(-liking, VOTES, axis=1)[:, :VOTES], 1, axis=1)
    return ballots


@dataclass(frozen=True)
class Measured:
    """One number of clients: seconds of the vote; peak memory in GB, by process and of this one; the vote's facts."""

    clients: int
    seconds: float
    pss: dict[str, float]
    rss: float
    files: float
    bits: int
    share_to_grid: float
    residual: float
    chi_square: float
    alarm: bool


def measure(clients: int) -> Measured:
    """The streamed vote."""
    began = time.perf_counter()
    with watched_pss() as largest:
        vote = streamed(clients, mu=BUDGET.mu)
    seconds = time.perf_counter() - began
    return _measured(clients, seconds, largest, 0.0, vote.noise, vote)


def measure_cohort(clients: int) -> Measured:
    """The same by a cohort of virtual clients, and a ledger. They have no scores, and vote at random."""
    from dpray.experiments.benchmarks.pool import local_ray
    from dpray.platform.cohort import Cohort, Records, Votes
    from dpray.platform.privacy.ledger import Ledger, ReleaseKey
    from dpray.trainers.models import LinearHead

    mechanism, query = TopKVotes(VOTES, CANDIDATES), Votes("search", CANDIDATES, VOTES)
    x, y = np.zeros((clients, 1)), np.zeros(clients)
    shards = {f"{i:07d}": Records(x[i : i + 1], y[i : i + 1]) for i in range(clients)}
    with local_ray(2**28) as folder, Ledger(f"sqlite:///{folder}/ledger.db") as ledger:
        population = ledger.population("people")
        population.account(Unit.CLIENT, BUDGET)
        run, regime = population.run("vote"), Regime.DISTRIBUTED
        with watched_pss() as largest, Cohort(LinearHead(1, 2), shards, state_dir=folder / "sites", actors=2) as cohort:
            cohort.start()
            began = time.perf_counter()
            run.release(
                ReleaseKey("search", mechanism.name, 0),
                query.describe(),
                mechanism,
                BUDGET.quanta,
                lambda attempt: cohort.sum(attempt, query, mechanism, regime).pack(),
                trust=cohort.trust(regime),
            )
            seconds = time.perf_counter() - began
            noise = cohort.noise_for(mechanism, BUDGET.mu, regime)
        files = sum(path.stat().st_size for path in Path(folder).rglob("*.db*") if path.is_file()) / 1e9
    return _measured(clients, seconds, largest, files, noise, None)  # what was voted stays with the clients


def _measured(
    clients: int, seconds: float, pss: dict[str, float], files: float, noise: GridNoise, vote: Vote | None
) -> Measured:
    return Measured(
        clients=clients,
        seconds=seconds,
        pss=pss,
        rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        files=files,
        bits=_ring(clients, noise),
        share_to_grid=noise.share / noise.grid,
        residual=noise.residual_delta,
        chi_square=float("nan") if vote is None else vote.chi_square,
        alarm=vote is not None and vote.alarm,
    )


def _apart(kind: str, clients: int) -> Measured:
    """In a fresh process, so that nothing else is in its memory."""
    words = [sys.executable, "-m", "dpray.experiments.benchmarks.hype_scale", "--one", kind, str(clients)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def report(streams: list[int], cohorts: list[int]) -> None:
    """Measure and print."""
    print(f"## A vote of many clients: p = {CANDIDATES}, k = {VOTES}, {BUDGET}, n_min = n\n")
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(f"- {line}" for line in machine.describe(Path(folder))))
    print(f"- streamed in blocks of {BLOCK} clients; peak memory of all processes (PSS) and of this one (RSS), GB")
    print("- χ² of the noise against its stated std; expected: p, alarm once in 10⁶ runs\n")
    print(
        "| | clients | s | µs a client | PSS, GB | RSS, GB | files, GB | ring | σ_share/g | residual δ | χ² | noise |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for kind, sizes in (("streamed", streams), ("cohort", cohorts)):
        for clients in sizes:
            each = _apart(kind, clients)
            seen = "" if np.isnan(each.chi_square) else f"{each.chi_square:.0f}"
            said = "" if not seen else "NOT AS STATED" if each.alarm else "as stated"
            print(
                f"| {kind} | {clients} | {each.seconds:.2f} | {each.seconds / clients * 1e6:.1f} | "
                f"{sum(each.pss.values()):.2f} | {each.rss:.2f} | {each.files:.2f} | {each.bits} bits | "
                f"{each.share_to_grid:.0f} | {each.residual:.0e} | {seen} | {said} |",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description="The vote of many clients: seconds and memory.")
    parser.add_argument("--clients", type=int, nargs="*", default=list(SIZES), help="streamed")
    parser.add_argument("--cohort", type=int, nargs="*", default=[], help="through a cohort of virtual clients")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        kind, clients = given.one
        print(json.dumps(asdict((measure if kind == "streamed" else measure_cohort)(int(clients)))))
        return
    report(given.clients, given.cohort)


if __name__ == "__main__":
    main()
