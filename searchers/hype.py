"""DP-HYPE: clients vote for hyperparameters, and only the noisy count of the votes is released, or the winner alone.

Notation, and where it lives here:

| symbol    | meaning                                                              | in the code                      |
|-----------|----------------------------------------------------------------------|----------------------------------|
| H_1 … H_p | candidates: public configurations, chosen without data               | `candidates`                     |
| n, n_min  | clients; clients sure to answer, less the assumed colluders          | `cohort.clients`, `cohort.n_min` |
| k         | votes a client has, k < p                                            | `votes_per_client`               |
| v_i       | ballot of client i: ones at its k best candidates, (p,) of 0/1       | stays with the client            |
| ṽ_i       | v_i + N(0, σ²/n_min · I): noised ballot, (p,)                        | stays with the client            |
| S         | Σ ṽ_i: noisy count of the votes, (p,)                                | `votes`                          |
| Δ         | √(2·min(k, p − k)): L2 sensitivity of Σ v_i to replacing one client  | `mechanism.sensitivity`          |
| μ, σ      | μ = Δ/σ: exact Gaussian DP of the one release                        | `mu`, `sigma`; `quanta` = μ²·2⁶⁰ |
| ε, b      | of `release="winner"`: pure ε; Gumbel scale 2/ε on counts (`vote`)   | `epsilon`, `scale`               |

Steps 1 and 2 are Tune trials, 3 and 4 happen inside one release of the cohort, 5 is post-processing:

1. the candidates are public: `define`;
2. for every candidate, every client trains and scores a model of its own: `propose`, `CandidateTrial` (one trial asks
   for several candidates where clients are quicker so, `candidates_per_trial`);
3. every client votes for its k best, ties broken at random, and
4. the noised ballots are added up: `advance`, the only release;
5. the winner is argmax S: `best_candidate`. With `release="winner"` steps 4 and 5 are one: the index alone is released.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy.budget import Budget, to_mu
from dpray.platform.privacy.ledger import Plan, PlannedRelease, ReleaseKey
from dpray.platform.privacy.mechanisms import Regime, TopKVotes, Unit, VoteWinner
from dpray.searchers import space as spaces
from dpray.searchers.base import PrivateSearcher
from dpray.searchers.batch import Batch, Config
from dpray.searchers.candidate_trial import (
    CandidateTrial,
    PerTrial,
    checked,
    numbers_of,
    scores_of,
    size_of,
    suggestions,
)
from dpray.searchers.candidates import candidates_of, refuse_untrainable
from dpray.searchers.errors import SearchError
from dpray.searchers.trial import CANDIDATE, head_share
from dpray.searchers.vote import NoisyCounts, WinnerAlone, release_of

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort, Votes
    from dpray.platform.privacy.ledger import Attempt, Release, Run

MECHANISM, WINNER = NoisyCounts.name, WinnerAlone.name
"""Names of the release in the ledger: (label, "votes", step 0), or (label, "winner", step 0)."""


class DPHypeSearch(PrivateSearcher):
    """Ray Tune searcher that finds hyperparameters by a private vote of the clients (DP-HYPE).

    Args:
        cohort: the clients; their task's `fit_and_score` says how a candidate is judged.
        run: the ledger's run that is charged.
        budget: what the vote may spend, as (ε, δ); or
        quanta: the same as μ² in quanta of 2⁻⁶⁰ (a share of a larger plan). None: no noise, NOT PRIVATE, which only a
            `non_private` account admits.
        votes: k, votes per client. Small cohorts need a small k.
        candidates: explicit configurations, or how many to draw from the space. Without it the whole grid is searched.
        space: Tune search space; may be left to `param_space` of the Tuner.
        seed: public seed of the draws. Not a seed of noise.
        release: `votes`, the paper's noisy counts of all candidates; `winner`, the index of the best alone: pure ε-DP,
            for a trusted aggregator. `vote` says which to take when.
        regime: who adds noise; `central` and `distributed` as the cohort's sum provides them. None: `distributed` for
            votes; `central`, which it needs, for a winner.
        label: phase of the run in the ledger.
        reserve: set the spend aside before the first trial. False where the run's plan has a line
            (label, release, unit client) already.
        candidates_per_trial: how many candidates a trial asks for. Clients train them together where their task has a
            `fit_and_scores`, and Tune spends its tenth of a second once for all of them; what fails is tried again
            together. `auto`: a tenth of the candidates, at least 10, with such a task, else 1.
        max_retries, max_concurrent: see `PrivateSearcher`.
        resources: what one trial reserves; by default as much of the head node's marker as lets `max_concurrent` run.

    Attributes:
        votes: S as released, (p,) float64, in votes; raises before there is one, and where a winner is released.
        best_candidate, best_config: argmax S or the released winner, and its configuration.
        epsilon, scale: of a winner: pure ε, the largest that costs no more than μ, and the Gumbel scale 2/ε.

    Example:
        >>> search = DPHypeSearch(cohort, run, budget=Budget(3.0, 1e-5), votes=1, space=space)
        >>> tune.Tuner(
        ...     search.trainable(),
        ...     param_space=space,
        ...     tune_config=tune.TuneConfig(search_alg=search, num_samples=search.num_samples, reuse_actors=True),
        ... ).fit()
        >>> search.best_config

    Resuming: build the search again with the same arguments and run a new Tuner. Clients keep their scores, the ledger
    keeps the vote; if it was released already, no trial runs.

    *Guarantee.* The released counts, and so the winner and every plot of them, are μ-GDP for one client replaced by
    another (Δ as above, one release whatever p is). With `release="winner"` the index alone is, as `VoteWinner` states
    it; the aggregator sees the counts, within the cohort's sum, and is trusted not to look. Nothing else about scores
    leaves the clients, however these train: many candidates at once, or some not to the end. Not protected: who takes
    part, how many answered, and timing.

    Raises:
        SpaceError, ValueError: nothing to search, k ≥ p, k < 1, a winner without a trusted aggregator, a candidate that
            no client can train: before anything is spent.
        BudgetExceeded, PlanConflict: from `reserve`, before the first trial.
        ReleaseLost: the vote passed its point of no return and cannot be repeated: its charge stands. Search again
            under another `label`, which is charged anew; scores are kept.
    """

    def __init__(
        self,
        cohort: Cohort,
        run: Run,
        *,
        budget: Budget | None = None,
        quanta: int | Literal["budget"] | None = "budget",
        votes: int = 1,
        candidates: Sequence[Mapping[str, Any]] | int | None = None,
        space: Mapping[str, Any] | None = None,
        seed: int = 0,
        release: Literal["votes", "winner"] = "votes",
        regime: Regime | None = None,
        label: str = "search",
        reserve: bool = True,
        max_retries: int = 3,
        candidates_per_trial: PerTrial = "auto",
        max_concurrent: int = 2,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(max_retries=max_retries, max_concurrent=max_concurrent)
        if (budget is None) == (quanta == "budget"):
            raise ValueError("Say what the vote may spend, once: budget=Budget(epsilon, delta), or quanta=… of μ².")
        self.quanta: int | None = budget.quanta if budget is not None else _whole(quanta)
        if isinstance(votes, bool) or not isinstance(votes, int) or votes < 1:
            raise ValueError(f"votes is {votes!r}; every client has at least 1 vote.")
        self.cohort, self.run, self.label, self.reserve = cohort, run, label, reserve
        self._vote_release = release_of(release, cohort, votes, regime)
        self.release, self.regime = self._vote_release.name, self._vote_release.regime
        self.votes_per_client, self.seed = votes, seed
        self._per_trial = checked(candidates_per_trial)
        self.resources = None if resources is None else dict(resources)
        self._count = candidates if isinstance(candidates, int) else None
        self._given = None if candidates is None or isinstance(candidates, int) else spaces.distinct(candidates)
        self._space = space
        self._candidates: tuple[Config, ...] | None = None
        self._fixed = False  # begun or restored: the candidates stay as they are
        self._released: Release | None = None
        if self._given is not None or space is not None:
            self.define(None)

    # Step 1: public candidates ----------------------------------------------------------------------------------

    def define(self, space: Mapping[str, Any] | None) -> None:
        """Fix H_1 … H_p, from the explicit candidates or the space, and refuse a k that does not fit."""
        if space is None and self._candidates is not None:
            return
        found = candidates_of(self._given, self._space, space or {}, self._count, self.seed)
        if self._fixed and found != self._candidates:
            raise SearchError(
                "The Tuner's param_space gives other candidates than this search has begun with: give the same one."
            )
        self._vote_release.mechanism(len(found))
        refuse_untrainable(found, self.cohort)
        self._candidates = found

    @property
    def candidates(self) -> tuple[Config, ...]:
        """H_1 … H_p."""
        if self._candidates is None:
            raise SearchError("The candidates are not known before the Tuner hands param_space over; or give space=.")
        return copy.deepcopy(self._candidates)

    @property
    def evaluations(self) -> int:
        """Trials: one per candidate, or per `candidates_per_trial` of them; each is asked of every client."""
        return math.ceil(self._known_count / self.candidates_per_trial)

    @property
    def candidates_per_trial(self) -> int:
        """How many candidates a trial asks for; the last one has what is left."""
        together = self._per_trial == "auto" and self.cohort.scores_together
        return size_of(self._per_trial, self._known_count, together)

    @property
    def _known_count(self) -> int:
        """p."""
        if self._candidates is not None:
            return len(self._candidates)
        if self._count is not None:
            return self._count
        raise SearchError(
            "How many candidates there are is not known before the Tuner hands param_space over: give the search "
            "space=param_space, or candidates=… to draw."
        )

    # Budget -----------------------------------------------------------------------------------------------------

    @property
    def mechanism(self) -> TopKVotes | VoteWinner:
        """The release: sum of ballots with k ones among p, or the index of its largest entry."""
        return self._vote_release.mechanism(len(self.candidates))

    @property
    def mu(self) -> float:
        """What the vote spends; ∞ without noise."""
        return math.inf if self.quanta is None else to_mu(self.quanta)

    @property
    def sigma(self) -> float:
        """σ, in votes: std of the noise in S if exactly n_min clients add their share (n where each adds it all)."""
        return self._vote_release.sigma(len(self.candidates), self.mu)

    @property
    def sigma_votes(self) -> float:
        """σ_S, in votes: std of the noise in every entry of S if all clients answer."""
        return self._vote_release.sigma_votes(len(self.candidates), self.mu)

    @property
    def epsilon(self) -> float:
        """Pure ε of a released winner: the largest whose exact μ is within what is spent; ∞ without noise."""
        return self._vote_release.epsilon(len(self.candidates), self.mu)

    @property
    def scale(self) -> float:
        """b = 2/ε, in votes: scale of the Gumbel noise on the counts that a winner is chosen from."""
        return self._vote_release.scale(len(self.candidates), self.mu)

    def begin(self) -> None:
        """Set the spend aside before the first trial; a vote that is in the ledger already ends the search here."""
        self._fixed = True
        if self.run.stored(self._key) is not None:
            self._vote()
            return
        if self.reserve:
            self.run.reserve(Plan((PlannedRelease(self.label, self.release, Unit.CLIENT, self.quanta, 1),)))
        clients, spread = len(self.cohort.clients), self._vote_release.spread(len(self.candidates), self.mu)
        if spread > clients / 2:
            warnings.warn(
                f"The vote is mostly noise: a difference of two counts has a standard deviation of {spread:.1f} votes, "
                f"and there are {clients} clients. "
                "Give it more of the budget, fewer votes per client, or more clients.",
                stacklevel=2,
            )

    # Step 2: every candidate on every client, as trials ---------------------------------------------------------

    def propose(self, step: int) -> Sequence[Config]:
        """All candidates at once, `candidates_per_trial` in a suggestion: the vote is the only step."""
        return suggestions(self.candidates, self.candidates_per_trial)

    def trainable(self) -> type:
        """Class for `tune.Tuner`: one trial asks every client to train and score `candidates_per_trial` candidates.

        Named after the search, so that a result in Tune reads `Candidate_…`. Holds no data: a handle of the cohort.
        """
        self._require_attached()
        self.start_over()
        resources = self.resources if self.resources is not None else head_share(self.max_concurrent)
        bound = {"handle": self.cohort.handle(), "run": self._searched, "resources": resources}
        return type("Candidate", (CandidateTrial,), bound)

    @property
    def mark(self) -> str:
        """Digest of all candidates: scores of an earlier list in the same run are not taken for this one's."""
        return hashlib.sha256(json.dumps(self.candidates, sort_keys=True).encode()).hexdigest()[:8]

    # Steps 3 and 4: the vote, the only release ------------------------------------------------------------------

    def advance(self, step: int, batch: Batch) -> str | None:
        """Every candidate is settled: have the clients vote, and release the noisy count."""

        def asked(slots: Iterable[int]) -> int:
            return sum(len(numbers_of({CANDIDATE: slot, **batch.points[slot]})) for slot in slots)

        p = len(self.candidates)
        if not batch.evaluated:
            return (
                f"none of the {p} candidates was evaluated, because their trials failed (see Tune's error files). "
                "No vote was held and nothing was spent."
            )
        self._vote()
        self.cohort.forget(scores_of(self._searched, self.mark))  # nothing needs the scores any more
        missing = f" {asked(batch.given_up)} were given up after failures and count as worst." if batch.given_up else ""
        return (
            f"{asked(batch.evaluated)} of {p} candidates were evaluated, the clients voted, and {self._result}{missing}"
        )

    def _vote(self) -> None:
        """Charge, hold the vote, store, read: once per run and label, however often this is called."""
        mechanism = self.mechanism
        query = {
            **self._ballots.describe(),
            "configurations": list(self.candidates),
            "clients": len(self.cohort.clients),
            "n_min": self.cohort.n_min,
            "regime": self.regime.value,
        }
        self._released = self.run.release(
            self._key, query, mechanism, self.quanta, self._hold, trust=self.cohort.trust(self.regime)
        )
        self._releases = [self._released]
        if not self.finished and not self._released.first:
            self.finish(f"the vote of this run was released before; {self._result}")

    def _hold(self, attempt: Attempt) -> NDArray[Any]:
        return self._vote_release.compute(attempt, self._ballots)

    @property
    def _result(self) -> str:
        if self.release == WINNER:
            return f"candidate {self.best_candidate} was released as the winner."
        return f"candidate {self.best_candidate} has the most votes."

    @property
    def _ballots(self) -> Votes:
        from dpray.platform.cohort import Votes

        return Votes(scores_of(self._searched, self.mark)[1], len(self.candidates), self.votes_per_client)

    @property
    def _searched(self) -> tuple[str, str]:
        return self.run.population.name, self.run.name

    @property
    def _key(self) -> ReleaseKey:
        return ReleaseKey(self.label, self.release, 0)

    # Step 5: the winner -----------------------------------------------------------------------------------------

    @property
    def _value(self) -> NDArray[Any]:
        """What was released; read from the ledger if it is there."""
        if self._released is None and self._candidates is not None and self.run.stored(self._key) is not None:
            self._vote()
        if self._released is None:
            raise self._result_missing()
        return self._released.value

    @property
    def votes(self) -> NDArray[np.float64]:
        """S as released: noisy votes per candidate, (p,). May be logged and plotted. Not there for a winner alone."""
        return self._vote_release.counts(self._value, len(self.candidates))

    @property
    def best_candidate(self) -> int:
        """Argmax S, or the winner as released."""
        return self._vote_release.best(self._value, len(self.candidates))

    @property
    def best_config(self) -> Config:
        """The winner's configuration, without reserved keys."""
        return copy.deepcopy(self.candidates[self.best_candidate])

    # Saved state ------------------------------------------------------------------------------------------------

    def search_state(self) -> dict[str, Any]:
        """Candidates, k, label, release, regime, size of a trial: all public. Votes are in the ledger."""
        return {
            "candidates": None if self._candidates is None else list(self.candidates),
            "votes": self.votes_per_client,
            "label": self.label,
            "release": self.release,
            "regime": self.regime.value,
            "candidates_per_trial": None if self._candidates is None else self.candidates_per_trial,
        }

    def load_search_state(self, state: Mapping[str, Any]) -> None:
        """Take the candidates over; refuse a state of a search built otherwise."""
        mine, state = self.search_state(), {"release": MECHANISM, **state}  # older states have no release
        for name in ("votes", "label", "release", "regime"):
            if state[name] != mine[name]:
                raise SearchError(
                    f"The saved search has {name} = {state[name]!r}, this one was built with {mine[name]!r}."
                )
        saved = None if state["candidates"] is None else tuple(state["candidates"])
        if None not in (saved, self._candidates) and saved != self._candidates:
            raise SearchError("The saved search has other candidates than this one was built with.")
        if saved is not None:
            self._candidates, self._fixed = saved, True
            size = int(state.get("candidates_per_trial", 1))  # in states of before: one candidate a trial
            if self._per_trial != "auto" and size != self.candidates_per_trial:
                raise SearchError(
                    f"The saved search has candidates_per_trial = {size}, this one was built with "
                    f"{self.candidates_per_trial}."
                )
            self._per_trial = size


def _whole(quanta: int | str | None) -> int | None:
    """An explicit spend; the ledger checks the number again."""
    if quanta is None:
        return None
    if isinstance(quanta, bool) or not isinstance(quanta, int) or quanta < 1:
        raise ValueError(f"quanta is {quanta!r}; it is a whole number of quanta of μ² from 1, or None (NOT PRIVATE).")
    return quanta
