"""H_1 … H_p of a vote: public configurations, given one by one or taken from a Tune space, without looking at data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpray.searchers import space as spaces
from dpray.searchers.batch import Config
from dpray.searchers.errors import SearchError

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort


def candidates_of(
    given: Sequence[Config] | None,
    own: Mapping[str, Any] | None,
    space: Mapping[str, Any],
    count: int | None,
    seed: int,
) -> tuple[Config, ...]:
    """The candidates of a search.

    Args:
        given: one by one; the Tuner's constants are laid under each.
        own: the search's `space`.
        space: the Tuner's `param_space`.
        count: how many to draw; None for the whole grid.
        seed: of the draws, public.

    Raises:
        SpaceError, SearchError: nothing to search, two different spaces, or a space that cannot be searched.
    """
    keys = [(leaf.path, leaf.values) for leaf in spaces.leaves(space)]
    if given is not None:
        if keys:
            raise SearchError("The candidates were given one by one, so param_space may hold constants only.")
        return spaces.distinct([{**spaces.plain(space), **config} for config in given])
    if not keys and own is not None:
        space = {**space, **own}
    elif own is not None and keys != [(leaf.path, leaf.values) for leaf in spaces.leaves(own)]:
        raise SearchError("The Tuner's param_space searches other keys or values than space=: give only one.")
    elif not space:
        raise SearchError("There is nothing to search: give candidates=, space=, or the Tuner's param_space.")
    return spaces.candidates(space, count, seed=seed)


def refuse_untrainable(candidates: Sequence[Config], cohort: Cohort) -> None:
    """Refuse candidates that no client could train: all of them would count as worst, and the vote be a random one.

    Raises:
        ValueError: naming the first of them, and what its task says.
    """
    for number, config in enumerate(candidates):
        try:
            cohort.check_candidate(config)
        except ValueError as error:
            raise ValueError(f"No client can train candidate {number}, {config}: {error} Nothing was spent.") from error
