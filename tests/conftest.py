"""Fixtures every test may use: one local Ray for the session, and the folder of real data where there is one."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

settings.register_profile("dpray", deadline=None)  # how long an example takes says more of the machine than of the code
settings.load_profile("dpray")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def ray_local() -> Iterator[ModuleType]:
    """Ray on this machine, two CPUs, without dashboard; its processes and its folder are gone afterwards.

    The folder's name is short because the sockets in it must have paths of at most 107 bytes. Its logs are at
    `Path(ray._private.worker._global_node.get_session_dir_path())`.
    """
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray

    if ray.is_initialized():
        pytest.fail("Ray is running already: a test started it without the fixture ray_local.")
    folder = tempfile.mkdtemp(prefix="dpr", dir="/tmp" if Path("/tmp").is_dir() else None)
    # The object store is capped so that several sessions fit one machine.
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=folder,
        object_store_memory=512 * 1024**2,
        log_to_driver=True,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the real data sets: DPRAY_DATA, else `../shared/data` beside the checkout; skips without one."""
    named = os.environ.get("DPRAY_DATA")
    for folder in [Path(named)] if named else [ROOT.parent / "shared" / "data"]:
        if folder.is_dir():
            return folder
    pytest.skip("The real data sets are not here: name their folder in DPRAY_DATA.")
