"""All figures of DP-HYPE's local search in one run: `python -m dpray.experiments.benchmarks.hype`.

| part   | question                                                                     | bound                 |
|--------|------------------------------------------------------------------------------|-----------------------|
| client | 100 candidates on an Adult-sized client, against the plain loop over them    | ≥ 4.5 × (MLP, 1 core) |
|        | the same by `torch.func`, for any module                                     | ≥ 3.5 ×               |
|        | the same MLP in two processes, on two cores                                  | ≥ 9 ×                 |
| vote   | a whole vote on Adult, 100 clients, 10 000 local models, through Tune        | ≤ 90 s                |
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpray.experiments.benchmarks import hype_client, hype_vote, machine

PARTS = ("client", "vote")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.benchmarks.hype")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part only; may be repeated")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with adult.npz; left out: DPRAY_DATA")
    parser.add_argument(
        "--patience", type=float, default=0.0, metavar="S", help="wait up to S seconds before a burst for quiet"
    )
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(*(f"- {line}" for line in machine.describe(Path(folder))), "", sep="\n")
    parts = asked.only or PARTS
    if "client" in parts:
        size = replace(hype_client.QUICK if asked.quick else hype_client.FULL, patience=asked.patience)
        print(*hype_client.rows(size), "", sep="\n", flush=True)
    if "vote" in parts:
        print(*hype_vote.rows(hype_vote.QUICK if asked.quick else hype_vote.FULL, asked.data), sep="\n", flush=True)


if __name__ == "__main__":
    main()
