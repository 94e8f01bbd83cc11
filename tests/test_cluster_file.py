"""`cluster.yaml` is a file that Ray's launcher accepts, and keeps the promises its comments make."""

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


def test_every_start_command_asks_for_a_token_and_none_binds_to_all_addresses(cluster: dict[str, object]) -> None:
    starts = [
        line
        for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"])
        for line in commands
        if "ray start" in line
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "0.0.0.0" not in CLUSTER.read_text()
