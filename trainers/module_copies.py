"""Every pass of a module starts from the same state: on a copy, with random numbers of its own.

A module may keep something of what it is given (a running mean in a buffer, the last batch in an attribute, a count of
its calls). Whoever used it next would meet that, and with it records of others, or at least how many passes there were
before, which one record changes by making the module raise. So the module that a factory made is never run: copies are,
each for one pass or one training, and are thrown away.

*Not covered.* What a module keeps outside of itself: in its class, in globals, in a closure, in files, or in an object
that hands out itself when it is copied (`__deepcopy__`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def fresh(module: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy that shares nothing with the module, and whose parameters are copies of those given.

    Raises:
        ValueError: the module holds something that cannot be copied.
    """
    import torch

    known: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # a weight that a hook computes from others
                known[id(value)] = value.detach().clone()
    own = dict(module.named_parameters())
    for name, value in (parameters or {}).items():
        known[id(own[name])] = torch.nn.Parameter(value.clone())
    try:
        return deepcopy(module, known)
    except Exception as error:
        raise ValueError(
            "The module cannot be copied, and every pass needs a copy, so that none meets what another has left behind "
            f"({type(error).__name__}: {error}). Keep open files, locks and results of computations out of it."
        ) from error


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Random numbers of torch, NumPy and Python that follow from the seed alone; all put back afterwards.

    On a GPU, kernels are deterministic. Gradients are on as they were, whatever happens inside.
    """
    import torch

    legacy, plain = np.random.get_state(), random.getstate()  # noqa: NPY002
    with (
        torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []),
        torch.set_grad_enabled(torch.is_grad_enabled()),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
    ):
        try:
            # `manual_seed` formats a stack trace for each kind of accelerator, even where there is none.
            accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()
            (torch.manual_seed if accelerated else torch.default_generator.manual_seed)(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
            yield
        finally:
            np.random.set_state(legacy)  # noqa: NPY002
            random.setstate(plain)
