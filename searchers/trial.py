"""One evaluation as a Ray Tune trial: it asks where the data is, and reports bookkeeping only.

Written once for all searches, because it is what stands between private values and Tune's files: JSON, CSV and
TensorBoard loggers write every reported value to disk.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ray.tune import PlacementGroupFactory, Trainable

CANDIDATE = "__candidate__"
"""Key of a trial's configuration that says which point it evaluates; `candidate=3` in the names Tune shows."""

SEARCH = "__search__"
"""Key of a trial's configuration with a mark of the search's own, such as a digest of all its candidates."""

MORE = "__more__"
"""Key of a trial's configuration that lists the further points it evaluates after its first."""

NUMBERS = "__candidates__"
"""Key of a trial's configuration with the numbers of all candidates it evaluates, where they are several."""

RESERVED = frozenset({CANDIDATE, SEARCH, MORE, NUMBERS, "__trial_index__"})
"""Keys of a trial's configuration that are not part of the point: ours, and the one of `ray.tune.search.Repeater`."""

BOOKKEEPING = frozenset({"evaluated", "candidate", "candidates", "clients_answered", "training_iteration"})
"""All that a trial may report."""

_HEAD = "node:__internal_head__"  # every Ray cluster has exactly 1.0 of it
_PARTS = 10_000  # Ray counts resources in ten-thousandths


class EvaluationTrial(Trainable):  # type: ignore[misc]  # Ray has no types
    """A trial that evaluates one point and reports no objective; searches derive from it.

    Its actor is reused for the next trial where `TuneConfig(reuse_actors=True)` is set. It needs no CPU of its own:
    the work happens at the clients.
    """

    resources: ClassVar[Mapping[str, float]] = {"memory": 1 << 20}

    @abstractmethod
    def evaluate(self, candidate: int, config: dict[str, Any], mark: str) -> dict[str, int]:
        """Have one point evaluated where the data is; returns bookkeeping (`clients_answered`).

        Args:
            candidate: number of the point in its batch.
            config: the point, without reserved keys.
            mark: what the search's `mark` said when the point was suggested.
        """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        """What a trial reserves: no CPU, or it would wait for ever for the one its clients hold."""
        return PlacementGroupFactory([dict(cls.resources)])

    def setup(self, config: dict[str, Any]) -> None:
        """Quiet Tune's line about every (empty) checkpoint."""
        logging.getLogger("ray.train._internal.storage").setLevel(logging.WARNING)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ready for the next point: no state is kept between points."""
        return True

    def step(self) -> dict[str, Any]:
        """Evaluate the point once; that is the whole trial."""
        candidate = int(self.config[CANDIDATE])
        config = {key: value for key, value in self.config.items() if key not in RESERVED}
        answer = self.evaluate(candidate, config, str(self.config.get(SEARCH, "")))
        report = {"evaluated": 1, "candidate": candidate, **answer}
        undeclared = sorted(
            key for key, value in report.items() if key not in BOOKKEEPING or not isinstance(value, int)
        )
        if undeclared:
            raise ValueError(f"A trial reports bookkeeping only (whole numbers): {', '.join(undeclared)} was refused.")
        return {**report, "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Nothing to save: a trial that is run again asks again, and the clients remember."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing to load."""


def head_share(parts: int) -> dict[str, float]:
    """Resources that let at most `parts` trial actors exist at a time, on the head node beside the driver.

    With reused actors Tune asks for a new actor per trial and drops the request once an old actor is free. A request
    that waits for resources is dropped at no cost; one that is met at once starts a process only to stop it again.
    """
    import ray

    if ray.is_initialized() and ray.cluster_resources().get(_HEAD, 0) >= 1:
        return {_HEAD: math.floor(_PARTS / parts) / _PARTS}
    return {"memory": float(1 << 20)}
