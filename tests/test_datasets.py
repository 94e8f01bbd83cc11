"""Real data by name: formats, public scaling, and what is said when a file is not there."""

import importlib.util
import io
import json
import sys
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dpray.platform.datasets import ADULT_SCALES, Dataset, DatasetDamaged, DatasetMissing, load, names

RNG = np.random.default_rng(0)


def images(number, *channels):
    return RNG.integers(0, 256, (number, 28, 28, *channels), dtype=np.uint8)


def mnist():
    labels = np.array([0, 9, 3], dtype=np.uint8)
    return {"x_train": images(3), "y_train": labels, "x_test": images(1), "y_test": labels[:1]}


def adult():
    columns = ["age", "workclass", "capital_gain", "sex"]
    categories = {"workclass": ["?", "Private"], "sex": ["Female", "Male"]}
    rows = np.array([[50, 1, 0, 0], [25, 0, 99_999, 1]], dtype=np.int32)
    return {
        "x_train": rows,
        "y_train": np.array([0, 1], dtype=np.uint8),
        "x_test": rows[:1],
        "y_test": np.array([1], dtype=np.uint8),
        "columns": np.array(columns),
        "numeric": np.array(["age", "capital_gain"]),
        "categories_json": np.array(json.dumps(categories)),
    }


def cifar():
    return {
        "classes": np.array([f"class {index}" for index in range(10)]),
        "f_train": RNG.standard_normal((4, 256)).astype(np.float16),
        "y_train": np.array([0, 9, 1, 2], dtype=np.uint8),
        "f_test": RNG.standard_normal((2, 256)).astype(np.float16),
        "y_test": np.array([5, 5], dtype=np.uint8),
    }


def jpegs():
    arrays = {"classes": np.array([f"class {index}" for index in range(10)])}
    for part, labels in (("train", [0, 1, 9, 9]), ("test", [3, 4])):
        files = [jpeg(RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in labels]
        arrays[f"jpeg_{part}"] = np.frombuffer(b"".join(files), dtype=np.uint8)
        arrays[f"offsets_{part}"] = np.cumsum([0, *map(len, files)])
        arrays[f"y_{part}"] = np.array(labels, dtype=np.uint8)
    return arrays


def jpeg(pixels, kind="JPEG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def medical(*channels):
    """As MedMNIST's own files: three parts, labels in a column."""
    parts = {"train": 3, "val": 2, "test": 1}
    arrays = {f"{part}_images": images(number, *channels) for part, number in parts.items()}
    return arrays | {f"{part}_labels": np.ones((number, 1), dtype=np.uint8) for part, number in parts.items()}


def pathology():
    return medical(3) | {"train_labels": np.array([[8], [0], [4]], dtype=np.uint8)}


def uci():
    arrays = {}
    for name, width in [("gas", 128), ("bike", 17)]:
        arrays[f"{name}_x"] = RNG.standard_normal((20, width)).astype(np.float32)
        arrays[f"{name}_y"] = RNG.standard_normal(20).astype(np.float32)
        arrays[f"{name}_fold"] = np.arange(20, dtype=np.uint8) % 10
    return arrays


FILES = {
    "mnist": ("mnist.npz", mnist),
    "adult": ("adult.npz", adult),
    "cifar10": ("cifar10_jpeg_effnetlite0_rp256.npz", cifar),
    "cifar10_jpeg": ("cifar10_jpeg_full60k.npz", jpegs),
    "cifar10_jpeg16": ("cifar10_jpeg_full60k.npz", jpegs),
    "pneumoniamnist": ("pneumoniamnist_balanced.npz", medical),
    "pathmnist": ("pathmnist.npz", pathology),
    "gas": ("uci_regression_fallback.npz", uci),
    "bike": ("uci_regression_fallback.npz", uci),
}
SHAPES = {
    "mnist": (3, 1, 784),
    "adult": (2, 1, 6),
    "cifar10": (4, 2, 256),
    "cifar10_jpeg": (4, 2, 3072),
    "cifar10_jpeg16": (4, 2, 768),
    "pneumoniamnist": (5, 1, 784),
    "pathmnist": (5, 1, 2352),
    "gas": (18, 2, 128),
    "bike": (18, 2, 17),
}
REAL = {
    "digits": (1437, 360, 64, 10),
    "mnist": (60_000, 10_000, 784, 10),
    "adult": (32_561, 16_281, 108, 2),
    "cifar10": (50_000, 10_000, 256, 10),
    "cifar10_jpeg16": (50_000, 10_000, 768, 10),
    "pneumoniamnist": (2_698, 468, 784, 2),
    "protein": (None, None, 9, 0),
    "keggundirected": (None, None, 27, 0),
    "bike": (None, None, 17, 0),
    "gas": (None, None, 128, 0),
    "parkinsons": (None, None, 20, 0),
}


def check(data):
    assert isinstance(data, Dataset)
    assert data.x_train.dtype == data.x_test.dtype == np.float64
    assert np.all(np.isfinite(data.x_train))
    assert np.all(np.isfinite(data.x_test))
    assert data.licence
    assert data.notes
    if data.classes:
        assert data.y_train.dtype == np.int64
        assert set(np.unique(data.y_train)) <= set(range(len(data.classes)))
    else:
        assert data.y_train.dtype == np.float64


@pytest.fixture(autouse=True)
def no_medmnist(monkeypatch):
    """Whoever has it installed downloads nothing here."""
    monkeypatch.setitem(sys.modules, "medmnist", None)


@pytest.fixture
def folder(tmp_path):
    for file, make in FILES.values():
        np.savez(tmp_path / file, **make())
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_small_file_of_the_format_is_read(folder, name):
    data = load(name, folder)
    check(data)
    assert (len(data.x_train), len(data.x_test), data.features) == SHAPES[name]


@pytest.mark.parametrize("name", FILES)
def test_a_records_features_do_not_depend_on_other_records(tmp_path, name):
    """Halve the training part: the features of what is left are bit for bit the same."""
    file, make = FILES[name]
    arrays = make()
    rows = {
        "mnist": ["x_train", "y_train"],
        "adult": ["x_train", "y_train"],
        "cifar10": ["f_train", "y_train"],
        "jpeg": ["y_train"],
    }.get("jpeg" if "jpeg" in name else name, [key for key in arrays if key.startswith(("train_", "gas_", "bike_"))])

    features = []
    for label, keep in (("all", None), ("fewer", 2)):
        (tmp_path / label).mkdir()
        kept = {key: array[:keep] if key in rows else array for key, array in arrays.items()}
        if "jpeg" in name and keep:
            end = arrays["offsets_train"][keep]
            kept["offsets_train"], kept["jpeg_train"] = arrays["offsets_train"][: keep + 1], arrays["jpeg_train"][:end]
        np.savez(tmp_path / label / file, **kept)
        features.append(load(name, tmp_path / label).x_train)
    assert features[1][0].tobytes() == features[0][0].tobytes()


def test_pixels_are_scaled_by_what_a_pixel_can_be(folder):
    with np.load(folder / "mnist.npz") as arrays:
        np.testing.assert_array_equal(load("mnist", folder).x_train * 255, arrays["x_train"].reshape(3, -1))
    digits = load("digits")
    assert (digits.x_train.min(), digits.x_train.max()) == (0.0, 1.0)
    assert np.all(digits.x_train * 16 == np.rint(digits.x_train * 16))


def test_images_are_decoded_channels_first_and_halved_by_means(tmp_path):
    """One colour each: JPEG keeps it up to a rounding of the colour space."""
    arrays = jpegs()
    flat = [jpeg(np.full((32, 32, 3), colour, dtype=np.uint8)) for colour in ((255, 0, 0), (0, 128, 255))]
    arrays["jpeg_test"] = np.frombuffer(b"".join(flat), dtype=np.uint8)
    arrays["offsets_test"] = np.cumsum([0, *map(len, flat)])
    np.savez(tmp_path / "cifar10_jpeg_full60k.npz", **arrays)
    whole, half = load("cifar10_jpeg", tmp_path), load("cifar10_jpeg16", tmp_path)
    colours = whole.x_test.reshape(2, 3, 32, 32).mean(axis=(2, 3))
    np.testing.assert_allclose(colours, [[1, 0, 0], [0, 128 / 255, 1]], atol=3 / 255)
    means = whole.x_train.reshape(4, 3, 16, 2, 16, 2).mean(axis=(3, 5)).reshape(4, -1)
    np.testing.assert_allclose(half.x_train, means, atol=1e-12)


def test_pathology_has_its_nine_tissues_and_labels_out_of_their_column(folder):
    data = load("pathmnist", folder)
    assert len(data.classes) == 9
    np.testing.assert_array_equal(data.y_train, [8, 0, 4, 1, 1])
    with np.load(folder / "pathmnist.npz") as arrays:
        np.testing.assert_array_equal(data.x_test * 255, arrays["test_images"].reshape(1, -1))
        np.testing.assert_array_equal(data.x_train[3] * 255, arrays["val_images"][0].reshape(-1))


@pytest.mark.skipif(importlib.util.find_spec("medmnist") is None, reason="medmnist is not installed: dpray[medical]")
def test_the_file_is_one_that_medmnist_itself_reads(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "medmnist")
    from medmnist import INFO, PathMNIST

    theirs = PathMNIST(split="train", root=str(folder), download=False)
    data = load("pathmnist", folder)
    np.testing.assert_array_equal(data.x_train[:3] * 255, theirs.imgs.reshape(3, -1))
    np.testing.assert_array_equal(data.y_train[:3], theirs.labels.ravel())
    assert data.classes == tuple(INFO["pathmnist"]["label"].values())


def medmnist_that(gets):
    """The package, with a `PathMNIST` that gets its file this way."""

    def path_mnist(*, split, download):
        assert (split, download) == ("train", True)
        return SimpleNamespace(root=str(gets()))

    return SimpleNamespace(PathMNIST=path_mnist)


def test_pathology_is_downloaded_by_medmnist_where_the_folder_lacks_it(folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "medmnist", medmnist_that(lambda: asked.append(1) or folder))
    monkeypatch.delenv("DPRAY_DATA", raising=False)
    assert len(load("pathmnist").x_train) == 5
    (tmp_path / "empty").mkdir()
    assert len(load("pathmnist", tmp_path / "empty").x_train) == 5
    assert len(asked) == 2
    load("pathmnist", folder)
    assert len(asked) == 2


def test_pathology_that_cannot_be_had_is_refused_with_a_sentence(tmp_path, monkeypatch):
    def offline():
        raise RuntimeError("Automatic download failed!")

    for package in (None, medmnist_that(offline), medmnist_that(lambda: tmp_path)):
        monkeypatch.setitem(sys.modules, "medmnist", package)
        with pytest.raises(DatasetMissing, match=r"dpray\[medical\]"):
            load("pathmnist", tmp_path)


def large_images(arrays):
    files = [jpeg(np.zeros((64, 64, 3), dtype=np.uint8))] * 2
    return {
        "jpeg_test": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets_test": np.cumsum([0, *map(len, files)]),
    }


def other_files(arrays):
    files = [jpeg(np.zeros((32, 32, 3), dtype=np.uint8), "PNG")] * 2
    return {
        "jpeg_test": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets_test": np.cumsum([0, *map(len, files)]),
    }


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: {"jpeg_train": arrays["jpeg_train"][:-1]},
        lambda arrays: {"offsets_train": arrays["offsets_train"][::-1]},
        lambda arrays: {"offsets_train": arrays["offsets_train"] * 0},
        lambda arrays: {"jpeg_train": np.zeros_like(arrays["jpeg_train"])},
        large_images,
        other_files,
    ],
)
def test_a_stream_that_holds_no_such_images_is_refused(tmp_path, damage):
    arrays = jpegs()
    np.savez(tmp_path / "cifar10_jpeg_full60k.npz", **(arrays | damage(arrays)))
    with pytest.raises(DatasetDamaged, match="is not the file"):
        load("cifar10_jpeg", tmp_path)


def test_adult_is_one_hot_by_public_categories_and_scaled_by_public_numbers(folder):
    data = load("adult", folder)
    np.testing.assert_allclose(
        data.x_train,
        [[50 / 100, 0, 1, 0, 1, 0], [25 / 100, 1, 0, 99_999 / ADULT_SCALES["capital_gain"], 0, 1]],
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "jpeg" in name else ()) for name in REAL]
)
def test_real_files_have_their_published_sizes(request, name):
    data = load(name, None if name == "digits" else request.getfixturevalue("data_dir"))
    check(data)
    train, test, features, classes = REAL[name]
    assert data.features == features
    assert len(data.classes) == classes
    if train is not None:
        assert (len(data.x_train), len(data.x_test)) == (train, test)


def test_digits_are_all_there_in_two_parts():
    data = load("digits")
    assert len(data.x_train) + len(data.x_test) == 1797


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, name):
    with pytest.raises(DatasetMissing) as caught:
        load(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "https://" in str(caught.value) or "backbone" in str(caught.value)


def test_without_a_folder_the_variable_is_named(monkeypatch, folder):
    monkeypatch.delenv("DPRAY_DATA", raising=False)
    with pytest.raises(DatasetMissing, match="set DPRAY_DATA"):
        load("mnist")
    monkeypatch.setenv("DPRAY_DATA", str(folder))
    assert load("mnist").name == "mnist"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DatasetMissing, match="digits, mnist"):
        load("mnits")
    assert "digits" in names()


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: {**arrays, "x_train": arrays["x_train"][:2]},
        lambda arrays: {**arrays, "y_train": arrays["y_train"] + 5},
        lambda arrays: {**arrays, "x_train": arrays["x_train"].astype(float)},
        lambda arrays: {"x_train": arrays["x_train"]},
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, damage):
    np.savez(tmp_path / "mnist.npz", **damage(mnist()))
    with pytest.raises(DatasetDamaged, match="is not the file"):
        load("mnist", tmp_path)


SECRET = "Alice HIV+"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("gas", lambda arrays: {**arrays, "gas_x": np.full((20, 128), SECRET)}),
        ("mnist", lambda arrays: {**arrays, "y_train": np.array([SECRET] * 3)}),
        ("adult", lambda arrays: {**arrays, "x_train": np.full((2, 4), SECRET)}),
        ("adult", lambda arrays: {**arrays, "columns": np.array(["age", SECRET, "capital_gain", "sex"])}),
        ("adult", lambda arrays: {**arrays, "categories_json": np.array(SECRET)}),
        ("mnist", lambda arrays: {**arrays, "y_train": np.array([[0], [1]])}),
    ],
)
def test_what_stands_in_a_damaged_file_is_told_nowhere(tmp_path, name, damage):
    """Neither in the sentence nor in an exception behind it, which a traceback would print."""
    file, make = FILES[name]
    np.savez(tmp_path / file, **damage(make()))
    with pytest.raises(DatasetDamaged, match="is not the file") as caught:
        load(name, tmp_path)
    assert "".join(traceback.format_exception(caught.value)).count(SECRET) == 0
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(b"half a download")
    with pytest.raises(DatasetDamaged, match="is not the file"):
        load("mnist", tmp_path)
