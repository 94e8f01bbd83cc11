"""Hosts of a small network on this machine: each has its own address, processes, home and temporary files.

    laptop ─┐
    head ───┤ a bridge in a network namespace of its own: 10.77.0.0/24 leads nowhere else
    site-a ─┤
    site-b ─┘

A host is one process that holds Linux namespaces (network, processes, mounts, shared memory, name). Its home (at the
same path on every host) and `/tmp/ray` are its own; the rest of the file system, so the code, is shared. When the
process that holds a host is killed, the kernel kills everything that runs in it, daemons included, and its network is
gone; it is killed when the test process ends, however that ends. This machine's own namespaces are never touched.

`Network.cut` and `Network.mend` take a host's cable out and in; `Host.power_off` is a machine that loses power.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PREFIX, BRIDGE = "10.77.0.", "dpray0"
PYTHON = Path(sys.executable)
_REAPS = (
    "import os, time\nwhile True:\n    try:\n        os.wait()\n    except ChildProcessError:\n        time.sleep(0.1)"
)
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_APART = ("unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
_SPY = """
import select, socket, sys
pattern, found, everything = bytes.fromhex(sys.argv[1]), 0, socket.htons(3)
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything)
tap.setsockopt(socket.SOL_SOCKET, 33, 256 * 2**20)  # SO_RCVBUFFORCE
print("listening", flush=True)
while True:
    ready, _, _ = select.select([tap, sys.stdin], [], [])
    if tap in ready:
        found += pattern in tap.recv(2**17)
    elif sys.stdin in ready:
        break
print(found)
"""
_SETUP = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t tmpfs -o size=768m tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd /tmp/ray
mount --bind "$2/$1/home" "$2/me"
mount --bind "$2/$1/ray" /tmp/ray
mount --bind "$2/names" /etc/hosts
mount --bind "$2/users" /etc/passwd
ip link set lo up
exec "$3" -c "$4"
"""


def missing() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts of a network are made of Linux namespaces, by root"
    wanted = [tool for tool in ("ip", "nsenter", "ps", "setpriv", "unshare") if shutil.which(tool) is None]
    if wanted:
        return f"not installed here: {', '.join(wanted)} (Debian: iproute2, procps, util-linux)"
    tried = subprocess.run(
        [*_APART, "ip", "link", "add", BRIDGE, "type", "bridge"], check=False, capture_output=True, text=True
    )
    return f"namespaces may not be made here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Host:
    """One machine of the network.

    Attributes:
        name: its host name.
        address: its only address besides loopback.
        folder: of its files on this machine: `home` and `ray` (its `/tmp/ray`).
        holder: the process that holds its namespaces.
        environment: of every command on it.
    """

    name: str
    address: str
    folder: Path
    holder: subprocess.Popen[bytes]
    environment: dict[str, str] = field(default_factory=dict)
    begun: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """What `~` is there, as seen from here."""
        return self.folder / "home"

    def begin(
        self,
        *command: object,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: object = "~",
        log: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command there, in a process group that `end` ends as a whole; what it says goes to `log`."""
        folder = self.environment["HOME"] if cwd == "~" else str(cwd)
        given = {**self.environment, **(environment or {})}
        variables = [f"{name}={value}" for name, value in given.items()]
        inside = ["env", "-i", *variables, *map(str, command)]
        if user is not None:
            inside = ["setpriv", "--reuid", user, "--regid", user, "--init-groups", *inside]
        output = subprocess.PIPE if log is None else log.open("a")
        process = subprocess.Popen(
            ["nsenter", "-t", str(self.init), "-n", "-p", "-m", "-i", "-u", f"--wdns={folder}", "--", *inside],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        self.begun.append(process)
        return process

    def run(
        self,
        *command: object,
        environment: Mapping[str, str] | None = None,
        timeout: float = 240,
        check: bool = True,
        user: str | None = None,
        cwd: object = "~",
    ) -> Ended:
        """Run a command there to its end.

        Raises:
            AssertionError: it failed, unless `check` is false.
        """
        process = self.begin(*command, environment=environment, user=user, cwd=cwd)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process)
            raise
        assert not check or process.returncode == 0, f"{self.name}: {command} ended with {process.returncode}:\n" + (
            stdout[-4000:] + stderr[-4000:]
        )
        return Ended(process.returncode, stdout, stderr)

    def python(self, code: str, **options: object) -> Ended:
        """Run Python code there."""
        return self.run(PYTHON, "-c", code, **options)  # type: ignore[arg-type]

    @property
    def init(self) -> int:
        """Process id, here, of the first process there."""
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        if not children:
            raise RuntimeError(f"The host {self.name} is off.")
        return int(children[0])

    def processes(self) -> list[int]:
        """Process ids, here, of all that runs there."""
        space = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") == space:
                    found.append(int(entry.name))
        return found

    def listening(self) -> set[str]:
        """ADDRESS:PORT of every TCP socket that listens there."""
        return {line.split()[3] for line in self.run("ss", "-Hltn").stdout.splitlines()}

    def power_off(self) -> None:
        """Kill everything there at once; its files stay."""
        with contextlib.suppress(OSError, RuntimeError, ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)  # it is gone only after everything else there is
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.holder.wait(30)
        self.holder.kill()
        self.holder.wait(30)
        for process in self.begun:
            with contextlib.suppress(OSError, ValueError):
                end(process)


@dataclass
class Network:
    """Hosts on one bridge; make one with `network`."""

    folder: Path
    switch: subprocess.Popen[bytes]
    hosts: dict[str, Host] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    @property
    def shared(self) -> Path:
        """A folder that all hosts see, as one mounted from a file server would be."""
        return self.folder / "shared"

    def add(self, name: str) -> Host:
        """Switch a host on and connect it; again, after `power_off`, with the same address and files.

        From a thread that lasts: the kernel ends the host with the thread that has made it.
        """
        number = list(self.hosts).index(name) if name in self.hosts else len(self.hosts)
        folder, address = self.folder / name, f"{PREFIX}{number + 1}"
        for part in ("home", "ray"):
            (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "names").open("a") as names:  # the same file, since hosts have it mounted
            names.write("" if name in self.hosts else f"{address} {name}\n")
        command = [*_DIES_WITH_US, *_APART, "sh", "-c", _SETUP, "sh", name, self.folder, PYTHON, _REAPS]
        holder = subprocess.Popen(list(map(str, command)), start_new_session=True)
        host = Host(name, address, folder, holder, _environment(self.folder / "me"))
        self.hosts[name] = host
        wait(lambda: _command_of(host).startswith(str(PYTHON)), f"host {name}")  # the last thing its set-up does
        self._plug(host, f"p{number}")
        return host

    def cut(self, name: str) -> None:
        """Take the host's cable out: packets are lost, nobody is told."""
        self._at_switch("ip", "link", "set", f"p{list(self.hosts).index(name)}", "down")

    def mend(self, name: str) -> None:
        """Put the cable in again."""
        self._at_switch("ip", "link", "set", f"p{list(self.hosts).index(name)}", "up")

    def sent(self) -> dict[str, int]:
        """Bytes that each host has sent so far."""
        found = {}
        for number, name in enumerate(self.hosts):
            path = f"/sys/class/net/p{number}/statistics/rx_bytes"
            found[name] = int(self._at_switch("sh", "-c", f"mount -t sysfs none /sys 2>/dev/null; cat {path}"))
        return found

    @contextlib.contextmanager
    def listening_in(self, pattern: bytes) -> Iterator[Callable[[], int]]:
        """Counts the packets on the bridge that hold these bytes; to be called once, at the end."""
        spy = subprocess.Popen(
            ["nsenter", "-t", str(self._switch_pid), "-n", "--", str(PYTHON), "-c", _SPY, pattern.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def found() -> int:
            return int(spy.communicate("stop\n", timeout=60)[0].split()[-1])

        try:
            assert spy.stdout is not None
            spy.stdout.readline()
            yield found
        finally:
            spy.kill()
            spy.wait(10)

    def close(self) -> None:
        """Switch everything off and remove its files."""
        for host in self.hosts.values():
            host.power_off()
        self.switch.kill()
        self.switch.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _plug(self, host: Host, port: str) -> None:
        self._at_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.init))
        self._at_switch("ip", "link", "set", port, "master", BRIDGE, "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "dev", "eth0")

    @property
    def _switch_pid(self) -> int:
        return int(Path(f"/proc/{self.switch.pid}/task/{self.switch.pid}/children").read_text().split()[0])

    def _at_switch(self, *command: str) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(self._switch_pid), "-n", "-m", "--", *command],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return done.stdout


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """A network of these hosts, for as long as the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix="dpn", dir="/tmp"))
    folder.chmod(0o755)
    for name in ("shared", "me"):
        (folder / name).mkdir()
    (folder / "names").write_text("127.0.0.1 localhost\n")
    (folder / "users").write_text(_users(folder / "me"))
    made = subprocess.Popen(
        [*_DIES_WITH_US, "unshare", "--net", "--mount", "--fork", "--kill-child", "sleep", "infinity"],
        start_new_session=True,
    )
    found = Network(folder, made)
    try:
        wait(lambda: bool(found._switch_pid), "the switch")
        wait(lambda: os.readlink(f"/proc/{found._switch_pid}/ns/net") != os.readlink("/proc/self/ns/net"), "its net")
        found._at_switch("ip", "link", "add", BRIDGE, "type", "bridge")
        found._at_switch("ip", "link", "set", BRIDGE, "up")
        for name in names:
            found.add(name)
        yield found
    finally:
        found.close()


def end(process: subprocess.Popen[str]) -> None:
    """End a command with the children it has not given a session of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


def _users(home: Path) -> str:
    """This machine's users, with the tests' own one at home in `home`: where `sshd` and `~` lead."""
    lines = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[2] == str(os.geteuid()):
            fields[5], fields[6] = str(home), "/bin/bash"
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def _environment(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "USER": pwd.getpwuid(os.geteuid()).pw_name,
        "PATH": f"{PYTHON.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _command_of(host: Host) -> str:
    try:
        return Path(f"/proc/{host.init}/cmdline").read_text().replace("\0", " ")
    except (OSError, RuntimeError):
        return ""


def wait(ready: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Until it is ready.

    Raises:
        TimeoutError: it is not, in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, IndexError):
            if ready():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {seconds:g} s")
        time.sleep(0.02)
