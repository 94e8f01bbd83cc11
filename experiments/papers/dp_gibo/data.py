"""Real regression data of the kernel SVR experiment: some records to train on, some people to validate on.

| name           | records   | features | from                                                             |
|----------------|-----------|----------|------------------------------------------------------------------|
| ct_slices      | 53 500    | 384      | `slice_localization_data.csv` of UCI, or a part of it as `.npz`  |
| gas, keggundirected, protein, … | | | `dpray.platform.datasets`                                        |

Features and targets are brought to mean 0 and standard deviation 1 by the *training* records, which are public here: a
user's loss depends on that user's record and public constants only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.datasets import DatasetDamaged, DatasetMissing, load

FloatArray = NDArray[np.float64]

CT_SLICES = "ct_slices"
CT_FILES = ("slice_localization_data.csv", "ct_slice_partial_682rows_2patients.npz")
"""The whole data set as UCI publishes it, and a part of it, which is used where the whole is not there."""
_CT_FEATURES = 384
_CT_HELP = (
    "Get slice_localization_data.csv from https://archive.ics.uci.edu/dataset/206 and name its folder in DPRAY_DATA."
)


@dataclass(frozen=True, eq=False)
class Split:
    """Records in two parts, scaled by the first.

    Attributes:
        x_train, y_train: public, (m, f) and (m,).
        x_users, y_users: one record per validation user, (n, f) and (n,).
        source: where it is from.
    """

    x_train: FloatArray
    y_train: FloatArray
    x_users: FloatArray
    y_users: FloatArray
    source: str


def regression(
    name: str, *, features: int, train: int = 1_000, users: int = 9_000, seed: int = 0, folder: Path | str | None = None
) -> Split:
    """A split of a named data set, drawn by a public seed.

    Args:
        name: `ct_slices`, or a regression of `dpray.platform.datasets`.
        features: f: the first so many columns that are not constant over the training records.
        train: m.
        users: n at most; fewer where the data has fewer records.
        seed: of the split.
        folder: where the file is; None: the environment variable DPRAY_DATA.

    Raises:
        DatasetMissing, DatasetDamaged: as `dpray.platform.datasets.load`.
        ValueError: more features or records are asked for than there are.
    """
    x, y, source = ct_slices(folder) if name == CT_SLICES else _of_the_platform(name, folder)
    if len(x) <= train:
        raise ValueError(f"{name} has {len(x)} records, and {train} of them were to train on: ask for fewer.")
    order = np.random.default_rng([seed, 206]).permutation(len(x))
    first, second = order[:train], order[train : train + users]
    center, spread = x[first].mean(axis=0), x[first].std(axis=0)
    use = np.flatnonzero(spread > 1e-9 * np.maximum(1.0, np.abs(center)))[:features]
    if len(use) < features:
        raise ValueError(f"{name} has {len(use)} features that vary, and {features} were asked for.")
    scaled = (x[:, use] - center[use]) / spread[use]
    level, unit = y[first].mean(), y[first].std()
    targets = (y - level) / unit
    return Split(scaled[first], targets[first], scaled[second], targets[second], source)


def ct_slices(folder: Path | str | None = None) -> tuple[FloatArray, FloatArray, str]:
    """Relative location of CT slices: 384 histogram features, target 0 … 180; (x, y, source).

    The column of patients is left out: a user here is a slice, as in the paper.

    Raises:
        DatasetMissing: neither file is in the folder.
        DatasetDamaged: the file is not what it must be; its text is never quoted.
    """
    given = folder if folder is not None else os.environ.get("DPRAY_DATA") or None
    if given is None:
        raise DatasetMissing(f"No folder was named for the CT slices. {_CT_HELP}")
    found = [path for path in (Path(given).expanduser() / name for name in CT_FILES) if path.is_file()]
    if not found:
        raise DatasetMissing(f"Neither {' nor '.join(CT_FILES)} is in {given}. {_CT_HELP}")
    path = found[0]
    try:
        x, y = _csv(path) if path.suffix == ".csv" else _archive(path)
    except Exception as error:  # whatever it is: its text may hold what stands in a record
        raise DatasetDamaged(
            f"{path} is not the CT slices as UCI has them ({type(error).__name__}). {_CT_HELP}"
        ) from None
    if x.ndim != 2 or x.shape[1] != _CT_FEATURES or y.shape != (len(x),) or not np.isfinite(x).all():
        raise DatasetDamaged(f"{path} does not hold {_CT_FEATURES} finite features and one target a record. {_CT_HELP}")
    part = "" if path.suffix == ".csv" else f", a part of {len(x)} records only"
    return x, y, f"UCI CT slices (CC BY 4.0){part}"


def _csv(path: Path) -> tuple[FloatArray, FloatArray]:
    """Columns patientId, value0 … value383, reference."""
    import pandas as pd

    table = pd.read_csv(path)
    columns = [f"value{index}" for index in range(_CT_FEATURES)]
    return table[columns].to_numpy(dtype=np.float64), table["reference"].to_numpy(dtype=np.float64)


def _archive(path: Path) -> tuple[FloatArray, FloatArray]:
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["x"].astype(np.float64), arrays["y"].astype(np.float64)


def _of_the_platform(name: str, folder: Path | str | None) -> tuple[FloatArray, FloatArray, str]:
    data: Any = load(name, folder)
    if data.classes:
        raise ValueError(f"{name} has classes, and a regression is wanted.")
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    return x, y, f"{name} ({data.licence})"
