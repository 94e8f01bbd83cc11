"""What is trained: gradients of a client's records, each clipped, summed, in float64.

| symbol | meaning | shape |
|---|---|---|
| θ | parameters, flat | (d,) |
| X, X̃ | features; features with a 1 appended, [X, 1] (never formed) | (n, f), (n, f+1) |
| W | θ of a linear head, bias in the last row | (f+1, K) |
| A | softmax(X̃W) − onehot(y) | (n, K) |
| g_x | gradient of one record's cross-entropy | (d,) |
| C | clip bound on ‖g_x‖, the norm over all parameters | scalar |
| w_x | min(1, C/‖g_x‖) | scalar |
| u | Σ_x w_x g_x, one client's message before noise | (d,) |

A record with a non-finite feature, one too large to be squared, or a label that is not one of 0 … K−1 is *bad*: it
contributes zero, in its features and in its factor (0·NaN is NaN in a matrix product), and is not reported.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.client import ClientTask, Records, Stack

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_BLOCK = 4096  # records whose logits are formed together: K rows of this many float64 stay in the cache
_SMALL_SQUARES = 1e-280  # below it squares may have lost digits, or vanished
_KEPT = 64  # blocks of a host's clients whose designs are kept


def class_labels(y: NDArray[Any], classes: int) -> tuple[IntArray, BoolArray]:
    """Labels as whole numbers, and which of them are classes; a label that is not becomes 0 and is marked.

    Args:
        y: (n,) of any numeric dtype.
        classes: K; the classes are 0 … K−1.
    """
    given = np.asarray(y)
    with np.errstate(invalid="ignore"):
        known = (given >= 0) & (given < classes) & (given == np.floor(given))
    return np.where(known, given, 0).astype(np.int64), np.asarray(known, dtype=np.bool_)


class Model(ClientTask):
    """A `ClientTask` without a rehearsal: parameters, predictions, clipped gradient sums and local steps.

    Give it to a `Cohort` as it is to train with known settings; wrap it in a `TrainingTask` to search for them first.
    """

    classes: int

    @abstractmethod
    def initial(self) -> FloatArray:
        """θ at the start, (d,): public, the same in every process."""

    @abstractmethod
    def logits(self, theta: FloatArray, x: NDArray[Any]) -> FloatArray:
        """Scores of the classes, (n, K)."""

    @abstractmethod
    def mean_gradient(self, theta: FloatArray, records: Records) -> FloatArray:
        """Mean of g_x over the records that are not bad, unclipped, (d,); zero if there are none."""

    def refuse_clip(self, clip: float) -> None:
        """Refuse a C that the model's arithmetic cannot keep (`ValueError`); float64 keeps all that releases allow."""

    def usable(self, records: Records) -> BoolArray:
        """Which records are not bad, (n,): they can be trained on and scored. Not private: it stays with the client."""
        x = np.asarray(records.x)
        finite = np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
        return np.asarray(class_labels(np.asarray(records.y).reshape(-1), self.classes)[1] & finite)

    def update(self, theta: FloatArray, records: Records, settings: Mapping[str, Any]) -> FloatArray:
        """θ_K − θ after K full-batch local steps without noise (DP-FedAvg; the cohort clips it).

        Args:
            theta: (d,).
            records: one client's.
            settings: `local_steps` K (1 if absent) and `local_rate` η_l (1.0 if absent). With these two left out the
                update is minus the mean gradient.
        """
        local = theta.copy()
        for _ in range(int(settings.get("local_steps", 1))):
            local -= float(settings.get("local_rate", 1.0)) * self.mean_gradient(local, records)
        local -= theta
        return local

    def fit_and_score(self, config: Mapping[str, Any], records: Records, rng: np.random.Generator) -> float:
        """Refused: a model alone does not know which training its clients should rehearse."""
        raise NotImplementedError(
            f"A {type(self).__name__} alone cannot score candidates for a vote: give the cohort "
            "TrainingTask(model, rehearsal)."
        )

    def prepare(self, records: Records) -> Any:
        """One client's records in the form `fold_sums` wants, made once for many calls."""
        return records

    def fold_sums(self, thetas: FloatArray, prepared: Any, members: BoolArray, clip: float) -> FloatArray:
        """Clipped sums of several models, each over its own subset of one client's records, (m, d).

        Args:
            thetas: (m, d), one model a fold.
            prepared: `prepare` of n records.
            members: (m, n), the records that count for each model.
            clip: C.
        """
        pairs = zip(thetas, members, strict=True)
        return np.stack([self.clipped_sum(theta, take(prepared, rows), clip) for theta, rows in pairs])

    def named(self, theta: FloatArray) -> dict[str, FloatArray]:
        """θ as parameters by name, as a reader of an exported file knows them; public."""
        return {"theta": theta}

    def flat(self, named: Mapping[str, FloatArray]) -> FloatArray:
        """Inverse of `named`, (d,)."""
        return np.concatenate([named[name].reshape(-1) for name in self.named(self.initial())])

    def predict(self, theta: FloatArray, x: NDArray[Any]) -> IntArray:
        """Most probable class of each record, (n,)."""
        return np.asarray(self.logits(theta, x).argmax(axis=1), dtype=np.int64)

    def accuracy(self, theta: FloatArray, records: Records) -> float:
        """Fraction predicted right, in [0, 1]; NaN without records. Not private: for public records."""
        return float(np.mean(self.predict(theta, records.x) == records.y)) if len(records) else float("nan")

    def evaluate(self, theta: FloatArray, records: Records) -> dict[str, float]:
        """`accuracy` in [0, 1] and mean `loss` in nats on public records."""
        return {"accuracy": self.accuracy(theta, records), "loss": float(np.mean(self.losses(theta, records)))}

    def losses(self, theta: FloatArray, records: Records) -> FloatArray:
        """Cross-entropy of each record in nats, (n,); infinite for a label that is no class. Not private."""
        labels, known = class_labels(records.y, self.classes)
        z = self.logits(theta, records.x)
        z = z - z.max(axis=1, keepdims=True)
        per_record = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), labels]
        return np.where(known, per_record, np.inf)


def take(records: Records, rows: NDArray[Any]) -> Records:
    """The chosen records, by index or mask."""
    return Records(records.x[rows], records.y[rows])


@dataclass(frozen=True)
class Design:
    """A stack of clients' records, ready for products: bad records zeroed, what does not depend on θ computed.

    x (n, f) float64; y (n,) with 0 for bad records; norm (n,) is ‖x̃‖, 0 for bad records; good (n,);
    offsets (clients + 1,): where each client's rows begin. x is not copied where it is float64 and no record is bad.
    """

    x: FloatArray
    y: IntArray
    norm: FloatArray
    good: BoolArray
    offsets: IntArray

    @staticmethod
    def of(stack: Stack, features: int, classes: int) -> Design:
        """Errors: ValueError for features of another shape than (n, f)."""
        if stack.x.ndim != 2 or stack.x.shape[1] != features:
            raise ValueError(f"Features must have the shape (n, {features}), and {stack.x.shape} was given.")
        x = np.ascontiguousarray(stack.x, dtype=np.float64)
        y, good = class_labels(stack.y.reshape(-1), classes)
        with np.errstate(over="ignore", invalid="ignore"):
            norm = np.sqrt(np.einsum("ij,ij->i", x, x) + 1.0)
        good &= np.isfinite(norm)
        if not good.all():
            x = np.where(good[:, None], x, 0.0)
            norm = np.where(good, norm, 0.0)
        return Design(x, y, norm, good, stack.offsets)


class LinearHead(Model):
    """Multinomial logistic regression on fixed features, in closed form: g_x = x̃ ⊗ a_x, so ‖g_x‖ = ‖x̃‖·‖a_x‖ and

        u = X̃ᵀ diag(w) A

    One matrix product for the logits of a block of clients, one per client for the sums; no per-record gradients, and
    no column of ones is ever formed. float64 throughout.

    Guarantee: replacing one record of a client by anything moves its `clipped_sum` by at most 2C(1 + `relative_error`).
    It asks for features made from public constants only: a scaler fitted on the client's own records breaks it.

    Example:
        `LinearHead(features=64, classes=10)`; its θ reshaped to (65, 10) is W.
    """

    def __init__(self, features: int, classes: int) -> None:
        if features < 1 or classes < 2:
            raise ValueError(
                f"A linear head needs at least 1 feature and 2 classes; {features} and {classes} were given."
            )
        self.features = features
        self.classes = classes
        self.dimension = (features + 1) * classes
        self.relative_error = (
            4 * (features + classes + 4) * float(np.finfo(np.float64).eps)
        )  # norms and products in float64
        self._kept: list[tuple[Stack, Design]] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": []}

    def check_records(self, shape: tuple[int, ...]) -> None:
        """Refuse records that are not f features in a row."""
        if shape != (self.features,):
            raise ValueError(
                f"A linear head of {self.features} features takes records of the shape ({self.features},), and the "
                f"clients' have {shape}: give it as many features as they have, each record's in a row."
            )

    def initial(self) -> FloatArray:
        """θ = 0."""
        return np.zeros(self.dimension)

    def logits(self, theta: FloatArray, x: NDArray[Any]) -> FloatArray:
        """X̃W, (n, K)."""
        W = theta.reshape(self.features + 1, self.classes)
        return np.asarray(np.asarray(x, dtype=np.float64) @ W[:-1] + W[-1])

    def named(self, theta: FloatArray) -> dict[str, FloatArray]:
        """`weight` (K, f) and `bias` (K,), as `torch.nn.Linear` has them."""
        W = theta.reshape(self.features + 1, self.classes)
        return {"weight": W[:-1].T, "bias": W[-1]}

    def flat(self, named: Mapping[str, FloatArray]) -> FloatArray:
        """W from weight and bias, (d,)."""
        return np.concatenate([named["weight"].T, named["bias"][None]]).reshape(-1)

    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """u of one client, (d,)."""
        return np.asarray(self._sums(theta, self.prepare(records), clip)[0])

    def clipped_sums(self, theta: FloatArray, shards: Sequence[Records], clip: float) -> FloatArray:
        """u of each client, (clients, d). What does not depend on θ is kept for the next call with the same records."""
        stack = shards if isinstance(shards, Stack) else Stack.of(shards)
        return self._sums(theta, self._design(stack), clip)

    def mean_gradient(self, theta: FloatArray, records: Records) -> FloatArray:
        """X̃ᵀA/n, (d,)."""
        design = self.prepare(records)
        return np.asarray(self._sums(theta, design, np.inf)[0] / max(int(design.good.sum()), 1))

    def usable(self, records: Records) -> BoolArray:
        """As `Model.usable`, and the features can be squared."""
        return self.prepare(records).good

    def prepare(self, records: Records) -> Design:
        """The records of one client as a design."""
        return Design.of(Stack.of([records]), self.features, self.classes)

    def fold_sums(self, thetas: FloatArray, prepared: Design, members: BoolArray, clip: float) -> FloatArray:
        """All folds in two matrix products: every model sees every record, and those outside its fold weigh zero."""
        m, f, K = len(thetas), self.features, self.classes
        W = thetas.reshape(m, f + 1, K)
        with np.errstate(over="ignore", invalid="ignore"):
            A = (W[:, :-1].transpose(0, 2, 1).reshape(m * K, f) @ prepared.x.T).reshape(m, K, -1)
            A += W[:, -1, :, None]
            residuals(A, prepared.y)
            A *= (clip_weights(A, prepared.norm, clip) * (members & prepared.good))[:, None]
        sums = np.empty((m, f + 1, K))
        sums[:, :-1] = (A.reshape(m * K, -1) @ prepared.x).reshape(m, K, f).transpose(0, 2, 1)
        sums[:, -1] = A.sum(axis=2)
        return sums.reshape(m, -1)

    def _design(self, stack: Stack) -> Design:
        """The design of a host's stack, or of one of its blocks, made once; those of other data are let go."""
        for kept, design in self._kept:
            if _same(kept, stack):
                return design
        if len(self._kept) >= _KEPT or (self._kept and _memory(self._kept[0][0]) is not _memory(stack)):
            self._kept = []
        self._kept.append((stack, Design.of(stack, self.features, self.classes)))
        return self._kept[-1][1]

    def _sums(self, theta: FloatArray, design: Design, clip: float) -> FloatArray:
        W = np.asarray(theta, dtype=np.float64).reshape(self.features + 1, self.classes)
        sums = np.zeros((len(design.offsets) - 1, self.features + 1, self.classes))
        for first, last in _blocks(design.offsets):
            self._block(W, design, design.offsets[first : last + 1], clip, sums[first:last])
        return sums.reshape(len(sums), -1)

    def _block(self, W: FloatArray, design: Design, offsets: IntArray, clip: float, sums: FloatArray) -> None:
        """Fill sums (clients, f+1, K) of the clients whose rows lie between these offsets."""
        rows = slice(offsets[0], offsets[-1])
        x = design.x[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            A = W[:-1].T @ x.T  # (K, n): reductions over classes run along contiguous records
            A += W[-1][:, None]
            residuals(A, design.y[rows])
            A *= clip_weights(A, design.norm[rows], clip) * design.good[rows]
        starts = offsets - offsets[0]
        for client, (i, j) in enumerate(pairwise(starts)):
            np.matmul(x[i:j].T, A[:, i:j].T, out=sums[client, :-1])
            A[:, i:j].sum(axis=1, out=sums[client, -1])


def _same(kept: Stack, given: Stack) -> bool:
    """Whether two stacks are the same memory; the kept one is alive, so an address cannot have been used again."""
    pairs = ((kept.x, given.x), (kept.y, given.y))
    return all(a.__array_interface__ == b.__array_interface__ for a, b in pairs) and np.array_equal(
        kept.offsets, given.offsets
    )


def _memory(stack: Stack) -> object:
    """What owns a stack's features: the same for all views of one array."""
    return stack.x if stack.x.base is None else stack.x.base


def _blocks(offsets: IntArray) -> list[tuple[int, int]]:
    """Runs of consecutive clients that hold about `_BLOCK` records together."""
    cuts = [0]
    for client in range(1, len(offsets)):
        if offsets[client] - offsets[cuts[-1]] > _BLOCK and client - 1 > cuts[-1]:
            cuts.append(client - 1)
    return list(zip(cuts, [*cuts[1:], len(offsets) - 1], strict=True))


def residuals(z: FloatArray, y: IntArray) -> None:
    """Turn logits (…, K, n) into softmax − onehot(y), in place."""
    z -= z.max(axis=-2, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(axis=-2, keepdims=True)
    z[..., y, np.arange(len(y))] -= 1.0


def clip_weights(A: FloatArray, norm: FloatArray, clip: float) -> FloatArray:
    """w_x = min(1, C/(‖a_x‖·‖x̃‖)), shape (…, n); a column of A that is not finite is zeroed, and weighs zero.

    Args:
        A: (…, K, n) residuals, changed in place only where they are not finite.
        norm: (n,) ‖x̃‖.
        clip: C, may be infinite.
    """
    squares = np.einsum("...kn,...kn->...n", A, A)
    length: FloatArray = np.sqrt(squares) * norm
    small = squares < _SMALL_SQUARES
    if small.any():  # large features make a gradient of residuals whose squares underflow
        length[small] = _norms_of_small(np.moveaxis(A, -2, -1)[small]) * np.broadcast_to(norm, small.shape)[small]
    # never divides by a zero norm
    weights = np.ones_like(length) if clip == np.inf else clip / np.maximum(length, clip)
    finite = np.isfinite(length)
    if not finite.all():
        weights[~finite] = 0.0
        np.copyto(A, 0.0, where=~finite[..., None, :])
    return weights


def _norms_of_small(rows: FloatArray) -> FloatArray:
    """Norm of each row, (m,), whatever its size: each is divided by its largest value before it is squared."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scaled = rows / np.where(largest > 0, largest, 1.0)[:, None]
    return np.asarray(largest * np.sqrt(np.einsum("ij,ij->i", scaled, scaled)))
