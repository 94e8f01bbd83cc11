"""A search in the central model: per-user losses meet at a curator, and only its releases come back.

    propose ──configs──▶ trials ──losses (n,)──▶ curator ──release (charged first)──▶ the search

| symbol | meaning                                              | in the code         |
|--------|------------------------------------------------------|---------------------|
| n      | protected validation users, public                   | `users`             |
| T, b   | steps (releases), most new points of a step          | `iterations`, `batch_size` |
| row    | a point's name at the curator, `step.number`         | `points(step)`      |

What a step needs is named by rows. The curator says which of them it does not have: those become trials. If its process
dies, all are missing again and are evaluated again, before anything is charged.

*Guarantee.* Nothing in this file sees a loss. What a release protects stands with the search that makes it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dpray.platform.privacy import checks
from dpray.platform.privacy.budget import Budget, floor_quanta, split, to_mu
from dpray.platform.privacy.ledger import Plan, PlannedRelease, ReleaseKey
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.privacy.noise import SEEDED
from dpray.searchers.base import PrivateSearcher
from dpray.searchers.batch import Batch, Config
from dpray.searchers.errors import EvaluateAgain, SearchError
from dpray.searchers.losses_trial import LossesTrial, TaskSource, rows_of, suggestion
from dpray.searchers.trial import SEARCH

if TYPE_CHECKING:
    from dpray.platform.curator_actor import CuratorOwner
    from dpray.platform.privacy.ledger import Attempt, Run
    from dpray.platform.privacy.ledger.plan import Releasable
    from dpray.platform.user_losses import UserLosses


class CentralSearch(PrivateSearcher):
    """Base of the searches whose trials send per-user losses to a curator.

    Args:
        task: what is tuned, or a function that makes it on the node of each trial (its data then never leaves there).
        run: the ledger's run that is charged.
        users: n; None takes `task.users`.
        budget, mu, quanta: what the whole search may spend: as (ε, δ), as a GDP parameter, or as μ² in quanta of 2⁻⁶⁰
            (a share of a larger plan). Exactly one. quanta=None: no noise, NOT PRIVATE, for `non_private` accounts.
        iterations: T, releases.
        points_per_trial: points that one trial evaluates; more of them spare cheap objectives Tune's time per trial.
        seed: public seed of whatever the search draws. Not a seed of noise.
        noise_seed: None: noise of the operating system. A seed is for simulation and tests: NOT PRIVATE.
        label: phase of the run in the ledger.
        reserve: set the spend aside before the first trial. False where the run's plan has the line `planned` already.
        max_concurrent: trials in flight; None: as many as the cluster has CPUs.
        resources: what one trial reserves, by default one CPU.
        time_limit: seconds that the losses of one point may take before they are taken to hang, and their process is
            ended; None waits for ever.
        curator_actor: False keeps the curator in this process (tests, simulations).

    Attributes:
        on_release: called with every step whose release is known, in order, those found in the ledger included.
    """

    mechanism_name: str
    on_release: Callable[[int], object] | None = None

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        users: int | None = None,
        budget: Budget | None = None,
        mu: float | None = None,
        quanta: int | Literal["budget"] | None = "budget",
        iterations: int = 1,
        points_per_trial: int = 1,
        space: Mapping[str, Any] | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        label: str = "search",
        reserve: bool = True,
        max_retries: int = 3,
        max_concurrent: int | None = None,
        resources: Mapping[str, float] | None = None,
        time_limit: float | None = None,
        curator_actor: bool = True,
    ) -> None:
        super().__init__(max_retries=max_retries, max_concurrent=_cpus() if max_concurrent is None else max_concurrent)
        self.task, self.run, self.label, self.reserve = task, run, label, reserve
        self.users = _users(task, users)
        self.quanta = _spend(budget, mu, quanta)
        self.iterations = whole("iterations", iterations)
        self.points_per_trial = whole("points_per_trial", points_per_trial)
        self.seed, self.noise_seed = whole("seed", seed, least=0), noise_seed
        self.resources = {"CPU": 1.0} if resources is None else dict(resources)
        self.spends: tuple[int | None, ...] = (None,) * iterations
        if self.quanta is not None:
            self.spends = split(self.quanta, iterations)
        self.time_limit = None if time_limit is None else checks.positive("time_limit", time_limit)
        self._space, self._curator_actor = space, curator_actor
        self._curator: CuratorOwner | None = None
        self._given_up: set[str] = set()
        self._foreign = 0  # trials of the batch under way whose losses stayed with another process

    # What a search supplies -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """b: most new points a step can have; raises `SearchError` while it cannot be known."""

    @abstractmethod
    def points(self, step: int) -> Sequence[tuple[str, Config]]:
        """Every row a step's release needs, and its configuration: a function of public and released values only."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Public constants of the search, plain JSON: part of every request, and of saved state."""

    @property
    @abstractmethod
    def known(self) -> bool:
        """Whether the space is fixed, so that `identity` can be told."""

    # The spend --------------------------------------------------------------------------------------------------

    @property
    def mu(self) -> float:
        """What all releases together spend; ∞ without noise."""
        return math.inf if self.quanta is None else to_mu(self.quanta)

    def mu_of(self, step: int) -> float:
        """What one release spends; ∞ without noise."""
        quanta = self.spends[step]
        return math.inf if quanta is None else to_mu(quanta)

    @property
    def planned(self) -> PlannedRelease:
        """The search's line in a plan."""
        return PlannedRelease(self.label, self.mechanism_name, Unit.USER, self.quanta, self.iterations)

    @property
    def evaluations(self) -> int:
        """Trials: those done, those of the step under way, and as many as later steps can need at most."""
        each = math.ceil(self.batch_size / self.points_per_trial)
        done = self._earlier["evaluated"] + self._earlier["given_up"]
        now = len(self._batch.points) if self._batch is not None else 0 if self.finished else each
        return done + now + (0 if self.finished else self._foreign + each * (self.iterations - self.step - 1))

    @property
    def _spare(self) -> int:
        """Enough for a batch that is lost with the curator's process, too."""
        return max(super()._spare, math.ceil(self.batch_size / self.points_per_trial)) if self.max_retries else 0

    def set_aside(self) -> None:
        """Reserve the whole spend, before the first trial."""
        if self.reserve and not self.run.closed:
            self.run.reserve(Plan((self.planned,)))

    def take_up(self, released: int) -> None:
        """Go on after the releases that the ledger holds, whatever state was saved when; the curator is told.

        Raises:
            SearchError: the saved state is ahead of the ledger.
        """
        if released < self.step:
            raise SearchError(
                f"The saved search has made {self.step} releases, and run {self.run.name!r} in the ledger holds "
                f"{released}: it is another run, or an older copy of the ledger."
            )
        if released > self.step:
            self.step, self._batch, self._foreign = released, None, 0
        if self._batch is not None and not self.finished:
            self.curator.expect([row for row, _ in self.points(self.step)])

    def key(self, step: int) -> ReleaseKey:
        """The release of a step."""
        return ReleaseKey(self.label, self.mechanism_name, step)

    # A step: rows that are missing become trials -----------------------------------------------------------------

    def propose(self, step: int) -> Sequence[Config]:
        """The points of a step whose losses the curator does not have, `points_per_trial` in a suggestion."""
        self._foreign, needed = 0, self.points(step)
        missing = set(self.curator.expect([row for row, _ in needed])) - self._given_up
        todo = [(row, config) for row, config in needed if row in missing]
        size = self.points_per_trial
        chunks = [todo[i : i + size] for i in range(0, len(todo), size)]
        strict = step == 0 and not any(account.spent for account in self.run.population.accounts())
        return [
            suggestion([config for _, config in chunk], [row for row, _ in chunk], strict=strict) for chunk in chunks
        ]

    def usable(self, step: int, batch: Batch, least: int = 2) -> list[int] | str:
        """Numbers of the points of a settled step that could be evaluated; a sentence where too few could.

        Raises:
            EvaluateAgain: losses were lost with the curator's process.
        """
        for slot in batch.given_up:
            self._given_up.update(rows_of(batch.points[slot][SEARCH]))
        rows = [row for row, _ in self.points(step)]
        used = [j for j, row in enumerate(rows) if row not in self._given_up]
        refusal = self.curator.refusal()
        if refusal is not None or len(used) < least:
            why = refusal or (
                f"{len(used)} of the {len(rows)} points of iteration {step} could be evaluated, because their trials "
                "failed (see Tune's error files)."
            )
            return f"{why} Nothing was spent on iteration {step}."
        missing = self.curator.expect([rows[j] for j in used])
        if missing:
            raise self._lost(step, len(missing))
        return used

    def released(self, step: int, ask: Callable[[], Any]) -> Any:
        """What the curator answers; losses that died with it on the way are evaluated again.

        Raises:
            EvaluateAgain: that is so. What was charged stays charged, once: the ledger knows the release by its key.
        """
        from dpray.platform.curator import CuratorLost, RowsMissing

        try:
            return ask()
        except (CuratorLost, RowsMissing):
            raise self._lost(step, len(self.points(step))) from None

    def tell(self, step: int) -> None:
        """Say that a step's release is known and taken up."""
        if self.on_release is not None:
            self.on_release(step)

    def _lost(self, step: int, points: int) -> EvaluateAgain:
        return EvaluateAgain(
            f"The losses of {points} points of iteration {step} were lost with the curator's process more often than "
            "max_retries allows. Run the search again: nothing is charged twice."
        )

    def opened(self, attempt: Attempt, mechanism: Releasable) -> tuple[str | int, ...]:
        """Check an attempt before its value is computed, and name its noise."""
        attempt.check(mechanism, "central")
        if self.noise_seed is not None and attempt.quanta is not None:
            attempt.stamp(SEEDED)
        key = attempt.key
        return self.run.population.name, self.run.name, key.label, key.mechanism, key.step

    # The curator and the trials ---------------------------------------------------------------------------------

    @property
    def curator(self) -> CuratorOwner:
        """Where the losses are; opened when it is first needed."""
        if self._curator is None:
            from dpray.platform.curator_actor import open_curator

            self._curator = open_curator(self.users, actor=self._curator_actor)
        return self._curator

    def trainable(self) -> type:
        """Class for `tune.Tuner`: a trial evaluates one suggestion and reports that it did."""
        self._require_attached()
        self.start_over()
        bound = {
            "source": TaskSource.of(self.task),
            "handle": self.curator.handle(),
            "resources": self.resources,
            "time_limit": self.time_limit,
        }
        return type("Evaluation", (LossesTrial,), bound)

    def close(self) -> None:
        """End the curator's process: the losses it holds are gone. What was released stays in the ledger."""
        if self._curator is not None:
            self._curator.close()
            self._curator = None

    # Saved state ------------------------------------------------------------------------------------------------

    def search_state(self) -> dict[str, Any]:
        """Public constants; releases are in the ledger, losses nowhere but at the curator."""
        return {
            "identity": self.identity() if self.known else None,
            "label": self.label,
            "given_up": sorted(self._given_up),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See `PrivateSearcher.set_state`. The losses of what was evaluated stayed with the saved search's process."""
        super().set_state(state)
        self._foreign = 0 if self._batch is None else len(self._batch.evaluated)

    def load_search_state(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of a search built otherwise."""
        saved = state["identity"]
        mine = self.identity() if self.known and saved is not None else saved
        for name in sorted({*(saved or {}), *(mine or {})}):
            if saved.get(name) != mine.get(name):
                raise SearchError(
                    f"The saved search has {name} = {saved.get(name)!r}, this one was built with {mine.get(name)!r}."
                )
        if state["label"] != self.label:
            raise SearchError(f"The saved search has label {state['label']!r}, this one {self.label!r}.")
        self._given_up = set(state["given_up"])


def _cpus() -> int:
    """CPUs that trials may use at a time."""
    import os

    import ray

    if ray.is_initialized():
        return max(1, int(ray.cluster_resources().get("CPU", 1)))
    return os.cpu_count() or 1


def _users(task: Any, users: int | None) -> int:
    declared = users if users is not None else None if isinstance(task, type) else getattr(task, "users", None)
    if declared is None:
        raise ValueError("The number of protected users is public and has to be declared: task.users, or users=.")
    return whole("users", declared)


def _spend(budget: Budget | None, mu: float | None, quanta: int | str | None) -> int | None:
    if (budget is not None) + (mu is not None) + (quanta != "budget") != 1:
        raise ValueError("Say what the search may spend, once: budget=Budget(epsilon, delta), mu=…, or quanta=… of μ².")
    if budget is not None:
        return budget.quanta
    if mu is not None:
        return floor_quanta(mu)
    return None if quanta is None else whole("quanta", quanta)


def whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number, or a sentence (ValueError)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; give a whole number from {least}.")
    return value
