"""How good the result of a central search is: one more release, charged on its own.

| symbol | meaning                                                | in the code |
|--------|--------------------------------------------------------|-------------|
| c      | bound: users' losses are clipped to [0, c]             | `bound`     |
| n, μ_s | users; what the score spends                           | `users`     |
|        | (1/n) Σ clip(loss_i) + N(0, σ²), σ = c/(nμ_s)          | `release_score` |

A search tells no loss, not even of its result. Who wants to know it asks here, and pays for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy.budget import ceil_quanta, to_mu
from dpray.platform.privacy.ledger import PlannedRelease, ReleaseKey
from dpray.platform.privacy.units import Unit
from dpray.searchers.central import CentralSearch
from dpray.searchers.trial import CANDIDATE, SEARCH

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Attempt

MECHANISM = "score"
"""Name of the release in the ledger: (label, "score", step 0)."""


def release_score(search: CentralSearch, bound: float, *, mu: float | None = None, quanta: int | None = None) -> float:
    """The users' mean loss at the search's result, clipped and noised; the same value whenever it is asked again.

    The result is evaluated once more, in another process where Ray runs. The charge is the run's: outside its plan,
    unless that has a line for it (`planned_score`).

    Args:
        search: finished, not closed.
        bound: c, public, in losses; smaller losses than 0 count as 0, larger ones and bad ones as c.
        mu: μ_s; or
        quanta: the same as μ_s² in quanta of 2⁻⁶⁰.

    Returns:
        A number around [0, c]: with its noise it may lie outside.

    Raises:
        ValueError: the spend is not given once, or the bound is not above 0.
        SearchUnfinished: the search has no result.
        BudgetExceeded: the account does not have that much left; nothing was evaluated.
        RunClosed: the run is closed.

    *Guarantee.* μ_s-GDP for one validation user replaced by another, Δ = c/n; it adds to what the search has spent.
    """
    from dpray.platform.curator_asks import ScoreAsk, score_mechanism

    if quanta is None and mu is not None:
        quanta = ceil_quanta(mu)
    elif quanta is None or mu is not None:
        raise ValueError("Say what the score may spend, once: mu=μ_s, or quanta=… of μ_s².")
    config, mechanism, spent = search.best_config, score_mechanism(bound, search.users), to_mu(quanta)
    row = "score.0"

    def compute(attempt: Attempt) -> NDArray[Any]:
        key = search.opened(attempt, mechanism)
        search.curator.expect([row])
        _evaluated(search, {**config, CANDIDATE: 0, SEARCH: row})
        ask = ScoreAsk(row=row, mechanism=mechanism, mu=spent, key=key, seed=search.noise_seed)
        value = search.curator.score(ask, attempt)
        return np.array([value])

    query = {**search.identity(), "config": config, "bound": float(bound)}
    released = search.run.release(ReleaseKey(search.label, MECHANISM, 0), query, mechanism, quanta, compute)
    return float(released.value[0])


def planned_score(label: str, quanta: int) -> PlannedRelease:
    """The line of a plan that sets a score's spend aside beside a search's, under the search's label."""
    return PlannedRelease(label, MECHANISM, Unit.USER, quanta, 1)


def _evaluated(search: CentralSearch, config: dict[str, Any]) -> None:
    """Have one point's losses sent to the curator, by a trial outside of Tune."""
    trial: Any = object.__new__(search.trainable())
    trial.config = config
    trial.step()
