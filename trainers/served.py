"""An exported model as MLflow loads it: `mlflow.pyfunc.load_model("runs:/<run id>/model")`.

MLflow imports this module by the name in the model's `MLmodel` file; what it loads is checked as everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpray.trainers.export import load_model
from dpray.trainers.models import IntArray


class Served:
    """A model that predicts classes, and says what it cost.

    Attributes:
        statement: the `ModelStatement` it travels with.
    """

    def __init__(self, folder: Path) -> None:
        self._model, self._theta, self.statement = load_model(folder)

    def predict(self, x: Any, params: dict[str, Any] | None = None) -> IntArray:
        """Most probable class of each row of features, (n,)."""
        return self._model.predict(self._theta, np.asarray(x, dtype=np.float64))


def _load_pyfunc(data_path: str) -> Served:
    """MLflow's hook."""
    return Served(Path(data_path))
