"""The repository's cluster.yaml, by `ray up` over ssh: labels, loopback, a job from submission to report."""

import time

import hosts
import pytest
import ray_up
import servers

from dpray.experiments.reading import read_yaml
from dpray.experiments.runs import shipped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster():
    for reason in (hosts.missing(), ray_up.missing()):
        if reason is not None:
            pytest.skip(reason)
    with hosts.network(("head", "site-a", "site-b", "laptop")) as network:
        ray_up.ray_up(network)
        found = servers.Cluster(network, http=ray_up.tunnel(network["laptop"], network["head"]))
        ask = "import ray; ray.init('auto', log_to_driver=False); print(sorted(ray.cluster_resources()))"
        servers.wait(lambda: "site:site-b" in found.head.python(ask, check=False).stdout, "the last site", 300)
        yield found


def test_every_site_has_its_label_and_the_token_of_mode_0600(cluster):
    ask = (
        "import ray; ray.init('auto', log_to_driver=False)\n"
        "for node in ray.nodes(): print(node['NodeManagerAddress'], sorted(node['Resources']))"
    )
    nodes = dict(line.split(" ", 1) for line in cluster.head.python(ask).stdout.splitlines())
    assert len(nodes) == 3
    for site in cluster.sites:
        assert f"site:{site.name}" in nodes[site.address]
    for host in (cluster.head, *cluster.sites):
        assert (host.home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_the_job_server_and_mlflow_listen_on_loopback_of_the_head_only(cluster):
    for port in (servers.DASHBOARD, servers.MLFLOW):
        listening = {place.rsplit(":", 1)[0] for place in cluster.head.listening() if place.endswith(f":{port}")}
        assert listening == {"127.0.0.1"}, port
    for site in cluster.sites:
        assert not [place for place in site.listening() if place.endswith((":8265", ":5000"))]


def test_the_quickstart_as_a_newcomer_submits_it(cluster, row):
    recipe = cluster.recipe({**read_yaml(shipped()["digits_quickstart"]), "noise": {"seed": 1}, "name": "quickstart"})
    began = time.monotonic()
    done = cluster.laptop.run("dpray", "submit", recipe)
    row("ray up", "quickstart over the network, its seconds", f"{time.monotonic() - began:.0f}")
    assert "all 80 rounds done" in done.stdout
    there, here = servers.outcome(cluster.head.home / "dpray", recipe.stem), cluster.alone(recipe, recipe.stem)
    for key in ("winner", "noisy_votes", "accuracy"):
        assert there[key] == here[key]
    row("ray up", "quickstart over the network: accuracy, equal to one machine", f"{there['accuracy']:.4f}")
    ledger = cluster.head.home / "dpray" / "ledger.db"
    assert ledger.stat().st_mode & 0o777 == 0o600
    inside = f"sqlite:///{cluster.head.environment['HOME']}/dpray/ledger.db"
    told = cluster.head.run("dpray", "ledger", "verify", "--ledger", inside, "--tracking", cluster.tracking).stdout
    assert "1 anchor," in told


def test_ray_down_ends_it(cluster):
    """On the head at once; a site's node ends itself when its head has been gone for a minute."""
    assert all(ray_up.ray_runs_on(host) for host in (cluster.head, *cluster.sites))
    ray_up.ray_down(cluster.network)
    assert not ray_up.ray_runs_on(cluster.head)
    for site in cluster.sites:
        servers.wait(lambda site=site: not ray_up.ray_runs_on(site), f"the end of Ray on {site.name}", 150)
