"""Files: what is private is its owner's alone, and nothing that is read from a disk can run code."""

import ast
import hashlib
import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpray.experiments import kinds
from dpray.experiments.reading import RecipeError
from dpray.platform import datasets
from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.privacy.ledger import Ledger
from dpray.searchers import state as searcher_state
from dpray.searchers.errors import SearchError
from dpray.trainers.checkpoints import Checkpoints
from dpray.trainers.settings import ServerState

ROOT = Path(__file__).resolve().parent.parent
PORTIONS = ("platform", "searchers", "trainers", "experiments")
MODULES = ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
CALLS = {
    *(f"{module}.{name}" for module in MODULES for name in ("load", "loads", "open", "Unpickler")),
    *(f"{name}.load" for name in ("torch", "np", "numpy", "yaml")),
    *(f"yaml.{name}" for name in ("load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all")),
    *(f"{name}.read_pickle" for name in ("pd", "pandas")),
    *("eval", "exec"),
}
HARMLESS = {
    "np.load": lambda call: _keyword(call, "allow_pickle") is False,
    "torch.load": lambda call: _keyword(call, "weights_only") is True,
    "yaml.load": lambda call: getattr(_value(call, "Loader"), "id", None) == "_CoreSchemaLoader",
}
NOT_FROM_A_DISK = {("searchers/testing.py", "pickle.loads")}
"""The conformance suite makes a pickle in memory and reads it back."""


# who may read


def test_what_is_private_or_charged_is_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            ledger.population("people")
            journal = SiteJournal(tmp_path / "site" / "journal.db")
            journal.enrol(("a",))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
            journal.close()
    finally:
        os.umask(before)
    assert modes.pop("site") == 0o700
    assert {"ledger.db", "ledger.db-wal", "journal.db", "journal.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}


SPILLED = """
import os, sys
from pathlib import Path
import numpy as np
os.umask(0)
from dpray.platform.local_ray import start_alone
import ray
start_alone(num_cpus=1, object_store_memory=80 * 1024**2)
kept = [ray.put(np.full(2**22, 7.0)) for _ in range(4)]
(folder,) = Path(os.environ["RAY_TMPDIR"]).glob("dpray-spilled-*")
print(oct(folder.stat().st_mode & 0o777), sum(path.stat().st_size > 2**20 for path in folder.rglob("*")))
ray.shutdown()
"""


def test_what_ray_spills_to_disk_is_for_its_owner_only_and_gone_afterwards(tmp_path):
    """Records of a pool are in Ray's shared memory; beyond its size Ray writes them to a disk."""
    folder = Path("/tmp") / f"dpa{os.getpid()}"
    environment = {**os.environ, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", SPILLED], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert ended.returncode == 0, ended.stderr
        mode, files = ended.stdout.split()
        assert (mode, int(files) > 0) == ("0o700", True)
        assert not list(folder.glob("dpray-spilled-*"))
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


# what may run


@pytest.mark.parametrize("harm", [
    "!!python/object/apply:os.system ['touch HARM']",
    "!!python/object/new:os.system ['touch HARM']",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/tuple [1, 2]",
    "!harm {a: b}",
])  # fmt: skip
def test_a_recipe_cannot_name_code(harm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (f"name: small\nnoise: {harm}\n", f"objective: {harm}\n", harm):
        with pytest.raises(RecipeError, match="is not plain YAML"):
            kinds.read(text)
    assert not list(tmp_path.iterdir())


class Harm:
    """Runs code when it is unpickled."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return Path.touch, (Path(self.place),)


def test_the_harm_of_these_tests_is_real(tmp_path):
    """Negative control."""
    pickle.loads(pickle.dumps(Harm(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


def harmful_arrays(place, harm, **others):
    np.savez(place, harm=np.array([Harm(harm)], dtype=object), **others)


def test_a_checkpoint_is_arrays_and_json_and_a_pickle_in_it_is_passed_over(tmp_path):
    harm, checkpoints = tmp_path / "harm", Checkpoints(tmp_path / "kept", {"run": "a"})
    state = ServerState(np.arange(3.0), {"momentum": np.ones(3)}, 1)
    place = checkpoints.save(1, state, ({"accuracy": 0.5},))
    assert {path.name for path in place.iterdir()} == {"state.npz", "state.json"}
    with np.load(place / "state.npz", allow_pickle=False) as arrays:
        assert {name: arrays[name].dtype for name in arrays.files} == {"theta": float, "slot.momentum": float}
    manifest = json.loads((place / "state.json").read_text())
    harmful_arrays(place / "state.npz", harm, theta=state.theta)
    manifest["sha256"] = hashlib.sha256((place / "state.npz").read_bytes()).hexdigest()
    (place / "state.json").write_text(json.dumps(manifest))
    assert checkpoints.newest() is None
    assert not harm.exists()


def test_a_searchers_state_is_json_and_a_pickle_is_refused(tmp_path):
    saved, harm = tmp_path / "searcher.json", tmp_path / "harm"
    searcher_state.write(saved, {"format": "dpray-search"})
    assert json.loads(saved.read_text()) == {"format": "dpray-search"}
    saved.write_bytes(pickle.dumps(Harm(harm)))
    with pytest.raises(SearchError, match="it is no JSON"):
        searcher_state.read(saved)
    assert not harm.exists()


def test_a_data_set_with_a_pickle_in_it_is_refused(tmp_path):
    harm = tmp_path / "harm"
    for name in datasets.names():
        file = datasets._SOURCES[name].file
        if file is not None:
            harmful_arrays(tmp_path / file, harm, x=np.ones(3))
            with pytest.raises(datasets.DatasetDamaged):
                datasets.load(name, tmp_path)
    assert not harm.exists()


def code():
    """(file, call, its name) of every call in the package that could run what it reads."""
    for portion in PORTIONS:
        for path in sorted((ROOT / portion).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
                    yield str(path.relative_to(ROOT)), node, ast.unparse(node.func)


def test_nothing_in_the_package_reads_code_from_a_disk():
    found = {(file, name) for file, call, name in code() if not HARMLESS.get(name, lambda call: False)(call)}
    assert found == NOT_FROM_A_DISK
    assert {name for _, _, name in code()} >= {"np.load", "yaml.load"}, "the search finds nothing at all"


def _value(call, name):
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _keyword(call, name):
    value = _value(call, name)
    return value.value if isinstance(value, ast.Constant) else None
