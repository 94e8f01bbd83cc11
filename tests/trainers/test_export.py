"""A trained model taken away and read back, with what it cost; and everything that must be noticed on the way."""

import json
import math

import numpy as np
import pytest
from safetensors import safe_open

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Head, Ledger
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.privacy.noise import SEEDED
from dpray.platform.tracking import Tracker
from dpray.trainers.export import PARAMETERS, STATEMENT, ModelRefused, export_model, load_model, log_model
from dpray.trainers.fedgd import DPFedGDTrainer, FedGDSettings
from dpray.trainers.models import LinearHead
from dpray.trainers.torch_module import TorchModule

F, K = 4, 3
BUDGET = Budget(8.0, 1e-5)
X = np.random.default_rng(0).normal(size=(50, F))


class Trained:
    """What `export_model` reads of a trainer, with parameters nobody trained."""

    def __init__(self, run, model, unit=Unit.RECORD):
        self.run, self.model, self.unit, self.rows = run, model, unit, ({"training_iteration": 1},)
        self.theta = np.random.default_rng(1).normal(size=model.dimension)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as opened:
        opened.population("people").account(Unit.RECORD, BUDGET)
        yield opened


def trained(ledger, model=None, stamps=(), quanta=BUDGET.quanta // 4):
    from dpray.platform.privacy.ledger import ReleaseKey
    from dpray.platform.privacy.mechanisms import ClippedSum

    run = ledger.population("people").run("run", stamps=stamps)
    model = model or LinearHead(F, K)
    mechanism = ClippedSum(1.0, Unit.RECORD, model.dimension, 100)
    run.release(ReleaseKey("training", "gradients", 1), {}, mechanism, quanta, lambda _: np.zeros(3))
    return Trained(run, model)


def test_read_back_it_predicts_the_same_and_says_what_it_cost(ledger, tmp_path):
    trainer = trained(ledger)
    folder = export_model(trainer, tmp_path / "exported")
    model, theta, statement = load_model(folder)
    np.testing.assert_array_equal(theta, trainer.theta)
    np.testing.assert_array_equal(model.predict(theta, X), trainer.model.predict(trainer.theta, X))
    account = ledger.population("people").account(Unit.RECORD)
    assert (statement.population, statement.run, statement.unit) == ("people", "run", "record")
    assert (statement.epsilon, statement.delta, statement.budget) == (account.spent_epsilon, 1e-5, 8.0)
    assert (statement.relation, statement.noise, statement.private) == ("replace-one", "operating system", True)
    assert statement.account["lines"][0]["steps"] == 1
    assert ledger.verify([Head(*statement.ledger)]) == ()


def test_any_reader_of_safetensors_finds_a_torch_linear_layer(ledger, tmp_path):
    import torch

    trainer = trained(ledger)
    folder = export_model(trainer, tmp_path / "exported")
    with safe_open(str(folder / PARAMETERS), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    layer = torch.nn.Linear(F, K, dtype=torch.float64)
    layer.load_state_dict(state)
    logits = layer(torch.tensor(X)).detach().numpy()
    np.testing.assert_allclose(logits, trainer.model.logits(trainer.theta, X), rtol=1e-12)


def test_a_torch_module_is_given_to_the_reader(ledger, tmp_path):
    import torch

    def factory():
        return torch.nn.Sequential(torch.nn.Linear(F, 5), torch.nn.Tanh(), torch.nn.Linear(5, K))

    trainer = trained(ledger, TorchModule(factory, K))
    folder = export_model(trainer, tmp_path / "exported")
    with pytest.raises(ModelRefused, match="whose code is not in the file"):
        load_model(folder)
    model, theta, _ = load_model(folder, TorchModule(factory, K))
    np.testing.assert_array_equal(theta, trainer.theta)
    np.testing.assert_array_equal(model.predict(theta, X), trainer.model.predict(trainer.theta, X))
    with pytest.raises(ModelRefused, match="give the model that was trained"):
        load_model(folder, LinearHead(F, K))
    with safe_open(str(folder / PARAMETERS), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert factory().load_state_dict(state, strict=False).missing_keys == []


def test_seeded_noise_is_not_private(ledger, tmp_path):
    _, _, statement = load_model(export_model(trained(ledger, stamps=(SEEDED,)), tmp_path / "exported"))
    assert (statement.private, statement.noise) == (False, "seeded")
    assert str(statement).startswith(SEEDED)


def test_without_noise_it_is_not_private(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.population("people").account(Unit.RECORD, Budget(math.inf, 1e-5, non_private=True))
        folder = export_model(trained(ledger, quanta=None), tmp_path / "exported")
    _, _, statement = load_model(folder)
    assert (statement.private, statement.noise, statement.epsilon) == (False, "none", math.inf)
    assert str(statement).startswith("NOT PRIVATE")


def rewrite(place, change):
    document = json.loads(place.read_text())
    change(document)
    place.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(epsilon=0.1),
        lambda document: document.update(unit="client"),
        lambda document: document.update(stamps=[]),
        lambda document: document.update(parameters="0" * 64),
        lambda document: document["account"].update(epsilon=0.1),
    ],
    ids=["epsilon", "unit", "stamps", "parameters", "account"],
)
def test_a_changed_statement_is_refused(ledger, tmp_path, change):
    folder = export_model(trained(ledger, stamps=(SEEDED,)), tmp_path / "exported")
    rewrite(folder / STATEMENT, change)
    with pytest.raises(ModelRefused, match="not the statement these parameters were exported with"):
        load_model(folder)


def test_changed_parameters_are_refused(ledger, tmp_path):
    folder = export_model(trained(ledger), tmp_path / "exported")
    place = folder / PARAMETERS
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(bytes(content))
    with pytest.raises(ModelRefused, match="are not those that"):
        load_model(folder)


def test_the_statement_of_another_model_is_refused(ledger, tmp_path):
    first = trained(ledger)
    folder = export_model(first, tmp_path / "first")
    first.theta = first.theta + 1
    other = export_model(first, tmp_path / "other")
    (folder / STATEMENT).write_bytes((other / STATEMENT).read_bytes())
    with pytest.raises(ModelRefused, match="is another model's"):
        load_model(folder)


def test_a_pickle_in_its_place_is_not_run(ledger, tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    folder = export_model(trained(ledger), tmp_path / "exported")
    (folder / PARAMETERS).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelRefused, match="is damaged"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_exported_is_refused(ledger, tmp_path):
    trainer = trained(ledger)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ModelRefused, match="holds something already"):
        export_model(trainer, tmp_path / "full")
    trainer.rows = ()
    with pytest.raises(ModelRefused, match="has not finished a round"):
        export_model(trainer, tmp_path / "exported")
    with pytest.raises(ModelRefused, match=r"no model.safetensors and no privacy.json"):
        load_model(tmp_path / "nowhere")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"full"}


def test_mlflow_serves_it_with_its_signature(ledger, tmp_path):
    import mlflow

    trainer = trained(ledger)
    folder = export_model(trainer, tmp_path / "exported")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with Tracker(tmp_path / "spool", "run", uri=uri) as tracker:
        log_model(folder, tracker)
        tracker.flush(60)
        run_id = tracker.run_ids["experiment"]
    mlflow.set_tracking_uri(uri)
    served = mlflow.pyfunc.load_model(f"runs:/{run_id}/model")
    np.testing.assert_array_equal(served.predict(X), trainer.model.predict(trainer.theta, X))
    assert served.metadata.signature.inputs.inputs[0].shape == (-1, F)
    assert served.metadata.metadata["population"] == "people"
    with pytest.raises(mlflow.exceptions.MlflowException):
        served.predict(X[:, :2])
    kept = [path.name for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()]
    assert "MLmodel" in kept
    assert not [name for name in kept if name.endswith(("pkl", "pickle", "pt"))]


def test_a_trainer_exports_what_it_has_trained(ledger, tmp_path, alone_cohort, make_blobs):
    model = LinearHead(F, K)
    run = ledger.population("people").run("fit")
    settings = FedGDSettings(rounds=3, learning_rate=1.0, clip=1.0)
    trainer = DPFedGDTrainer(
        alone_cohort(model, {"a": make_blobs(40)}), run, model, settings, budget=BUDGET, regime="central"
    )
    trainer.fit()
    _, theta, statement = load_model(export_model(trainer, tmp_path / "exported"))
    np.testing.assert_array_equal(theta, trainer.theta)
    assert statement.epsilon_run == statement.epsilon == pytest.approx(8.0, rel=1e-9)
    assert statement.epsilon <= 8.0
