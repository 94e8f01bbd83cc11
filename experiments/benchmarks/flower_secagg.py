"""A masked sum by Flower's SecAgg+ workflow, on its simulation engine. Run by a Python of its own, as `flower_round`.

    FOLDER/bin/python flower_secagg.py CLIENTS DIMENSION SHARES THRESHOLD ROUNDS CPUS

Work of one round: every client returns a vector of DIMENSION float32 numbers; Flower's workflow clips, quantises, masks
and adds them (32-bit ring, SHARES shares of each secret, itself counted, THRESHOLD of which open it). No noise, no
ledger, no journal. Nothing of dpray is imported.

Prints one line of JSON: `seconds`, the time of every round after the first, from one round's configuration to the
next's, and `first`, the time of the first.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from flwr.client import NumPyClient  # type: ignore[import-not-found]
from flwr.client.mod import secaggplus_mod  # type: ignore[import-not-found]
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from flwr.common import ndarrays_to_parameters  # type: ignore[import-not-found]
from flwr.server import LegacyContext, ServerConfig  # type: ignore[import-not-found]
from flwr.server.strategy import FedAvg  # type: ignore[import-not-found]
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow  # type: ignore[import-not-found]
from flwr.serverapp import ServerApp  # type: ignore[import-not-found]
from flwr.simulation import run_simulation  # type: ignore[import-not-found]

CLIENTS, DIMENSION, SHARES, THRESHOLD, ROUNDS, CPUS = (int(word) for word in sys.argv[1:7])

began: list[float] = []


class Client(NumPyClient):  # type: ignore[misc]
    """Returns a vector."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Ones."""
        return [np.ones(DIMENSION, np.float32)], 1, {}


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that notes when each round begins."""

    def configure_fit(self, *args: Any, **kwargs: Any) -> Any:
        """As FedAvg's."""
        began.append(time.perf_counter())
        return super().configure_fit(*args, **kwargs)


def serve(grid: Any, context: Any) -> None:
    """The server: all clients, no evaluation."""
    strategy = Timed(
        fraction_evaluate=0.0,
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters([np.zeros(DIMENSION, np.float32)]),
    )
    legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=ROUNDS), strategy=strategy)
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(SHARES, THRESHOLD))(grid, legacy)
    began.append(time.perf_counter())
    for number, array in enumerate(strategy_sum(legacy)):
        if not np.allclose(array, 1, atol=1e-2):
            raise SystemExit(f"Flower's sum is not the sum in array {number}: {array[:3]}")


def strategy_sum(legacy: Any) -> list[Any]:
    """The arrays of the last round: the mean of what clients returned."""
    arrays = legacy.state.array_records["parameters"]
    return [np.frombuffer(each.data, dtype=np.float32)[-DIMENSION:] for each in arrays.values()]


if __name__ == "__main__":
    server = ServerApp()
    server.main()(serve)
    client = ClientApp(client_fn=lambda context: Client().to_client(), mods=[secaggplus_mod])
    resources = {"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}, "init_args": {"num_cpus": CPUS}}
    run_simulation(server, client, CLIENTS, backend_config=resources)
    if len(began) != ROUNDS + 1:
        raise SystemExit("Flower did not finish its rounds.")
    seconds = np.diff(began).tolist()
    print(json.dumps({"seconds": seconds[1:], "first": seconds[0]}))
