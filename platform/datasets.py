"""Real data by name: bundled with a dependency, or in a folder; features by public constants only.

| name           | task                         | from                                 | features             |
|----------------|------------------------------|--------------------------------------|----------------------|
| digits         | 10 digits, 8 × 8             | scikit-learn (a dependency)          | 64, / 16             |
| mnist          | 10 digits, 28 × 28           | `mnist.npz`, or torchvision's files  | 784, / 255           |
| adult          | income above 50 000          | `adult.npz`                          | 108, `ADULT_SCALES`  |
| cifar10        | 10 objects, frozen features  | `cifar10_jpeg_effnetlite0_rp256.npz` | 256, / 8             |
| cifar10_images | 10 objects, 32 × 32 colour   | torchvision's files                  | 3 072, / 255         |
| cifar10_jpeg   | 10 objects, 32 × 32 colour   | `cifar10_jpeg_full60k.npz`           | 3 072, / 255         |
| cifar10_jpeg16 | the same at 16 × 16          | `cifar10_jpeg_full60k.npz`           | 768, / 255           |
| pneumoniamnist | pneumonia, 28 × 28           | `pneumoniamnist_balanced.npz`        | 784, / 255           |
| pathmnist      | 9 tissues, 28 × 28 colour    | `pathmnist.npz`, as MedMNIST has it  | 2 352, / 255         |
| protein, keggundirected, bike, gas, parkinsons | regression | `uci_regression_fallback.npz` | 9 … 128, as they are |

A record becomes features through constants that were fixed without looking at the data it is in: what a pixel can be,
what a category list says, a round number for an amount. A scaler fitted on records would make each record's features
depend on all others.

Folder: the argument, else the environment variable DPRAY_DATA. What torchvision keeps and is not there, it is asked to
fetch, if it is installed: into the folder, or into `~/.cache/dpray/data` where none is named. PathMNIST is asked of the
package `medmnist`, if that is installed, which keeps it in its own folder. Nothing else is fetched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform import torchvision_files
from dpray.platform.torchvision_files import Unlike

FloatArray = NDArray[np.float64]

ADULT_SCALES: Mapping[str, float] = {
    "age": 100.0,
    "capital_gain": 100_000.0,
    "capital_loss": 5_000.0,
    "education_num": 16.0,
    "fnlwgt": 1_500_000.0,
    "hours_per_week": 100.0,
}
"""Public round numbers by which Adult's numeric columns are divided."""
_FETCHED = "~/.cache/dpray/data"
_CIFAR_SCALE = 8.0
_TEST_FOLD = 0
_UCI = ("protein", "keggundirected", "bike", "gas", "parkinsons")


class DatasetError(Exception):
    """A data set that cannot be had, in a sentence."""


class DatasetMissing(DatasetError):  # noqa: N818 - an outcome callers handle
    """The data set is not on this machine; the message says how to get it."""


class DatasetDamaged(DatasetError):  # noqa: N818 - an outcome callers handle
    """The file is there and is not what it must be."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in two parts.

    Attributes:
        name: as asked for.
        x_train, x_test: (n, f) float64 features.
        y_train, y_test: (n,) int64 classes, or float64 targets of a regression.
        classes: names of the classes by number; empty for a regression. Public by declaration.
        licence: of the data.
        notes: what a reader of results must know.
    """

    name: str
    x_train: FloatArray
    y_train: NDArray[Any]
    x_test: FloatArray
    y_test: NDArray[Any]
    classes: tuple[str, ...]
    licence: str
    notes: str

    @property
    def features(self) -> int:
        """f, number of features."""
        return int(self.x_train.shape[1])


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Attributes:
        read: from arrays to records.
        file: an archive in the data folder that holds the arrays.
        get: how to have it, in a sentence.
        torchvision: the class of torchvision whose files hold the arrays where there is no archive.
        fetch: its publisher's package to the folder that holds the file then, None where it cannot be had so.
    """

    read: Callable[[Mapping[str, NDArray[Any]]], Dataset]
    file: str | None = None
    get: str = ""
    torchvision: str | None = None
    fetch: Callable[[], Path | None] = lambda: None

    @property
    def bundled(self) -> bool:
        """Whether it comes with a dependency."""
        return self.file is None and self.torchvision is None

    @property
    def place(self) -> str:
        """What is looked for in the folder."""
        kept = None if self.torchvision is None else torchvision_files.READERS[self.torchvision][0]
        return " or ".join(each for each in (self.file, kept) if each is not None)


def names() -> tuple[str, ...]:
    """The data sets that `load` knows."""
    return tuple(_SOURCES)


def load(name: str, folder: Path | str | None = None) -> Dataset:
    """A data set by name.

    Args:
        name: one of `names()`.
        folder: where its file is; None: the environment variable DPRAY_DATA.

    Raises:
        DatasetMissing: an unknown name, no folder, or no such file in it; says how to get it.
        DatasetDamaged: the file is not what it must be.
    """
    source = _SOURCES.get(name)
    if source is None:
        raise DatasetMissing(f"There is no data set {name!r}; there are {', '.join(names())}.")
    if source.bundled:
        return source.read({})
    path = _found(name, source, folder)
    try:
        return source.read(_arrays(name, source, path))
    except Exception as error:  # whatever it is: its text and its frames may hold what stands in a record
        why = str(error) if isinstance(error, Unlike) else type(error).__name__
        raise DatasetDamaged(
            f"{path} is not the file that data set {name!r} is read from ({why}). {source.get}"
        ) from None


def _arrays(name: str, source: Source, path: Path) -> Mapping[str, NDArray[Any]]:
    if source.torchvision is not None and path.is_dir():
        return torchvision_files.READERS[source.torchvision][1](path)
    with np.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files if _needed(name, key)}


def _found(name: str, source: Source, folder: Path | str | None) -> Path:
    """The archive, or torchvision's folder, which torchvision is asked for if neither is there."""
    given = folder if folder is not None else os.environ.get("DPRAY_DATA") or None
    root, files = Path(given or _FETCHED).expanduser(), list[Path]()
    if source.file is not None and given is not None:
        files.append(root / source.file)
    if source.torchvision is not None:
        files.append(root / torchvision_files.READERS[source.torchvision][0])
    for path in files:
        if path.exists():
            return path
    if source.file is not None and (fetched := source.fetch()) is not None and (fetched / source.file).is_file():
        return fetched / source.file
    refused = None if source.torchvision is None else torchvision_files.download(source.torchvision, root)
    if source.torchvision is not None and refused is None:
        return files[-1]
    how = " ".join(sentence for sentence in (source.get, refused) if sentence)
    if given is None:
        raise DatasetMissing(
            f"Data set {name!r} is read from {source.place}, and no folder was named: set DPRAY_DATA to the folder "
            f"that holds it. {how}"
        )
    raise DatasetMissing(f"Data set {name!r} is read from {' or '.join(map(str, files))}, which is not there. {how}")


def _needed(name: str, key: str) -> bool:
    return name not in _UCI or key.startswith(f"{name}_")


def _digits(_: Mapping[str, NDArray[Any]]) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    test = np.arange(len(bunch.target)) % 5 == 0
    x, y = bunch.data / 16.0, bunch.target.astype(np.int64)
    return _dataset(
        "digits",
        (x[~test], y[~test], x[test], y[test]),
        tuple(str(digit) for digit in range(10)),
        "CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits; copy in scikit-learn)",
        "Every fifth record, by position, is the test set. Pixels 0 … 16 are divided by 16.",
    )


def _mnist(arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    return _dataset(
        "mnist",
        (_pixels(arrays["x_train"]), arrays["y_train"], _pixels(arrays["x_test"]), arrays["y_test"]),
        tuple(str(digit) for digit in range(10)),
        "CC BY-SA 3.0",
        "The canonical split of 60 000 and 10 000. Pixels 0 … 255 are divided by 255.",
    )


def _adult(arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    columns = [str(column) for column in arrays["columns"]]
    numeric = {str(column) for column in arrays["numeric"]}
    categories: dict[str, list[str]] = json.loads(str(arrays["categories_json"]))

    def features(codes: NDArray[Any]) -> FloatArray:
        parts = []
        for index, column in enumerate(columns):
            values = codes[:, index]
            if column in numeric:
                parts.append(values[:, None] / ADULT_SCALES[column])
            else:
                parts.append((values[:, None] == np.arange(len(categories[column]))).astype(np.float64))
        return np.concatenate(parts, axis=1)

    return _dataset(
        "adult",
        (features(arrays["x_train"]), arrays["y_train"], features(arrays["x_test"]), arrays["y_test"]),
        ("<=50K", ">50K"),
        "CC BY 4.0 (UCI)",
        "The canonical split of 32 561 and 16 281. '?' is a category of its own; numeric columns are divided by "
        "public round numbers; the category lists are public by declaration.",
    )


def _cifar(arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    x_train, x_test = (arrays[key].astype(np.float64) / _CIFAR_SCALE for key in ("f_train", "f_test"))
    return _dataset(
        "cifar10",
        (x_train, arrays["y_train"], x_test, arrays["y_test"]),
        tuple(str(label) for label in arrays["classes"]),
        "not stated: not to be redistributed",
        "CIFAR-10-JPEG: features of a frozen EfficientNet-Lite0 (ImageNet) on a lossy JPEG copy, projected to 256 by a "
        "data-independent Gaussian matrix. Not to be compared with published CIFAR-10 numbers. Divided by 8.",
    )


def _cifar_images(name: str, halved: bool) -> Callable[[Mapping[str, NDArray[Any]]], Dataset]:
    def read(arrays: Mapping[str, NDArray[Any]]) -> Dataset:
        from dpray.platform.jpeg import decoded

        x_train, x_test = (
            decoded(arrays[f"jpeg_{part}"], arrays[f"offsets_{part}"], 32, halved=halved) for part in ("train", "test")
        )
        return _dataset(
            name,
            (x_train, arrays["y_train"], x_test, arrays["y_test"]),
            tuple(str(label) for label in arrays["classes"]),
            "not stated: not to be redistributed",
            "CIFAR-10-JPEG: a lossy JPEG copy. Not to be compared with published CIFAR-10 numbers. Sorted by class. "
            f"Pixels 0 … 255 are divided by 255, channels first{', means of 2 × 2 pixels' if halved else ''}.",
        )

    return read


def _cifar_pixels(arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    return _dataset(
        "cifar10_images",
        (_pixels(arrays["x_train"]), arrays["y_train"], _pixels(arrays["x_test"]), arrays["y_test"]),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        "not stated by its publisher",
        "CIFAR-10 as published, 50 000 and 10 000. Pixels 0 … 255 are divided by 255, channels first.",
    )


def _medical(name: str, classes: tuple[str, ...], notes: str) -> Callable[[Mapping[str, NDArray[Any]]], Dataset]:
    """A file as MedMNIST has them: images (n, 28, 28) or (n, 28, 28, 3), labels (n, 1), in three parts."""

    def read(arrays: Mapping[str, NDArray[Any]]) -> Dataset:
        x_train = np.concatenate([_pixels(arrays["train_images"]), _pixels(arrays["val_images"])])
        y_train = np.concatenate([arrays["train_labels"], arrays["val_labels"]])
        return _dataset(
            name,
            (x_train, y_train.ravel(), _pixels(arrays["test_images"]), arrays["test_labels"].ravel()),
            classes,
            "CC BY 4.0 (MedMNIST v2)",
            f"{notes} Training and validation parts together are the training set. Pixels 0 … 255 are divided by 255.",
        )

    return read


def _by_medmnist() -> Path | None:
    """Folder in which the package `medmnist` has PathMNIST now; None if it is not installed, or could not get it."""
    try:
        from medmnist import PathMNIST
    except ImportError:
        return None
    try:
        return Path(PathMNIST(split="train", download=True).root)
    except Exception:  # no network, or no torchvision that fits torch: it says so in many ways
        return None


def _regression(name: str) -> Callable[[Mapping[str, NDArray[Any]]], Dataset]:
    def read(arrays: Mapping[str, NDArray[Any]]) -> Dataset:
        x, y = arrays[f"{name}_x"].astype(np.float64), arrays[f"{name}_y"].astype(np.float64)
        test = arrays[f"{name}_fold"] == _TEST_FOLD
        leak = " Its columns may give the target away." if name == "bike" else ""
        return _dataset(
            name,
            (x[~test], y[~test], x[test], y[test]),
            (),
            "CC BY 4.0 (UCI)",
            f"Fold {_TEST_FOLD} of 10 is the test set. Centred on the whole data set by its publisher, not scaled: the "
            f"means are taken as public constants.{leak}",
        )

    return read


def _pixels(images: NDArray[Any]) -> FloatArray:
    if images.dtype != np.uint8:
        raise Unlike(f"images are uint8, not {images.dtype}")
    return images.reshape(len(images), -1) / 255.0


def _dataset(
    name: str,
    parts: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]],
    classes: tuple[str, ...],
    licence: str,
    notes: str,
) -> Dataset:
    """Check shapes and labels, and put arrays into their types."""
    x_train, y_train, x_test, y_test = parts
    kind = np.int64 if classes else np.float64
    for x, y in ((x_train, y_train), (x_test, y_test)):
        if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or x.shape[1] != x_train.shape[1]:
            raise Unlike("features and labels do not belong together")
        if classes and len(y) and not (y.min() >= 0 and y.max() < len(classes)):
            raise Unlike(f"labels are outside 0 … {len(classes) - 1}")
    ready = [np.ascontiguousarray(x, dtype=np.float64) for x in (x_train, x_test)]
    return Dataset(name, ready[0], y_train.astype(kind), ready[1], y_test.astype(kind), classes, licence, notes)


_TISSUES = (
    "adipose",
    "background",
    "debris",
    "lymphocytes",
    "mucus",
    "smooth muscle",
    "normal colon mucosa",
    "cancer-associated stroma",
    "colorectal adenocarcinoma epithelium",
)
_BY_HAND = (
    "Get it from its publisher, convert it (dpray.platform.datasets shows each file's arrays), and name its folder."
)
_SOURCES: dict[str, Source] = {
    "digits": Source(_digits),
    "mnist": Source(
        _mnist,
        "mnist.npz",
        "Get it with `curl -O https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz` (11 MB).",
        "MNIST",
    ),
    "adult": Source(_adult, "adult.npz", f"It is UCI Adult (https://archive.ics.uci.edu/dataset/2). {_BY_HAND}"),
    "cifar10": Source(
        _cifar, "cifar10_jpeg_effnetlite0_rp256.npz", f"It holds features of CIFAR-10 by a public backbone. {_BY_HAND}"
    ),
    "cifar10_images": Source(
        _cifar_pixels,
        get="Unpack cifar-10-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html (163 MB) there.",
        torchvision="CIFAR10",
    ),
    **{
        name: Source(
            _cifar_images(name, halved),
            "cifar10_jpeg_full60k.npz",
            f"It holds CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html) as JPEG. {_BY_HAND}",
        )
        for name, halved in (("cifar10_jpeg", False), ("cifar10_jpeg16", True))
    },
    "pneumoniamnist": Source(
        _medical(
            "pneumoniamnist",
            ("normal", "pneumonia"),
            "A balanced undersample, not the official MedMNIST file.",
        ),
        "pneumoniamnist_balanced.npz",
        f"It is a part of MedMNIST (https://medmnist.com). {_BY_HAND}",
    ),
    "pathmnist": Source(
        _medical("pathmnist", _TISSUES, "The test part is from another hospital than the training part."),
        "pathmnist.npz",
        "Get it with `curl -Lo pathmnist.npz 'https://zenodo.org/records/10519652/files/pathmnist.npz?download=1'` "
        "(206 MB); or install `dpray[medical]`, whose medmnist downloads it with a torchvision that fits torch.",
        fetch=_by_medmnist,
    ),
    **{
        name: Source(
            _regression(name),
            "uci_regression_fallback.npz",
            f"It holds UCI regression sets (https://archive.ics.uci.edu). {_BY_HAND}",
        )
        for name in _UCI
    },
}
