"""The benchmark's round on Flower's simulation engine. Run by a Python of its own, because Flower pins another Ray.

    python -m venv FOLDER && FOLDER/bin/pip install "torch==2.13.0" "flwr[simulation]==1.42.0"
    FOLDER/bin/python flower_round.py API CLIENTS RECORDS FEATURES CLASSES ROUNDS CPUS

Work of one round, in float64 as in dpray: every client makes the sum of its records' gradients, each clipped to norm 1,
of a linear softmax head with bias, adds Gaussian noise, and returns its mean step; Flower averages. No ledger, no
journal, no commit: less than a round of dpray does. Nothing of dpray is imported.

API is `client` (NumPyClient and a server_fn, what most code written for Flower uses) or `message` (ClientApp.train and
Strategy.start, its newer interface).

Prints one line of JSON: `seconds`, the time of every round after the first, from one round's configuration to the
next's, and `first`, the time of the first.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.client import NumPyClient  # type: ignore[import-not-found]
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from flwr.common import ndarrays_to_parameters  # type: ignore[import-not-found]
from flwr.server import ServerAppComponents, ServerConfig  # type: ignore[import-not-found]
from flwr.server.strategy import FedAvg as ClientFedAvg  # type: ignore[import-not-found]
from flwr.serverapp import ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg as MessageFedAvg  # type: ignore[import-not-found]
from flwr.simulation import run_simulation  # type: ignore[import-not-found]

API = sys.argv[1]
CLIENTS, RECORDS, FEATURES, CLASSES, ROUNDS, CPUS = (int(word) for word in sys.argv[2:8])
NOISE, RATE = 0.1, 0.1

held: dict[int, tuple[Any, Any]] = {}
began: list[float] = []


def start() -> Any:
    """W before the first round."""
    return np.zeros((FEATURES + 1, CLASSES))


def data(context: Any) -> tuple[Any, Any]:
    """(x̃, y) of the client that a context names, made once in a process; a column of ones after its features."""
    client = int(context.node_config["partition-id"])
    if client not in held:
        generator = np.random.default_rng(client)
        x = generator.standard_normal((RECORDS, FEATURES))
        held[client] = np.hstack([x, np.ones((RECORDS, 1))]), generator.integers(0, CLASSES, RECORDS)
    return held[client]


def step(W: Any, x: Any, y: Any) -> Any:
    """W after one client's noised step."""
    A = x @ W
    A -= A.max(axis=1, keepdims=True)
    np.exp(A, out=A)
    A /= A.sum(axis=1, keepdims=True)
    A[np.arange(RECORDS), y] -= 1
    norms = np.linalg.norm(A, axis=1) * np.linalg.norm(x, axis=1)
    A *= np.minimum(1, 1 / norms)[:, None]
    noised = x.T @ A + NOISE * np.random.default_rng().standard_normal(W.shape)
    return W - RATE / RECORDS * noised


class Client(NumPyClient):  # type: ignore[misc]
    """The client of the older interface."""

    def __init__(self, context: Any) -> None:
        self.data = data(context)

    def fit(self, parameters: Any, config: Any) -> Any:
        """One step."""
        return [step(parameters[0], *self.data)], RECORDS, {}


class TimedClients(ClientFedAvg):  # type: ignore[misc]
    """FedAvg that notes when each round begins."""

    def configure_fit(self, *args: Any, **kwargs: Any) -> Any:
        """As FedAvg's."""
        began.append(time.perf_counter())
        return super().configure_fit(*args, **kwargs)


class TimedMessages(MessageFedAvg):  # type: ignore[misc]
    """FedAvg that notes when each round begins."""

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        """As FedAvg's."""
        began.append(time.perf_counter())
        return super().configure_train(*args, **kwargs)


def serve_clients(context: Any) -> Any:
    """The server of the older interface: all clients, no evaluation."""
    strategy = TimedClients(
        fraction_evaluate=0.0,
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters([start()]),
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


def train(message: Any, context: Any) -> Any:
    """The client of the newer interface."""
    stepped = step(message.content["arrays"].to_numpy_ndarrays()[0], *data(context))
    answer = {"arrays": ArrayRecord([stepped]), "metrics": MetricRecord({"num-examples": RECORDS})}
    return Message(content=RecordDict(answer), reply_to=message)


def serve_messages(grid: Any, context: Any) -> None:
    """The server of the newer interface: all clients, no evaluation."""
    strategy = TimedMessages(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    strategy.start(grid=grid, initial_arrays=ArrayRecord([start()]), num_rounds=ROUNDS)


def apps() -> tuple[Any, Any]:
    """(server, client) of the interface that was asked for."""
    if API == "client":
        return ServerApp(server_fn=serve_clients), ClientApp(client_fn=lambda context: Client(context).to_client())
    server, client = ServerApp(), ClientApp()
    server.main()(serve_messages)
    client.train()(train)
    return server, client


if __name__ == "__main__":
    alone = {"address": "local", "num_cpus": CPUS}  # or Flower would join a Ray that runs, and wait for ever
    resources = {"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}, "init_args": alone}
    run_simulation(*apps(), CLIENTS, backend_config=resources)
    seconds = np.diff(began).tolist()
    print(json.dumps({"first": seconds[0], "seconds": seconds[1:]}))
