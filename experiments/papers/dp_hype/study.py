"""How often a good candidate wins: noisy votes against the winner alone, over (n, p, k, ε), and the bounds of both.

    python -m dpray.experiments.papers.dp_hype.study [--runs 500] [--seed 200] [--out dp_hype_results]

| symbol | meaning                                                                                       |
|--------|-----------------------------------------------------------------------------------------------|
| n, p, k | clients, candidates, votes of a client                                                       |
| q_j    | quality of candidate j: 0 for the good ones (5 %), between −3 and −1 for the others            |
| τ      | how much clients differ: client i likes candidate j by q_j + τ·N(0, 1)                         |
| γ      | votes by which the last good candidate leads the first bad one, in one run                     |
| ε, δ   | of the release alone; δ = 10⁻⁵                                                                |

| method            | release                                                                                       |
|-------------------|-----------------------------------------------------------------------------------------------|
| votes             | Gaussian votes, noise shared by all clients (n_min = n): the paper's                           |
| winner, same ε    | the winner alone, pure ε-DP with the ε that the votes have at δ                                |
| winner, same μ²   | the winner alone for the votes' share of an account: pure ε with 2Φ⁻¹(e^ε/(1+e^ε)) = μ         |

Ballots are made up and the same for all methods and ε of a run; noise is calibrated by the product's mechanisms and
seeded. The bound of a method is the mean over runs of 1 − its failure bound at that run's γ.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.mechanisms import (
    TopKVotes,
    VoteWinner,
    vote_failure_bound,
    winner_failure_bound,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]

CLIENTS = (50, 100, 250)
CANDIDATES = (20, 100)
VOTES = (1, 5, 25)
EPSILONS = (0.1, 0.25, 0.5, 1.0, 3.0)
DELTA = 1e-5
AGREE, DIFFER = 0.5, 2.0
"""τ of clients that agree, and of clients that differ."""
METHODS = ("votes", "winner, same ε", "winner, same μ²")
NO_NOISE = "no noise"
CONFIDENCE = 0.95
SHOWN = [(tau, n, 5) for tau in (AGREE, DIFFER) for n in CLIENTS] + [(DIFFER, 100, 1), (DIFFER, 100, 25)]
"""τ, n and k in the text; the plot has the same."""
NOTE = "data: synthetic; seeded noise, NOT PRIVATE"


@dataclass(frozen=True)
class Row:
    """A line of the CSV: `success` of `runs` with its 95 % limits, and `bound`, below which it should not be."""

    n: int
    p: int
    k: int
    tau: float
    epsilon: float
    method: str
    runs: int
    success: float
    low: float
    high: float
    bound: float
    lead: float


def good_of(p: int) -> int:
    """Number of good candidates: one in twenty."""
    return max(1, p // 20)


def counts_of(n: int, p: int, ks: Sequence[int], tau: float, runs: int, seed: int) -> dict[int, FloatArray]:
    """Votes without noise by k, (runs, p); good candidates first."""
    generator = np.random.default_rng([seed, n, p, round(1000 * tau)])
    good = good_of(p)
    quality = np.concatenate([np.zeros(good), np.linspace(-1.0, -3.0, p - good)])
    counts = {k: np.zeros((runs, p)) for k in ks}
    for run in range(runs):
        order = np.argsort(-(quality + tau * generator.standard_normal((n, p))), axis=1)
        for k in ks:
            counts[k][run] = np.bincount(order[:, :k].ravel(), minlength=p)
    return counts


def rows_of(n: int, p: int, k: int, tau: float, counts: FloatArray, seed: int) -> Iterator[Row]:
    """Every method at every ε, on the same votes."""
    runs, good = len(counts), good_of(p)
    leads = counts[:, :good].min(axis=1) - counts[:, good:].max(axis=1)
    generator = np.random.default_rng([seed, n, p, k, round(1000 * tau), 1])

    def row(epsilon: float, method: str, noise: FloatArray, failures: Sequence[float]) -> Row:
        tied = counts + 1e-9 * generator.random(counts.shape)  # random ties, where there is no noise
        right = int(np.count_nonzero(np.argmax(tied + noise, axis=1) < good))
        low, high = _limits(right, runs)
        bound = 1 - float(np.mean(failures))
        return Row(n, p, k, tau, epsilon, method, runs, right / runs, low, high, bound, float(np.mean(leads)))

    yield row(math.inf, NO_NOISE, np.zeros_like(counts), [0.0 if lead > 0 else 1.0 for lead in leads])
    for epsilon in EPSILONS:
        mu = Budget(epsilon, DELTA).mu
        sigma = TopKVotes(k, p).noise(mu, noisers=n).std(n)
        failures = [vote_failure_bound(lead, sigma, p - good) for lead in leads]
        yield row(epsilon, METHODS[0], generator.normal(0.0, sigma, counts.shape), failures)
        winner = VoteWinner(k, p)
        for method, pure in zip(METHODS[1:], (epsilon, winner.epsilon_of(mu)), strict=True):
            scale = winner.scale(pure)
            failures = [winner_failure_bound(lead, scale, p - good, good) for lead in leads]
            yield row(epsilon, method, generator.gumbel(0.0, scale, counts.shape), failures)


def study(runs: int, seed: int) -> list[Row]:
    """All of it."""
    found = []
    for tau in (AGREE, DIFFER):
        for p in CANDIDATES:
            ks = [k for k in VOTES if k < p]
            for n in CLIENTS:
                for k, counts in counts_of(n, p, ks, tau, runs, seed).items():
                    found += list(rows_of(n, p, k, tau, counts, seed))
    return found


def _limits(count: int, runs: int) -> tuple[float, float]:
    """Clopper-Pearson limits of a rate."""
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, runs - count + 1))
    return low, 1.0 if count == runs else float(beta.isf(tail, count + 1, runs - count))


def write(rows: Sequence[Row], place: Path) -> None:
    """The CSV."""
    with place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = dataclasses.asdict(row)
            writer.writerow(
                {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in cells.items()}
            )


def written(rows: Sequence[Row]) -> str:
    """Markdown: success of each method at p = 100, with what its bound promises."""
    runs = rows[0].runs
    lines = [
        "### Who wins a noisy vote",
        "",
        f"{NOTE}. p = 100 candidates, 5 of them good; {runs} runs a line; success [95 % limits], and in italics what",
        "the bound promises at least. ε of the release alone (votes at δ = 10⁻⁵). All of it, p = 20 too: `study.csv`.",
        "",
        f"| clients | n | k | ε | lead | no noise | {' | '.join(METHODS)} |",
        "|---" * (6 + len(METHODS)) + "|",
    ]
    for tau, n, k in SHOWN:
        own = [row for row in rows if _at(row, n, k, tau)]
        exact = next(row for row in own if row.method == NO_NOISE)
        for epsilon in (0.25, 1.0, 3.0):
            at = {row.method: row for row in own if row.epsilon == epsilon}
            cells = " | ".join(_cell(at[method]) for method in METHODS)
            said = "agree" if tau == AGREE else "differ"
            lines.append(f"| {said} | {n} | {k} | {epsilon:g} | {exact.lead:.0f} | {exact.success:.2f} | {cells} |")
    return "\n".join(lines) + "\n"


def _at(row: Row, n: int, k: int, tau: float) -> bool:
    return (row.n, row.p, row.k, row.tau) == (n, 100, k, tau)


def _cell(row: Row) -> str:
    return f"{row.success:.2f} [{row.low:.2f}, {row.high:.2f}] *{max(row.bound, 0.0):.2f}*"


_COLOURS = dict(zip(METHODS, ("tab:blue", "tab:orange", "tab:green"), strict=True))


def draw(rows: Sequence[Row], place: Path) -> None:
    """Success over ε: by n for clients that agree and that differ (k = 5), and by k (n = 100)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 3, sharex=True, sharey=True)
    for column, n in enumerate(CLIENTS):
        _panel(panels[0][column], rows, n, 5, AGREE, f"clients agree, n = {n}, k = 5")
        _panel(panels[1][column], rows, n, 5, DIFFER, f"clients differ, n = {n}, k = 5")
    for column, k in enumerate(VOTES):
        _panel(panels[2][column], rows, 100, k, DIFFER, f"clients differ, n = 100, k = {k}")
    panels[0][0].legend(fontsize=8, loc="lower right")
    for line in panels:
        line[0].set_ylabel("a good candidate wins", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("ε of the release alone", fontsize=8)
    figure.suptitle(f"p = 100, 5 good; dashed: bounds; grey: no noise, and a random candidate. {NOTE}", fontsize=10)
    figure.savefig(place, dpi=110)


def _panel(axes: Axes, rows: Sequence[Row], n: int, k: int, tau: float, title: str) -> None:
    own = [row for row in rows if _at(row, n, k, tau)]
    for method in METHODS:
        line = sorted((row for row in own if row.method == method), key=lambda row: row.epsilon)
        x, colour = [row.epsilon for row in line], _COLOURS[method]
        axes.plot(x, [row.success for row in line], "o-", color=colour, markersize=3, linewidth=1.2, label=method)
        axes.fill_between(x, [row.low for row in line], [row.high for row in line], color=colour, alpha=0.15)
        axes.plot(x, [max(row.bound, 0.0) for row in line], "--", color=colour, linewidth=0.8)
    exact = next(row for row in own if row.method == NO_NOISE)
    axes.axhline(exact.success, color="grey", linewidth=0.8)
    axes.axhline(good_of(100) / 100, color="grey", linestyle=":", linewidth=0.8)
    axes.set(xscale="log", ylim=(-0.02, 1.02))
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    axes.set_title(f"{title}; lead {exact.lead:.0f}", fontsize=9)


def main(arguments: list[str] | None = None) -> int:
    """Simulate, and write CSV, text and plot."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.papers.dp_hype.study", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=500, help="elections of each size")
    parser.add_argument("--seed", type=int, default=200, help="of ballots and noise")
    parser.add_argument("--out", type=Path, default=Path("dp_hype_results"), help="folder of CSV, text and plot")
    given = parser.parse_args(arguments)
    if given.runs < 1 or given.seed < 0:
        parser.error("--runs is at least 1, and --seed at least 0")
    begun = time.monotonic()
    rows = study(given.runs, given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    write(rows, given.out / "study.csv")
    (given.out / "study.md").write_text(written(rows), encoding="utf-8")
    draw(rows, given.out / "study.png")
    print(written(rows))
    print(f"{time.monotonic() - begun:6.0f} s  done: {len(rows)} rows in {given.out / 'study.csv'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
