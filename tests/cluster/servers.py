"""What runs on the hosts: Ray nodes started by hand, PostgreSQL, MLflow. All of it ends with its host."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hosts import PYTHON, Host, Network

GCS, DASHBOARD, MLFLOW, POSTGRES = 6379, 8265, 5000, 5432
_STORE = 100 * 2**20


def give_token(*hosts: Host) -> str:
    """The cluster's token, in a file of mode 0600 at home on every host."""
    token = secrets.token_hex(32)
    for host in hosts:
        private(host.home / ".ray" / "auth_token", token)
    return token


def private(place: Path, text: str) -> Path:
    """Write a file of mode 0600."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    return place


def start_head(host: Host, *, cpus: int = 1) -> None:
    """Ray's head, its job server on the host's address, as whoever asks for that starts it."""
    host.run(
        "ray", "start", "--head", f"--node-ip-address={host.address}", f"--port={GCS}", f"--num-cpus={cpus}",
        f"--dashboard-host={host.address}", f"--object-store-memory={_STORE}", "--disable-usage-stats",
    )  # fmt: skip


def start_worker(host: Host, head: Host, *, cpus: int = 1) -> None:
    """A Ray node with its site's label."""
    host.run(
        "ray", "start", f"--address={head.address}:{GCS}", f"--node-ip-address={host.address}", f"--num-cpus={cpus}",
        f'--resources={{"site:{host.name}": 1}}', f"--object-store-memory={_STORE}", "--disable-usage-stats",
    )  # fmt: skip


def by_hand(network: Network) -> Host:
    """Start Ray with a token on `head` and every site, all at once; returns the head."""
    head, *sites = [host for name, host in network.hosts.items() if name != "laptop"]
    give_token(*network.hosts.values())
    start_head(head)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda site: start_worker(site, head), sites))
    return head


def postgres_binaries() -> Path | None:
    """Folder of PostgreSQL's programs; None where there is none, or no user to run them as."""
    found = [folder for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin")) if (folder / "initdb").exists()]
    with contextlib.suppress(KeyError):
        pwd.getpwnam("postgres")
        return found[-1] if found else None
    return None


def start_postgres(host: Host, databases: tuple[str, ...] = ("ledger", "mlflow")) -> Path:
    """PostgreSQL on the host's address, passwords wanted; returns the password file of its owner, `dpray`."""
    binaries = postgres_binaries()
    assert binaries is not None
    folder, password = host.folder / "postgres", secrets.token_hex(16)
    folder.mkdir()
    shutil.chown(folder, "postgres")
    first = private(host.folder / "first-password", password)
    shutil.chown(first, "postgres")
    host.folder.chmod(0o755)
    host.run(
        binaries / "initdb", "-D", folder / "data", "-U", "dpray", f"--pwfile={first}", "-A", "scram-sha-256",
        "-E", "UTF8", "--locale=C", "--no-sync", user="postgres", cwd="/",
    )  # fmt: skip
    with (folder / "data" / "pg_hba.conf").open("a") as rules:
        rules.write("host all all samenet scram-sha-256\n")
    host.begin(
        binaries / "postgres", "-D", folder / "data", "-k", folder, "-c", f"listen_addresses={host.address}",
        user="postgres", cwd="/",
    )  # fmt: skip
    passfile = private(host.home / ".dpray-password", f"{host.address}:*:*:dpray:{password}\n")
    path = f"{host.environment['HOME']}/.dpray-password"
    for name in databases:
        wait(
            lambda name=name: host.run(
                binaries / "createdb", "-h", host.address, "-U", "dpray", "-w", name,
                environment={"PGPASSFILE": path}, check=False,
            ).code == 0,
            f"database {name}",
        )  # fmt: skip
    return passfile


def start_mlflow(host: Host, store: str, *, address: str = "127.0.0.1") -> None:
    """MLflow's server, on loopback unless asked otherwise."""
    place = host.home / "mlflow"
    place.mkdir(exist_ok=True)
    host.begin(
        "mlflow", "server", "--host", address, "--port", MLFLOW, "--workers", 1, "--backend-store-uri", store,
        "--artifacts-destination", f"{host.environment['HOME']}/mlflow",
    )  # fmt: skip
    probe = f"import urllib.request as u; u.urlopen('http://{address}:{MLFLOW}/health', timeout=5)"
    wait(lambda: host.run(PYTHON, "-c", probe, check=False).code == 0, "MLflow", 90)


def wait(ready: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Until it is ready.

    Raises:
        TimeoutError: it is not, in time.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {seconds:g} s")
        time.sleep(0.2)
