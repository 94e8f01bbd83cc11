"""The package: quick to import, everything it names is there."""

import subprocess
import sys

import pytest

import dpray.trainers


@pytest.mark.parametrize(
    ("used", "unloaded"),
    [("", ("torch", "ray", "pandas", "mlflow")), ("DPFedSOFIMTrainer, LinearHead", ("torch", "mlflow"))],
    ids=["the package", "a linear trainer"],
)
def test_what_is_not_used_is_not_loaded(used, unloaded):
    take = f"from dpray.trainers import {used};" if used else "import dpray.trainers;"
    code = f"import sys; {take} print([name for name in {unloaded} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("name", dpray.trainers.__all__)
def test_every_name_is_there(name):
    assert getattr(dpray.trainers, name).__name__ == name


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="DPFedSophia"):
        _ = dpray.trainers.DPFedSophia
