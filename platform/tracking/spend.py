"""What an account has spent, as metrics.

| metric                      | value                                                            |
|-----------------------------|------------------------------------------------------------------|
| `privacy/mu`                | μ = √(quanta · 2⁻⁶⁰) of everything the account was ever charged  |
| `privacy/epsilon`           | ε(μ) at the account's δ                                          |
| `privacy/epsilon_run`       | ε of this run's own charges alone                                |
| `privacy/epsilon_remaining` | ε(√(μ_B² − μ²))                                                  |
| `privacy/share_spent`       | μ²/μ_B²                                                          |
| `privacy/share_run`         | this run's part of μ_B²                                          |

ε does not add up (search + training ≠ total); the shares do. An ε takes about a millisecond to compute, so a spend is
spooled as integers and converted on its way to MLflow.
"""

import math
from functools import lru_cache

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, Quanta, part_of, remaining_epsilon, upper_mu
from dpray.platform.tracking.spool import Entry


def privacy_metrics(budget: Budget, spent: Quanta, run_spent: Quanta) -> dict[str, float]:
    """The metrics of the table; spends are rounded up, what remains is rounded down.

    Args:
        budget: of the account. One that is not private has neither remainder nor shares.
        spent: quanta charged to the account over its lifetime.
        run_spent: quanta charged by this run.
    """
    metrics = {
        "privacy/mu": upper_mu(spent),
        "privacy/epsilon": _epsilon(spent, budget.delta),
        "privacy/epsilon_run": _epsilon(run_spent, budget.delta),
    }
    if budget.quanta is not None:
        metrics["privacy/epsilon_remaining"] = remaining_epsilon(budget, spent)
        metrics["privacy/share_spent"] = part_of(spent, budget.quanta)
        metrics["privacy/share_run"] = part_of(run_spent, budget.quanta)
    return metrics


def spend_entry(budget: Budget, spent: Quanta, run_spent: Quanta) -> Entry:
    """The spend as it is spooled; `expanded` makes metrics of it."""
    epsilon = None if budget.non_private else budget.epsilon
    return {"op": "spend", "epsilon": epsilon, "delta": budget.delta, "spent": spent, "run": run_spent}


def expanded(entry: Entry) -> Entry:
    """A spooled spend as an entry of metrics."""
    metrics = privacy_metrics(_budget(entry["epsilon"], entry["delta"]), entry["spent"], entry["run"])
    return {"op": "metrics", "part": entry["part"], "step": entry["step"], "time": entry["time"], "values": metrics}


@lru_cache(maxsize=16)
def _budget(epsilon: float | None, delta: float) -> Budget:
    return Budget(math.inf, delta, non_private=True) if epsilon is None else Budget(epsilon, delta)


@lru_cache(maxsize=1024)
def _epsilon(quanta: Quanta, delta: float) -> float:
    return gdp.epsilon(upper_mu(quanta), delta)
