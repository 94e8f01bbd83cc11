"""The two kinds of experiment a recipe can state, and the seam between them.

| kind | recipe | what a run does | code |
|---|---|---|---|
| federated | `spec.Recipe` | the clients of a cohort vote on settings, then train | `federated`, `job` |
| central | `central.spec.CentralRecipe` | a search whose losses meet at a curator, alone | `central` |

    read(text) ─▶ recipe ─▶ load(recipe) ─▶ Experiment ─▶ `pipeline`: plan or run ─▶ outcome ─▶ drawn(outcome)

Everything outside `federated`, `job`, `material`, `central` is common to both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpray.experiments.central.outcome import CentralOutcome
from dpray.experiments.central.spec import ALGORITHMS, CentralRecipe
from dpray.experiments.figures import number
from dpray.experiments.outcome import Outcome
from dpray.experiments.parts import Foreseen
from dpray.experiments.reading import RecipeError, read_yaml
from dpray.experiments.spec import Recipe
from dpray.platform.privacy.budget import remaining_epsilon

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dpray.experiments.live import Live
    from dpray.experiments.runs import RunDirectory
    from dpray.experiments.showing import Showing
    from dpray.experiments.standing import Standing
    from dpray.platform.privacy.ledger import Account, Ledger, Plan, Run, Statement

AnyRecipe = Recipe | CentralRecipe
AnyOutcome = Outcome | CentralOutcome

_ELSEWHERE = ("shares", "data", "cohort", "training")
"""Sections of a cohort's recipe that a search in the central model does not have."""


@dataclass(frozen=True)
class Begun:
    """A run that may spend now: its plan is set aside, and it is shown from here on."""

    files: RunDirectory
    account: Account
    run: Run
    ledger: Ledger
    showing: Showing
    live: Live

    def spent(self) -> str:
        """ε of the account by now, and what is left of it, in words."""
        budget = self.account.budget
        if budget.non_private or self.account.unbounded:
            return "ε = ∞, NOT PRIVATE"
        if self.account.kind == "pld":
            return f"ε {number(self.account.spent_epsilon)} spent of {number(budget.epsilon)}"
        left = remaining_epsilon(budget, self.account.spent)
        return f"ε {number(self.account.spent_epsilon)} spent, {number(left, up=False)} left"

    def settle(self) -> Statement:
        """Close the run, show where it leaves the account, and return the account's statement."""
        self.run.close()
        statement = self.account.statement(self.run.name)
        self.showing.spend(self.showing.root, self.account, self.run, 0)
        self.showing.statement(statement, self.ledger)
        return statement


class Experiment(ABC):
    """A recipe with what it is made of at hand. Making one touches neither ledger nor Ray, and spends nothing."""

    expected: Foreseen

    @property
    @abstractmethod
    def size(self) -> str:
        """Public sizes, in words."""

    @abstractmethod
    def planned(self) -> Plan:
        """What a run sets aside before its first release."""

    @abstractmethod
    def forecast(self, before: Standing) -> RenderableType:
        """What `dpray plan` prints, with the account as it stands."""

    @abstractmethod
    def running(self, workspace: Path, address: str | None, live: Live) -> AbstractContextManager[None]:
        """Ray, and whatever the releases are made of, for the time of a run.

        Raises:
            LedgerTampered: who is asked has seen another ledger.
        """

    @abstractmethod
    def carry_out(self, begun: Begun) -> AnyOutcome:
        """Everything that is released, from where an earlier process stopped; ends with `begun.settle()`."""


def read(text: str, name: str = "The recipe") -> AnyRecipe:
    """A recipe of either kind.

    Raises:
        RecipeError: with one sentence for each problem found.
    """
    document = read_yaml(text, name)
    if not _is_central(document):
        return Recipe.read(text, name)
    strangers = [f"`{key}`" for key in _ELSEWHERE if key in document]
    if strangers:
        raise RecipeError(
            f"{' and '.join(strangers)} cannot stand beside an `objective`: a recipe is either a search in the central "
            "model (`objective`, `search`) or a cohort that votes and trains (`data`, `cohort`, `shares`, `training`)."
        )
    return CentralRecipe.read(text, name)


def _is_central(document: Mapping[str, Any]) -> bool:
    search = document.get("search")
    algorithm = search.get("algorithm") if isinstance(search, Mapping) else None
    return "objective" in document or (isinstance(algorithm, str) and algorithm in ALGORITHMS)


def load(recipe: AnyRecipe, workspace: Path) -> Experiment:
    """The recipe with its data.

    Raises:
        RecipeError and its like: whatever can be refused without looking at the ledger.
    """
    home = "central.experiment" if isinstance(recipe, CentralRecipe) else "federated"
    loaded: Experiment = import_module(f"dpray.experiments.{home}").load(recipe, workspace)
    return loaded


def outcome_of(recipe: AnyRecipe, fields: Mapping[str, Any]) -> AnyOutcome:
    """The outcome of a run of this recipe, from its stored fields."""
    return CentralOutcome(**fields) if isinstance(recipe, CentralRecipe) else Outcome(**fields)


def drawn(outcome: AnyOutcome) -> RenderableType:
    """The final report of a run."""
    if isinstance(outcome, CentralOutcome):
        from dpray.experiments.central.report import outcome as draw_central

        return draw_central(outcome)
    from dpray.experiments.report import outcome as draw_federated

    return draw_federated(outcome)
