"""A cluster by `ray up cluster.yaml`, over `sshd` on each host: the file as it stands, but for addresses and user."""

from __future__ import annotations

import getpass
import shutil
from pathlib import Path

import servers
import yaml
from hosts import PYTHON, Host, Network

ROOT = Path(__file__).resolve().parents[2]


def missing() -> str | None:
    """What is not installed; None if everything is."""
    wanted = [tool for tool in ("/usr/sbin/sshd", "ssh", "ssh-keygen", "rsync") if shutil.which(tool) is None]
    return f"not installed here: {', '.join(wanted)} (Debian: openssh-server, rsync)" if wanted else None


def start_sshd(network: Network) -> None:
    """Every host is reached by `ssh`, with the key of the laptop."""
    laptop = network["laptop"]
    laptop.run("sh", "-c", "mkdir -p -m 700 .ssh && ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519")
    key = (laptop.home / ".ssh" / "id_ed25519.pub").read_text()
    for host in network.hosts.values():
        servers.private(host.home / ".ssh" / "authorized_keys", key)
        identity = host.folder / "host-key"
        host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", identity)
        options = {
            "ListenAddress": host.address,
            "HostKey": identity,
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
        }
        given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        host.begin("/usr/sbin/sshd", "-D", "-e", *given, log=host.folder / "sshd.log")


def settings(network: Network) -> dict[str, object]:
    """The repository's cluster.yaml for these hosts."""
    document = yaml.safe_load(servers.CLUSTER.read_text())
    sites = [host.address for name, host in network.hosts.items() if name.startswith("site-")]
    document["provider"] |= {"head_ip": network["head"].address, "worker_ips": sites}
    document["auth"]["ssh_user"] = getpass.getuser()
    return document


def ray_up(network: Network) -> Path:
    """Give every host an environment and every site its label, and bring the cluster up from the laptop."""
    laptop = network["laptop"]
    start_sshd(network)
    for host in network.hosts.values():
        (host.home / "dpray-env").symlink_to(PYTHON.parents[1])
    for site in (host for name, host in network.hosts.items() if name.startswith("site-")):
        (site.home / "dpray-site").write_text(f'{{"site:{site.name}": 1}}')
    laptop.run("ray", "get-auth-token", "--generate")
    place = laptop.home / "cluster.yaml"
    place.write_text(yaml.safe_dump(settings(network), sort_keys=False))
    inside = f"{laptop.environment['HOME']}/cluster.yaml"
    laptop.run("ray", "up", "-y", "--no-config-cache", inside, cwd=ROOT, timeout=600)
    return place


def ray_down(network: Network) -> None:
    """As `ray_up` brought it up."""
    laptop = network["laptop"]
    laptop.run("ray", "down", "-y", f"{laptop.environment['HOME']}/cluster.yaml", cwd=ROOT, timeout=300)


def ray_runs_on(host: Host) -> bool:
    """Whether a process of Ray's own is left."""
    names = [(Path("/proc") / str(pid) / "comm") for pid in host.processes()]
    return any(name.read_text().startswith(("raylet", "gcs_server")) for name in names if name.exists())


def tunnel(laptop: Host, head: Host) -> str:
    """The head's job server on loopback of the laptop, as `ray dashboard` brings it there; its address."""
    laptop.begin(
        "ssh", "-N", "-o", "StrictHostKeyChecking=no", "-L", "8265:127.0.0.1:8265",
        f"{getpass.getuser()}@{head.address}",
        log=laptop.folder / "tunnel.log",
    )  # fmt: skip
    ask = "import socket; socket.create_connection(('127.0.0.1', 8265), timeout=5)"
    servers.wait(lambda: laptop.run(PYTHON, "-c", ask, check=False).code == 0, "the tunnel", 60)
    return "http://127.0.0.1:8265"
