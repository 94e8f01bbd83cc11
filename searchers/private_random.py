"""Private random search: candidates drawn without data, the best of them told by report-noisy-max.

| symbol | meaning                                                              | in the code       |
|--------|----------------------------------------------------------------------|-------------------|
| K      | candidates, drawn from the space by a public seed                    | `candidates`      |
| c      | bound: users' losses are clipped to [0, c]                           | `bound`           |
| ε, μ   | pure ε of the one release; μ = 2Φ⁻¹(e^ε/(1 + e^ε)) enters the account | `epsilon`, `mu`   |

Gumbel noise of scale 2c/(nε) on the mean losses, and only the index of the lowest leaves: ε-DP for any K (McSherry &
Talwar 2007). A strong baseline, and the thing to use where d is small or the space is no box: choices and whole numbers
are welcome here.

*Guarantee.* As `NoisyMax` states it, for one validation user replaced by another. Models that are trained on protected
records are charged where they are trained.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy import gdp
from dpray.platform.privacy.mechanisms import NoisyMax
from dpray.searchers import space as spaces
from dpray.searchers.batch import Batch, Config
from dpray.searchers.central import CentralSearch, whole
from dpray.searchers.errors import SearchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpray.platform.privacy.ledger import Attempt, Run
    from dpray.platform.user_losses import UserLosses

MECHANISM = "winner"
"""Name of the release in the ledger: (label, "winner", step 0)."""


class PrivateRandomSearch(CentralSearch):
    """Ray Tune searcher that draws candidates at random and releases which of them is best, privately.

    Args:
        bound: c, largest loss of a user that counts in full, public; losses below 0 count as 0.
        candidates: K, or the configurations themselves.
        budget, mu, quanta: what the release may spend; exactly one.
        space, seed: where candidates are drawn from, and the public seed of the draws.
        others: see `CentralSearch`.

    *Guarantee.* As stated at the top of this file.

    Raises:
        SpaceError, ValueError: nothing to search, c ≤ 0, K < 2: before anything is spent.
    """

    mechanism_name = MECHANISM

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        bound: float,
        candidates: int | Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> None:
        super().__init__(task, run, iterations=1, **options)
        self._count = whole("candidates", candidates, least=2) if isinstance(candidates, int) else None
        self._given = None if isinstance(candidates, int) else spaces.distinct(candidates)
        self.bound = NoisyMax(bound, self.users, 2).bound
        self._candidates: tuple[Config, ...] | None = None
        self._winner: int | None = None
        if self._given is not None or self._space is not None:
            self.define(None)

    def define(self, space: Mapping[str, Any] | None) -> None:
        """Fix the candidates; refuse other ones than before."""
        space = self._space if space is None else space
        if self._given is not None:
            if space is not None and spaces.leaves(space):
                raise SearchError("The candidates were given one by one, so the space may hold constants only.")
            found = spaces.distinct([{**spaces.plain(space or {}), **config} for config in self._given])
        elif space is None:
            if self._candidates is None:
                raise SearchError("There is nothing to search: give space=, or the Tuner's param_space.")
            return
        else:
            found = spaces.candidates(space, self._count, seed=self.seed)
        if self._candidates is not None and found != self._candidates:
            raise SearchError("The Tuner's param_space gives other candidates than this search has: give the same.")
        self._candidates = found

    @property
    def candidates(self) -> tuple[Config, ...]:
        """The K candidates."""
        if self._candidates is None:
            raise SearchError(
                "The candidates are not known before the Tuner hands param_space over: give the search "
                "space=param_space."
            )
        return copy.deepcopy(self._candidates)

    @property
    def known(self) -> bool:
        """Whether the candidates are fixed."""
        return self._candidates is not None

    @property
    def batch_size(self) -> int:
        """K."""
        return len(self.candidates)

    @property
    def mechanism(self) -> NoisyMax:
        """The release: index of the lowest mean loss."""
        return NoisyMax(self.bound, self.users, len(self.candidates))

    @property
    def epsilon(self) -> float:
        """Pure ε of the release: the largest whose exact μ is within what is spent; ∞ without noise."""
        return gdp.pure_epsilon(self.mu)

    def begin(self) -> None:
        """Set the spend aside; a winner that is in the ledger already ends the search here."""
        self.set_aside()
        if self.run.stored(self.key(0)) is None:
            self.take_up(0)
        else:
            self._release(())
            if not self.finished:
                self.finish(f"the winner was released before: candidate {self._winner}. Nothing was spent now.")

    def points(self, step: int) -> Sequence[tuple[str, Config]]:
        """All candidates."""
        return [(f"{step}.{j}", config) for j, config in enumerate(self.candidates)]

    def advance(self, step: int, batch: Batch) -> str | None:
        """Every candidate is settled: release the winner among those that could be evaluated."""
        used = self.usable(step, batch)
        if isinstance(used, str):
            return used
        self._release(used)
        failed = len(self.candidates) - len(used)
        return f"candidate {self._winner} of {len(self.candidates)} was released as the best" + (
            f"; {failed} could not be evaluated." if failed else "."
        )

    def _release(self, used: Sequence[int]) -> None:
        mechanism = self.mechanism

        def compute(attempt: Attempt) -> NDArray[Any]:
            from dpray.platform.curator_asks import WinnerAsk

            rows = [row for row, _ in self.points(0)]
            ask = WinnerAsk(
                rows=tuple(rows[j] for j in used),
                mechanism=NoisyMax(self.bound, self.users, len(used)),
                epsilon=self.epsilon,
                key=self.opened(attempt, mechanism),
                seed=self.noise_seed,
            )
            winner = self.released(0, lambda: self.curator.winner(ask, attempt))
            return np.array([used[winner]], dtype=np.int64)

        query = {**self.identity(), "configurations": list(self.candidates)}
        released = self.run.release(self.key(0), query, mechanism, self.quanta, compute)
        self._releases = [released]
        self._winner = int(released.value[0])
        self.tell(0)

    @property
    def winner(self) -> int:
        """Index of the candidate that was released as the best."""
        if self._winner is None:
            raise self._result_missing()
        return self._winner

    @property
    def best_config(self) -> Config:
        """The winner."""
        return self.candidates[self.winner]

    def identity(self) -> dict[str, Any]:
        """Public constants of the search."""
        return {
            "search": type(self).__name__,
            "candidates": list(self.candidates),
            "users": self.users,
            "bound": self.bound,
            "public_seed": self.seed,
        }
