"""A candidate's settings, how it is judged on its client, and when a hopeless one is stopped early.

| symbol | meaning                                                              | code            |
|--------|----------------------------------------------------------------------|-----------------|
| η      | learning rate of the first epoch                                     | `learning_rate` |
| γ      | the learning rate is multiplied by it every `step_epochs` epochs     | `gamma`         |
| β      | momentum: b ← βb + g, θ ← θ − ηb, with b = g at the first step       | `momentum`      |
| B, E   | records of a minibatch, passes over the training part                | `batch_size`, `epochs` |
| k      | candidates a client votes for                                        | `keep`          |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from dpray.trainers.settings import from_names

Score = Literal["accuracy", "loss"]


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """SGD with momentum and a step schedule, as a client trains one candidate (`torch.optim.SGD` and `StepLR`).

    Attributes:
        learning_rate: η, 0 or more.
        momentum: β in [0, 1).
        gamma: γ in [0, 1]; 0 ends the descent after `step_epochs` epochs.
        step_epochs: epochs from one step of the schedule to the next.
        batch_size: B; the last minibatch of an epoch is smaller where B does not divide the training part.
        epochs: E.
        dropout: probability with which each hidden unit is left out while training, in [0, 1). A model that brings
            its own (`StackedModule`) takes 0 only.

    Raises:
        ValueError: for a number out of range, naming it.
    """

    learning_rate: float
    momentum: float = 0.0
    gamma: float = 1.0
    step_epochs: int = 1
    batch_size: int = 64
    epochs: int = 5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _require(self, "learning_rate", _between(self.learning_rate, 0, math.inf), "a finite number of at least 0")
        _require(self, "gamma", _between(self.gamma, 0, 1) or self.gamma == 1, "a number from 0 to 1")
        for name in ("momentum", "dropout"):
            _require(self, name, _between(getattr(self, name), 0, 1), "a number from 0 up to, and without, 1")
        for name in ("step_epochs", "batch_size", "epochs"):
            _require(self, name, _whole(getattr(self, name)), "a whole number of at least 1")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Settings from a candidate laid over defaults.

        Raises:
            ValueError: for a name that is no setting, with the nearest one; for one that is missing or out of range.
        """
        return from_names(cls, "a client's own training", config, defaults)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name; what `from_config` takes."""
        return asdict(self)

    @property
    def stackable(self) -> tuple[int, int, int, float]:
        """What candidates must have in common to be trained in one stack; their rates may differ."""
        return self.batch_size, self.epochs, self.step_epochs, self.dropout


@dataclass(frozen=True, kw_only=True)
class Validation:
    """How a client judges a candidate: on records it was not trained on. Higher is better.

    Attributes:
        score: `accuracy` in [0, 1], or minus the mean cross-entropy (`loss`) in nats.
        fraction: of the client's records that are held out, classes alike.
        folds: k of a k-fold cross-validation instead, which costs k times as much and judges better where a client is
            small; None: hold-out.
        folds_below: clients with fewer records than this use the folds, all others hold out; None: all use them.

    Raises:
        ValueError: for a value out of range, naming it.
    """

    score: Score = "accuracy"
    fraction: float = 0.2
    folds: int | None = None
    folds_below: int | None = None

    def __post_init__(self) -> None:
        _require(self, "score", self.score in ("accuracy", "loss"), "`accuracy` or `loss`")
        _require(self, "fraction", _between(self.fraction, 0, 1) and self.fraction > 0, "a number between 0 and 1")
        _require(self, "folds", self.folds is None or _whole(self.folds, 2), "a whole number of at least 2, or None")
        below = self.folds_below
        wanted = "a number of records of at least 1, with `folds`; or None"
        _require(self, "folds_below", below is None or (_whole(below) and self.folds is not None), wanted)

    def folds_of(self, records: int) -> int | None:
        """Number of folds for a client of so many records; None: hold-out."""
        return self.folds if self.folds_below is None or records < self.folds_below else None


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop a candidate that will not be among its client's best, and keep the score it has by then.

    After each epoch from `after` on, a candidate is stopped whose score is more than `margin` below the `keep`-th best
    of those it is trained with. What is stopped depends on which candidates are trained together.

    Attributes:
        keep: at least the search's k, so that a ballot's places are filled by candidates that were trained to the end.
        after: epochs that every candidate is trained for.
        margin: in units of the score, accuracy or nats.

    Raises:
        ValueError: for a number out of range, naming it.

    *Guarantee.* Scores stay with the client and the vote's sensitivity holds for any ballot, however it was arrived at:
    stopping costs no privacy. How long a client takes then depends on its data, and timing is not protected.
    """

    keep: int
    after: int = 1
    margin: float = 0.1

    def __post_init__(self) -> None:
        for name in ("keep", "after"):
            _require(self, name, _whole(getattr(self, name)), "a whole number of at least 1")
        _require(self, "margin", _between(self.margin, 0, math.inf), "a finite number of at least 0")


def _require(settings: object, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {wanted}, and {getattr(settings, name)!r} was given.")


def _between(value: object, least: float, below: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < below


def _whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
