"""torchvision's files: read as they are written, and never run."""

import gzip
import io
import pickle
import socket
import sys
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from dpray.platform import datasets, torchvision_files
from dpray.platform.datasets import DatasetDamaged, DatasetMissing, load

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
IDX = {
    "train-images-idx3-ubyte": (4, 28, 28),
    "train-labels-idx1-ubyte": (4,),
    "t10k-images-idx3-ubyte": (2, 28, 28),
    "t10k-labels-idx1-ubyte": (2,),
}


class Python2(pickle._Pickler):
    """Text and bytes as Python 2 pickled its one kind of string, which is how CIFAR-10 was published."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def _string(self, given):
        data = given.encode("latin1") if isinstance(given, str) else given
        short = len(data) < 256
        head = b"U" + bytes([len(data)]) if short else b"T" + len(data).to_bytes(4, "little")
        self.write(head + data)
        self.memoize(given)

    dispatch[str] = dispatch[bytes] = _string


def published(batch):
    """Bytes of a batch as its publisher wrote it: protocol 2, Python 2, the NumPy of the day."""
    file = io.BytesIO()
    Python2(file, 2).dump(batch)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def batch(number, rows=3):
    rng = np.random.default_rng(number)
    return {
        "batch_label": f"training batch {number} of 5",
        "labels": [int(label) for label in rng.integers(0, 10, rows)],
        "data": rng.integers(0, 256, (rows, 3072), dtype=np.uint8),
        "filenames": [f"{name}.png" for name in range(rows)],
    }


@pytest.fixture
def cifar(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate(BATCHES):
        (folder / name).write_bytes(published(batch(number)))
    return folder


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch):
    """Whatever is installed here: no test reaches the network."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


def test_a_batch_of_the_published_format_is_read_as_pickle_would(cifar):
    """The oracle: Python's own unpickler, on a file that this test wrote."""
    data = load("cifar10_images", cifar.parent)
    truth = [pickle.loads((cifar / name).read_bytes(), encoding="bytes") for name in BATCHES]
    assert truth[0][b"batch_label"] == b"training batch 0 of 5"
    np.testing.assert_array_equal(data.x_train * 255, np.concatenate([each[b"data"] for each in truth[:5]]))
    np.testing.assert_array_equal(data.y_train, np.concatenate([each[b"labels"] for each in truth[:5]]))
    np.testing.assert_array_equal(data.x_test * 255, truth[5][b"data"])
    assert data.classes[truth[5][b"labels"][0]] == data.classes[data.y_test[0]]
    assert len(data.classes) == 10
    assert data.features == 3 * 32 * 32


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_python_3s_pickles_are_read_too(cifar, protocol):
    (cifar / "test_batch").write_bytes(pickle.dumps(batch(7), protocol))
    np.testing.assert_array_equal(load("cifar10_images", cifar.parent).x_test * 255, batch(7)["data"])


class Malicious:
    """Runs a callable as soon as a pickle of it is read."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


RUN = []


def mark(text="run"):
    RUN.append(text)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda place: Malicious(mark),
        lambda place: Malicious(open, str(place), "w"),
        lambda place: Malicious(eval, f"open({str(place)!r}, 'w')"),
        lambda place: {**batch(0), "data": Malicious(open, str(place), "w")},
        lambda place: {**batch(0), "labels": Malicious(open, str(place), "w")},
        lambda place: {**batch(0), "labels": [1, 2, Malicious(open, str(place), "w")]},
    ],
)
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(cifar, tmp_path, hidden):
    """Negative control: Python's own unpickler runs it."""
    place = tmp_path / "made by a pickle"
    evil = pickle.dumps(hidden(place), 2)
    (cifar / "data_batch_3").write_bytes(evil)
    RUN.clear()
    with pytest.raises(DatasetDamaged) as caught:
        load("cifar10_images", tmp_path)
    assert str(place) not in str(caught.value)
    assert not RUN
    assert not place.exists()
    pickle.loads(evil)
    assert RUN or place.exists()


def test_code_beside_the_images_is_not_run_either(cifar, tmp_path):
    place = tmp_path / "made by a pickle"
    evil = pickle.dumps({**batch(2), "filenames": Malicious(open, str(place), "w")}, 2)
    (cifar / "data_batch_3").write_bytes(evil)
    assert len(load("cifar10_images", tmp_path).x_train) == 15
    assert not place.exists()
    pickle.loads(evil)
    assert place.exists()


BAD_STATE = b"\x80\x02cdpray.platform.torchvision_files\n_Named\n}X\x04\x00\x00\x00nameK\x01sb."
"""A class of the reader's own, whose state a file tries to set."""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pickle.dumps([1, 2], 2), "not a table"),
        (published({**batch(0), "labels": [1, 2, 10]}), "0 to 9"),
        (published({**batch(0), "labels": [1, 2, True]}), "0 to 9"),
        (published({**batch(0), "labels": [1, 2]}), "do not belong together"),
        (published({**batch(0), "data": np.zeros((3, 3072))}), "not an array of bytes"),
        (published({**batch(0), "data": np.zeros((3, 3072), dtype=object)}), "not an array of bytes"),
        (published({**batch(0), "data": np.zeros((3, 3072), dtype=np.uint8, order="F")}), "not an array of bytes"),
        (published({**batch(0), "data": b"\0" * 9216}), "not an array of bytes"),
        (published({**batch(0), "data": np.zeros(9216, dtype=np.uint8)}), "not an array of bytes"),
        (published(batch(0)).replace(b"M\x00\x0c", b"M\x01\x0c"), "not an array of bytes"),
        (b"half a download", "not a plain table"),
        (published(batch(0))[:-100], "no pickle, or a part of one"),
        (BAD_STATE, "UnpicklingError"),
        (b"", "no pickle, or a part of one"),
        (b"}r" + (2**26).to_bytes(4, "little") + b".", "not a plain table"),  # a gigabyte of places for one number
        (b"}K\x01" + b"\x85" * 2_000_000 + b"K\x02s.", "not a plain table"),  # looked up by recursion: a crash
        (b"}K\x01" + b"2\x86" * 30 + b"K\x02s.", "not a plain table"),  # looked up 2**30 times
        (b"}K\x01" + b"q\x00h\x00\x86" * 30 + b"K\x02s.", "not a plain table"),  # the same without copying
        (b"\x80\x02}\x8b" + (2**31 - 1).to_bytes(4, "little"), "no pickle, or a part of one|not a plain table"),
    ],
)
def test_what_is_no_batch_is_refused_in_a_sentence(cifar, data, words):
    (cifar / "data_batch_2").write_bytes(data)
    with pytest.raises(DatasetDamaged, match=words) as caught:
        load("cifar10_images", cifar.parent)
    assert "cs.toronto.edu" in str(caught.value)


def test_a_batch_larger_than_any_and_a_device_are_not_read(cifar, monkeypatch):
    monkeypatch.setattr(torchvision_files, "_LARGEST", 1000)
    with pytest.raises(DatasetDamaged, match="not a plain table"):
        load("cifar10_images", cifar.parent)
    (cifar / "data_batch_1").unlink()
    (cifar / "data_batch_1").symlink_to("/dev/zero")
    with pytest.raises(DatasetDamaged, match="FileNotFoundError"):
        load("cifar10_images", cifar.parent)


def test_a_batch_that_is_not_there_is_told(cifar):
    (cifar / "data_batch_4").unlink()
    with pytest.raises(DatasetDamaged, match="FileNotFoundError"):
        load("cifar10_images", cifar.parent)


def idx(folder, packed=False):
    """MNIST's four files; returns the arrays in them."""
    raw, rng, arrays = folder / "MNIST" / "raw", np.random.default_rng(1), {}
    raw.mkdir(parents=True)
    for name, shape in IDX.items():
        arrays[name] = rng.integers(0, 10, shape, dtype=np.uint8)
        head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        data = head + arrays[name].tobytes()
        (raw / f"{name}{'.gz' if packed else ''}").write_bytes(gzip.compress(data) if packed else data)
    return arrays


@pytest.mark.parametrize("packed", [False, True])
def test_mnists_own_files_are_read_packed_or_not(tmp_path, packed):
    arrays = idx(tmp_path, packed)
    data = load("mnist", tmp_path)
    np.testing.assert_array_equal(data.x_train * 255, arrays["train-images-idx3-ubyte"].reshape(4, 784))
    np.testing.assert_array_equal(data.y_test, arrays["t10k-labels-idx1-ubyte"])


def test_an_archive_goes_before_them(tmp_path):
    idx(tmp_path)
    empty = np.zeros((1, 28, 28), dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=empty[0], y_train=empty[1], x_test=empty[0], y_test=empty[1])
    assert len(load("mnist", tmp_path).x_train) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "does not hold what its sizes say"),
        (lambda data: data + b"0", "does not hold what its sizes say"),
        (lambda data: b"\1" + data[1:], "does not begin as an idx file"),
        (lambda data: data[:6], "does not begin as an idx file"),
        (lambda data: data[:8] + (27).to_bytes(4, "big") + data[12:], "does not say that it holds MNIST"),
        (lambda data: data[:4] + b"\xff" * 4 + data[8:], "does not say that it holds MNIST"),
    ],
)
def test_what_is_no_idx_file_is_refused(tmp_path, change, words):
    idx(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DatasetDamaged, match=words):
        load("mnist", tmp_path)


# Fetching -----------------------------------------------------------------------------------------------------------


def package(monkeypatch, fetch):
    """A torchvision whose way of fetching an archive is `fetch(url, folder, md5)`. Its classes must not be made."""

    def fetched(url, download_root, filename, md5):
        fetch(url, Path(download_root), md5)

    def made(self, *_, **__):
        pytest.fail("this class unpickles what it finds")

    modules = {
        name: types.ModuleType(name) for name in ("torchvision", *(f"torchvision.datasets{x}" for x in ("", ".utils")))
    }
    found = modules["torchvision.datasets"]
    where = {"url": "https://a/cifar.tar.gz", "filename": "cifar.tar.gz", "tgz_md5": "c0"}
    found.CIFAR10 = type("CIFAR10", (), {"__init__": made, **where})
    several = {"mirrors": ["https://a/", "https://b/"], "resources": [(f"{name}.gz", "d0") for name in IDX]}
    found.MNIST = type("MNIST", (), {"__init__": made, **several})
    found.utils = modules["torchvision.datasets.utils"]
    found.utils.download_and_extract_archive = fetched
    modules["torchvision"].datasets = found
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_what_is_not_there_is_fetched_by_torchvision_into_the_folder(cifar, tmp_path, monkeypatch):
    asked, target = [], tmp_path / "data"
    target.mkdir()

    def fetch(url, folder, md5):
        asked.append((url, md5))
        assert folder.parent == target
        assert folder.stat().st_mode & 0o077 == 0
        cifar.rename(folder / cifar.name)

    package(monkeypatch, fetch)
    assert len(load("cifar10_images", target).x_train) == 15
    assert len(load("cifar10_images", target).x_train) == 15
    assert asked == [("https://a/cifar.tar.gz", "c0")]
    assert [each.name for each in target.iterdir()] == [cifar.name]


def test_without_a_folder_it_is_fetched_into_a_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("DPRAY_DATA", raising=False)
    monkeypatch.setattr(datasets, "_FETCHED", str(tmp_path / "cache"))
    idx(tmp_path / "published")
    asked = []

    def fetch(url, folder, md5):
        asked.append(url)
        if url.startswith("https://a/"):
            raise OSError("this mirror is gone")
        name = url.removeprefix("https://b/").removesuffix(".gz")
        (tmp_path / "published" / "MNIST" / "raw" / name).rename(folder / name)

    package(monkeypatch, fetch)
    assert len(load("mnist").x_train) == 4
    assert len(asked) == 8
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["MNIST"]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["cifar10_images", "mnist"])
def test_without_torchvision_or_a_network_it_is_refused_in_a_sentence(tmp_path, monkeypatch, name, named):
    monkeypatch.delenv("DPRAY_DATA", raising=False)
    monkeypatch.setattr(datasets, "_FETCHED", str(tmp_path / "cache"))
    folder = tmp_path if named else None
    with pytest.raises(DatasetMissing, match="torchvision, which would fetch it, is not installed") as caught:
        load(name, folder)
    assert "https://" in str(caught.value)
    assert ("which is not there" if named else "set DPRAY_DATA") in str(caught.value)

    def offline(url, folder, md5):
        raise OSError("no route to host, and something secret")

    package(monkeypatch, offline)
    with pytest.raises(DatasetMissing, match=r"could not fetch it \(OSError\): is there a network\?") as caught:
        load(name, folder)
    assert "secret" not in str(caught.value)


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    seen, before = [], socket.getdefaulttimeout()
    package(monkeypatch, lambda url, folder, md5: seen.append(socket.getdefaulttimeout()))
    assert torchvision_files.download("MNIST", tmp_path) is None
    assert 0 < seen[0] <= 60
    assert socket.getdefaulttimeout() == before
