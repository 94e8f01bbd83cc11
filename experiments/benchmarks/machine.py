"""What a figure was measured on: processor, memory, versions, and how long a durable write takes there."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

_WRITES = 100


def describe(folder: Path) -> list[str]:
    """Lines about this machine; `folder` is where the benchmark keeps ledger and journals."""
    blas = next(
        (each for each in threadpool_info() if each["user_api"] == "blas" and "numpy" in each["filepath"]), None
    )
    words = (
        "BLAS unknown"
        if blas is None
        else f"{blas['internal_api']} {blas['version']} ({blas['num_threads']} threads by default)"
    )
    median, best = durable_write(folder)
    return [
        f"{cores()} cores, {_processor()}, {_memory():.0f} GB, {platform.system()} {platform.release()}",
        f"Python {sys.version.split()[0]}, NumPy {np.__version__}, {words}, Ray {version('ray')}",
        f"a 4 KiB write made durable (fdatasync) takes {median * 1e3:.2f} ms here (best {best * 1e3:.2f} ms)",
    ]


def cores() -> int:
    """Cores of this machine."""
    return os.cpu_count() or 1


def durable_write(folder: Path) -> tuple[float, float]:
    """(median, best) seconds to append 4 KiB and have it on disk."""
    path, seconds = folder / "durable", []
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        for place in range(_WRITES):
            os.pwrite(handle, b"d" * 4096, place * 4096)
            began = time.perf_counter()
            os.fsync(handle)
            seconds.append(time.perf_counter() - began)
    finally:
        os.close(handle)
        path.unlink()
    return float(np.median(seconds)), min(seconds)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> float:
    """Gigabytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
