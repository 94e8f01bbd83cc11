"""Your own data and model: least squares on the records of two sites, twenty noised steps from one account.

A `ClientTask` runs only where the records are; what comes out of it is a clipped, noised, charged sum. Before you
trust one of your own, let `dpray.platform.cohort.check_records_alone(task, records, theta, clip)` try to catch it
letting one record move more than its share.

    python -m dpray.experiments.examples.own_task
"""

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort import ClientTask, Cohort, GradientSum, Records
from dpray.platform.privacy import Budget, ClippedSum, Regime, Unit
from dpray.platform.privacy.budget import floor_quanta, split
from dpray.platform.privacy.ledger import Attempt, Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import clip_rows

STEPS, RATE, CLIP = 20, 0.5, 1.0


class LeastSquares(ClientTask):
    """Gradients of ½(x·θ − y)², one row a record."""

    dimension = 3

    def clipped_sum(self, theta: NDArray[np.float64], records: Records, clip: float) -> NDArray[np.float64]:
        """Sum of the records' clipped gradients."""
        gradients = (records.x @ theta - records.y)[:, None] * records.x
        total: NDArray[np.float64] = clip_rows(gradients, clip).sum(axis=0)
        return total


def made_up_sites(rows: int) -> dict[str, Records]:
    """Two sites whose records follow y = x·(1, −2, ½)."""
    rng = np.random.default_rng(0)
    return {name: Records(x := rng.normal(size=(rows, 3)), x @ [1.0, -2.0, 0.5]) for name in ("north", "south")}


def main() -> None:
    """Spend a budget of ε = 3 on the steps, and say where they led."""
    sites = made_up_sites(500)
    records = sum(len(site) for site in sites.values())  # public by declaration
    population = Ledger("sqlite:///ledger.db").population("people")
    budget = Budget(epsilon=3, delta=1e-5)
    account = population.account("record", budget)
    run = population.run("least-squares")
    mechanism = ClippedSum(clip=CLIP, unit=Unit.RECORD, dimension=3, records=records)
    theta = np.zeros(3)
    with Cohort(LeastSquares(), sites, state_dir="sites/people") as cohort:
        for step, share in enumerate(split(floor_quanta(budget.mu), STEPS)):  # of the account's μ², exactly
            query = GradientSum(theta, clip=CLIP)

            def compute(attempt: Attempt, query: GradientSum = query) -> NDArray[np.float64]:
                return cohort.sum(attempt, query, mechanism, Regime.DISTRIBUTED).pack()

            release = run.release(
                ReleaseKey("training", "gradients", step),
                query.describe(),
                mechanism,
                share,
                compute,
                trust=cohort.trust(Regime.DISTRIBUTED),
            )
            theta = theta - RATE * release.value[:3] / records
    print(f"θ = {np.round(theta, 2)}, spent ε = {account.spent_epsilon:.2f}")


if __name__ == "__main__":
    main()
