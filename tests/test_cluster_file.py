"""`cluster.yaml` is a file that Ray's launcher accepts, and keeps the promises its comments make."""

import re
from pathlib import Path

import pytest
import yaml

CLUSTER = Path(__file__).resolve().parents[1] / "cluster.yaml"


@pytest.fixture(scope="module")
def cluster() -> dict[str, object]:
    return yaml.safe_load(CLUSTER.read_text())


def test_ray_accepts_the_file(cluster: dict[str, object]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))


def starts(cluster: dict[str, list[str]]) -> list[str]:
    commands = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    return [line for line in commands if "ray start" in line]


def test_every_start_command_asks_for_a_token_and_none_binds_to_all_addresses(cluster: dict[str, list[str]]) -> None:
    assert len(starts(cluster)) == 2
    assert all("RAY_AUTH_MODE=token" in line for line in starts(cluster))
    assert "--dashboard-host=127.0.0.1" in starts(cluster)[0]
    (books,) = (line for line in cluster["head_start_ray_commands"] if "mlflow server" in line)
    assert "--host 127.0.0.1" in books
    assert "0.0.0.0" not in CLUSTER.read_text()


def test_the_only_secret_travels_as_a_file_and_no_data_does(cluster: dict[str, dict[str, str]]) -> None:
    assert cluster["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token", "~/dpray-source": "."}
    assert {".git", ".venv", "*.db", "*.npz", "dpray-runs", "dpray-sites"} <= set(cluster["rsync_exclude"])
    assert any("chmod 600 ~/.ray/auth_token" in line for line in cluster["setup_commands"])


def test_jobs_find_ledger_and_mlflow_in_the_heads_environment(cluster: dict[str, list[str]]) -> None:
    assert "DPRAY_LEDGER=sqlite:///$HOME/" in starts(cluster)[0]
    assert "DPRAY_TRACKING=http://127.0.0.1:5000" in starts(cluster)[0]


def test_a_machine_without_power_is_dead_for_ray_after_half_a_minute(cluster: dict[str, list[str]]) -> None:
    """Every check fails at its time limit at the latest, and the next one follows a period later."""
    given = {name: int(value) for name, value in re.findall(r"RAY_health_check_(\w+)=(\d+)", starts(cluster)[0])}
    seconds = given["failure_threshold"] * (given["timeout_ms"] + given["period_ms"]) / 1000
    assert 15 <= seconds <= 30  # neither after a pause of the network
