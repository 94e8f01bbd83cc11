"""What a round shows: public facts and released values. What was spent to get there is `platform.tracking.progress`.

| metric | value |
|---|---|
| `round/clients`, `round/records` | clients whose sum was used, and their records |
| `round/sigma` | std of the noise on each coordinate of the sum |
| `round/lost` | 1 if the release was lost: charged, no step made |
| `round/gradient_norm` | ‖G‖ |
| `round/noise_to_signal`, `round/signal_to_noise` | of G, see `platform.tracking.progress` |
| `round/step_norm`, `round/parameter_norm` | ‖θ_{t+1} − θ_t‖, ‖θ_{t+1}‖ |
| `accuracy`, `loss` | of θ_{t+1} on the evaluation set declared public |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpray.platform.tracking.progress import Row, against_noise
from dpray.trainers.models import FloatArray

PUBLIC = frozenset({"round/clients", "round/records", "round/sigma", "round/lost"})


@dataclass(frozen=True)
class Answer:
    """A released round: G (d,), the std of the noise on each of its coordinates and on the sum's, and who answered.

    `parts` (n, d) is what each client released, where each client's message is private by itself; else None.
    """

    gradient: FloatArray
    noise: float
    sigma: float
    clients: int
    records: int
    parts: FloatArray | None = None


def measure(answer: Answer | None, before: FloatArray, after: FloatArray) -> Row:
    """The `round/` metrics; before and after are θ (d,). An answer of None is a lost round."""
    if answer is None:
        return {"round/lost": 1}
    norm = float(np.linalg.norm(answer.gradient))
    return {
        "round/lost": 0,
        "round/clients": answer.clients,
        "round/records": answer.records,
        "round/sigma": answer.sigma,
        "round/gradient_norm": norm,
        **against_noise(norm, answer.noise * math.sqrt(answer.gradient.size), "round"),
        "round/step_norm": float(np.linalg.norm(after - before)),
        "round/parameter_norm": float(np.linalg.norm(after)),
    }
