"""Addresses of ledger and MLflow: what a cluster refuses, what its environment names, and no password anywhere."""

import pytest

from dpray.experiments import places
from dpray.experiments.reading import RecipeError
from dpray.experiments.runs import find_recipe


def recipe(ledger=None, tracking=None):
    return places.placed(find_recipe("digits_quickstart"), ledger, tracking)


def test_relative_files_are_refused_on_a_cluster_only():
    places.check(recipe(), cluster=False)
    with pytest.raises(RecipeError, match=r"`ledger` \(sqlite:///dpray-ledger.db\) is a relative path") as refused:
        places.check(recipe(), cluster=True)
    assert len(refused.value.problems) == 2
    assert "DPRAY_TRACKING" in refused.value.problems[1]
    places.check(recipe("sqlite:////data/ledger.db", "http://127.0.0.1:5000"), cluster=True)


def test_a_cluster_names_places_for_relative_files_alone(monkeypatch):
    monkeypatch.setenv("DPRAY_LEDGER", "postgresql://dpray@head/ledger")
    monkeypatch.delenv("DPRAY_TRACKING", raising=False)
    assert places.of_cluster(recipe()).ledger == "postgresql://dpray@head/ledger"
    assert places.of_cluster(recipe()).tracking.uri == "sqlite:///mlflow.db"
    assert places.of_cluster(recipe("sqlite:////mine.db")).ledger == "sqlite:////mine.db"


def test_a_recipe_that_tracks_nothing_goes_on_tracking_nothing():
    silent = find_recipe("digits_quickstart")
    silent = silent.model_copy(update={"tracking": silent.tracking.model_copy(update={"uri": None})})
    assert places.placed(silent, None, "http://head:5000").tracking.uri is None


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:hunter2@head/ledger",
        "postgresql://me:hunter2/x@head/ledger",
        "postgresql://me:hunter2#x@head/ledger",
        "postgresql://me@head/ledger?password=hunter2",
        "postgresql://me@head/ledger?sslmode=require&PASSWORD=hunter2",
        "postgresql://me@head/ledger?sslpassword=hunter2",
        "postgresql://me@head/ledger?p%61ssword=hunter2",
        "postgresql://me@head/ledger?dbname=postgresql://me:hunter2@head/ledger",
        "postgresql://me@head/ledger#password=hunter2",
        "http://head:5000/?token=hunter2",
        "HTTPS://head:5000/?access_key=hunter2",
        "http://head:5000/#hunter2",
        "https://hunter2@head",
    ],
)
@pytest.mark.parametrize("cluster", [False, True])
def test_a_secret_in_an_address_is_refused_without_showing_it(address, cluster):
    for given in (recipe(address, "http://head:5000"), recipe("sqlite:////ledger.db", address)):
        with pytest.raises(RecipeError, match=r"holds a password.*passfile=") as refused:
            places.check(given, cluster=cluster)
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me@head/ledger?passfile=/home/me/pass&sslmode=verify-full&SSLROOTCERT=/ca.pem&connect_timeout=5",
        "postgresql+psycopg://me@/ledger?host=/run/postgresql&port=5433&application_name=dpray",
        "sqlite:////data/run#1/me@lab/ledger.db",
    ],
)
def test_what_is_known_to_be_no_secret_stays(address):
    places.check(recipe(address, "https://head:5000/mlflow"), cluster=True)


def test_a_password_file_that_others_can_read_is_refused(tmp_path):
    place = tmp_path / "pass"
    url = f"postgresql://me@head/ledger?passfile={place}"
    with pytest.raises(RecipeError, match="there is no such file"):
        places.check_password_files(recipe(url))
    place.write_text("head:*:*:me:hunter2")
    place.chmod(0o644)
    with pytest.raises(RecipeError, match=r"of mode 0644: others can read it"):
        places.check_password_files(recipe(url))
    place.chmod(0o600)
    places.check_password_files(recipe(url))
