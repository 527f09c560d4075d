"""Predict arrays with a personal or the global model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError, did_you_mean
from corefed.bayes.uncertainty import Prediction
from corefed.data import inputs, memory
from corefed.data.cells import shorten
from corefed.training.fitted import Fitted
from corefed.use.predictions import BLOCK, half_width

Array = npt.NDArray[Any]


class Uncertainty(NamedTuple):
    """Uncertainty of predictions, [n] each: total = aleatoric + epistemic.

    Classification: entropies in nats. Regression: variances, in the square of the target's unit
    ([n, targets] with several targets). More data reduce the epistemic part only.
    """

    total: Array
    aleatoric: Array
    epistemic: Array


class Predictor:
    """One model. X is an array [n, features], or the path of a file of points."""

    def __init__(self, fitted: Fitted, client: str, kind: str, classes: Array) -> None:
        self._fitted, self._client, self._kind = fitted, client, kind
        self.classes_ = classes

    def predict_proba(self, X: Any) -> Array:
        """[n, classes] probabilities in the order of `classes_`, averaged over samples."""
        self._only(bool(len(self.classes_)), "predict_proba", "classes", "predict and interval")
        return self._predict(X).mean.numpy()

    def predict(self, X: Any) -> Array:
        """[n] the most probable class, or the mean of the target ([n, targets] with several)."""
        mean = self._predict(X).mean.numpy()
        if len(self.classes_):
            return np.asarray(self.classes_[mean.argmax(-1)])
        return _flat(mean)

    def uncertainty(self, X: Any) -> Uncertainty:
        """Total uncertainty, and its aleatoric and epistemic parts."""
        found = self._predict(X)
        fields = found.total, found.aleatoric, found.epistemic
        return Uncertainty(*(each.numpy() if len(self.classes_) else _flat(each.numpy())
                             for each in fields))  # fmt: skip

    def interval(self, X: Any, level: float = 0.95) -> tuple[Array, Array]:
        """Lower and upper ends of the interval with coverage `level`."""
        self._only(not len(self.classes_), "interval", "regressions", "predict_proba")
        if not 0 < level < 1:
            raise UserError(f"level is {level}; it must be between 0 and 1.")
        found = self._predict(X)
        half = half_width(found, level)
        return _flat((found.mean - half).numpy()), _flat((found.mean + half).numpy())

    def score(self, X: Any, y: Any) -> float:
        """Accuracy, or R^2 of a regression."""
        from sklearn.metrics import accuracy_score, r2_score  # takes a second

        measure = accuracy_score if len(self.classes_) else r2_score
        predicted = self.predict(X)
        truth = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
        if len(truth) != len(predicted):
            raise UserError(f"y has {len(truth)} targets for {len(predicted)} points.")
        return float(measure(truth, predicted))

    def __repr__(self) -> str:
        whose = f"of {self._client!r}" if self._kind == "personal" else "of all clients"
        return f"<{self._kind} model {whose}>"

    def _predict(self, X: Any) -> Prediction:
        ready = self._points(X)
        parts = [self._fitted.predict(self._client, x, kind=self._kind) for x in ready.split(BLOCK)]
        return Prediction(*(torch.cat(field) for field in zip(*parts, strict=True)))

    def _points(self, X: Any) -> Tensor:
        """As the network sees them."""
        preparation = self._fitted.preparations[0]
        if isinstance(X, str | Path):
            return inputs.read(Path(X), preparation, self._client).x
        if preparation.kind != "array":
            raise UserError(
                f"This model was trained on {preparation.kind}; give the path of a file of points, "
                "of the kind that it was trained on."
            )
        raw = memory.points(X, "X", preparation.shape)
        if preparation.levels and getattr(X, "dtype", None) in (np.uint8, torch.uint8):
            raw = raw / 255
        return preparation.scale(raw, self._client)

    def _only(self, holds: bool, name: str, what: str, instead: str) -> None:
        if not holds:
            raise UserError(f"{name} is for {what}; this model has {instead}.")


class Personal(Mapping[Any, Predictor]):
    """Client -> its personal model."""

    def __init__(self, names: Sequence[Any], fitted: Fitted, classes: Array) -> None:
        self._names, self._fitted, self._classes = list(names), fitted, classes

    def __getitem__(self, name: Any) -> Predictor:
        if name not in self._names:
            known = [str(each) for each in self._names]
            hint = did_you_mean(str(name), known, otherwise=f"there are {shorten(known)}")
            raise UserError(f"There is no client {name!r}{hint}")
        return Predictor(self._fitted, str(name), "personal", self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<personal models of {len(self)} clients>"


def _flat(values: Array) -> Array:
    """[n] for one target, [n, targets] for several."""
    return values[:, 0] if values.shape[1] == 1 else values
