"""What stands in MLflow's store after a run, read with plain SQL."""

import math
import pickle
from fractions import Fraction
from pathlib import Path
from urllib.request import url2pathname

import pytest

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, remaining_epsilon, split
from dpray.platform.tracking import Tracker, UndeclaredMetric, anchors
from dpray.platform.tracking.spend import privacy_metrics

BUDGET = Budget(6.0, 1e-5)


class Head:
    def __init__(self, sequence, digest):
        self.sequence, self.digest = sequence, digest


class Statement:
    def as_dict(self):
        return {"epsilon": 6.0, "ledger": "postgresql://me:hunter2@host/ledger"}


@pytest.fixture(scope="module")
def told(store, tmp_path_factory):
    """A run like the real one: a search with trials, a training of 40 rounds, a statement."""
    folder = tmp_path_factory.mktemp("run")
    plot = folder / "plot.png"
    plot.write_bytes(b"\x89PNG image")
    tags = {"unit": "record", "population": "digits", "relation": "replace-one", "delta": 1e-5}
    with Tracker(folder / "spool", "told", uri=store.uri, experiment="digits (quickstart)", tags=tags) as tracker:
        tracker.params({"budget": {"epsilon": 6.0, "shares": [0.3, 0.7]}, "ledger": "postgresql://me:hunter2@h/l"})
        tracker.params({"note": "x" * 10_000})
        search = tracker.child("search")
        for candidate in range(3):
            with search.child("trial", f"candidate {candidate}", candidate) as trial:
                trial.public({"search/clients_answered": 20})
        search.released({"search/winner": 1})
        search.finish()
        training = tracker.child("training")
        spent = 0
        for step, quanta in enumerate(split(BUDGET.quanta, 40), start=1):
            spent += quanta
            training.released({"round/gradient_norm": 1 / step, "evaluation/accuracy": step / 40}, step)
            training.spend(BUDGET, spent, spent, step=step)
        training.stamps(["NOT PRIVATE (seeded noise)", "NOT PRIVATE (seeded noise)"])
        training.finish()
        tracker.statement(Statement(), "spent: everything\n")
        tracker.artifact(plot, "plots/accuracy.png")
        tracker.anchor(Head(7, "a" * 64))
        tracker.anchor(Head(9, "b" * 64))
    return store.runs("told")


def test_runs_are_nested_finished_and_named(told):
    root = told["experiment"][0]
    assert {part: (name, status, parent) for part, (_, name, status, parent) in told.items()} == {
        "experiment": ("told", "FINISHED", None),
        "search": ("search", "FINISHED", root),
        "training": ("training", "FINISHED", root),
        **{f"search/trial/{n}": (f"candidate {n}", "FINISHED", told["search"][0]) for n in range(3)},
    }


def test_every_round_is_there_once(told, store):
    steps = range(1, 41)
    run = told["training"][0]
    assert store.points(run, "round/gradient_norm") == [(step, 1 / step) for step in steps]
    assert store.points(run, "evaluation/accuracy") == [(step, step / 40) for step in steps]
    names = {name for name, _, _ in store.metrics(run)}
    assert {name for name in names if name.startswith("privacy/")} == set(privacy_metrics(BUDGET, 1, 1))
    assert all(len(store.points(run, name)) == 40 for name in names)


def test_the_spend_is_cumulative_and_ends_at_the_budget(told, store):
    run = told["training"][0]
    epsilons = [value for _, value in store.points(run, "privacy/epsilon")]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == pytest.approx(6.0, rel=1e-9)
    half = sum(split(BUDGET.quanta, 40)[:20])
    assert dict(store.points(run, "privacy/epsilon_remaining"))[20] == remaining_epsilon(BUDGET, half)
    assert dict(store.points(run, "privacy/epsilon_remaining"))[40] == 0.0
    assert dict(store.points(run, "privacy/share_spent"))[40] == 1.0
    assert dict(store.points(run, "privacy/share_spent"))[20] == pytest.approx(0.5)


def test_tags_parameters_and_stamps(told, store):
    root = told["experiment"][0]
    tags = store.pairs("tags", root)
    assert {name: tags[name] for name in ("unit", "population", "relation", "delta")} == {
        "unit": "record",
        "population": "digits",
        "relation": "replace-one",
        "delta": "1e-05",
    }
    params = store.pairs("params", root)
    assert params["budget.epsilon"] == "6.0"
    assert params["budget.shares"] == "[0.3, 0.7]"
    assert params["ledger"] == "postgresql://me:***@h/l"
    assert params["note"] == "x" * 5999 + "…"
    stamped = store.pairs("tags", told["training"][0])
    assert stamped["dpray.stamps"] == "NOT PRIVATE (seeded noise)"
    assert "NOT PRIVATE" in stamped["mlflow.note.content"]


def test_artefacts_lie_beside_the_store_and_hold_no_password(told, store):
    [(location,)] = store.rows("SELECT artifact_uri FROM runs WHERE run_uuid = ?", told["experiment"][0])
    folder = Path(url2pathname(location.removeprefix("file://")))
    assert folder.is_relative_to(store.path.parent / "mlartifacts")
    assert (folder / "privacy" / "statement.txt").read_text() == "spent: everything\n"
    assert '"postgresql://me:***@host/ledger"' in (folder / "privacy" / "statement.json").read_text()
    assert (folder / "plots" / "accuracy.png").read_bytes() == b"\x89PNG image"


def test_trials_carry_no_times_of_their_own(told, store):
    times = store.rows(
        "SELECT r.start_time, r.end_time, m.timestamp FROM runs r JOIN metrics m USING (run_uuid)"
        " JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'dpray.kind' AND t.value = 'trial' ORDER BY r.name"
    )
    [(search,)] = store.rows("SELECT start_time FROM runs WHERE run_uuid = ?", told["search"][0])
    assert times == [(search + n,) * 3 for n in (1, 2, 3)]


def test_the_newest_anchor_is_found_by_the_names_of_the_runs(told, store):
    assert anchors(store.uri, "digits (quickstart)", ["told", "other"]) == ((9, "b" * 64),)
    assert anchors(store.uri, "digits (quickstart)", ["other"]) == ()
    assert anchors(store.uri, "no such experiment", ["told"]) == ()


def test_looking_for_anchors_makes_nothing(store, tmp_path, told):
    assert anchors(f"sqlite:///{tmp_path}/none.db", "dpray", ["told"]) == ()
    assert not (tmp_path / "none.db").exists()
    assert store.rows("SELECT name FROM experiments WHERE name = 'no such experiment'") == []


def test_an_undeclared_metric_reaches_neither_spool_nor_store(store, tracker_of):
    tracker = tracker_of("leak", store.uri)
    with pytest.raises(UndeclaredMetric):
        tracker.public({"client 3 loss": 0.987654321})
    assert tracker.finish()
    assert "0.98765" not in tracker.spool_path.read_text()
    assert store.metrics(store.runs("leak")["experiment"][0]) == []


def fail(tracker, error):
    with tracker:
        tracker.child("search").child("trial", key=1)
        raise error


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_failure_or_an_interrupt_ends_every_part(store, tmp_path, error, status):
    with pytest.raises(error):
        fail(Tracker(tmp_path, status, uri=store.uri), error)
    assert {row[2] for row in store.runs(status).values()} == {status}
    assert set(store.runs(status)) == {"experiment", "search", "search/trial/1"}


def test_an_infinite_spend_is_a_stamp_and_no_number(store, tracker_of):
    tracker = tracker_of("infinite", store.uri)
    tracker.spend(Budget(math.inf, 1e-5, non_private=True), None, None, step=0)
    assert tracker.finish()
    root = store.runs("infinite")["experiment"][0]
    assert store.metrics(root) == []
    assert store.pairs("tags", root)["dpray.stamps"] == "NOT PRIVATE (no noise)"


def test_a_noised_spend_of_an_unlimited_account_has_no_remainder():
    metrics = privacy_metrics(Budget(math.inf, 1e-5, non_private=True), 1 << 60, 0)
    assert metrics["privacy/epsilon"] == pytest.approx(gdp.epsilon(1.0, 1e-5), rel=1e-12)
    assert metrics["privacy/epsilon_run"] == 0.0
    assert set(metrics) == {"privacy/mu", "privacy/epsilon", "privacy/epsilon_run"}


def test_spends_are_rounded_up():
    for quanta in (1, 3, (1 << 60) + 1, BUDGET.quanta):
        metrics = privacy_metrics(BUDGET, quanta, quanta)
        assert Fraction(metrics["privacy/mu"]) ** 2 >= Fraction(quanta, 1 << 60)
        assert Fraction(metrics["privacy/share_spent"]) >= Fraction(quanta, BUDGET.quanta)
        assert metrics["privacy/share_run"] == metrics["privacy/share_spent"]


def test_a_tracker_does_not_travel(store, tracker_of):
    with pytest.raises(TypeError, match="stays with the driver"):
        pickle.dumps(tracker_of("travel", store.uri))


def test_bad_arguments_are_refused_with_a_sentence(store, tracker_of, tmp_path):
    with pytest.raises(ValueError, match="no name for a run"):
        tracker_of("it's", store.uri)
    tracker = tracker_of("args", store.uri)
    for path in ("/etc/x", "../x", ""):
        with pytest.raises(ValueError, match="relative"):
            tracker.artifact_text(path, "text")
    with pytest.raises(FileNotFoundError, match="no file"):
        tracker.artifact(tmp_path / "none.png", "plots/none.png")
    with pytest.raises(ValueError, match="DONE"):
        tracker.finish("DONE")
    assert tracker.finish()
    with pytest.raises(RuntimeError, match="finished"):
        tracker.public({"round/clients": 1})


def test_odd_names_and_many_values_arrive(store, tracker_of):
    tracker = tracker_of("many", store.uri)
    tracker.params({f"p{n}": n for n in range(250)} | {"odd(name)": "", "empty": {}})
    tracker.tags({"a=b": None})
    for step in range(3000):
        tracker.public({"round/clients": step}, step)
    assert tracker.finish()
    root = store.runs("many")["experiment"][0]
    assert len(store.pairs("params", root)) == 252
    assert store.pairs("params", root)["odd_name_"] == ""
    assert store.pairs("tags", root)["a_b"] == "None"
    assert store.points(root, "round/clients") == [(step, float(step)) for step in range(3000)]
