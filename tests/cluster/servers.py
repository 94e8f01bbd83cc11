"""What runs on the hosts: Ray nodes started by hand, PostgreSQL, MLflow. All of it ends with its host."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hosts import PYTHON, Ended, Host, Network, wait

GCS, DASHBOARD, MLFLOW, POSTGRES = 6379, 8265, 5000, 5432
CLUSTER = Path(__file__).resolve().parents[2] / "cluster.yaml"
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


def health_checks() -> dict[str, str]:
    """Environment of a head whose health checks are those of the repository's cluster.yaml."""
    return dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", CLUSTER.read_text()))


def start_head(host: Host, *, cpus: int = 1) -> None:
    """Ray's head, its job server on the host's address, as whoever asks for that starts it."""
    host.run(
        "ray", "start", "--head", f"--node-ip-address={host.address}", f"--port={GCS}", f"--num-cpus={cpus}",
        f"--dashboard-host={host.address}", f"--object-store-memory={_STORE}", "--disable-usage-stats",
        environment=health_checks(),
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
        user="postgres", cwd="/", log=host.folder / "postgres.log",
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
        "--artifacts-destination", f"{host.environment['HOME']}/mlflow", log=host.folder / "mlflow.log",
    )  # fmt: skip
    probe = f"import urllib.request as u; u.urlopen('http://{address}:{MLFLOW}/health', timeout=5)"
    wait(lambda: host.run(PYTHON, "-c", probe, check=False).code == 0, "MLflow", 240)


@dataclass
class Cluster:
    """Three hosts with Ray, and the laptop from which jobs are submitted.

    Attributes:
        network: its hosts.
        http: address of the job server, as the laptop reaches it.
    """

    network: Network
    http: str
    tracking: str = f"http://127.0.0.1:{MLFLOW}"

    @property
    def head(self) -> Host:
        """The host that drives jobs."""
        return self.network["head"]

    @property
    def laptop(self) -> Host:
        """The host that is no node."""
        return self.network["laptop"]

    @property
    def sites(self) -> list[Host]:
        """The hosts that hold records."""
        return [host for name, host in self.network.hosts.items() if name.startswith("site-")]

    @property
    def passfile(self) -> str:
        """The database's password file, where the head, and whoever else drives, has it."""
        return f"{self.head.environment['HOME']}/.dpray-password"

    @property
    def ledger(self) -> str:
        """Address of the ledger in PostgreSQL."""
        return f"postgresql://dpray@{self.head.address}/ledger?passfile={self.passfile}"

    def start_books(self) -> None:
        """PostgreSQL, and MLflow with a database there."""
        secret = start_postgres(self.head).read_text()
        for site in self.sites:
            private(site.home / ".dpray-password", secret)
        store = f"postgresql+psycopg://dpray@{self.head.address}/mlflow?passfile={self.passfile}"
        start_mlflow(self.head, store)

    def submit(self, recipe: Path | str, *options: object, check: bool = True, **more: Any) -> Ended:
        """`dpray submit` on the laptop."""
        places = ("--ledger", self.ledger, "--tracking", self.tracking)
        return self.laptop.run(
            "dpray", "submit", recipe, "--address", self.http, *places, *options, check=check, **more
        )

    def alone(self, recipe: Path, name: str) -> dict[str, Any]:
        """The same recipe and name on one machine without a cluster: its outcome."""
        workspace = self.laptop.home / "alone" / name
        workspace.mkdir(parents=True)
        inside = f"{self.laptop.environment['HOME']}/alone/{name}"
        self.laptop.run(
            "dpray", "run", recipe, "--name", name, "--workspace", inside, environment={"RAY_AUTH_MODE": "disabled"}
        )
        return outcome(workspace, name)

    def recipe(self, document: Mapping[str, Any]) -> Path:
        """Write a recipe where every host sees it."""
        place = self.network.shared / f"{document['name']}.yaml"
        place.write_text(yaml.safe_dump(dict(document), sort_keys=False))
        return place


def outcome(workspace: Path, name: str) -> dict[str, Any]:
    """What came out of a run, but for what tells one ledger from another."""
    return json.loads((workspace / "dpray-runs" / name / "outcome.json").read_text())
