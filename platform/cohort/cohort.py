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

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

import ray

from dpray.platform import local_ray
from dpray.platform.cohort.actors import PoolShard, SiteShard, start_host
from dpray.platform.cohort.client import ClientTask, Records, Site, Stack, refuse_larger
from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.handle import CohortHandle
from dpray.platform.cohort.host import HostSpec, marker_path
from dpray.platform.cohort.layout import (
    CPU,
    balanced,
    checked_clients,
    checked_resources,
    checked_search,
    whole,
)
from dpray.platform.cohort.lineage import Shown, anchor
from dpray.platform.cohort.local_steps import NoisedQuery
from dpray.platform.cohort.masked.parameters import parameters
from dpray.platform.cohort.masked_sums import MaskedSum
from dpray.platform.cohort.queries import Query, Terms, Votes
from dpray.platform.cohort.request import Ready, Refusal, Request, noise_of
from dpray.platform.cohort.secure_sum import Masked, Trusted, named
from dpray.platform.cohort.sums import ClientSum, Members, central, shared, winner
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
            whose node is dead for Ray, at most half a minute (see `dispatch`).
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
        self._actors = actors if actors == "auto" else whole("actors", actors)
        self._pool = {client: shard for client, shard in shards.items() if isinstance(shard, Records)}
        self._sites = {client: shard for client, shard in shards.items() if isinstance(shard, Site)}
        self._task, self._noise, self._cap = task, noise or NoiseSource(), cap
        for shard in self._pool.values():
            self._check_shape(shard.x.shape[1:])
            break  # all have one
        self._timeout, self._limit = timeout, timeout / 8 if limit is None else limit
        given = Path(state_dir)
        self._folder = given if given.parts[:1] == ("~",) else given.expanduser().absolute()
        self.sites = bool(self._sites)
        self.terms = Terms(task.dimension, task.relative_error, len(self.clients), sum(self.counts.values()))
        self._running: _Running | None = None
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
    ) -> tuple[_Running, Request]:
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
        copy._running = _Running(running.dispatch, running.members, [], [])
        return copy

    def start(self) -> None:
        """Start the actors and wait until the quorum is there; nothing if they run already.

        Without a Ray that runs or a cluster that is named, Ray is started on this machine, on loopback.

        Raises:
            CohortError: hosts cannot be placed, cannot load their records, or hold records of different shapes, or of
                one that the task does not take.
        """
        if self._running is not None:
            return
        if not ray.is_initialized():
            local_ray.join_or_start()
        name = f"dpray-cohort-{secrets.token_hex(8)}"
        specs = self._site_specs(name) if self.sites else self._pool_specs(name)
        needs = tuple(dict(site.resources) for site in self._sites.values()) or ({CPU: 1.0},) * len(specs)
        handles = [start_host(spec, namespace=name, needs=need) for spec, need in zip(specs, needs, strict=True)]
        sizes = tuple(len(spec.clients) for spec in specs)
        dispatch = Dispatch(name, tuple(spec.name for spec in specs), self._timeout, sizes, self._limit, needs)
        dispatch.adopt(handles)
        members = Members(tuple(spec.clients for spec in specs), self.counts, self.quorum)
        self._running = _Running(dispatch, members, handles, specs)
        try:
            self._check_ready(self._running)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actors. Journals stay."""
        running, self._running = self._running, None
        if running is not None and ray.is_initialized():
            for handle, spec in zip(running.handles, running.specs, strict=True):
                ray.kill(handle)
                marker_path(spec).unlink(missing_ok=True)  # here, if the host was: its end was no crash

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

    def _started(self) -> _Running:
        self.start()
        if self._running is None:  # pragma: no cover - `start` sets it or raises
            raise CohortError("The cohort is not running.")
        return self._running

    def _check_ready(self, running: _Running) -> None:
        answers = running.dispatch.call("ready", dict.fromkeys(range(len(running.handles)), ()))
        for answer in answers.values():
            if isinstance(answer, Refusal):
                raise CohortError(answer.sentence)
        up = running.members.of(answers)
        if len(up) < self.quorum:
            raise CohortError(
                f"{len(up)} of {len(self.clients)} clients have come up in time, fewer than the quorum of "
                f"{self.quorum}. A pool host takes one free CPU of the Ray cluster, a site's host the site's resources."
            )
        shapes = {answer.features for answer in answers.values() if isinstance(answer, Ready)}
        if len(shapes) > 1:
            raise CohortError("The sites' records have different numbers of features: one task needs one schema.")
        for shape in shapes:
            self._check_shape(shape)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        try:
            self._task.check_records(shape)
        except ValueError as error:
            raise CohortError(str(error)) from None

    def _pool_specs(self, name: str) -> list[HostSpec]:
        cpus = int(ray.cluster_resources().get("CPU", 1)) if self._actors == "auto" else int(self._actors)
        specs = []
        for index, clients in enumerate(balanced(self.counts, cpus)):
            stack = Stack.of(self._pool[client] for client in clients)
            shard = PoolShard(ray.put(stack.x), ray.put(stack.y), stack.offsets)
            specs.append(self._spec(f"{name}-{index}", clients, shard, self._folder))
        return specs

    def _site_specs(self, name: str) -> list[HostSpec]:
        checked_resources(self._sites, self.quorum)
        specs = []
        for index, (client, site) in enumerate(self._sites.items()):
            shard = SiteShard(site.load, site.records)
            specs.append(self._spec(f"{name}-{index}", (client,), shard, self._folder / quote(client, safe="")))
        return specs

    def _spec(self, name: str, clients: tuple[str, ...], shard: PoolShard | SiteShard, folder: Path) -> HostSpec:
        return HostSpec(
            name=name,
            clients=clients,
            task=self._task,
            load=shard,
            folder=str(folder),
            terms=self.terms,
            quorum=self.quorum,
            n_min=self.n_min,
            noise=self._noise,
            cap=self._cap,
            limit=self._limit,
            site=self.sites,
            masked=self._sum if isinstance(self._sum, Masked) else None,
            everyone=self.clients if isinstance(self._sum, Masked) else (),
            colluders=self._colluders,
        )


@dataclass(frozen=True)
class _Running:
    dispatch: Dispatch
    members: Members
    handles: list[Any]
    specs: list[HostSpec]
