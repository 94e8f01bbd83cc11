"""The benchmark's round on pfl-research's simulation. Run by a Python of its own.

    python -m venv FOLDER && FOLDER/bin/pip install "torch==2.13.0" "pfl==0.6.0"
    FOLDER/bin/python -m torch.distributed.run --standalone --nproc_per_node=2 pfl_round.py \
        CLIENTS RECORDS FEATURES CLASSES ROUNDS

Work of one round, in float32, on two processes of one thread each: every client makes one full-batch step of a linear
softmax head; its update is clipped as a whole, and noise is added to the sum. No clipping of records, no ledger, no
journal: less than a round of dpray does. Nothing of dpray is imported.

Prints one line of JSON: `seconds` of every round after three to warm up.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PFL_PYTORCH_DEVICE"] = "cpu"

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.aggregate.weighting import WeightByUser  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.internal.ops.selector import get_framework_module  # type: ignore[import-not-found]
from pfl.metrics import Metrics, Weighted  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]
from pfl.privacy import (  # type: ignore[import-not-found]
    CentrallyAppliedPrivacyMechanism,
    GaussianMechanism,
)

CLIENTS, RECORDS, FEATURES, CLASSES, ROUNDS = (int(word) for word in sys.argv[1:6])
WARMING, RATE = 3, 0.1


class Head(torch.nn.Linear):
    """The linear head, with the two methods that pfl asks of a model."""

    def loss(self, x: Any, y: Any) -> Any:
        """Mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Any, y: Any) -> Any:
        """Not asked for in rounds without evaluation."""
        return {"loss": Weighted(torch.nn.functional.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """Notes when each round ends."""

    ends: list[float]

    def on_train_begin(self, *, model: Any) -> Any:
        """The start of the first round."""
        self.ends = [time.perf_counter()]
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        """The end of one."""
        self.ends.append(time.perf_counter())
        return False, Metrics()


def data() -> dict[int, Any]:
    """(x, y) of every client."""
    generator = np.random.default_rng(0)
    found = {}
    for client in range(CLIENTS):
        x = generator.standard_normal((RECORDS, FEATURES), dtype=np.float32)
        y = generator.integers(0, CLASSES, RECORDS)
        found[client] = [torch.from_numpy(x), torch.from_numpy(y)]
    return found


def main() -> None:
    """Measure and print, in the first process."""
    head, clock = Head(FEATURES, CLASSES), Clock()
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model = PyTorchModel(
        model=head,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(head.parameters(), RATE),
    )
    users = FederatedDataset.from_slices(data(), get_user_sampler("minimize_reuse", list(range(CLIENTS))))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(clipping_bound=1.0, relative_noise_stddev=1.0))
    backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser(), noise])
    logging.disable(logging.INFO)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ROUNDS + WARMING,
            evaluation_frequency=10**9,
            train_cohort_size=CLIENTS,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(local_learning_rate=1.0, local_num_epochs=1, local_batch_size=None),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if get_framework_module().distributed.global_rank == 0:
        print(json.dumps({"seconds": np.diff(clock.ends)[WARMING:].tolist()}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
