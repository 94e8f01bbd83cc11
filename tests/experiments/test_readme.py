"""The examples in the README run as they stand there, in a fresh folder; so do the programs it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(text: str) -> list[str]:
    return BLOCK.findall(text)


def ran(folder: Path, *command: str) -> str:
    environment = {**os.environ, "HOME": str(folder), "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.timeout(600)
def test_the_examples_run(tmp_path):
    blocks = examples(README.read_text(encoding="utf-8"))
    assert len(blocks) >= 3, "The README shows a search, a training, and a search where a curator is trusted."
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    ran(tmp_path, "readme.py")


@pytest.mark.timeout(600)
def test_ones_own_task_spends_its_budget_and_comes_near_the_truth(tmp_path):
    said = ran(tmp_path, "-m", "dpray.experiments.examples.own_task")
    theta = [float(number) for number in re.search(r"θ = \[(.*?)\]", said)[1].split()]
    assert theta == pytest.approx(
        [1.0, -2.0, 0.5], abs=0.3
    )  # noise alone: std .05 a step, and half of what is left is undone
    assert "spent ε = 3.00" in said


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\nb\n```bash\nls\n```\n```python\ny = 2\n```\n"
    assert examples(text) == ["x = 1\n", "y = 2\n"]
