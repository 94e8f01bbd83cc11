"""Ray, for as long as a run lasts: this machine alone by default, a cluster by its address, quiet either way."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # JSON, CSV and TensorBoard files of every reported value
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_AUTHENTICATION = "RAY_AUTH_MODE"
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
    """Set what Ray reads from the environment when it is imported; call it before anything imports Ray.

    A cluster is asked with its token, Ray alone on this machine without one; RAY_AUTH_MODE, where it is set, decides.
    """
    mode = "disabled" if address is None else "token"
    for name, value in {**_QUIET, _AUTHENTICATION: mode}.items():
        os.environ.setdefault(name, value)


def cluster_of(address: str | None) -> str | None:
    """The cluster to use: the one that is named, or the one that runs this process as a job; None without either."""
    if address is None and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return "auto"
    return address


@contextmanager
def ray_running(
    address: str | None,
    actors: int | str,
    *,
    labels: Mapping[str, float] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Iterator[None]:
    """Ray within the block. One that runs already is used and left running.

    Args:
        address: of a cluster; None starts Ray on this machine, on loopback, without a dashboard.
        actors: hosts the cohort asks for, or "auto"; this machine then offers at least as many CPUs.
        labels: resources this machine offers where it is alone: of sites that it simulates.
        say: is told the versions on every node of a cluster.

    Raises:
        NodesDiffer: a node of the cluster runs other versions than this process.
        ClusterUnreachable: no cluster answers at the address, or it refuses the token.
    """
    import ray

    from dpray.experiments import nodes
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
                resources=dict(labels or {}),
                object_store_memory=_STORE_BYTES,
                logging_level=logging.ERROR,
            )
        else:
            _join(address)
    try:
        if address is not None:
            nodes.check(say)
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise ClusterUnreachable(
            f"The Ray cluster at {address!r} cannot be joined: {error}\nA cluster is joined from one of its own nodes, "
            "with its token (RAY_AUTH_MODE=token and ~/.ray/auth_token); from elsewhere, use `dpray submit`."
        ) from None


class ClusterUnreachable(Exception):  # noqa: N818 - an outcome that callers handle
    """No cluster answers at an address, or it refuses this process."""
