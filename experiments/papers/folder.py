"""Where real data is on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from dpray.platform.datasets import DatasetMissing

_SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def data_folder() -> Path:
    """Where real data is: DPRAY_DATA, else `../shared/data` beside the checkout.

    Raises:
        DatasetMissing: neither is a folder.
    """
    named = os.environ.get("DPRAY_DATA")
    folder = Path(named).expanduser() if named else _SHARED
    if not folder.is_dir():
        raise DatasetMissing(f"The real data is not here: {folder} is no folder. Name its folder in DPRAY_DATA.")
    return folder
