"""The cohort: clients on Ray actors, asked together, answering with sums.

| symbol | code           | meaning                                                                  |
|--------|----------------|--------------------------------------------------------------------------|
| n      | `len(clients)` | clients in the cohort                                                    |
|        | `quorum`       | fewest clients that must answer, or a sum is refused                     |
| n_min  | `n_min`        | max(quorum − colluders, 1): clients whose noise is counted on (`counted_noisers`) |
| d      |                | dimension of a message                                                   |

    shards = {"a": Records(x[:90], y[:90]), "b": Records(x[90:], y[90:])}
    with Cohort(task, shards, state_dir="dpray-sites") as cohort:
        noise = cohort.noise_for(mechanism, mu, Regime.DISTRIBUTED)
        release = run.release(key, query.describe(), mechanism, quanta,
                              lambda attempt: cohort.sum(attempt, query, mechanism, Regime.DISTRIBUTED).pack())

A pool (`Records` given) spreads virtual clients over a few actors, one vectorised pass each; a real site (`Site`
given) is one actor, pinned by its resources, which loads its own records. Per sum the driver makes one call per actor
and phase and moves O(actors · d).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import ray

from dpray.platform.cohort.client import ClientTask, Records, Site, refuse_larger
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.handle import CohortHandle
from dpray.platform.cohort.host import HostSpec
from dpray.platform.cohort.layout import checked_clients, checked_resources, checked_search, whole
from dpray.platform.cohort.lineage import Shown, anchor
from dpray.platform.cohort.local_steps import NoisedQuery
from dpray.platform.cohort.masked.parameters import parameters
from dpray.platform.cohort.masked_sums import MaskedSum
from dpray.platform.cohort.queries import Query, Terms, Votes
from dpray.platform.cohort.request import Ready, Request, noise_of
from dpray.platform.cohort.secure_sum import Masked, Trusted, named
from dpray.platform.cohort.starting import Running, check_shape, pool_specs, site_specs, started
from dpray.platform.cohort.sums import ClientSum, central, shared, winner
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Attempt, Head, Ledger, ReleaseLost, Standing
from dpray.platform.privacy.mechanisms import Mechanism, Regime, VoteWinner
from dpray.platform.privacy.noise import SEEDED, GridNoise, NoiseSource, counted_noisers

DEFAULT_TIMEOUT = 600.0


class Cohort:
    """Clients on Ray actors. Builds on construction, starts on first use, ends with `close` or the `with` block.

    Args:
        task: what clients run.
        shards: records by client (a pool), or a `Site` each.
        actors: number of pool actors, one CPU each; `auto`: one a CPU of the cluster. Sites have one each.
        state_dir: folder for journals, on the machine of each host (`~/…`: in the home there). Keep it with the
            ledger: clients refuse an older or another ledger than the one their journals have seen. One folder for
            all that sites are ever asked, whatever the population: a site's own folder is in it, by its name.
        noise: source of noise; None: the operating system's. A seeded one is for tests and NOT PRIVATE.
        quorum: fewest clients that must answer; None: all.
        colluders: clients that may pool what they know; their noise is not counted on. At least 1: whoever takes part
            knows its own share of the noise and sees the released sum.
        cap: each client's own lifetime budget, counted at its site per release at the μ² of one record. The smallest
            one ever given for a journal holds: see `journal`.
        timeout: seconds to wait for a host's answer to one call, on top of the longest that user code can take; of one
            whose node is dead for Ray, at most half a minute (see `dispatch`); of a new one, at least a minute.
        limit: seconds one call of user code may take before its process is ended (see `confine`); None: timeout/8.
        secure_sum: for regime `distributed`. `trusted`: the server adds up the hosts' messages itself, a simulation;
            `masked`, or `Masked(degree=…)`: SecAgg+ between clients; a pool's hosts run it for each of theirs.

    Raises:
        CohortError: no clients, a client without records, records of different shapes or of one that the task does not
            take (`ClientTask.check_records`; sites are asked at the start), fewer clients than the quorum, a quorum or
            colluders not above zero, fewer sites than the quorum with their resources on the cluster, if it runs
            already, numbers out of range; a masked sum that could not both survive the losses and withstand the
            colluders.
    """

    def __init__(
        self,
        task: ClientTask,
        shards: Mapping[str, Records] | Mapping[str, Site],
        *,
        actors: int | Literal["auto"] = "auto",
        state_dir: Path | str,
        noise: NoiseSource | None = None,
        quorum: int | None = None,
        colluders: int = 1,
        cap: Budget | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        limit: float | None = None,
        secure_sum: Literal["trusted", "masked"] | Masked = "trusted",
    ) -> None:
        checked_clients(shards)
        self.clients: tuple[str, ...] = tuple(shards)
        self.counts: Mapping[str, int] = {
            client: shard.records if isinstance(shard, Site) else len(shard) for client, shard in shards.items()
        }
        self.quorum = len(self.clients) if quorum is None else whole("quorum", quorum)
        if self.quorum > len(self.clients):
            raise CohortError(f"A quorum of {self.quorum} cannot be met by {len(self.clients)} clients: lower it.")
        self.n_min = counted_noisers(self.quorum, whole("colluders", colluders))
        self._sum, self._colluders = named(secure_sum), colluders
        if isinstance(self._sum, Masked):
            parameters(len(self.clients), self.quorum, colluders, self._sum.degree)
        if not timeout > 0 or not (limit is None or limit > 0):
            raise CohortError("timeout and limit are numbers of seconds above zero.")
        self._actors = None if actors == "auto" else whole("actors", actors)
        self._pool = {client: shard for client, shard in shards.items() if isinstance(shard, Records)}
        self._sites = {client: shard for client, shard in shards.items() if isinstance(shard, Site)}
        self._task, self._noise, self._cap = task, noise or NoiseSource(), cap
        for shard in self._pool.values():
            check_shape(task, shard.x.shape[1:])
            break  # all have one
        self._timeout, self._limit = timeout, timeout / 8 if limit is None else limit
        given = Path(state_dir)
        self._folder = given if given.parts[:1] == ("~",) else given.expanduser().absolute()
        self.sites = bool(self._sites)
        self.terms = Terms(task.dimension, task.relative_error, len(self.clients), sum(self.counts.values()))
        self._running: Running | None = None
        self._shown = Shown()
        if self.sites and ray.is_initialized():
            checked_resources(self._sites, self.quorum)

    def __enter__(self) -> Cohort:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cohort({len(self.clients)} clients, quorum {self.quorum}, {'sites' if self.sites else 'pool'})"

    @property
    def reproducible(self) -> bool:
        """True if its noise is seeded: NOT PRIVATE. Every release it has a part in is stamped so in the ledger."""
        return self._noise.reproducible

    @property
    def masked(self) -> bool:
        """Whether sums under regime distributed are masked: the server's code must not see what is added up."""
        return self._sum.hides_shares

    def trust(self, regime: Regime) -> str:
        """Trust mode to show and to charge under: who may see what, including what is only simulated."""
        if regime is Regime.CENTRAL:
            return "central"
        if regime is Regime.DISTRIBUTED:
            if not self._sum.hides_shares:
                return "central (aggregator trusted, shares simulated)"
            return "distributed" if self.sites else "distributed (clients simulated)"
        return "local" if self.sites else "local (clients simulated)"

    def noise_for(self, mechanism: Mechanism | VoteWinner, mu: float, regime: Regime) -> GridNoise:
        """Noise of a μ-GDP release: σ once (central), σ/√n_min a client (distributed), σ a client (local)."""
        if isinstance(mechanism, VoteWinner):  # no sum may hold its counts, which have no noise of their own
            raise CohortError("A VoteWinner releases no sum: ask for `Cohort.winner`, in regime central.")
        return noise_of(mechanism, mu, regime, self.n_min)

    def sum(self, attempt: Attempt, query: Query, mechanism: Mechanism, regime: Regime) -> ClientSum:
        """Ask every client, and add up their messages and noise: one release's value.

        Called inside `Run.release`'s compute (or between `charge` and `store`), never in anything that repeats itself.

        *Guarantee.* For the mechanism's unit, with n_min honest clients' noise, the sum is `attempt.mu`-GDP against
        everyone but the parties its trust mode names as trusted. Who took part and numbers of records are public.

        Raises:
            CohortError: query and mechanism do not fit each other, or the cohort; a client holds more records than the
                population declares; the release is stored already. Nothing was asked.
            KeyConflict: the release was charged for another mechanism, unit or trust mode; nothing was asked.
            LedgerError: this attempt has given a value already (regime central), which is to be stored.
            QuorumLost: too few clients answered; nothing was revealed, the same attempt can be made again.
            ClientsRefused: a client's guard (lease, ledger head, cap, key).
            ReleaseLost: it was lost before, or the committed set cannot be repeated byte for byte.
        """
        noise = self.noise_for(mechanism, attempt.mu, regime)
        if self.masked and regime is Regime.CENTRAL:
            raise CohortError(
                "This cohort's sums are masked, so its aggregator must not see a sum without noise, which regime "
                "`central` shows it. Use regime `distributed`, or build the cohort with secure_sum='trusted'."
            )
        running, request = self._asked(attempt, query, mechanism, regime)
        if regime is Regime.CENTRAL:
            return central(running.dispatch, running.members, attempt, request, noise, self._noise, self._shown)
        asked = running.dispatch, running.members, attempt
        if isinstance(self._sum, Masked) and regime is Regime.DISTRIBUTED:
            return MaskedSum(*asked, noise, self._sum, self.terms, self._colluders, self._shown).run(request)
        return shared(*asked, request, noise, Trusted(), self._shown)

    def winner(self, attempt: Attempt, query: Votes, mechanism: Mechanism | VoteWinner) -> int:
        """Ask every client for its ballot, and name the candidate with the most votes under Gumbel noise: the index.

        Regime central: the driver's process adds the ballots up, draws the noise, and forgets both. To be called as
        `sum` is.

        *Guarantee.* As `VoteWinner` states it, at the largest pure ε that costs no more than `attempt.mu`, against
        everyone but this process and whoever administers the machines it and the clients' hosts run on.

        Raises:
            CohortError: the mechanism is no VoteWinner, or the cohort's sums are masked, which says that this process
                must not see counts; others, and all other errors, as `sum` in regime central.
        """
        if not isinstance(mechanism, VoteWinner):
            raise CohortError(f"A winner alone is released by a VoteWinner; {mechanism.describe()} was given.")
        if self.masked:
            raise CohortError(
                "This cohort's sums are masked, so its aggregator must not see the votes' counts, and a winner alone "
                "is chosen from them. Release noisy votes, or build the cohort with secure_sum='trusted'."
            )
        running, request = self._asked(attempt, query, mechanism, Regime.CENTRAL)
        return winner(running.dispatch, running.members, attempt, request, mechanism, self._noise, self._shown)

    def _asked(
        self, attempt: Attempt, query: Query, mechanism: Mechanism | VoteWinner, regime: Regime
    ) -> tuple[Running, Request]:
        """What clients are asked, after everything that is refused before anybody is."""
        query.check(mechanism, self.terms)
        if isinstance(query, NoisedQuery):
            query.refuse_regime(regime)
        attempt.check(mechanism, self.trust(regime))
        standing = self._shown.ask(attempt)
        self._refuse(attempt, standing)
        if self.reproducible:
            attempt.stamp(SEEDED)
        running = self._started()
        run = attempt.run
        request = Request(
            population=run.population.name,
            run=run.name,
            key=attempt.key,
            epoch=attempt.epoch,
            head=standing.head,
            quanta=attempt.quanta,
            query=query,
            mechanism=mechanism,
            regime=regime,
            participants=None if attempt.participants is None else tuple(sorted(attempt.participants)),
            ledger=standing.ledger,
            lineage=standing.lineage,
            records_per_client=standing.records_per_client,
        )
        return running, request

    def _refuse(self, attempt: Attempt, standing: Standing) -> None:
        """What must not be computed, whatever the clients would say."""
        words = f"Release {attempt.key} of run {attempt.run.name!r}"
        if standing.state == "lost":
            raise ReleaseLost(f"{words} is lost ({standing.reason}): its noise is never drawn again.")
        if standing.state == "stored":
            raise CohortError(f"{words} is stored already: read it with `run.stored`. It has one value only.")
        if attempt.handed_out:
            attempt.hand_out()
        refuse_larger(self.counts.values(), standing.records_per_client, attempt.run.population.name)
        if self.reproducible and standing.state == "committed" and SEEDED not in standing.stamps:
            raise CohortError(
                f"{words} was committed to noise that is not seeded, and this cohort's noise is: finish it with a "
                "cohort without a seed, or lose it."
            )

    def evaluate(self, run: tuple[str, str], candidate: int, config: Mapping[str, Any]) -> int:
        """Have every client train and score a candidate; scores stay at their sites. Returns how many clients answered.

        Args:
            run: (population, search): a vote on that population, of that name (`Votes.run`), counts the scores.
            candidate: its number.
            config: its configuration.

        Scores that are there already (same run, candidate and configuration) are not computed again.
        """
        return self.handle().evaluate(run, candidate, config)

    def evaluate_all(self, run: tuple[str, str], candidates: Mapping[int, Mapping[str, Any]]) -> int:
        """As `evaluate`, for several candidates at once: configurations by number. One call per actor."""
        return self.handle().evaluate_all(run, candidates)

    def check_candidate(self, config: Mapping[str, Any]) -> None:
        """As `ClientTask.check_candidate` of the cohort's task; asked here, of public settings alone."""
        self._task.check_candidate(config)

    @property
    def scores_together(self) -> bool:
        """Whether its task has a way of scoring several candidates at once (`ClientTask.fit_and_scores`)."""
        return type(self._task).fit_and_scores is not ClientTask.fit_and_scores

    def forget(self, run: tuple[str, str]) -> None:
        """Drop the clients' scores of a search, (population, search), that has ended."""
        self._each("forget", checked_search(run))

    def anchors(self) -> tuple[Head, ...]:
        """Newest ledger heads the clients have seen, for `Ledger.verify`."""
        return tuple(answer for answer in self._each("anchor").values() if isinstance(answer, Head))

    def anchor(self, ledger: Ledger) -> tuple[str, ...]:
        """Have the clients remember how far the ledger has come; whose journals know it now (dropouts do not).

        To be called after a run's last release is stored. Clients see the ledger when they are asked, after the charge;
        until they see that the value was stored, a copy of the ledger made in between is taken for the ledger, and the
        release could be drawn again from it. The next sum shows them too.

        Raises:
            ClientsRefused: it is not the ledger the clients know, or an older copy.
        """
        running = self._started()
        known = anchor(running.dispatch, len(running.members.hosts), ledger, self._shown)
        return running.members.of(known)

    def handle(self) -> CohortHandle:
        """What a trial needs: light and picklable; outlives restarts of the hosts, not the cohort."""
        running = self._started()
        return CohortHandle(running.dispatch, tuple(len(clients) for clients in running.members.hosts))

    def attached(self) -> Cohort:
        """The same clients for another process of this Ray: picklable, holds no records, and `close` leaves them alone.

        It can ask for sums as this one can, until this one is closed.
        """
        running = self._started()
        copy = object.__new__(Cohort)
        copy.__dict__.update(self.__dict__)
        copy._pool, copy._sites, copy._shown = {}, {}, Shown()
        copy._running = Running(running.dispatch, running.members)
        return copy

    def start(self) -> None:
        """Start the actors and wait until the quorum is there; nothing if they run already.

        Without a Ray that runs or a cluster that is named, Ray is started on this machine, on loopback.

        Raises:
            CohortError: hosts cannot be placed, cannot load their records, or hold records of different shapes, or of
                one that the task does not take.
        """
        if self._running is None:
            self._running = started(
                self._specs(),
                [dict(site.resources) for site in self._sites.values()],
                self.counts,
                self._task,
                quorum=self.quorum,
                timeout=self._timeout,
                limit=self._limit,
            )

    def close(self) -> None:
        """End the actors. Journals stay."""
        running, self._running = self._running, None
        if running is not None and ray.is_initialized():
            running.close()

    def processes(self) -> dict[int, tuple[str, ...]]:
        """Clients by the process that hosts them now."""
        members = self._started().members
        return {
            answer.process: members.hosts[host]
            for host, answer in self._each("ready").items()
            if isinstance(answer, Ready)
        }

    def _each(self, method: str, *arguments: Any) -> dict[int, Any]:
        running = self._started()
        return running.dispatch.call(method, dict.fromkeys(range(len(running.members.hosts)), arguments))

    def _started(self) -> Running:
        self.start()
        if self._running is None:  # pragma: no cover - `start` sets it or raises
            raise CohortError("The cohort is not running.")
        return self._running

    def _specs(self) -> Callable[[str], list[HostSpec]]:
        """What its hosts are made of, by the name that the cohort is started under."""
        masked = self._sum if isinstance(self._sum, Masked) else None
        make = partial(
            HostSpec,
            task=self._task,
            terms=self.terms,
            quorum=self.quorum,
            n_min=self.n_min,
            noise=self._noise,
            cap=self._cap,
            limit=self._limit,
            site=self.sites,
            masked=masked,
            everyone=() if masked is None else self.clients,
            colluders=self._colluders,
        )
        if self.sites:
            return site_specs(make, self._sites, self.quorum, self._folder)
        return pool_specs(make, self._pool, self._actors, self._folder)
