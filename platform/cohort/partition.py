"""How a data set is dealt out to clients: pure, by a public seed; every client gets at least one record.

| symbol | code          | meaning                                                         |
|--------|---------------|-----------------------------------------------------------------|
| n      | `clients`     | number of clients                                               |
| N      |               | number of records                                               |
| α      | `alpha`       | concentration of a Dirichlet distribution: small is skewed      |
| p_c    |               | (n,) shares of label c that the clients get, ~ Dirichlet(α·1)   |

How data came to be split is given, not protected: a split by label depends on the labels. It is done once, before
anything is released, by whoever simulates; real sites are split by life.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpray.platform.cohort.errors import CohortError

IntArray = NDArray[np.int64]
_TRIES = 200


def partition(labels: ArrayLike, clients: int, kind: str = "iid", seed: int = 0, **params: Any) -> tuple[IntArray, ...]:
    """Record indices of every client: disjoint, sorted, together all records, none empty.

    Args:
        labels: (N,) labels; their values matter to `dirichlet` and `shards` only.
        clients: n.
        kind: `iid`: equal parts at random. `dirichlet` (alpha=0.5): each label spread by its own Dirichlet draw.
            `shards` (per_client=2): records sorted by label, cut into n·per_client runs, dealt at random (McMahan et
            al. 2017). `quantity` (alpha=0.5): parts of Dirichlet-distributed size, labels at random.
        seed: public.
        alpha, per_client: as above. minimum (1): fewest records of a client.

    Raises:
        CohortError: an unknown kind or parameter, a value out of range, or a split that leaves a client with fewer
            than `minimum` records in 200 draws.
    """
    values = np.asarray(labels)
    if values.ndim != 1:
        raise CohortError(f"Labels are a vector, one a record; an array of shape {values.shape} was given.")
    _whole("clients", clients)
    _whole("seed", seed, least=0)
    if kind not in _KINDS:
        raise CohortError(f"A partition is iid, dirichlet, shards or quantity; {kind!r} was given.")
    draw, defaults = _KINDS[kind]
    settings: dict[str, Any] = {"minimum": 1, **defaults}
    for name, value in params.items():
        if name not in settings:
            raise CohortError(
                f"A partition of kind {kind!r} has the parameters {sorted(settings)}; {name!r} was given."
            )
        settings[name] = value
    minimum = settings.pop("minimum")
    _whole("minimum", minimum)
    _checked(settings)
    if clients * minimum > len(values):
        raise CohortError(
            f"{len(values)} records cannot give {clients} clients at least {minimum} each: use fewer clients."
        )
    rng = np.random.default_rng([seed, clients])
    for _ in range(_TRIES):
        parts = draw(values, clients, rng, **settings)
        if min(len(part) for part in parts) >= minimum:
            return tuple(np.sort(part).astype(np.int64) for part in parts)
        if kind in {"iid", "shards"}:
            break
    raise CohortError(
        f"A {kind} partition of {len(values)} records over {clients} clients leaves one with fewer than {minimum}: use "
        "fewer clients, a larger alpha, or a smaller minimum."
    )


def _iid(labels: NDArray[Any], clients: int, rng: np.random.Generator) -> list[IntArray]:
    return np.array_split(rng.permutation(len(labels)), clients)


def _dirichlet(labels: NDArray[Any], clients: int, rng: np.random.Generator, *, alpha: float) -> list[IntArray]:
    parts: list[list[IntArray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(members)
        for part, piece in zip(parts, np.split(members, cuts.round().astype(int)), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _shards(labels: NDArray[Any], clients: int, rng: np.random.Generator, *, per_client: int) -> list[IntArray]:
    order = np.lexsort((rng.permutation(len(labels)), labels))
    pieces = np.array_split(order, clients * per_client)
    dealt = rng.permutation(clients * per_client).reshape(clients, per_client)
    return [np.concatenate([pieces[piece] for piece in hand]) for hand in dealt]


def _quantity(labels: NDArray[Any], clients: int, rng: np.random.Generator, *, alpha: float) -> list[IntArray]:
    cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(labels)
    return np.split(rng.permutation(len(labels)), cuts.round().astype(int))


_KINDS: Mapping[str, tuple[Callable[..., list[IntArray]], Mapping[str, Any]]] = {
    "iid": (_iid, {}),
    "dirichlet": (_dirichlet, {"alpha": 0.5}),
    "shards": (_shards, {"per_client": 2}),
    "quantity": (_quantity, {"alpha": 0.5}),
}


def _checked(settings: dict[str, Any]) -> None:
    if "alpha" in settings:
        alpha = settings["alpha"]
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
            raise CohortError(f"alpha is a finite number above 0; {alpha!r} was given.")
    if "per_client" in settings:
        _whole("per_client", settings["per_client"])


def _whole(name: str, value: Any, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise CohortError(f"{name} is a whole number, at least {least}; {value!r} was given.")
