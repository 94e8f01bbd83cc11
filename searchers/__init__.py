"""Private hyperparameter searches for Ray Tune.

Names are imported when they are first used, so that importing the package is quick and never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpray.searchers.base import PrivateSearcher as PrivateSearcher
    from dpray.searchers.differences import FiniteDifferenceSearch as FiniteDifferenceSearch
    from dpray.searchers.differences import SPSASearch as SPSASearch
    from dpray.searchers.errors import SearchError as SearchError
    from dpray.searchers.errors import SearchUnfinished as SearchUnfinished
    from dpray.searchers.errors import SpaceError as SpaceError
    from dpray.searchers.gibo import DPGIBOSearch as DPGIBOSearch
    from dpray.searchers.gibo import GIBOSearch as GIBOSearch
    from dpray.searchers.global_bo import GlobalBOSearch as GlobalBOSearch
    from dpray.searchers.hype import DPHypeSearch as DPHypeSearch
    from dpray.searchers.private_random import PrivateRandomSearch as PrivateRandomSearch
    from dpray.searchers.score import release_score as release_score

_HOMES = {
    "DPGIBOSearch": "gibo",
    "FiniteDifferenceSearch": "differences",
    "GIBOSearch": "gibo",
    "GlobalBOSearch": "global_bo",
    "PrivateRandomSearch": "private_random",
    "SPSASearch": "differences",
    "release_score": "score",
    "DPHypeSearch": "hype",
    "PrivateSearcher": "base",
    "SearchError": "errors",
    "SearchUnfinished": "errors",
    "SpaceError": "errors",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
