"""The folder `platform/` must never shadow the standard library's `platform` in any process the project starts."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import platform, dpray.platform.privacy.gdp as gdp, dpray.searchers, dpray.trainers
answer = (platform.system(), platform.__file__, gdp.__file__)
"""


def run(code: str, cwd: Path, **environment: str) -> str:
    """Run `code` in a fresh interpreter started in `cwd` and return what it printed."""
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip().splitlines()[-1]


def test_no_init_file_makes_the_folder_a_top_level_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_driver_started_in_the_repository_root_sees_the_standard_library() -> None:
    name, file, ours = eval(run(PROBE + "print(answer)", ROOT))
    assert name == sys.platform.capitalize()
    assert Path(file).name == "platform.py"
    assert "site-packages" not in file
    assert not Path(file).is_relative_to(ROOT / "platform")
    assert Path(ours).name == "gdp.py"


def test_torch_and_ray_import_from_the_repository_root() -> None:
    assert run("import torch, ray, platform; print(platform.python_implementation())", ROOT) == "CPython"


RAY_PROBE = f"""
import tempfile, ray
with tempfile.TemporaryDirectory(prefix="dp") as short:
    options = dict(include_dashboard=False, log_to_driver=False, runtime_env=@SHIPPED@)
    ray.init(address="local", num_cpus=1, _temp_dir=short, **options)
    @ray.remote
    def probe():
        {PROBE.strip().replace(chr(10), chr(10) + "        ")}
        return answer
    print(ray.get(probe.remote()))
    ray.shutdown()
"""


def test_ray_worker_sees_the_standard_library() -> None:
    name, file, _ = eval(run(RAY_PROBE.replace("@SHIPPED@", "None"), ROOT))
    assert name == sys.platform.capitalize()
    assert not Path(file).is_relative_to(ROOT / "platform")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built from a copy so that nothing is left in the tree."""
    source, out = tmp_path_factory.mktemp("source") / "dpray", tmp_path_factory.mktemp("wheel")
    keep = ("pyproject.toml", "README.md", "LICENSE", "platform", "searchers", "trainers", "experiments")
    source.mkdir()
    for name in keep:
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return next(out.glob("dpray-*.whl"))


def test_wheel_holds_every_module_and_no_top_level_platform(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not [name for name in names if name.startswith("platform/")]
    for portion in ("platform", "searchers", "trainers", "experiments"):
        tree = {
            f"dpray/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / portion).rglob("*")
            if path.suffix in {".py", ".yaml", ".typed"} and "__pycache__" not in path.parts
        }
        assert tree <= names, f"missing from the wheel: {sorted(tree - names)}"


def test_installed_wheel_imports_and_leaves_platform_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = tmp_path / "site"
    name, _, ours = eval(run(PROBE + "print(answer)", site, PYTHONPATH=str(site)))
    assert name == sys.platform.capitalize()
    assert Path(ours).is_relative_to(site)


def test_wheel_shipped_to_a_ray_worker_is_what_the_worker_imports(wheel: Path, tmp_path: Path) -> None:
    # Unpacked: Ray would pip-install a wheel file together with all of its dependencies, torch included, on every node.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shipped = {"py_modules": [str(tmp_path / "site" / "dpray")]}
    name, file, ours = eval(run(RAY_PROBE.replace("@SHIPPED@", repr(shipped)), tmp_path))
    assert name == sys.platform.capitalize()
    assert Path(file).name == "platform.py"
    assert "py_modules" in ours
