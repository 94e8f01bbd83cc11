"""Which configuration of a search has which of the trainings that were set aside: given once, remembered on disk.

    <folder>/slots.json    {"<SHA-256 of the configuration>": [number, configuration], …}

Configurations are public. Where Ray runs, the table is kept by an actor on the driver's node, so that trials in
processes of their own, on any node, ask one keeper.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SlotsTaken(ValueError):  # noqa: N818 - an outcome that callers handle
    """More configurations were tried than trainings were set aside."""


class Slots:
    """The keeper of the table.

    Args:
        folder: made if it is not there.
        number: how many there are.
    """

    def __init__(self, folder: str, number: int) -> None:
        self._place, self._number = Path(folder) / "slots.json", number
        self._place.parent.mkdir(parents=True, exist_ok=True)
        there = self._place.read_text(encoding="utf-8") if self._place.is_file() else "{}"
        self._taken: dict[str, list[Any]] = json.loads(there)

    def claim(self, config: dict[str, Any]) -> int | None:
        """The number of a configuration, the next free one if it is new; None if there is none left."""
        text = json.dumps(config, sort_keys=True, default=_plain)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self._taken:
            if len(self._taken) >= self._number:
                return None
            self._taken[digest] = [len(self._taken), json.loads(text)]
            self._write()
        return int(self._taken[digest][0])

    def _write(self) -> None:
        partial = self._place.with_name(f".slots.{os.getpid()}")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(self._taken, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._place)


def open_slots(folder: Path, number: int) -> Any:
    """The keeper, on this node: an actor where Ray runs, else an object of this process."""
    import ray

    where = str(folder.expanduser().absolute())
    if not ray.is_initialized():
        return Slots(where, number)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Slots).options(num_cpus=0, scheduling_strategy=here).remote(where, number)


def claim(slots: Any, config: Mapping[str, Any]) -> int:
    """The number of a configuration.

    Raises:
        SlotsTaken: there is none left.
    """
    if isinstance(slots, Slots):
        number = slots.claim(dict(config))
    else:
        import ray

        number = ray.get(slots.claim.remote(dict(config)))
    if number is None:
        raise SlotsTaken(
            "Every training that was set aside belongs to another configuration already: nothing was trained or spent. "
            "Set more of them aside (`trainings`), or let the search try fewer (`num_samples`)."
        )
    return int(number)


def close(slots: Any) -> None:
    """End the keeper's process; the table stays."""
    if not isinstance(slots, Slots):
        import ray

        if ray.is_initialized():
            ray.kill(slots)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's; anything else by its text."""
    return value.item() if hasattr(value, "item") else repr(value)
