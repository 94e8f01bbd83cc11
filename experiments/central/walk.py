"""What is shown of a search's releases, one after the other: released values, and spends.

| metric | value |
|---|---|
| `iterate/KEY` | a setting of the iterate, of what is best so far, or of the winner |
| `search/gradient_norm` | ‖ĝ‖ |
| `search/noise_to_signal`, `search/signal_to_noise` | of ĝ, see `platform.tracking.progress` |
| `search/step_norm` | ‖θ_{t+1} − θ_t‖, in the coordinates of the box |
| `search/winner` | index of the winner among the candidates |
| `loss` | exact mean loss over the users, only of objectives whose data are declared public |

Step t is after t releases; step 0 is the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.platform.tracking.progress import Row, Spent, against_noise, show
from dpray.platform.user_losses import evaluated
from dpray.searchers.central import CentralSearch
from dpray.searchers.descent import PrivateDescent
from dpray.searchers.global_bo import GlobalBOSearch
from dpray.searchers.private_random import PrivateRandomSearch

if TYPE_CHECKING:
    from dpray.platform.tracking import RunView
    from dpray.platform.user_losses import UserLosses

Config = Mapping[str, Any]


class Walk:
    """Follows a search, and shows what it releases.

    Args:
        search: whose releases.
        view: of the search in MLflow.
        spent: of its releases.
        public: the objective, if exact losses may be shown.

    Attributes:
        path: the start (of a descent), then what is known after every release.
        losses: exact mean loss at each of them; empty if they may not be shown.
    """

    def __init__(self, search: CentralSearch, view: RunView, spent: Spent, public: UserLosses | None) -> None:
        self._search, self._view, self._spent, self._public = search, view, spent, public
        self.path: list[Config] = []
        self.losses: list[float] = []
        if isinstance(search, PrivateDescent):
            self._show(0, search.path[0], {})
        self._spent.show(view, 0)

    def released(self, step: int) -> None:
        """A release is known: show it."""
        search = self._search
        row: Row = {}
        if isinstance(search, PrivateDescent):
            config, row = search.path[step + 1], _gradient(search, step)
        elif isinstance(search, PrivateRandomSearch):
            config, row = search.best_config, {"search/winner": search.winner}
        else:
            assert isinstance(search, GlobalBOSearch)
            config = search.incumbent
        self._show(step + 1, config, row)
        self._spent.show(self._view, step + 1)

    def loss(self, config: Config) -> float | None:
        """Exact mean loss over the users, if it may be shown; NaN where the objective fails: it is only for show."""
        if self._public is None:
            return None
        try:
            return float(np.mean(evaluated(self._public, config)))
        except Exception:
            return math.nan

    def _show(self, t: int, config: Config, row: Row) -> None:
        self.path.append(dict(config))
        loss = self.loss(config)
        if loss is not None:
            self.losses.append(loss)
            row = {**row, "loss": loss}
        iterate = {f"iterate/{key}": value for key, value in config.items() if not isinstance(value, bool)}
        show(self._view, {**row, **iterate}, t, public=())


def _gradient(search: PrivateDescent, t: int) -> Row:
    history = search.history
    norm = float(np.linalg.norm(history.gradients[t]))
    floor = history.sigma * math.sqrt(search.box.dimension)
    return {
        "search/gradient_norm": norm,
        **against_noise(norm, floor, "search"),
        "search/step_norm": float(np.linalg.norm(history.iterates[t + 1] - history.iterates[t])),
    }
