"""The model a run has trained: kept in its folder when it ends, shown in MLflow, copied out by `dpray export`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dpray.experiments.reading import RecipeError
from dpray.experiments.runs import RunDirectory

if TYPE_CHECKING:
    from dpray.platform.tracking import RunView
    from dpray.trainers.base import FederatedTrainer

MODEL = "model"


def keep(trainer: FederatedTrainer, files: RunDirectory, view: RunView) -> None:
    """Keep what was trained in `<run>/model` and in MLflow; anew, if an earlier process has kept it already."""
    from dpray.platform.tracking import NullTracker
    from dpray.trainers.export import export_model, log_model

    folder = files.path / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    if not trainer.rows:
        return
    export_model(trainer, folder)
    if not isinstance(view, NullTracker):
        log_model(folder, view)


def export(files: RunDirectory, out: Path) -> str:
    """Copy a finished run's model to a new folder.

    Returns:
        Where it is, and what it cost, in words.

    Raises:
        RecipeError: there is no such run, it has not finished, or it has no model.
        ModelRefused: the model that was kept is damaged, or the folder holds something already.
    """
    from dpray.trainers.export import load_model, write

    files.finished()
    folder = files.path / MODEL
    if not folder.is_dir():
        raise RecipeError(
            f"The run `{files.name}` kept no model: it searched for settings only, trained no round, or was finished "
            "by a version of dpray that kept none."
        )
    model, theta, statement = load_model(folder)
    write(out, model, theta, statement)
    return f"{out}: {statement}\nRead it back with dpray.trainers.load_model({str(out)!r})."
