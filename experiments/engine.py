"""Ray, for as long as a run lasts: this machine alone by default, a cluster by its address, quiet either way."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # JSON, CSV and TensorBoard files of every reported value
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_ALONE = {"RAY_AUTH_MODE": "disabled"}
_STORE_BYTES = 512 * 1024**2


@contextmanager
def hushed() -> Iterator[None]:
    """Keep what Ray's native code writes to stderr off the console; after an error it is shown.

    Ray warns of restartable actors made from references, which a cohort keeps alive itself.
    """
    sys.stderr.flush()
    console = os.dup(2)
    with tempfile.TemporaryFile() as heard:
        os.dup2(heard.fileno(), 2)
        try:
            yield
        except BaseException:
            heard.seek(0)
            os.write(console, heard.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(console, 2)
            os.close(console)


def prepare(address: str | None) -> None:
    """Set what Ray reads from the environment when it is imported; call it before anything imports Ray."""
    for name, value in (_QUIET if address is not None else {**_QUIET, **_ALONE}).items():
        os.environ.setdefault(name, value)


@contextmanager
def ray_running(address: str | None, actors: int | str) -> Iterator[None]:
    """Ray within the block. One that runs already is used and left running.

    Args:
        address: of a cluster; None starts Ray on this machine, on loopback, without a dashboard.
        actors: hosts the cohort asks for, or "auto"; this machine then offers at least as many CPUs.
    """
    import ray

    from dpray.platform import local_ray

    if ray.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if address is None:
            cpus = os.cpu_count() or 1
            local_ray.start_alone(
                num_cpus=max(cpus, actors) if isinstance(actors, int) else cpus,
                num_gpus=0,
                object_store_memory=_STORE_BYTES,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
