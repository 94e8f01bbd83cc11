"""The client's task: fit and score the candidates of a search, as many at once as one likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpray.platform.cohort.client import ClientTask, FloatArray, Records
from dpray.trainers.local_search.settings import EarlyStopping, Validation
from dpray.trainers.local_search.stacked import StackedModel
from dpray.trainers.models import Model


class LocalSearchTask(ClientTask):
    """DP-HYPE's local search: a fresh model a candidate, trained by SGD on the client's records, scored on held-out ones.

    Args:
        model: what is trained.
        training: settings of `LocalTraining` that the candidates leave open, such as `{"epochs": 5}`.
        validation: hold-out or folds, accuracy or loss.
        stopping: when to stop hopeless candidates; None: never.
        stack: models trained at once; None: as many as the processor's cache holds.
        gradients: the model of a training that follows the search, whose clipped sums and updates these clients then
            give; None: this task searches only.

    Candidates of one client share its split, the first parameters, the order of minibatches and the dropout masks:
    each of them alone is distributed as if it had drawn its own, and their scores differ by what they are.
    """

    def __init__(
        self,
        model: StackedModel,
        *,
        training: Mapping[str, Any] | None = None,
        validation: Validation = Validation(),
        stopping: EarlyStopping | None = None,
        stack: int | None = None,
        gradients: Model | None = None,
    ) -> None:
        self.model, self.training, self.validation = model, dict(training or {}), validation
        self.stopping, self.stack, self.gradients = stopping, stack, gradients

    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """As `gradients` does it."""
        raise NotImplementedError

    def fit_and_score(self, config: Mapping[str, Any], records: Records, rng: np.random.Generator) -> float:
        """Score of one candidate; higher is better."""
        raise NotImplementedError

    def fit_and_scores(
        self, configs: Sequence[Mapping[str, Any]], records: Records, rng: np.random.Generator
    ) -> FloatArray:
        """Scores of candidates trained together, (m,); NaN for one that diverged or has settings out of range."""
        raise NotImplementedError
