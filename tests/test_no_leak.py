"""No private number leaves the clients: canaries are looked for in everything a whole run writes or prints.

A spy task runs in place of the real one and writes every private number it meets (records, local losses and scores,
clients' gradient norms and un-noised sums, ballots) into a vault; it prints them, too, and raises exceptions that name
them. Afterwards every file of the run (console, ledger, MLflow's store, searcher state, checkpoints, Ray's logs and all
that its state API knows of actors, tasks and objects) is searched for them: as decimal text, as float32 and float64
bytes of either byte order, and as those bytes in hex or base64.

False alarms: a float64 is compared on 8 bytes and text on 9 digits (a few thousand canaries against some hundred
released numbers that a run writes as text: below 10⁻³). A float32 has only 4 bytes, and 32 of
them against the 2²⁴ windows of 16 MB of random data match by chance one time in eight, so float32 bytes count where two
different ones are found in one file (below 10⁻²).
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SPY = '''
import json, os, sys
from pathlib import Path
import numpy as np

VAULT = Path(os.environ["DPRAY_TEST_VAULT"])
STATE = Path(os.environ["DPRAY_TEST_STATE"])
LEAK = os.environ.get("DPRAY_TEST_LEAK", "")


def confess(kind, values):
    """Add private numbers to this process's file in the vault."""
    with (VAULT / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([kind, [float(value) for value in np.ravel(values)]]) + "\\n")


def watch():
    import dpray.experiments.material as material
    import dpray.trainers.rehearsal as rehearsal
    from dpray.platform.cohort import Records

    load = material.load

    def planted(recipe, workspace):
        found = load(recipe, workspace)
        rng = np.random.default_rng(7)
        shards = {}
        for client, records in found.shards.items():
            x = np.array(records.x, dtype=np.float64)
            x[0] = rng.uniform(0.1, 0.9, x.shape[1])
            confess("record", x[0])
            shards[client] = Records(x, records.y)
        object.__setattr__(found, "shards", shards)
        return found

    class Spy(rehearsal.TrainingTask):
        def fit_and_score(self, config, records, rng):
            score = super().fit_and_score(config, records, rng) + float(rng.uniform(1e-4, 1e-3))
            losses = self.model.losses(self.model.initial() + 0.01 * rng.standard_normal(self.dimension), records)
            confess("score", score)
            confess("loss", losses[:4])
            print("score", score)
            if config["learning_rate"] > 10:
                confess("raised", records.x[0])
                raise ValueError(f"score {score!r}, record {records.x[0].tolist()}", records.x)
            return score

        def clipped_sums(self, theta, shards, clip):
            sums = super().clipped_sums(theta, shards, clip)
            confess("norm", np.linalg.norm(sums, axis=1))
            confess("sum", sums[:, ::97])
            print("norms", np.linalg.norm(sums, axis=1))
            if np.any(theta):
                raise RuntimeError(f"sums {sums[:, ::97].tolist()}, record {shards[0].x[0].tolist()}")
            return sums

        def clipped_sum(self, theta, records, clip):
            row = super().clipped_sum(theta, records, clip)
            confess("sum", row[::97])
            if theta[0] > 0:
                raise KeyError(records.x[0].tolist(), row.tolist())
            return row

    material.load = planted
    import dpray.experiments.pipeline as pipeline
    pipeline.load = planted
    rehearsal.TrainingTask = Spy
    import dpray.trainers
    watch_ray()
    if LEAK:
        from dpray.searchers.hype import DPHypeSearch
        from dpray.trainers.checkpoints import Checkpoints

        record = np.random.default_rng(7).uniform(0.1, 0.9, 64)
        trainable, save = DPHypeSearch.trainable, Checkpoints.save

        def step(self):
            known = {"evaluated": 1, "candidate": self.config["__candidate__"], "clients_answered": 6}
            return {**known, "loss": record[3], "done": True}

        def telling(self):
            return type("Candidate", (trainable(self),), {"step": step})

        def fat(self, *arguments, **options):
            self.folder.mkdir(parents=True, exist_ok=True)
            np.save(self.folder / "extra.npy", record)
            return save(self, *arguments, **options)

        os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "0"
        DPHypeSearch.trainable, Checkpoints.save = telling, fat


def watch_ray():
    """A small object store that has to spill the clients' records, and all that Ray's state API says at the end."""
    import ray
    from ray.util import state

    from dpray.platform.cohort import Cohort

    init, shutdown, specs_of = ray.init, ray.shutdown, Cohort._specs
    spilled, pages, kept = [], [], []

    def watched_init(**options):
        spilled.append(Path(options["object_spilling_directory"]))
        context = init(**{**options, "include_dashboard": True, "object_store_memory": 80 * 1024**2})
        pages.append(f"http://{context.dashboard_url}")
        return context

    def pressed(self):
        make = specs_of(self)

        def specs(name):
            made = make(name)
            kept.extend(ray.put(np.full(2**22, float(number))) for number in range(4))
            first = next(iter(self._pool.values())).x[0].tobytes()
            (VAULT / "spilled.json").write_text(json.dumps({
                "mode": spilled[0].stat().st_mode & 0o777,
                "records": any(first in path.read_bytes() for path in spilled[0].rglob("*") if path.is_file()),
            }))
            return made

        return specs

    def told():
        if ray.is_initialized():
            for name in ("actors", "tasks", "objects", "workers", "jobs", "nodes", "runtime_envs"):
                options = {"address": pages[0], "detail": True, "limit": 10_000, "raise_on_missing_output": False}
                rows = getattr(state, f"list_{name}")(**options)
                (STATE / f"{name}.json").write_text(json.dumps([vars(row) for row in rows], default=str))
        shutdown()

    ray.init, ray.shutdown, Cohort._specs = watched_init, told, pressed


if __name__ == "__main__":
    os.environ["RAY_TMPDIR"] = os.environ["DPRAY_TEST_RAY"]
    import dpray.experiments.engine as engine
    engine.prepare(None)
    watch()
    from dpray.experiments.cli import main
    sys.argv[0] = "dpray"
    main()
'''

TEXT = re.compile(rb"[-+]?\d*\.\d{6,}(?:[eE][-+]?\d+)?|[-+]?\d+\.\d+[eE][-+]?\d+")
HEX = re.compile(rb"(?:[0-9a-fA-F]{2}){4,}")
BASE64 = re.compile(rb"[A-Za-z0-9+/\-_]{10,}={0,2}")


class Canaries:
    """Private numbers, and where they stand in some bytes."""

    def __init__(self, values):
        kept = {
            float(value) for value in values if np.isfinite(value) and abs(value) > 1e-6 and value != round(value, 4)
        }
        self.doubles = np.array(sorted(kept))
        singles = self.doubles.astype("<f4")
        telling = [single for single in singles if any(not 32 <= byte < 127 for byte in single.tobytes())]
        self.singles = np.unique(np.array(telling[:: max(1, len(telling) // 32)][:32], dtype="<f4"))
        self.text = {f"{abs(value):.8e}" for value in self.doubles}
        self.short = {str(np.abs(single)) for single in singles}  # how a float32 prints: at most 9 digits

    def in_bytes(self, data):
        """Encodings of canaries found in `data`: kinds and values."""
        found = self._in_text(data) | self._in_binary(data, "")
        words = {match.group() for match in HEX.finditer(data)}
        parts = [word[start:] for word in words for start in (0, 1)]
        found |= self._in_runs([bytes.fromhex(part[: len(part) // 2 * 2].decode()) for part in parts], "hex ")
        words = {match.group().rstrip(b"=").replace(b"-", b"+").replace(b"_", b"/") for match in BASE64.finditer(data)}
        parts = [word[start:] for word in words for start in range(4)]
        found |= self._in_runs([base64.b64decode(part[: len(part) // 4 * 4]) for part in parts], "base64 ")
        text = b" ".join(base64.b64decode(part + b"A" * (-len(part) % 4)) for part in parts)
        return found | self._in_text(text, "base64 ")

    def _in_runs(self, runs, how):
        """In each run by itself; first in all of them together, which misses nothing and takes seconds, not minutes."""
        if not self._in_binary(b"".join(runs), how):
            return set()
        return set().union(*(self._in_binary(run, how) for run in runs))

    def _in_text(self, data, how=""):
        values = {float(token) for token in TEXT.findall(data)}
        return {
            (how + "text", value)
            for value in values
            if f"{abs(value):.8e}" in self.text or (str(abs(value)) in self.short)
        }

    def _in_binary(self, data, how):
        found = set()
        for kind, width, known in (("float64", 8, self.doubles), ("float32", 4, self.singles)):
            hits = set()
            for order in "<>":
                for offset in range(width):
                    usable = (len(data) - offset) // width * width
                    window = np.frombuffer(data, f"{order}f{width}", usable // width, offset) if usable > 0 else []
                    with np.errstate(invalid="ignore"):
                        hits |= {float(value) for value in np.asarray(window)[np.isin(window, known)]}
            if len(hits) > (kind == "float32"):
                found |= {(how + kind, hit) for hit in hits}
        return found


def searched(canaries, *folders):
    """Every file below some folders that holds a canary, with what was found; not the sites' own, private by design."""
    found, files = {}, 0
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.is_file() and not path.is_symlink() and "dpray-sites" not in path.parts:
                files += 1
                hits = canaries.in_bytes(path.read_bytes())
                if hits:
                    found[str(path)] = hits
    assert files, "nothing was written, so nothing was searched"
    return found


def spied_run(folder: Path, *, leak: bool = False):
    """Run the small recipe under the spy; returns its canaries and the folders to search."""
    work, vault, out, state = folder / "work", folder / "vault", folder / "console", folder / "state"
    for each in (work, vault, out, state):
        each.mkdir()
    ray = Path("/tmp") / f"dpl{os.getpid()}{leak:d}"
    ray.mkdir(exist_ok=True)
    (folder / "spy.py").write_text(SPY)
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    environment = {
        **os.environ,
        "DPRAY_TEST_VAULT": str(vault),
        "DPRAY_TEST_STATE": str(state),
        "DPRAY_TEST_LEAK": "1" if leak else "",
        "DPRAY_TEST_RAY": str(ray),
        "PYTHONWARNINGS": "ignore",
    }
    ended = subprocess.run(
        [sys.executable, folder / "spy.py", "run", folder / "recipe.yaml", "--workspace", work],
        env=environment,
        capture_output=True,
        timeout=600,
        check=False,
    )
    (out / "stdout").write_bytes(ended.stdout)
    (out / "stderr").write_bytes(ended.stderr)
    confessed = [json.loads(line) for file in vault.glob("*.jsonl") for line in file.read_text().splitlines()]
    return ended, confessed, (work, out, ray, state)


RECIPE = {
    "name": "watched",
    "population": {"name": "people"},
    "budget": {"epsilon": 6, "delta": 1e-5},
    "shares": {"search": 0.3, "training": 0.7},
    "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.3}},
    "cohort": {"clients": 6, "partition": {"kind": "iid"}},
    "search": {"votes": 1, "folds": 3, "space": {"learning_rate": {"grid": [0.25, 4.0, 16.0]}}},
    "training": {"algorithm": "dp_fedsofim", "rounds": 5, "clip": 1.0},
}


@pytest.mark.parametrize("encode", [
    pytest.param(lambda x: repr(x[0]).encode(), id="repr"),
    pytest.param(lambda x: f"loss={x[0]:.10g};".encode(), id="ten digits"),
    pytest.param(lambda x: f"{x[0]:.12e}".encode(), id="scientific"),
    pytest.param(lambda x: str(np.float32(x[0])).encode(), id="float32 text"),
    pytest.param(lambda x: b"abc" + np.asarray(x, "<f8").tobytes(), id="float64"),
    pytest.param(lambda x: b"a" + np.asarray(x, ">f8").tobytes(), id="float64 big-endian, as in SQLite"),
    pytest.param(lambda x: b"ab" + np.asarray(x, "<f4").tobytes(), id="float32"),
    pytest.param(lambda x: b"0" + np.asarray(x, "<f8").tobytes().hex().encode(), id="hex"),
    pytest.param(lambda x: base64.b64encode(b"x" + np.asarray(x, "<f8").tobytes()), id="base64"),
    pytest.param(lambda x: base64.b64encode(repr(list(x)).encode()), id="base64 of text"),
])  # fmt: skip
def test_the_search_finds_a_canary_in_every_encoding(encode) -> None:
    values = np.random.default_rng(3).uniform(0.1, 0.9, 16)
    noise = os.urandom(4096)
    assert Canaries(values).in_bytes(noise + b" " + encode(values) + b" " + noise)
    assert not Canaries(values).in_bytes(noise + b" " + encode(values * 1.001) + b" " + noise)


@pytest.mark.timeout(900)
def test_a_run_leaves_no_private_number_behind(tmp_path: Path) -> None:
    ended, confessed, folders = spied_run(tmp_path)
    try:
        assert ended.returncode == 0, ended.stderr.decode()
        kinds = {kind for kind, _ in confessed}
        assert kinds == {"record", "score", "loss", "norm", "sum", "raised"}, "the spy did not see everything"
        values = [value for _, numbers in confessed for value in numbers]
        assert not searched(Canaries(values), *folders)
        assert (folders[0] / "dpray-sites").is_dir()
        written = {path.name for folder in folders for path in folder.rglob("*")}
        assert {"mlflow.db", "searcher.json", "dpray-ledger.db", "actors.json", "tasks.json"} <= written
        assert "ClientHost" in (folders[3] / "tasks.json").read_text()
        spilled = json.loads((tmp_path / "vault" / "spilled.json").read_text())
        assert spilled == {"mode": 0o700, "records": True}, "records were to be spilled, for their owner alone"
        assert not list(folders[2].glob("dpray-spilled-*"))
    finally:
        _remove(folders[2])


@pytest.mark.timeout(900)
def test_a_leaking_variant_is_caught(tmp_path: Path) -> None:
    _, confessed, folders = spied_run(tmp_path, leak=True)
    try:
        values = [value for _, numbers in confessed for value in numbers]
        found = searched(Canaries(values), *folders)
        assert any(Path(path).name == "extra.npy" for path in found), "planted in the checkpoints"
        assert any(Path(path).name == "result.json" for path in found), "reported by a trial"
    finally:
        _remove(folders[2])


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
