"""A trained model to take away, together with what it cost: safetensors, JSON, and an MLflow model around them.

    <folder>/model.safetensors    parameters by name, float64; in its header what kind of model they are
    <folder>/privacy.json         the model's `ModelStatement`

The statement names the parameters by their SHA-256, and the file of parameters names the statement by its: neither can
be changed or put beside another one unnoticed. That finds damage and mix-ups. It is no signature: whoever writes both
files anew can write anything, and the ledger, of which the statement names the last entry, is what settles it.

No pickles: reading a model runs nobody's code.

Example:
    result = trainer.fit()
    export_model(trainer, "exported")

    model, theta, statement = load_model("exported")
    print(statement)
    labels = model.predict(theta, x)
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.trainers.model_statement import ModelStatement, draw_up
from dpray.trainers.models import FloatArray, LinearHead, Model

if TYPE_CHECKING:
    from dpray.platform.tracking import RunView
    from dpray.trainers.base import FederatedTrainer

PARAMETERS, STATEMENT = "model.safetensors", "privacy.json"
_FORMAT = "1"
_LINEAR = "linear head"


class ModelRefused(ValueError):  # noqa: N818 - an outcome that callers handle
    """A folder that is no exported model, or whose parts do not belong together."""


def export_model(trainer: FederatedTrainer, folder: Path | str) -> Path:
    """Write what a trainer has trained, and what its account says about it, to a new folder.

    Args:
        trainer: after `fit()`, with the ledger still open.
        folder: must not hold anything yet; appears as a whole or not at all.

    Returns:
        The folder.

    Raises:
        ModelRefused: nothing was trained yet, or the folder is not empty.

    *Guarantee.* The parameters are made of releases, and so is the file: exporting costs nothing.
    """
    if not trainer.rows:
        raise ModelRefused("There is nothing to export: the trainer has not finished a round. Call `fit()` first.")
    digest = digest_of(trainer.model.named(trainer.theta))
    return write(Path(folder), trainer.model, trainer.theta, draw_up(trainer.run, trainer.unit, digest))


def write(folder: Path, model: Model, theta: FloatArray, statement: ModelStatement) -> Path:
    """Write a model and its statement, which must name these parameters, to a new folder."""
    from safetensors.numpy import save

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelRefused(f"{folder} holds something already: give a folder of its own to the model.")
    named = model.named(theta)
    text = statement.to_json().encode()
    header = {"format": _FORMAT, "model": json.dumps(describe(model)), "statement": hashlib.sha256(text).hexdigest()}
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    contiguous = {name: np.ascontiguousarray(value, dtype=np.float64) for name, value in named.items()}
    for name, content in ((PARAMETERS, save(contiguous, header)), (STATEMENT, text)):
        with (partial / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    partial.replace(folder)
    return folder


def load_model(path: Path | str, model: Model | None = None) -> tuple[Model, FloatArray, ModelStatement]:
    """Read an exported model back: the model, its θ (d,), and what it cost.

    Args:
        path: the folder.
        model: the model, built by you, where it is more than its parameters say (a `TorchModule`, whose factory is
            code and not in the file). A linear head builds itself.

    Raises:
        ModelRefused: a part is missing, or was changed, or is another model's.
    """
    folder = Path(path)
    header, named = _read(folder)
    text = (folder / STATEMENT).read_bytes()
    if header.get("statement") != hashlib.sha256(text).hexdigest():
        raise ModelRefused(
            f"{folder / STATEMENT} is not the statement these parameters were exported with: it was changed, or is "
            "another model's. Export the model again."
        )
    try:
        statement = ModelStatement.from_json(text.decode())
    except (ValueError, KeyError, TypeError):
        raise ModelRefused(f"{folder / STATEMENT} is no statement of a model.") from None
    if statement.parameters != digest_of(named):
        raise ModelRefused(
            f"The parameters in {folder / PARAMETERS} are not those that {STATEMENT} speaks about: one of the two was "
            "changed, or is another model's. Export the model again."
        )
    found = model or _built(json.loads(header["model"]), folder)
    wanted = {name: value.shape for name, value in found.named(found.initial()).items()}
    given = {name: value.shape for name, value in named.items()}
    if wanted != given:
        raise ModelRefused(
            f"{folder} holds parameters of the shapes {given}, and the model given has {wanted}: give the model that "
            "was trained."
        )
    return found, found.flat(named), statement


def log_model(folder: Path | str, view: RunView) -> None:
    """Keep an exported model as an artefact `model/` of a run in MLflow, as an MLflow model with its signature.

    `mlflow.pyfunc.load_model("runs:/<run id>/model")` then predicts classes. A model that does not build itself (see
    `load_model`) is kept as its two files: MLflow could load it only by running code out of the artefact.
    """
    import tempfile

    folder = Path(folder)
    with tempfile.TemporaryDirectory() as scratch:
        whole = _mlflow_model(folder, Path(scratch) / "model")
        for file in sorted(path for path in whole.rglob("*") if path.is_file()):
            view.artifact(file, f"model/{file.relative_to(whole).as_posix()}")


def describe(model: Model) -> dict[str, str | int]:
    """What a reader must know to build the model: all of it for a linear head, the class's name otherwise."""
    if type(model) is LinearHead:
        return {"kind": _LINEAR, "features": model.features, "classes": model.classes}
    return {"kind": type(model).__name__, "classes": model.classes}


def digest_of(named: Mapping[str, FloatArray]) -> str:
    """SHA-256 of parameters: name, shape and little-endian float64 values of each, names in alphabetical order."""
    found = hashlib.sha256()
    for name in sorted(named):
        value = np.ascontiguousarray(named[name], dtype="<f8")
        found.update(json.dumps([name, list(value.shape)]).encode() + value.tobytes())
    return found.hexdigest()


def _read(folder: Path) -> tuple[dict[str, str], dict[str, FloatArray]]:
    from safetensors import SafetensorError, safe_open

    missing = [name for name in (PARAMETERS, STATEMENT) if not (folder / name).is_file()]
    if missing:
        raise ModelRefused(f"{folder} is no exported model: it has no {' and no '.join(missing)}.")
    try:
        with safe_open(str(folder / PARAMETERS), framework="numpy") as file:
            header = dict(file.metadata() or {})
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise ModelRefused(f"{folder / PARAMETERS} is damaged: {error}") from None
    if header.get("format") != _FORMAT or "model" not in header or any(v.dtype != np.float64 for v in named.values()):
        raise ModelRefused(f"{folder / PARAMETERS} was not written by this version of dpray's export.")
    return header, named


def _built(kind: Mapping[str, Any], folder: Path) -> Model:
    if kind["kind"] != _LINEAR:
        raise ModelRefused(
            f"{folder} holds the parameters of a {kind['kind']}, whose code is not in the file: build it as you did "
            "for the training, and give it with `load_model(path, model)`."
        )
    return LinearHead(int(kind["features"]), int(kind["classes"]))


def _mlflow_model(folder: Path, place: Path) -> Path:
    from dpray.platform.tracking.address import quiet_environment

    header, _ = _read(folder)
    kind = json.loads(header["model"])
    if kind["kind"] != _LINEAR:
        return folder
    quiet_environment()
    from importlib.metadata import version

    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    signature = ModelSignature(
        Schema([TensorSpec(np.dtype(np.float64), (-1, kind["features"]))]),
        Schema([TensorSpec(np.dtype(np.int64), (-1,))]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an example: a record would be given away
        mlflow.pyfunc.save_model(
            str(place),
            loader_module="dpray.trainers.served",
            data_path=str(folder),
            signature=signature,
            pip_requirements=[f"dpray=={version('dpray')}"],
            metadata=json.loads((folder / STATEMENT).read_text(encoding="utf-8")),
        )
    return place
