"""Data sets as torchvision keeps them in a folder: read without running what stands in a file, and fetched by it.

| class   | files                                                  | what stands in them                               |
|---------|--------------------------------------------------------|---------------------------------------------------|
| CIFAR10 | `cifar-10-batches-py/data_batch_1` … `5`, `test_batch` | a pickled dict: `data` (n, 3 072) uint8, `labels` |
| MNIST   | `MNIST/raw/train-images-idx3-ubyte`, …, plain or `.gz` | idx: sizes, big-endian, 32 bits; then the bytes   |

A pickle is a program: whoever may put a file into a data folder could run code in every process that reads it. Here
nothing that a file names is imported or called. A name becomes an object that knows the name, a call of it a note of
the arguments, and only a note that says "uint8, these sizes, these bytes" is made an array, by this module's own code.
(An allow-list of NumPy's functions would still let a file set the state of arrays and types, down to their memory.)
Before that a batch is looked through without being built: size, kinds of instructions and their numbers are bounded, so
that a small file cannot ask for much memory, or for a table whose keys take for ever. What is fetched is fetched into a
folder of its own that nobody else may write to, and torchvision's classes, which would unpickle it, are never made.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import pickletools
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

CIFAR_FOLDER = "cifar-10-batches-py"
MNIST_FOLDER = "MNIST/raw"
_CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR_TEST = "test_batch"
_IDX = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
_MOST = 1_000_000
"""Records that a file may say it holds, before memory is set aside for them."""
_LARGEST = 64 * 2**20
"""Bytes of a batch, which has 31 000 000."""
_TUPLES = 16
"""Tuples in a batch: an array has eight, and nested ones cost twice as much to look up with each."""
# fmt: off
_INSTRUCTIONS = frozenset(
    {
        "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
        "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "SETITEM", "SETITEMS",
        "APPEND", "APPENDS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL",
        "STACK_GLOBAL", "REDUCE", "BUILD", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE",
        "BINBYTES", "SHORT_BINBYTES",
    }
)
# fmt: on
"""What pickles of tables, lists, numbers, text and one array are made of, from protocol 2 on."""
_PATIENCE = 60.0
"""Seconds without an answer after which a download is given up."""


class Unlike(ValueError):  # noqa: N818 - becomes part of a sentence
    """A file is not what the format says, in words that tell nothing of a record."""


# CIFAR-10: pickled batches ----------------------------------------------------------------------------------------


def cifar_batches(folder: Path) -> Arrays:
    """`x_train`, `x_test` (n, 3 072) uint8, channels first, and `y_train`, `y_test`, from the folder of the batches.

    Raises:
        Unlike, OSError, pickle.UnpicklingError: a batch is not there or not what it must be. Nothing of it was run.
    """
    train = [_batch(folder / name) for name in _CIFAR_TRAIN]
    x_test, y_test = _batch(folder / _CIFAR_TEST)
    return {
        "x_train": np.concatenate([x for x, _ in train]),
        "y_train": np.concatenate([y for _, y in train]),
        "x_test": x_test,
        "y_test": y_test,
    }


def _batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 3 072) and labels (n,) of one file."""
    if not path.is_file():  # a device would be read without end
        raise FileNotFoundError(path.name)
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    _look_through(data)
    found = _Inert(io.BytesIO(data), encoding="bytes").load()
    if not isinstance(found, dict):
        raise Unlike("a batch is not a table of names and values")
    labels = found.get(b"labels", found.get("labels"))
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise Unlike("the labels are not a list of whole numbers from 0 to 9")
    x = _bytes_of(found.get(b"data", found.get("data")))
    if x.shape != (len(labels), 3 * 32 * 32):
        raise Unlike("images and labels do not belong together")
    return x, np.array(labels, dtype=np.int64)


def _look_through(data: bytes) -> None:
    """Refuse a pickle that is more than the table of a batch, before any of it is built (`Unlike`)."""
    wrong = Unlike("a batch is not a plain table of images and labels")
    if len(data) > _LARGEST:
        raise wrong
    read = tuples = 0
    try:
        for instruction, argument, _ in pickletools.genops(data):
            read += 1
            tuples += "TUPLE" in instruction.name
            far = instruction.name in {"BINPUT", "LONG_BINPUT"} and (argument or 0) > read
            if instruction.name not in _INSTRUCTIONS or tuples > _TUPLES or far:
                raise wrong
    except Unlike:
        raise
    except Exception:  # its bytes are no instructions, or end among them: pickletools says so in many ways
        raise Unlike("a batch is no pickle, or a part of one") from None


class _Named:
    """What stands for anything a pickle names: it knows the name. Called, it is a note of the call."""

    __slots__ = ("name",)

    def __init__(self, name: tuple[str, str]) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> _Noted:
        return _Noted(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a name has no state")


class _Noted:
    """A call that was not made: whose, with what, and the state that was set afterwards."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: tuple[str, str], arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle.Unpickler):
    """Reads a pickle and imports nothing: the only objects made are Python's own plain ones and notes."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for the name."""
        return _Named((module, name))


_MADE_BY = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}


def _bytes_of(note: Any) -> NDArray[np.uint8]:
    """The array of bytes that a note describes as NumPy pickles one: row by row, of type `u1`.

    Raises:
        Unlike: it describes anything else.
    """
    wrong = Unlike("the images are not an array of bytes")
    if not isinstance(note, _Noted) or note.name not in _MADE_BY:
        raise wrong
    match note.state:
        case (1, (int(rows), int(width)), _Noted(name=("numpy", "dtype"), arguments=("u1" | b"u1", *_)), False, data):
            text = _text_of(data)
            if text is not None and min(rows, width) >= 0 and rows * width == len(text):
                return np.frombuffer(text, dtype=np.uint8).reshape(rows, width)
    raise wrong


def _text_of(data: Any) -> bytes | None:
    """Bytes as they are, or as Python 3 writes them for older readers: a note to encode text as latin-1."""
    match data:
        case bytes():
            return data
        case _Noted(name=("_codecs", "encode"), arguments=(str(text), "latin1")):
            return text.encode("latin1")
    return None


# MNIST: idx -------------------------------------------------------------------------------------------------------


def idx_files(folder: Path) -> Arrays:
    """`x_train`, `x_test` (n, 28, 28) and `y_train`, `y_test` (n,), uint8, from MNIST's four files.

    Raises:
        Unlike, OSError, EOFError: a file is not there or not what it must be.
    """
    return {key: _idx(folder / name, 3 if key.startswith("x") else 1) for key, name in _IDX.items()}


def _idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Two zero bytes, 8 for unsigned bytes, the number of dimensions; the sizes; the numbers."""
    packed = path.with_name(f"{path.name}.gz")
    with path.open("rb") if path.is_file() else gzip.open(packed) as file:
        head = file.read(4 + 4 * dimensions)
        if len(head) != 4 + 4 * dimensions or head[:4] != bytes((0, 0, 8, dimensions)):
            raise Unlike(f"{path.name} does not begin as an idx file of {dimensions} dimensions does")
        shape = struct.unpack(f">{dimensions}I", head[4:])
        if shape[0] > _MOST or shape[1:] != (28, 28)[: dimensions - 1]:
            raise Unlike(f"{path.name} does not say that it holds MNIST")
        data = file.read(math.prod(shape) + 1)
    if len(data) != math.prod(shape):
        raise Unlike(f"{path.name} does not hold what its sizes say")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


READERS: Mapping[str, tuple[str, Callable[[Path], Arrays]]] = {
    "CIFAR10": (CIFAR_FOLDER, cifar_batches),
    "MNIST": (MNIST_FOLDER, idx_files),
}
"""By torchvision's class: the folder it keeps within the data folder, and how that is read."""


def download(kind: str, root: Path) -> str | None:
    """Fetch a data set into `root` by torchvision, which checks what it fetches against published sums.

    Args:
        kind: a class of `READERS`.
        root: the data folder.

    Returns:
        None if it is there now, else a sentence that says why not.
    """
    try:
        from torchvision.datasets import utils  # type: ignore[import-not-found]
    except ImportError:
        return "torchvision, which would fetch it, is not installed (`pip install torchvision`)."
    place, patience = READERS[kind][0], socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    own = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=root))  # nobody changes a file between its check and its use
        archives, files = _published(kind, own / place)
        for sources, name, md5 in archives:
            fetch = partial(utils.download_and_extract_archive, download_root=str(files), filename=name, md5=md5)
            _from_one_of(sources, fetch)
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        os.replace(own / place, root / place)
    except Exception as error:  # whatever a network, a server or a disk may say
        return f"torchvision could not fetch it ({type(error).__name__}): is there a network?"
    finally:
        socket.setdefaulttimeout(patience)
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    return None


def _published(kind: str, place: Path) -> tuple[list[tuple[list[str], str, str]], Path]:
    """What is fetched, as torchvision knows it: (addresses, name, MD5) each, and the folder it is unpacked in."""
    from torchvision import datasets  # type: ignore[import-not-found]

    known = getattr(datasets, kind)
    if kind == "CIFAR10":  # its archive holds the folder
        return [([known.url], known.filename, known.tgz_md5)], place.parent
    place.mkdir(parents=True)
    return [([f"{mirror}{name}" for mirror in known.mirrors], name, md5) for name, md5 in known.resources], place


def _from_one_of(sources: list[str], fetch: Callable[[str], object]) -> None:
    for number, url in enumerate(sources, 1):
        try:
            fetch(url)
            return
        except Exception:
            if number == len(sources):
                raise
