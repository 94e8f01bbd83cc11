"""A run in MLflow: parent, search with its trials, training; spends per step, artefacts, anchors of the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dpray.experiments import report
from dpray.experiments.kinds import AnyRecipe
from dpray.experiments.parts import NoisedPart
from dpray.experiments.plan import Forecast
from dpray.experiments.runs import RunDirectory
from dpray.experiments.standing import in_workspace
from dpray.platform.privacy.mechanisms import vote_failure_bound
from dpray.platform.tracking import NullTracker, RunView, Tracker, Unreachable, check_uri, replay
from dpray.platform.tracking.spool import Spool

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Account, Ledger, Run, Statement
    from dpray.searchers.hype import DPHypeSearch


def checked_uri(recipe: AnyRecipe, workspace: Path, *, cluster: bool) -> str | None:
    """Where MLflow's store is; None for a recipe that tracks nothing.

    Raises:
        TrackingAddressError: an address that cannot work.
    """
    uri = recipe.tracking.uri
    if uri is None:
        return None
    return check_uri(in_workspace(uri, workspace), cluster)


class Showing:
    """What a run writes to MLflow, as it goes.

    Args:
        recipe, files: of the run.
        uri: of the store; None shows nothing.
        resumed: the run had begun before.
        stamps: such as "NOT PRIVATE (seeded noise)".
    """

    def __init__(
        self, recipe: AnyRecipe, files: RunDirectory, uri: str | None, *, resumed: bool, stamps: Sequence[str]
    ) -> None:
        tags = {
            "unit": recipe.population.unit,
            "population": recipe.population.name,
            "relation": "replace-one",
            "delta": recipe.budget.delta,
            "noise": "seeded" if recipe.noise.seed is not None else "operating system",
            "recipe": recipe.name,
        }
        self.root: RunView = NullTracker()
        if uri is not None:
            experiment = recipe.tracking.experiment
            self.root = Tracker(
                files.path / "spool",
                files.name,
                uri=uri,
                experiment=experiment,
                tags=tags,
                resume=resumed,
            )
        self.root.params(recipe.model_dump(exclude={"description", "tracking", "ledger"}, exclude_none=True))
        self.root.stamps(stamps)
        self.root.artifact_text("recipe.yaml", recipe.write())

    def trial(self, search: RunView, candidate: int, config: Mapping[str, Any], answered: int) -> None:
        """One candidate was evaluated: which, and by how many clients."""
        with search.child("trial", key=candidate) as trial:
            trial.params(config)
            trial.public({"search/candidate": candidate, "search/clients_answered": answered})

    def votes(self, view: RunView, search: DPHypeSearch, expected: Forecast) -> None:
        """The released votes and what follows from them, or the released winner."""
        view.public({"search/candidates": len(search.candidates), "search/votes_per_client": search.votes_per_client})
        view.params(search.best_config, prefix="winner")
        if search.release == "winner":
            view.released({"search/winner": search.best_candidate})
            if search.quanta is not None:
                view.public({"search/pure_epsilon": search.epsilon, "search/scale": search.scale})
            return
        for candidate, votes in enumerate(search.votes):
            view.released({"search/noisy_votes": float(votes)}, step=candidate)
        ranked = sorted(map(float, search.votes), reverse=True)
        gap = ranked[0] - ranked[1]
        sigma = expected.search.answered_sigma if isinstance(expected.search, NoisedPart) else 0.0
        bound = vote_failure_bound(gap, sigma, len(ranked) - 1)
        view.released({"search/winner": search.best_candidate, "search/noisy_gap": gap, "search/failure_bound": bound})
        view.public({"search/sigma": search.sigma})

    def spend(self, view: RunView, account: Account, run: Run, step: int) -> None:
        """What the account and this run have spent by now."""
        of_run = account.statement(run.name).run_spent
        if account.kind == "pld" and of_run is not None:
            view.public({"privacy/epsilon": account.spent_epsilon, "privacy/epsilon_run": of_run.epsilon}, step=step)
            return
        quanta = None if of_run is None else of_run.quanta
        view.spend(account.budget, None if account.unbounded else account.spent, quanta, step=step)

    def statement(self, statement: Statement, ledger: Ledger) -> None:
        """The account's statement, and the end of the ledger's chain."""
        self.root.statement(statement, report.statement_text(statement.as_dict()))
        self.root.tags({"trust": "; ".join(statement.trust)})
        self.root.stamps(statement.stamps)
        self.root.anchor(ledger.head(), ledger.identity)

    def finish(self) -> bool:
        """End the run; returns whether MLflow has everything."""
        return self.root.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.root.__exit__(*error)


def send_rest(files: RunDirectory, uri: str | None) -> bool:
    """Send what MLflow did not take while the run lasted; returns whether it has everything now."""
    folder = files.path / "spool"
    if uri is None or not (folder / "spool.jsonl").exists():
        return True
    spool = Spool(folder)
    waiting = spool.cursor < spool.end
    spool.close()
    try:
        return not waiting or replay(folder, uri)
    except Unreachable:
        return False


def plot(rounds: Sequence[Mapping[str, Any]], chance: float, place: Path) -> Path:
    """Draw accuracy on the public evaluation set and ε of the run over the rounds, as a PNG.

    Args:
        rounds: rows of the training, with `training_iteration`, `accuracy` and `privacy/epsilon_run`.
        chance: share of the most frequent class.
        place: file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    t = [row["training_iteration"] for row in rounds]
    left.plot(t, [row["accuracy"] for row in rounds], color="tab:blue")
    left.axhline(chance, color="grey", linestyle=":", linewidth=1)
    left.set(xlabel="round", ylim=(0, 1))
    left.set_ylabel("accuracy on the public evaluation set", color="tab:blue")
    right = left.twinx()
    right.plot(t, [float(row["privacy/epsilon_run"]) for row in rounds], color="tab:red")
    right.set_ylabel("ε of this run so far", color="tab:red")
    right.set_ylim(bottom=0)
    figure.savefig(place, dpi=120)
    return place
