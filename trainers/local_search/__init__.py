"""A client's own search before the vote (DP-HYPE): many candidate settings trained at once on its records.

| file         | what                                                                                     |
|--------------|------------------------------------------------------------------------------------------|
| `settings`   | a candidate's settings, how it is judged, when it is stopped early                         |
| `split`      | hold-out and folds                                                                       |
| `stacked`    | what a stack of models is, loss and accuracy of all of them                              |
| `mlp`        | linear heads and multi-layer perceptrons, kernels by hand                                |
| `module`     | any torch module, by `torch.func`                                                        |
| `descent`    | SGD with momentum and StepLR over a stack                                                |
| `task`       | the `ClientTask`                                                                         |

Names are imported when they are first used: the package is quick to import and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpray.trainers.local_search.mlp import StackedMLP as StackedMLP
    from dpray.trainers.local_search.module import StackedModule as StackedModule
    from dpray.trainers.local_search.settings import EarlyStopping as EarlyStopping
    from dpray.trainers.local_search.settings import LocalTraining as LocalTraining
    from dpray.trainers.local_search.settings import Validation as Validation
    from dpray.trainers.local_search.stacked import StackedModel as StackedModel
    from dpray.trainers.local_search.task import LocalSearchTask as LocalSearchTask

_HOMES = {
    "EarlyStopping": "settings",
    "LocalSearchTask": "task",
    "LocalTraining": "settings",
    "StackedMLP": "mlp",
    "StackedModel": "stacked",
    "StackedModule": "module",
    "Validation": "settings",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
