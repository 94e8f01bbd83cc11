"""Importing searchers is quick: nothing heavy is loaded before it is used."""

import subprocess
import sys

import pytest

PROGRAM = "import sys; {}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"


def modules_after(statement):
    command = [sys.executable, "-c", PROGRAM.format(statement)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split())


def test_the_package_alone_loads_neither_torch_nor_ray():
    assert not {"torch", "ray", "mlflow", "botorch"} & modules_after("import dpray.searchers")


@pytest.mark.parametrize("name", ["DPHypeSearch", "PrivateSearcher"])
def test_its_names_do_not_load_torch(name):
    loaded = modules_after(f"from dpray.searchers import {name}")

    assert "ray" in loaded
    assert not {"torch", "mlflow", "botorch", "gpytorch"} & loaded


def test_every_exported_name_exists_and_others_do_not():
    import dpray.searchers

    for name in dpray.searchers.__all__:
        assert getattr(dpray.searchers, name).__name__ == name
    assert set(dpray.searchers.__all__) <= set(dir(dpray.searchers))
    with pytest.raises(AttributeError, match="NoSuchSearch"):
        _ = dpray.searchers.NoSuchSearch
