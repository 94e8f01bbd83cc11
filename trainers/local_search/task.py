"""The client's task: fit and score the candidates of a search, many at once.

candidates ─▶ settings ─▶ groups alike in B, E, … ─▶ stacks the cache holds ─▶ epochs, all stacks in step ─▶ scores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.platform.cohort.client import ClientTask, FloatArray, Records
from dpray.trainers.local_search.descent import Descent, Part
from dpray.trainers.local_search.settings import EarlyStopping, LocalTraining, Validation
from dpray.trainers.local_search.split import judges
from dpray.trainers.local_search.stacked import StackedModel
from dpray.trainers.models import BoolArray, Model, class_labels

if TYPE_CHECKING:
    from torch import Tensor


class LocalSearchTask(ClientTask):
    """DP-HYPE's local search: for every candidate a fresh model, trained by SGD on the client's own records.

    A record with a feature that is not finite in float32, or a label that is no class, takes no part. A client with
    fewer than two others gives every candidate the worst score.

    Args:
        model: what is trained.
        training: settings of `LocalTraining` that the candidates leave open, such as `{"epochs": 5}`.
        validation: hold-out or folds, accuracy or loss.
        stopping: when to stop hopeless candidates; None: never.
        stack: models trained at once; None: as many as are quickest (`StackedModel.together`).
        gradients: the model of a training that follows the search, whose clipped sums and updates these clients then
            give; None: this task searches only.

    Candidates of one client share its split, the first parameters, the order of minibatches and the dropout masks
    (common random numbers). Each of them alone is distributed as if it had drawn its own; what is left of the
    difference between two scores is due to their settings.

    *Guarantee.* None of its own, and none is needed: scores stay with the client, and the vote's sensitivity holds for
    any ballot of one client, as long as no ballot follows from another client's records. Every stack is therefore
    trained on a fresh copy of a `StackedModule`'s module (which says what a copy does not reach), under this client's
    seeds. Private seeds, a split, early stopping and float32 cost nothing. Time is not protected.

    Raises:
        ValueError: `training` names no setting, or `stack` is no whole number.
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
        if stack is not None and (isinstance(stack, bool) or not isinstance(stack, int) or stack < 1):
            raise ValueError(f"`stack` must be a whole number of at least 1, or None, and {stack!r} was given.")
        self.model, self.training, self.validation = model, dict(training or {}), validation
        self.stopping, self.stack, self.gradients = stopping, stack, gradients
        self.settings({"learning_rate": 1.0})
        self.dimension = model.dimension if gradients is None else gradients.dimension
        self.relative_error = 0.0 if gradients is None else gradients.relative_error

    def settings(self, config: Mapping[str, Any]) -> LocalTraining:
        """A candidate's settings, with what it leaves open.

        Raises:
            ValueError: it names no setting, or one is out of range.
        """
        settings = LocalTraining.from_config(config, self.training)
        if settings.dropout and self.model.own_dropout:
            raise ValueError(
                f"`dropout` is {settings.dropout:g}, and the module brings its own dropout layers: leave it out."
            )
        return settings

    def check_candidate(self, config: Mapping[str, Any]) -> None:
        """Errors: as `settings`."""
        self.settings(config)

    def check_records(self, shape: tuple[int, ...]) -> None:
        """Refuse records that a model raises on, as it does on one of zeros."""
        import torch

        searched = self.model.fresh()
        try:
            searched.logits([value[None] for value in searched.initial(0)], torch.zeros(1, *shape))
        except Exception as error:
            raise ValueError(
                f"The model that is searched for does not take the clients' records, of the shape {shape} "
                f"({type(error).__name__}: {error}): give one that does, or records of the shape it is made for."
            ) from error
        if self.gradients is not None:
            self.gradients.check_records(shape)

    # The search ---------------------------------------------------------------------------------------------------

    def fit_and_score(self, config: Mapping[str, Any], records: Records, rng: np.random.Generator) -> float:
        """Score of one candidate; higher is better. Errors: as `settings`."""
        return float(self._scores([self.settings(config)], records, rng)[0])

    def fit_and_scores(
        self, configs: Sequence[Mapping[str, Any]], records: Records, rng: np.random.Generator
    ) -> FloatArray:
        """Scores of candidates trained together, (m,); NaN for one that diverged. Errors: as `settings`."""
        return self._scores([self.settings(config) for config in configs], records, rng)

    def _scores(self, settings: Sequence[LocalTraining], records: Records, rng: np.random.Generator) -> FloatArray:
        import torch

        x, y, usable = _cleaned(records, self.model.classes)
        folds = self.validation.folds_of(len(records))
        splits = judges(y.numpy(), usable, self.validation.fraction, folds, rng)
        total, judged = np.zeros(len(settings)), 0
        with torch.no_grad():
            for held_out in splits:
                train, judge = (
                    Part(x[rows], y[rows]) for rows in map(torch.from_numpy, (usable & ~held_out, held_out))
                )
                seed = int(rng.integers(1 << 63))
                for places in _groups(settings):
                    found = self._trained([settings[place] for place in places], train, judge, seed)
                    total[places] += found * len(judge.y)
                judged += len(judge.y)
        return total / judged if judged else np.full(len(settings), np.nan)

    def _trained(self, settings: Sequence[LocalTraining], train: Part, judge: Part, seed: int) -> FloatArray:
        """Scores of candidates alike in what a stack needs, (m,)."""
        at_once = self.stack or self.model.together
        starts = range(0, len(settings), at_once)
        stacks = [Descent(self.model, settings[start : start + at_once], seed) for start in starts]
        found = np.full(len(settings), np.nan)

        def leave(start: int, stack: Descent, which: Tensor, scores: Tensor) -> None:
            found[start + stack.members[which.numpy()]] = scores[which].numpy()
            stack.keep(~which)

        epochs = settings[0].epochs
        for number in range(1, epochs + 1):
            for start, stack in zip(starts, stacks, strict=True):
                stack.epoch(number, train)
                done = stack.at_rest if number < epochs else stack.at_rest.fill_(True)
                if len(stack.members) and bool(done.any()):
                    leave(start, stack, done, stack.scores(judge, self.validation.score))
            if self.stopping is not None and self.stopping.after <= number < epochs:
                scores = [stack.scores(judge, self.validation.score) for stack in stacks]
                for start, stack, mine in zip(starts, stacks, scores, strict=True):
                    leave(start, stack, hopeless(mine, scores, found, self.stopping), mine)
        return found

    # A training that follows ----------------------------------------------------------------------------------------

    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """As `gradients` does it."""
        return self._following().clipped_sum(theta, records, clip)

    def clipped_sums(self, theta: FloatArray, shards: Sequence[Records], clip: float) -> FloatArray | None:
        """As `gradients` does it."""
        return self._following().clipped_sums(theta, shards, clip)

    def update(self, theta: FloatArray, records: Records, settings: Mapping[str, Any]) -> FloatArray:
        """As `gradients` does it."""
        return self._following().update(theta, records, settings)

    def _following(self) -> Model:
        if self.gradients is None:
            raise NotImplementedError("This task only searches: give LocalSearchTask(gradients=…) a model to train.")
        return self.gradients


def hopeless(mine: Tensor, scores: Sequence[Tensor], left: FloatArray, stopping: EarlyStopping) -> Tensor:
    """Which of `mine` to stop, (m,) Boolean: those more than the margin below the `keep`-th best of all.

    Args:
        mine: scores of one stack.
        scores: of all stacks.
        left: of the candidates that have left, NaN for the others.
    """
    import torch

    known = torch.cat([*scores, torch.from_numpy(left)]).nan_to_num(nan=-torch.inf)
    bar = known.sort(descending=True).values[min(stopping.keep, len(known)) - 1]
    return ~(mine >= bar - stopping.margin)


def _groups(settings: Sequence[LocalTraining]) -> list[list[int]]:
    """Places of candidates that can be stacked, in order."""
    groups: dict[object, list[int]] = {}
    for place, each in enumerate(settings):
        groups.setdefault(each.stackable, []).append(place)
    return list(groups.values())


def _cleaned(records: Records, classes: int) -> tuple[Tensor, Tensor, BoolArray]:
    """Features in float32, labels, and which records take part."""
    import torch

    labels, known = class_labels(np.asarray(records.y).reshape(-1), classes)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.array(records.x, dtype=np.float32)
    usable: BoolArray = known & np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    return torch.from_numpy(x), torch.from_numpy(labels), usable
