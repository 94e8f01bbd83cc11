"""Torch modules that are refused, because in them one record could reach further than its own clipped gradient.

Modules whose *purpose* is to mix records (batch norm and its kin) are refused by name: each record goes through a
module alone, where they would not do what they are there for. Embeddings are refused on a GPU, where an index out of
range is not an exception of one record but the end of the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

_INSTEAD = {
    "BatchNorm1d": "GroupNorm or LayerNorm",
    "BatchNorm2d": "GroupNorm(groups, channels)",
    "BatchNorm3d": "GroupNorm(groups, channels)",
    "LazyBatchNorm1d": "GroupNorm or LayerNorm",
    "LazyBatchNorm2d": "GroupNorm(groups, channels)",
    "LazyBatchNorm3d": "GroupNorm(groups, channels)",
    "SyncBatchNorm": "GroupNorm(groups, channels)",
    "InstanceNorm1d": "the same layer with track_running_stats=False, or GroupNorm",
    "InstanceNorm2d": "the same layer with track_running_stats=False, or GroupNorm",
    "InstanceNorm3d": "the same layer with track_running_stats=False, or GroupNorm",
    "_SpectralNorm": "weight norm, or no constraint (its power iteration changes with every call)",
    "SpectralNorm": "weight norm, or no constraint (its power iteration changes with every call)",
}
_INDEXED = {"Embedding", "EmbeddingBag"}


def refuse_mixing(module: nn.Module) -> None:
    """Check that no part of a module is made to mix records or to keep running statistics of them.

    Raises:
        ValueError: naming the part, its type and what to use instead.
    """
    for name, part in module.named_modules():
        acting = (part, *part._forward_pre_hooks.values())  # the older spectral norm is a hook
        kinds = [kind.__name__ for each in acting for kind in type(each).__mro__]
        found = next((kind for kind in kinds if kind in _INSTEAD), None)
        if found is None or (found.startswith("InstanceNorm") and not getattr(part, "track_running_stats", False)):
            continue
        raise ValueError(
            f"`{name or 'the module itself'}` is a {found}: it mixes records or keeps statistics of them, so one "
            f"record would reach every gradient and the clip would bound nothing. Use {_INSTEAD[found]} instead."
        )


def place_of(module: nn.Module, device: str | None) -> torch.device:
    """Where a module runs: as asked, else on a GPU if there is one and the module has no embeddings.

    Raises:
        ValueError: a module with embeddings is to run elsewhere than on the CPU.
    """
    import torch

    indexed = any(kind.__name__ in _INDEXED for part in module.modules() for kind in type(part).__mro__)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() and not indexed else "cpu"))
    if indexed and place.type != "cpu":
        raise ValueError(
            f"A module with embeddings was to run on {place}, where one index out of range ends the device for the "
            "whole process, so that one record would silence a client. Leave out `device`, or give `cpu`."
        )
    return place
