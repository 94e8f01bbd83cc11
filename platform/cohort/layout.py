"""Who goes where: checks of what a cohort is built from, and how a pool's clients are dealt to its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from dpray.platform.cohort.client import Records, Site
from dpray.platform.cohort.errors import CohortError

CPU = "CPU"
_LONGEST_NAME = 200


def checked_clients(shards: Mapping[str, Any]) -> None:
    """Refuse what no cohort can be built from (`CohortError`)."""
    if not shards:
        raise CohortError("A cohort needs at least one client.")
    kinds = {type(shard) for shard in shards.values()}
    if kinds not in ({Records}, {Site}):
        raise CohortError("A cohort holds Records by client, or a Site by client, and not both.")
    for client, shard in shards.items():
        if not isinstance(client, str) or not 0 < len(client) <= _LONGEST_NAME or not client.isprintable():
            raise CohortError(f"A client's name is 1 to {_LONGEST_NAME} printable characters; {client!r} was given.")
        if client in (".", ".."):
            raise CohortError(f"A client's name also names its site's folder, which {client!r} cannot: give another.")
        if isinstance(shard, Site):
            whole(f"The declared number of records of site {client!r}", shard.records)
        elif not len(shard):
            raise CohortError(f"Client {client!r} has no records: leave it out, or split the data another way.")
    if kinds == {Records}:
        schemas = {
            (shard.x.shape[1:], shard.x.dtype.str, shard.y.shape[1:], shard.y.dtype.str) for shard in shards.values()
        }
        if len(schemas) > 1:
            raise CohortError(
                f"All clients' records have one schema (shape and type of a record); {len(schemas)} were given."
            )


def checked_resources(sites: Mapping[str, Any], quorum: int) -> None:
    """Refuse sites that ask for resources no node of the cluster has, if the others are no quorum (`CohortError`)."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    absent = without_place([site.resources for site in sites.values()], nodes)
    if len(sites) - len(absent) >= quorum:
        return
    for index, (client, site) in enumerate(sites.items()):
        asked = site.resources
        if index in absent:
            labels = sorted({name for node in nodes for name in node if name.startswith("site:")})
            raise CohortError(
                f"Site {client!r} asks for the resources {dict(asked)}, which no node of the Ray cluster has (site "
                f"labels there: {labels}). Start its node with ray start --resources, or correct the label."
            )


def without_place(needs: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> set[int]:
    """Numbers of the hosts that find no node; all of a pool's, if it has more hosts than there are CPUs.

    Args:
        needs: resources of each host's actor: labels of its own (a site), or one CPU (a pool).
        nodes: resources of the nodes that are alive, in use or not.
    """
    room = sum(int(node.get(CPU, 0)) for node in nodes)
    crowded = room < sum(need.get(CPU, 0) for need in needs)
    return {
        index
        for index, need in enumerate(needs)
        if (CPU in need and crowded)
        or not any(all(node.get(name, 0) >= amount for name, amount in need.items()) for node in nodes)
    }


def balanced(counts: Mapping[str, int], hosts: int) -> list[tuple[str, ...]]:
    """Deal clients to at most `hosts` hosts in order, with about equally many records each; no host is empty."""
    clients, ends = list(counts), np.cumsum(list(counts.values()))
    hosts = max(1, min(hosts, len(clients)))
    targets = ends[-1] * np.arange(1, hosts) / hosts
    cuts = [0, *np.searchsorted(ends, targets, side="left") + 1, len(clients)]
    for index in range(1, hosts):  # at least one client for each host before and after the cut
        cuts[index] = min(max(cuts[index], cuts[index - 1] + 1), len(clients) - hosts + index)
    return [tuple(clients[cuts[i] : cuts[i + 1]]) for i in range(hosts)]


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number ≥ least, or a sentence (`CohortError`)."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise CohortError(f"{name} is a whole number, at least {least}; {value!r} was given.")
    return int(value)


def checked_search(run: tuple[str, str]) -> tuple[str, str]:
    """The name of a search whose scores clients keep, or a sentence: scores of two populations never mix."""
    if not isinstance(run, tuple) or len(run) != 2 or not all(isinstance(part, str) and part for part in run):
        raise CohortError(f"A search is named by its population and its own name, (population, search); not {run!r}.")
    return run
