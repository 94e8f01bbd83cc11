"""The benchmark's convolutional network, and its clipped gradient sum by Opacus's ghost clipping.

    python -m venv FOLDER && FOLDER/bin/pip install "torch==2.13.0" "opacus==1.6.0"
    FOLDER/bin/python opacus_sum.py RECORDS ROUNDS THREADS

Work of one round, in float32: the sum over records of their cross-entropy's gradients, each clipped to norm 1. No
noise, no step. Two backward passes (Lee & Kifer 2021): norms first, then the gradient of the weighted loss. Nothing of
dpray is imported.

Prints one line of JSON: `seconds` of every round after two to warm up, and the `norm` of the sum.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, CLIP = 10, 1.0


class Network(nn.Module):
    """Two convolutions, a pooling, two linear layers: 1.2 million parameters on 28×28 grey values."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.f1, self.f2 = nn.Linear(9216, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1, 28, 28) ↦ (n, 10)."""
        x = functional.relu(self.c2(functional.relu(self.c1(x))))
        x = functional.relu(self.f1(functional.max_pool2d(x, 2).flatten(1)))
        return self.f2(x)  # type: ignore[no-any-return]


def network() -> Network:
    """The network with the parameters it has everywhere here."""
    torch.manual_seed(0)
    return Network()


def images(count: int) -> tuple[Tensor, Tensor]:
    """Random images and labels, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 28, 28, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def main(records: int, rounds: int, threads: int) -> None:
    """Measure and print."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping  # type: ignore[import-not-found]
    from opacus.optimizers import DPOptimizerFastGradientClipping  # type: ignore[import-not-found]
    from opacus.utils.fast_gradient_clipping_utils import (  # type: ignore[import-not-found]
        DPLossFastGradientClipping,
    )

    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    x, y = images(records)
    module = GradSampleModuleFastGradientClipping(
        network(), loss_reduction="sum", max_grad_norm=CLIP, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=records,
        loss_reduction="sum",
    )
    loss = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")
    seconds, norm = [], 0.0
    for _ in range(rounds + 2):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss(module(x), y).backward()
        seconds.append(time.perf_counter() - began)
        norm = float(torch.cat([each.grad.flatten() for each in module.parameters()]).norm())
    print(json.dumps({"seconds": seconds[2:], "norm": norm}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
