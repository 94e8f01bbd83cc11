"""A recipe whose records are at sites: what it must declare, what the driver does not open, and one run."""

import copy

import numpy as np
import pytest

from dpray.experiments import at_sites, kinds, material
from dpray.experiments.plan import forecast
from dpray.experiments.reading import RecipeError, write_yaml
from dpray.platform.cohort import Records

DOCUMENT = {
    "name": "sites",
    "population": {"name": "patients"},
    "budget": {"epsilon": 50, "delta": 1e-5},
    "shares": {"training": 1},
    "data": {
        "path": "/srv/{site}.npz",
        "features": 4,
        "classes": 3,
        "evaluation": {"public": True, "path": "public.npz"},
    },
    "cohort": {"sites": {"north": 30, "south": 40}},
    "training": {"algorithm": "dp_fedgd", "rounds": 3, "learning_rate": 1.0, "clip": 1.0},
    "noise": {"seed": 1},
}


def changed(section, key, value):
    document = copy.deepcopy(DOCUMENT)
    if value is None:
        del document[section][key]
    else:
        document[section][key] = value
    return write_yaml(document)


def write(path, count, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    np.savez(path, x=np.eye(4)[y] + 0.1 * rng.normal(size=(count, 4)), y=y)


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("data", "dataset", "digits", "cannot stand beside `data.path`"),
        ("data", "features", None, "`data.features` is missing"),
        ("data", "evaluation", {"public": True, "fraction": 0.2}, "file of its own"),
        ("data", "path", "records.npz", "start with / or ~/"),
        ("data", "path", None, "`data.dataset` is missing"),
        ("cohort", "clients", 3, "`cohort.sites` names 2"),
        ("cohort", "actors", 2, "sites hold their own"),
        ("cohort", "sites", {"north": 0, "south": 40}, "at least 1"),
    ],
)
def test_refused_with_a_sentence(section, key, value, words):
    with pytest.raises(RecipeError, match=words):
        kinds.read(changed(section, key, value))


def test_sites_without_a_path_and_a_path_without_sites_are_refused():
    document = copy.deepcopy(DOCUMENT)
    document["cohort"] = {"clients": 2}
    with pytest.raises(RecipeError, match="belong together"):
        kinds.read(write_yaml(document))


def test_the_recipe_reads_back_as_it_was_written():
    recipe = kinds.read(write_yaml(DOCUMENT))
    assert recipe.cohort.clients == 2
    assert kinds.read(recipe.write()) == recipe


def test_the_driver_opens_no_file_of_a_site_and_binds_the_name_to_what_is_declared(tmp_path):
    recipe = kinds.read(write_yaml(DOCUMENT))  # /srv/north.npz is nowhere
    write(tmp_path / "public.npz", 9, 0)
    found = material.load(recipe, tmp_path)
    assert (found.scale.clients, found.scale.records, found.scale.largest_client) == (2, 70, 40)
    assert {name: site.resources for name, site in found.shards.items()} == {
        "north": {"site:north": 1},
        "south": {"site:south": 1},
    }
    declared = forecast(recipe, found.scale).declaration
    assert declared["cohort.sites.north"] == 30
    assert declared["data.features"] == 4
    assert "/srv" not in str(declared)


def test_the_public_file_is_held_to_what_is_declared(tmp_path):
    recipe = kinds.read(write_yaml(DOCUMENT))
    with pytest.raises(RecipeError, match="not on this machine"):
        material.load(recipe, tmp_path)
    np.savez(tmp_path / "public.npz", x=np.zeros((5, 3)), y=np.zeros(5))
    with pytest.raises(RecipeError, match=r"is not an \.npz file of x \(n, 4\)"):
        material.load(recipe, tmp_path)
    np.savez(tmp_path / "public.npz", x=np.zeros((5, 4)), y=np.full(5, 3))
    with pytest.raises(RecipeError, match=r"classes 0 … 2"):
        material.load(recipe, tmp_path)


def test_a_file_with_a_pickle_in_it_is_not_read(tmp_path):
    np.savez(tmp_path / "evil.npz", x=np.zeros((2, 4)), y=np.array([{"a": 1}, None], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        at_sites.RecordsFile(str(tmp_path / "evil.npz"), 4)()


def test_a_loader_reads_the_file_where_it_is_called(tmp_path, monkeypatch):
    write(tmp_path / "mine.npz", 6, 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    records = at_sites.RecordsFile("~/mine.npz", 4)()
    assert isinstance(records, Records)
    assert len(records) == 6


def test_a_site_whose_features_have_another_width_is_refused_and_nothing_is_spent(tmp_path, make_workspace):
    workspace = make_workspace(tmp_path / "here")
    write(tmp_path / "north.npz", 30, 0)
    np.savez(tmp_path / "south.npz", x=np.zeros((40, 5)), y=np.zeros(40))
    write(workspace.folder / "public.npz", 60, 9)
    place = tmp_path / "recipe.yaml"
    place.write_text(changed("data", "path", str(tmp_path / "{site}.npz")))
    done = workspace.run("run", place)
    assert done.code == 2, done.stderr
    assert "south" in done.stderr
    assert not (workspace.folder / "dpray-ledger.db").exists()


def test_one_machine_plays_all_sites(tmp_path, make_workspace):
    workspace = make_workspace(tmp_path / "here")
    for seed, (site, count) in enumerate({"north": 30, "south": 40}.items()):
        write(tmp_path / f"{site}.npz", count, seed)
    write(workspace.folder / "public.npz", 60, 9)
    place = tmp_path / "recipe.yaml"
    place.write_text(changed("data", "path", str(tmp_path / "{site}.npz")))
    done = workspace.run("run", place)
    assert done.code == 0, done.stderr
    assert "all 3 rounds done" in done.stdout
    assert {path.parent.name for path in (workspace.folder / "dpray-sites").rglob("journal.db")} == {"north", "south"}
    assert workspace.outcome("sites")["records"] == 70
