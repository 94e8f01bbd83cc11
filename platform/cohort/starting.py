"""A cohort's hosts, started: what each is made of, and whether enough of them are up and fit to be asked."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ray

from dpray.platform import local_ray
from dpray.platform.cohort.actors import PoolShard, SiteShard, start_host
from dpray.platform.cohort.client import ClientTask, Records, Site, Stack
from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.host import HostSpec, marker_path
from dpray.platform.cohort.layout import CPU, balanced, checked_resources
from dpray.platform.cohort.request import Ready, Refusal
from dpray.platform.cohort.sums import Members

COMING_UP = 60.0
"""Seconds that a new host is waited for at least, whatever time an answer may take: a process starts, and loads."""

MakeSpec = Callable[..., HostSpec]
"""A `HostSpec` but for its name, clients, load and folder."""


@dataclass(frozen=True)
class Running:
    """Hosts that have been started.

    Attributes:
        dispatch: asks them.
        members: which clients they host.
        handles, specs: of their actors; none where another process has started them.
    """

    dispatch: Dispatch
    members: Members
    handles: Sequence[Any] = ()
    specs: Sequence[HostSpec] = ()

    def close(self) -> None:
        """End the actors that were started here."""
        for handle, spec in zip(self.handles, self.specs, strict=True):
            ray.kill(handle)
            marker_path(spec).unlink(missing_ok=True)  # here, if the host was: its end was no crash


def pool_specs(
    make: MakeSpec, pool: Mapping[str, Records], hosts: int | None, folder: Path
) -> Callable[[str], list[HostSpec]]:
    """Hosts of virtual clients, by the name of their cohort; as many as there are CPUs where `hosts` is None."""

    def specs(name: str) -> list[HostSpec]:
        counts = {client: len(records) for client, records in pool.items()}
        number = int(ray.cluster_resources().get(CPU, 1)) if hosts is None else hosts
        made = []
        for index, clients in enumerate(balanced(counts, number)):
            stack = Stack.of(pool[client] for client in clients)
            shard = PoolShard(ray.put(stack.x), ray.put(stack.y), stack.offsets)
            made.append(make(name=f"{name}-{index}", clients=clients, load=shard, folder=str(folder)))
        return made

    return specs


def site_specs(make: MakeSpec, sites: Mapping[str, Site], quorum: int, folder: Path) -> Callable[[str], list[HostSpec]]:
    """One host for each real site, by the name of their cohort, with a folder of its own.

    Errors: as `checked_resources`.
    """

    def specs(name: str) -> list[HostSpec]:
        checked_resources(sites, quorum)
        return [
            make(
                name=f"{name}-{index}",
                clients=(client,),
                load=SiteShard(site.load, site.records),
                folder=str(folder / quote(client, safe="")),
            )
            for index, (client, site) in enumerate(sites.items())
        ]

    return specs


def started(
    specs_of: Callable[[str], list[HostSpec]],
    needs: Sequence[Mapping[str, float]],
    counts: Mapping[str, int],
    task: ClientTask,
    *,
    quorum: int,
    timeout: float,
    limit: float,
) -> Running:
    """Start the hosts' actors, and wait until the quorum is there.

    Without a Ray that runs or a cluster that is named, Ray is started on this machine, on loopback.

    Args:
        specs_of: what the hosts are made of, by the name of the cohort.
        needs: resources of each host's actor; empty: one CPU each.
        counts: public numbers of records by client.
        task: that they run.
        quorum, timeout, limit: as `Cohort`'s.

    Errors: as `Cohort.start`; what was started has been ended then.
    """
    if not ray.is_initialized():
        local_ray.join_or_start()
    name = f"dpray-cohort-{secrets.token_hex(8)}"
    specs = specs_of(name)
    wanted = tuple(needs) or ({CPU: 1.0},) * len(specs)
    handles = [start_host(spec, namespace=name, needs=need) for spec, need in zip(specs, wanted, strict=True)]
    sizes = tuple(len(spec.clients) for spec in specs)
    dispatch = Dispatch(name, tuple(spec.name for spec in specs), timeout, sizes, limit, wanted)
    dispatch.adopt(handles)
    running = Running(dispatch, Members(tuple(spec.clients for spec in specs), counts, quorum), handles, specs)
    try:
        _check_ready(running, task)
    except BaseException:
        running.close()
        raise
    return running


def _check_ready(running: Running, task: ClientTask) -> None:
    members = running.members
    every = dict[int, tuple[Any, ...]].fromkeys(range(len(members.hosts)), ())
    answers = running.dispatch.call("ready", every, least=COMING_UP)
    for answer in answers.values():
        if isinstance(answer, Refusal):
            raise CohortError(answer.sentence)
    up = members.of(answers)
    if len(up) < members.quorum:
        raise CohortError(
            f"{len(up)} of {len(members.counts)} clients have come up in time, fewer than the quorum of "
            f"{members.quorum}. A pool host takes one free CPU of the Ray cluster, a site's host the site's resources."
        )
    shapes = {answer.shape for answer in answers.values() if isinstance(answer, Ready)}
    if len(shapes) > 1:
        raise CohortError("The sites' records have different shapes: one task needs one schema.")
    for shape in shapes:
        check_shape(task, shape)
        running.dispatch.shape = shape


def check_shape(task: ClientTask, shape: tuple[int, ...]) -> None:
    """Refuse records of a shape that the task does not take (`CohortError`)."""
    try:
        task.check_records(shape)
    except ValueError as error:
        raise CohortError(str(error)) from None
