"""The README's examples run as they stand there, one after the other, in a fresh folder."""

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


@pytest.mark.timeout(600)
def test_the_examples_run(tmp_path):
    blocks = examples(README.read_text(encoding="utf-8"))
    assert len(blocks) >= 3, "The README shows a search, a training, and one's own data."
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    ended = subprocess.run(
        [sys.executable, "readme.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\nb\n```bash\nls\n```\n```python\ny = 2\n```\n"
    assert examples(text) == ["x = 1\n", "y = 2\n"]
