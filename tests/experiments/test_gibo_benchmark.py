"""The benchmark of DP-GIBO runs. Nothing here is timed."""

import subprocess
import sys

import pytest

from dpray.experiments.benchmarks import gibo_design, gibo_release


@pytest.mark.slow
def test_quick_run_prints_every_table():
    command = [sys.executable, "-m", "dpray.experiments.benchmarks.gibo", "--quick"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    for name in (gibo_release.PRODUCT, gibo_release.RELEASE, gibo_release.SOLVES, gibo_design.JOINT):
        assert f"| {name} | " in printed
    assert "| all 1 iterations are released. |" in printed
