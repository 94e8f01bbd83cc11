"""A cohort that starts Ray itself: nobody on another machine reaches it."""

import contextlib
import ipaddress
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, numpy as np, ray
from dpray.platform.cohort import ClientTask, Cohort, Records

class Nothing(ClientTask):
    dimension = 1

    def clipped_sum(self, theta, records, clip):
        return np.zeros(1)

shards = {"a": Records(np.zeros((2, 1)), np.zeros(2)), "b": Records(np.zeros((2, 1)), np.zeros(2))}
with Cohort(Nothing(), shards, actors=1, state_dir=sys.argv[1]) as cohort:
    print("up", *cohort.processes(), flush=True)
    sys.stdin.readline()
ray.shutdown()
"""


def descendants(pid):
    """A process and all that came from it, by the parents that /proc names."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def listening(pids):
    """Addresses on which processes listen."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            sockets |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                packed = bytes.fromhex(fields[1].split(":")[0])
                words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                address = ipaddress.ip_address(words)
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are looked up in /proc")
def test_ray_that_a_cohort_starts_listens_on_loopback_only(tmp_path):
    left_out = {"RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env={**environment, "RAY_AUTH_MODE": "disabled"},
    )
    try:
        assert process.stdout.readline().startswith("up ")
        heard = listening(descendants(process.pid))
        assert heard
        assert heard <= {"127.0.0.1", "::1"}
    finally:
        process.communicate("\n", timeout=120)
    assert process.returncode == 0
