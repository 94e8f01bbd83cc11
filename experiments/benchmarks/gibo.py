"""All figures of DP-GIBO in one run: `python -m dpray.experiments.benchmarks.gibo`.

The design of a batch (`gibo_design`), the curator's release (`gibo_release`), evaluations through Tune (`gibo_trials`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpray.experiments.benchmarks import gibo_design, gibo_release, gibo_trials, machine


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.benchmarks.gibo")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--large", action="store_true", help="the joint design at d = 103, too (minutes, for Adam)")
    parser.add_argument(
        "--patience", type=float, default=0.0, metavar="S", help="wait up to S seconds before a burst for quiet"
    )
    asked = parser.parse_args(arguments)
    design = replace(gibo_design.QUICK if asked.quick else gibo_design.FULL, patience=asked.patience)
    release = replace(gibo_release.QUICK if asked.quick else gibo_release.FULL, patience=asked.patience)
    with tempfile.TemporaryDirectory() as folder:
        print(*(f"- {line}" for line in machine.describe(Path(folder))), "", sep="\n")
    print(*gibo_design.again(design), "", *gibo_design.joint(design), "", sep="\n", flush=True)
    if asked.large:
        print(*gibo_design.joint(replace(gibo_design.LARGE, patience=asked.patience)), "", sep="\n", flush=True)
    print(*gibo_release.rows(release), "", sep="\n", flush=True)
    print(*gibo_trials.rows(gibo_trials.QUICK if asked.quick else gibo_trials.FULL), sep="\n")


if __name__ == "__main__":
    main()
