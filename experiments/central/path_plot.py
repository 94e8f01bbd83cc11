"""A picture of a search: what was released, and where it went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dpray.experiments.central.walk import Walk
    from dpray.platform.tracking.progress import Spent
    from dpray.searchers.central import CentralSearch

_MOST_LINES = 20


def plot(walk: Walk, search: CentralSearch, spent: Spent, place: Path) -> Path | None:
    """Draw, over the releases, the exact mean loss (public data) or else ‖ĝ‖, ε of the run, and the iterates, as a PNG.

    Returns:
        `place`; None for searches that are no descent, which have no path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from dpray.searchers.descent import PrivateDescent

    if not isinstance(search, PrivateDescent):
        return None
    history, box = search.history, search.box
    t = np.arange(len(history.iterates))
    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, below = figure.subplots(2, 1, sharex=True)
    if walk.losses:
        left.plot(t, walk.losses, color="tab:blue")
        left.set_ylabel("exact mean loss (public data)", color="tab:blue")
    else:
        left.plot(t[1:], np.linalg.norm(history.gradients, axis=1), color="tab:blue")
        left.axhline(history.sigma * np.sqrt(box.dimension), color="grey", linestyle=":", linewidth=1)
        left.set_ylabel("‖ĝ‖, as released (dotted: noise alone)", color="tab:blue")
    epsilons = [float(spent.row(int(step))["privacy/epsilon_run"]) for step in t]
    if np.all(np.isfinite(epsilons)):
        right = left.twinx()
        right.plot(t, epsilons, color="tab:red")
        right.set_ylabel("ε of this run so far", color="tab:red")
        right.set_ylim(bottom=0)
    inside = (history.iterates - box.lower) / (box.upper - box.lower)
    below.plot(t, inside[:, :_MOST_LINES], linewidth=1)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set(xlabel="releases", ylim=(-0.02, 1.02))
    more = "" if box.dimension <= _MOST_LINES else f" (the first {_MOST_LINES} of {box.dimension})"
    below.set_ylabel(f"place in the box, by setting{more}")
    figure.savefig(place, dpi=120)
    return place
