"""Folders with real data, where a machine has them."""

import os
from pathlib import Path

import pytest

from dpray.experiments.papers.dp_gibo.data import CT_FILES

_SHARED = Path(__file__).resolve().parents[4].parent / "shared" / "data"


def _folder(name: str) -> Path:
    places = [Path(given) for given in [os.environ.get("DPRAY_DATA")] if given] + [_SHARED]
    for place in places:
        if (place / name).is_file():
            return place
    pytest.skip(f"{name} is neither in DPRAY_DATA nor in {_SHARED}")


@pytest.fixture
def uci_folder() -> Path:
    """Folder of the UCI regressions."""
    return _folder("uci_regression_fallback.npz")


@pytest.fixture
def ct_folder() -> Path:
    """Folder of the part of the CT slices."""
    return _folder(CT_FILES[1])
