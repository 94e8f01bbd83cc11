"""A cluster started by hand: jobs come over the network, records stay at their sites, a run goes on on another node."""

import copy
import time

import numpy as np
import pytest
import servers
from hosts import PYTHON, end
from sklearn.datasets import load_digits

from dpray.experiments.reading import read_yaml
from dpray.experiments.runs import shipped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CANARY = np.float64(0.7182818284590452)
SITES = {"site-a": 600, "site-b": 700}


@pytest.fixture(scope="module")
def records(cluster):
    """Real records at each site, some of them nothing but canaries; all of them on the laptop, which plays both."""
    digits = load_digits()
    x, y, begin = digits.data / 16.0, digits.target, 0
    for site, count in SITES.items():
        mine = x[begin : begin + count].copy()
        mine[:40] = CANARY
        for host in (cluster.network[site], cluster.laptop):
            np.savez(host.home / f"records-{site}.npz", x=mine, y=y[begin : begin + count])
        begin += count
    np.savez(cluster.network.shared / "public.npz", x=x[begin:], y=y[begin:])
    return cluster


def at_sites(cluster, name, population, rounds=12, **sections):
    """A recipe whose records are at the sites, with test-only noise."""
    return cluster.recipe(
        {
            "name": name,
            "population": {"name": population},
            "budget": {"epsilon": 20, "delta": 1e-5},
            "shares": {"search": 0.3, "training": 0.7},
            "data": {
                "path": "~/records-{site}.npz",
                "features": 64,
                "classes": 10,
                "evaluation": {"public": True, "path": str(cluster.network.shared / "public.npz")},
            },
            "cohort": {"sites": SITES},
            "search": {
                "votes": 1,
                "folds": 3,
                "space": {"learning_rate": {"grid": [0.5, 2.0]}, "clip": {"grid": [1.0, 0.5]}},
            },
            "training": {"algorithm": "dp_fedsofim", "rounds": rounds},
            "noise": {"seed": 1},
            **sections,
        }
    )


def same(one, other):
    """Everything that was released, and the account, bit for bit; trust and its stamps tell where it ran."""
    for key in ("winner", "noisy_votes", "accuracy", "training", "candidates", "records", "clients"):
        assert one[key] == other[key], key
    assert one["statement"]["spent"] == other["statement"]["spent"]


def test_the_quickstart_gives_what_it_gives_on_one_machine(cluster, row):
    document = copy.deepcopy(read_yaml(shipped()["digits_quickstart"]))
    recipe = cluster.recipe({**document, "noise": {"seed": 1}})
    began = time.monotonic()
    done = cluster.submit(recipe, "--name", "quick")
    seconds = time.monotonic() - began
    nodes = next(line for line in done.stdout.splitlines() if line.startswith("Nodes "))
    assert all(host.address in nodes for host in (cluster.head, *cluster.sites))
    assert "python" in nodes
    assert "ray 2." in nodes
    there, here = servers.outcome(cluster.head.home / "dpray", "quick"), cluster.alone(recipe, "quick")
    same(there, here)
    told = cluster.head.run("dpray", "ledger", "verify", "--ledger", cluster.ledger, "--tracking", cluster.tracking)
    assert "1 anchor," in told.stdout  # in PostgreSQL, and by MLflow's server, which has its store there too
    row("by hand", "quickstart over the network: accuracy, equal to one machine", f"{there['accuracy']:.4f}")
    row("by hand", "its seconds, submission to report", f"{seconds:.0f}")


def test_records_stay_at_their_sites_and_the_result_is_that_of_one_machine(records, row):
    cluster, recipe = records, at_sites(records, "sites", "patients")
    with cluster.network.listening_in(CANARY.tobytes() * 4) as heard:
        done = cluster.submit(recipe)
        assert heard() == 0
    assert "Winner" in done.stdout
    same(servers.outcome(cluster.head.home / "dpray", "sites"), cluster.alone(recipe, "sites"))
    for host in (cluster.head, *cluster.sites):
        journals = [site for site in SITES if (host.home / "dpray-sites" / site / "journal.db").exists()]
        assert journals == ([host.name] if host.name in SITES else [])
        for path in (host.home / "dpray-sites").rglob("journal.db*"):
            assert path.stat().st_mode & 0o777 == 0o600
    row("by hand", "packets with a record of a site, search and training", "0")


def test_a_record_on_the_network_would_have_been_heard(records, row):
    """The control of the test above: the same records, fetched by a driver."""
    cluster = records
    fetch = (
        "import ray, numpy as np, os; ray.init('auto', log_to_driver=False)\n"
        "load = ray.remote(num_cpus=0, resources={'site:site-a': 1})(lambda p: np.load(os.path.expanduser(p))['x'])\n"
        "print(ray.get(load.remote('~/records-site-a.npz')).shape)"
    )
    with cluster.network.listening_in(CANARY.tobytes() * 4) as heard:
        assert "(600, 64)" in cluster.head.python(fetch).stdout
        packets = heard()
    assert packets > 0
    row("by hand", "the same if a driver fetches the records (control)", str(packets))


def test_a_site_answers_under_another_name_of_its_people_only_if_its_operator_says_so(records, row):
    """The ledger counts a budget a name; the site, its records once. `resume` goes on with what was charged."""
    cluster, recipe = records, at_sites(records, "twin", "Patients", rounds=1)
    refused = cluster.submit(recipe, check=False)
    assert refused.code == 3
    assert "answers for the population 'patients' was asked for 'Patients'" in refused.stderr + refused.stdout
    row("by hand", "the same people under another name of a population", "refused by the sites")
    allow(cluster, "Patients")
    assert "Winner" in cluster.submit(recipe).stdout


def allow(cluster, population):
    """What a site's operator does there (see `dpray.platform.cohort.journal`)."""
    for site in cluster.sites:
        place = f"{site.environment['HOME']}/dpray-sites/{site.name}/journal.db"
        statement = f"UPDATE meta SET value = json_insert(value, '$[#]', '{population}') WHERE name = 'populations'"
        site.python(f"import sqlite3; d = sqlite3.connect({place!r}); d.execute({statement!r}); d.commit()")


def test_a_run_goes_on_by_its_name_alone_on_another_node(records, row):
    cluster, recipe = records, at_sites(records, "moved", "movers", rounds=150, tracking={"uri": None})
    allow(cluster, "movers")
    shared, first, second = cluster.network.shared / "runs", *cluster.sites
    shared.mkdir()
    driver = first.begin(
        "dpray", "run", recipe, "--workspace", shared, "--address", "auto", "--ledger", cluster.ledger,
        environment={"RAY_AUTH_MODE": "token"},
    )  # fmt: skip
    rounds = shared / "dpray-runs" / "moved" / "training"
    servers.wait(lambda: list(rounds.glob("round-*")) or driver.poll() is not None, "the first round", 120)
    assert driver.poll() is None, driver.communicate()
    end(driver)
    assert not (shared / "dpray-runs" / "moved" / "outcome.json").exists()
    done = second.run("dpray", "resume", "moved", "--workspace", shared, "--address", "auto")
    assert "all 150 rounds done" in done.stdout
    same(servers.outcome(shared, "moved"), cluster.alone(recipe, "moved"))
    row("by hand", "run killed on site-a, resumed by name on site-b: as uninterrupted", "equal")


def test_without_the_token_nothing_answers(cluster, row):
    laptop, head = cluster.laptop, cluster.head
    ask = (
        "import urllib.request as u, urllib.error as e\n"
        f"try: print(u.urlopen('{cluster.http}/api/jobs/', timeout=10).status)\n"
        "except e.HTTPError as error: print(error.code)"
    )
    assert laptop.python(ask).stdout.strip() == "401"
    refused = cluster.submit("digits_quickstart", check=False, environment={"RAY_AUTH_MODE": "disabled"})
    assert refused.code == 2
    assert "auth_token" in refused.stderr
    wrong = cluster.submit("digits_quickstart", check=False, environment={"RAY_AUTH_TOKEN": "0" * 64})
    assert wrong.code == 2
    assert "auth_token" in wrong.stderr
    join = "import ray; ray.init('auto', log_to_driver=False); print(ray.nodes())"
    joined = cluster.sites[0].python(join, check=False, environment={"RAY_AUTH_MODE": "disabled"})
    assert joined.code != 0
    row("by hand", "job request without, and with a wrong token; a driver without one", "401, refused")
    books = f"import urllib.request as u; u.urlopen('http://{head.address}:{servers.MLFLOW}', timeout=5)"
    assert laptop.run(PYTHON, "-c", books, check=False).code != 0
    listening = {address.rsplit(":", 1)[0] for address in head.listening() if address.endswith(f":{servers.MLFLOW}")}
    assert listening == {"127.0.0.1"}


def test_no_secret_is_in_any_file_that_ray_writes(cluster, row):
    token = (cluster.head.home / ".ray" / "auth_token").read_text()
    password = (cluster.head.home / ".dpray-password").read_text().strip().rsplit(":", 1)[1]
    for host in (cluster.head, *cluster.sites):
        written = [path for path in (host.folder / "ray").rglob("*") if path.is_file()]
        assert written
        for path in written:
            data = path.read_bytes()
            assert password.encode() not in data, path
            assert token.encode() not in data, path
    row("by hand", "files of Ray that hold the token or the database's password", "0")


def test_a_job_is_asked_about_and_stopped(cluster):
    recipe = cluster.recipe(
        {**read_yaml(shipped()["digits_quickstart"]), "name": "stopped", "population": {"name": "others"}}
    )
    job = cluster.submit(recipe, "--no-wait").stdout.split()[1]
    ask = lambda *command: cluster.laptop.run("dpray", *command, "--address", cluster.http, check=False)  # noqa: E731
    servers.wait(lambda: "Starting Ray" in ask("logs", job).stdout, "the job's log", 60)
    assert "RUNNING" in ask("status", job).stdout
    assert "being stopped" in ask("stop", job).stdout
    servers.wait(lambda: "STOPPED" in ask("status", job).stdout, "the end of the job", 60)
    assert ask("logs", job, "--follow").code != 0
    assert "no such job" in ask("status", "never").stderr


def test_ray_job_submit_runs_dpray_as_it_stands(cluster):
    recipe = cluster.recipe(
        {**read_yaml(shipped()["digits_quickstart"]), "name": "plain", "population": {"name": "plain"}}
    )
    command = [
        "dpray",
        "run",
        recipe,
        "--ledger",
        cluster.ledger,
        "--tracking",
        cluster.tracking,
        "--workspace",
        "~/dpray",
    ]
    done = cluster.laptop.run("ray", "job", "submit", "--address", cluster.http, "--", *command)
    assert "all 80 rounds done" in done.stdout
    assert all(host.address in done.stdout for host in cluster.sites)  # it ran on the cluster, not beside it


def test_a_relative_ledger_and_a_password_in_an_address_are_refused(cluster):
    laptop = cluster.laptop

    def ask(*places):
        return laptop.run("dpray", "submit", "digits_quickstart", "--address", cluster.http, *places, check=False)

    relative = ask()  # this head was started without places of its own
    assert relative.code == 2
    assert "relative path" in relative.stdout
    secret = ask("--ledger", "postgresql://dpray:hunter2@head/ledger", "--tracking", cluster.tracking)
    assert secret.code == 2
    assert "passfile" in secret.stderr
    assert "hunter2" not in secret.stderr


def test_an_sqlite_ledger_is_refused_where_the_driver_is_not_on_the_head(records):
    recipe = at_sites(records, "elsewhere", "elsewhere")
    place = f"sqlite:///{records.network.shared}/elsewhere.db"
    refused = records.sites[0].run(
        "dpray", "run", recipe, "--workspace", "~/w", "--address", "auto", "--ledger", place, "--tracking",
        records.tracking, check=False,
    )  # fmt: skip
    assert refused.code == 2
    assert "file on the head" in refused.stderr
    assert not (records.network.shared / "elsewhere.db").exists()
