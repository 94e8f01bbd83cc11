"""What every private search shares: a Ray Tune `Searcher` whose trials report no objective.

A search proceeds in batches. It proposes points (public configurations); Tune evaluates each in a trial, several at a
time, while the private results stay where they arise; once every point of the batch is settled the search makes its
release and either proposes the next batch or finishes with a reason. A search with a single batch is one step of this.

    define(space) ─▶ begin() ─▶ propose(0) ─▶ trials ─▶ advance(0) ─▶ propose(1) ─▶ … ─▶ finish(reason)

| a search supplies           | when it is called                                                               |
|-----------------------------|---------------------------------------------------------------------------------|
| `evaluations`               | any time: planned evaluations of the whole search                               |
| `define(space)`             | when Tune hands `param_space` over, or None before the first suggestion         |
| `begin()`                   | once per process, before the first suggestion: set the budget aside, look for   |
|                             | what an earlier process released; may call `finish(reason)`                     |
| `propose(step)`             | the points of a step that are not evaluated yet                                 |
| `advance(step, batch)`      | the batch is settled: make the release; a reason ends the search, None goes on; |
|                             | `EvaluateAgain` has `propose` asked for the same step once more                 |
| `search_state`, `load_search_state` | what else its saved state needs: plain JSON, public, no seeds of noise  |

What Tune guarantees little about is handled here: trials that fail (retried with a fresh suggestion of the same point,
`max_retries` times a point), completions that are unknown, repeated or NaN, a searcher asked with nothing in flight
(never answered with None, which would hang), a pickled copy (it carries public state only).

*Guarantee.* Nothing in this file sees a private value: trials report bookkeeping, saved state is public. Privacy is
charged where a subclass calls the ledger, in `advance`.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ray.tune.search import Searcher

from dpray.searchers import state as states
from dpray.searchers.batch import Batch, Config
from dpray.searchers.errors import EvaluateAgain, SearchError, SearchUnfinished, unfinished
from dpray.searchers.trial import BOOKKEEPING, CANDIDATE, RESERVED, SEARCH

logger = logging.getLogger(__name__)


class PrivateSearcher(Searcher, ABC):  # type: ignore[misc]  # Ray has no types
    """Base of all searches of this package; usable as `search_alg` of a plain `tune.Tuner`.

    Args:
        max_retries: how often a point whose trial failed is suggested again; 0 gives up at the first failure.
        max_concurrent: trials in flight at a time; `ConcurrencyLimiter` and `max_concurrent_trials` override it.

    Attributes:
        reason: why the search ended, a sentence; None while it has not.
        step: current step, counted from 0.
    """

    reason: str | None
    step: int
    max_concurrent: int
    _attached: bool
    _begun: bool
    _batch: Batch | None
    _earlier: dict[str, int]  # counts over the steps before this one
    _retried: int
    _again: int  # how often the current step's results were lost
    _asked: int  # suggestions given to the running experiment
    _allowance: float | None  # how many it may ask for; None if Tune has not said (empty param_space)
    _failure: Exception | None
    _releases: list[Any]

    def __init__(self, *, max_retries: int = 3, max_concurrent: int = 2) -> None:
        super().__init__(metric=None, mode=None)
        if max_retries < 0:
            raise ValueError(f"max_retries is {max_retries}; it counts further attempts, so give 0 or more.")
        self.max_retries = max_retries
        self._clear()
        self.set_max_concurrency(max_concurrent)

    # What a search supplies -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def evaluations(self) -> int:
        """Planned number of evaluations over all steps; raises `SearchError` while it cannot be known."""

    @abstractmethod
    def define(self, space: Mapping[str, Any] | None) -> None:
        """Fix what is searched. Called again with the same space when Tune starts over; refuse another one."""

    @abstractmethod
    def begin(self) -> None:
        """Check and set aside the budget before any trial starts; call `finish` if an earlier process has finished."""

    @abstractmethod
    def propose(self, step: int) -> Sequence[Config]:
        """Points of a step that are still to be evaluated, at least one; a point may carry its own `SEARCH` mark."""

    @abstractmethod
    def advance(self, step: int, batch: Batch) -> str | None:
        """The batch is settled: make the step's release. A returned sentence ends the search.

        Raises:
            EvaluateAgain: results of the step were lost, and are evaluated again.
        """

    @property
    @abstractmethod
    def best_config(self) -> Config:
        """The result, without bookkeeping keys; raises `SearchUnfinished` before there is one."""

    @abstractmethod
    def trainable(self) -> type:
        """Class to hand to `tune.Tuner`."""

    @property
    def mark(self) -> str | None:
        """What trials should know besides point and number; part of their configuration, so short and readable."""
        return None

    def search_state(self) -> dict[str, Any]:
        """Further public state, plain JSON."""
        return {}

    def load_search_state(self, state: Mapping[str, Any]) -> None:
        """Take `search_state` back; raise `SearchError` if it belongs to another search."""

    # What users read --------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether no further trial will be suggested."""
        return self.reason is not None

    @property
    def num_samples(self) -> int:
        """How often Tune may ask: the evaluations still to do, and spare ones for retries of failed trials.

        Spare are a quarter of the evaluations, or `max_retries` if that is more (none at all if it is 0). Tune shows
        this number; the search ends as soon as it is done.
        """
        return max(1, self._remaining() + self._spare)

    @property
    def releases(self) -> tuple[Any, ...]:
        """Every release this search has made or found again in the ledger, in order."""
        return tuple(self._releases)

    @property
    def progress(self) -> dict[str, int]:
        """Counts for display: planned, evaluated, in flight, retried and given up."""
        batch = self._batch
        return {
            "planned": self.evaluations,
            "evaluated": self._earlier["evaluated"] + (len(batch.evaluated) if batch else 0),
            "in_flight": batch.in_flight if batch else 0,
            "retried": self._retried,
            "given_up": self._earlier["given_up"] + (len(batch.given_up) if batch else 0),
        }

    def tune_config(self, **options: Any) -> Any:
        """`tune.TuneConfig` for this search with its trial actors reused: about 0.1 s a trial instead of 1.5 s."""
        from ray import tune

        return tune.TuneConfig(**{"search_alg": self, "num_samples": self.num_samples, "reuse_actors": True, **options})

    def start_over(self) -> None:
        """Forget what an earlier experiment left running, so that another one can take the search on.

        A release that failed is tried again; trials that never ended are suggested again.
        """
        if self._failure is not None:
            self._failure, self._begun = None, False
        if self._batch is not None:
            self._batch = Batch.from_state(self._batch.state())

    def finish(self, reason: str) -> None:
        """End the search; the reason is a sentence for the user."""
        self.reason = reason
        logger.info("%s ended: %s", type(self).__name__, reason)

    # What Tune calls --------------------------------------------------------------------------------------------

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Take `param_space` and the number of samples over; everything that can be refused is refused here.

        Raises:
            ValueError: TuneConfig names a metric. Trials of a private search report no objective, and Tune would abort
                the experiment at the first trial that ends without the metric it was told to expect.
        """
        self._require_attached()
        if metric is not None and metric not in BOOKKEEPING:
            raise ValueError(
                f"TuneConfig(metric={metric!r}) expects every trial to report {metric!r}, but the trials of a private "
                "search report no objective (the scores stay where the data is). Leave metric and mode out; "
                "the result is search.best_config."
            )
        collisions = RESERVED & set(config or {})
        if collisions:
            raise ValueError(
                f"{', '.join(sorted(collisions))} is reserved for the search: rename that key of the space."
            )
        self.define(config or None)
        self.start_over()
        self._begin()
        if self._failure is not None:
            raise self._failure
        samples = spec.get("num_samples")
        self._asked, self._allowance = 0, None
        if samples is not None:
            self._allowance = math.inf if samples < 0 or samples == sys.maxsize else samples
        if not self.finished and self._allowance is not None and self._allowance < self._remaining():
            raise ValueError(
                f"num_samples={samples} is not enough for the {self._remaining()} evaluations of this search: "
                "give TuneConfig(num_samples=search.num_samples)."
            )
        return True

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Trials in flight at a time; True tells Tune's limiter that the search sees to it itself."""
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent is {max_concurrent}; at least one trial must be able to run.")
        self.max_concurrent = max_concurrent
        return True

    def suggest(self, trial_id: str) -> Config | str | None:
        """Next configuration for a trial, `Searcher.FINISHED` at the end, None only while something is in flight."""
        self._require_attached()
        if self._failure is not None:
            raise self._failure
        if not self._begun:
            self.define(None)
            self._begin()
            if self._failure is not None:
                raise self._failure
        if self.finished or self._batch is None:
            return str(Searcher.FINISHED)
        if self._batch.in_flight >= self.max_concurrent:
            return None
        slot = self._batch.take(trial_id)
        if slot is None:
            return None
        self._asked += 1
        marks = {} if self.mark is None else {SEARCH: self.mark}
        return {**marks, **copy.deepcopy(self._batch.points[slot]), CANDIDATE: slot}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Settle a trial's point, or queue it again; the last point of a batch makes the release.

        A trial counts as evaluated if it ended with any result and no error; its values are not read. Trials that are
        unknown, or whose end was reported before, are ignored. An error of the release itself is kept and raised by
        the next `suggest` (Tune would bury it if it were raised here) and by `best_config`.
        """
        batch = self._batch
        if batch is None or self.finished or batch.slot_of(trial_id) is None:
            return
        if result and not error:
            batch.succeed(trial_id)
        else:
            again = self._may_retry(batch, trial_id)
            self._retried += again
            batch.fail(trial_id, again=again)
        if batch.settled:
            self._settle(batch)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing to learn from a result: it holds bookkeeping only."""

    def add_evaluated_point(self, parameters: dict[str, Any], value: float, *rest: Any, **options: Any) -> None:
        """Refused: an outside score was not released through the ledger."""
        raise SearchError(
            "A private search takes no evaluated points: a score from outside has not been released through the ledger."
        )

    # Saved state ------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Public state, plain JSON: no noise, no seeds of noise, no private values."""
        return {
            **states.header(type(self).__name__),
            "step": self.step,
            "reason": self.reason,
            "retried": self._retried,
            "earlier": dict(self._earlier),
            "batch": None if self._batch is None else self._batch.state(),
            "own": self.search_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `get_state`: the next suggestion is the one the saved search would have made.

        Raises:
            SearchError: not such a state, of a later version, or of another search.
        """
        self._require_attached()
        states.check(state, type(self).__name__)
        self.load_search_state(state["own"])
        self._clear()
        self.step = int(state["step"])
        self.reason = state["reason"]
        self._retried = int(state["retried"])
        self._earlier = {key: int(count) for key, count in state["earlier"].items()}
        self._batch = None if state["batch"] is None else Batch.from_state(state["batch"])

    def save(self, checkpoint_path: str) -> None:
        """Write the state as JSON, atomically: the file is the old one or the new one."""
        states.write(checkpoint_path, self.get_state())

    def restore(self, checkpoint_path: str) -> None:
        """Read a state that `save` wrote; the search must have been built with the same arguments."""
        self.set_state(states.read(checkpoint_path))

    def __getstate__(self) -> dict[str, Any]:
        return {"max_retries": self.max_retries, "max_concurrent": self.max_concurrent, "public": self.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(metric=None, mode=None)
        self._clear()
        self.max_retries, self.max_concurrent = state["max_retries"], state["max_concurrent"]
        self.step, self.reason = state["public"]["step"], state["public"]["reason"]
        self._attached = False

    # Internals --------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.reason, self.step = None, 0
        self._attached, self._begun = True, False
        self._batch, self._earlier = None, {"evaluated": 0, "given_up": 0}
        self._retried = self._asked = self._again = 0
        self._allowance = self._failure = None
        self._releases = []

    def _require_attached(self) -> None:
        if not self._attached:
            raise SearchError(
                "This search came out of a pickle (as Tuner.restore makes them) and has no cohort and no ledger. Build "
                "it again as before and run a new Tuner: finished work is kept at the clients and in the ledger."
            )

    def _begin(self) -> None:
        if not self._begun:
            self.begin()
            self._begun = True
        if not self.finished and self._batch is None:
            self._batch = self._proposed(self.step)
        if self._batch is not None and self._batch.settled and not self.finished:
            self._settle(self._batch)  # the saved search was interrupted between its last trial and its release

    def _proposed(self, step: int) -> Batch:
        batch = Batch(self.propose(step))
        if not batch.points:
            raise SearchError(f"{type(self).__name__} proposed no point for step {step}; it must finish instead.")
        return batch

    def _settle(self, batch: Batch) -> None:
        try:
            following = (self.step + 1, 0)
            try:
                reason = self.advance(self.step, batch)
            except EvaluateAgain:
                if self._again >= self.max_retries:
                    raise
                reason, following = None, (self.step, self._again + 1)
            if reason is not None:
                self.finish(reason)
                return
            self._earlier["evaluated"] += len(batch.evaluated)
            self._earlier["given_up"] += len(batch.given_up)
            (self.step, self._again), self._batch = following, None
            self._batch = self._proposed(self.step)
        except Exception as error:  # raised again by suggest() and best_config
            self._failure = error

    def _remaining(self) -> int:
        """Evaluations that are still to be asked for."""
        if self.finished:
            return 0
        done = self._earlier["evaluated"] + self._earlier["given_up"]
        if self._batch is None:
            return self.evaluations - done
        return self._batch.waiting + self.evaluations - done - len(self._batch.points)

    def _may_retry(self, batch: Batch, trial_id: str) -> bool:
        slot = batch.slot_of(trial_id)
        if slot is None or batch.failures[slot] >= self.max_retries:
            return False
        if self._allowance is None:
            return self._retried < self._spare
        return self._allowance - self._asked > self._remaining()

    @property
    def _spare(self) -> int:
        return max(self.max_retries, self.evaluations // 4) if self.max_retries else 0

    def _result_missing(self) -> SearchUnfinished:
        """The error for `best_config` where there is none."""
        return unfinished(self._failure, self.reason, self.progress if self._batch is not None else None)
