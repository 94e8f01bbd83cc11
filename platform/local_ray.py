"""Ray on this machine alone: everything it starts listens on loopback.

Whoever reaches Ray's ports runs code inside the trust boundary. By default Ray's processes on Linux listen on all
addresses, whatever `_node_ip_address` says. By default Ray spills objects that do not fit into its shared memory, a
pool's records among them, to a folder under /tmp that everybody may read: here it is the user's own, and goes with the
process.

What makes them stay on loopback is the switch by which Ray does without
clusters on other systems: an environment variable for its processes, and a constant, read from that variable when Ray
was imported, for the driver. Both are set only while Ray starts: a driver that joins a cluster later needs its own
address.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set by the user, it is left as it is: 1 opens Ray to other machines on purpose."""
SPILLING = "RAY_object_spilling_directory"
"""Set by the user, for a larger disk say: the folder is made in it."""


def start_alone(**options: Any) -> None:
    """Start Ray on this machine, on loopback, without a dashboard, its spilled objects readable by this user only.

    Args:
        options: further arguments of `ray.init`.
    """
    import ray

    with _on_loopback():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            object_spilling_directory=_private_folder(),
            **options,
        )


def join_or_start() -> None:
    """As `ray.init()`: join the cluster that RAY_ADDRESS or `ray start` names, else start Ray alone."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    if canonicalize_bootstrap_address(None) is None:
        start_alone()
    else:
        ray.init(log_to_driver=False)


def _private_folder() -> str:
    """A new folder of mode 0700, where the user wants Ray's files, that is removed when this process ends."""
    wanted = os.environ.get(SPILLING) or os.environ.get("RAY_TMPDIR")
    if wanted:
        os.makedirs(wanted, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="dpray-spilled-", dir=wanted)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _on_loopback() -> Iterator[None]:
    from ray._private import ray_constants

    if CLUSTERS in os.environ:
        yield
        return
    before = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[CLUSTERS], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[CLUSTERS]
