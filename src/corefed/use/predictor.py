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
from corefed.data import frames, inputs, memory
from corefed.data.cells import shorten
from corefed.data.preparation import Preparation
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
    """One model. X is an array [n, features], a DataFrame, or the path of a file of points."""

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

    def outside(self, X: Any) -> list[str]:
        """Per point, why it is unlike what the model was trained on; empty where it is not."""
        found = self._fitted.outside(self._points(X), self._whose())
        if found is None:
            raise UserError("The run was made by an older version, which kept nothing to tell by.")
        return list(found.why)

    def _whose(self) -> str | None:
        return self._client if self._kind == "personal" else None

    def _predict(self, X: Any) -> Prediction:
        """With the uncertainty of points outside raised."""
        ready, parts = self._points(X), []
        for x in ready.split(BLOCK):
            part = self._fitted.predict(self._client, x, kind=self._kind)
            outside = self._fitted.outside(x, self._whose())
            parts.append(part if outside is None else self._fitted.widen(part, outside.far))
        return Prediction(*(torch.cat(field) for field in zip(*parts, strict=True)))

    def _points(self, X: Any) -> Tensor:
        """As the network sees them."""
        preparation = self._fitted.preparations[0]
        if isinstance(X, str | Path):
            return inputs.read(Path(X), preparation, self._client).x
        return preparation.scale(raw_points(X, preparation), self._client)

    def _only(self, holds: bool, name: str, what: str, instead: str) -> None:
        if not holds:
            raise UserError(f"{name} is for {what}; this model has {instead}.")


class Personal(Mapping[Any, Predictor]):
    """Client -> its personal model."""

    def __init__(
        self, names: Sequence[Any], fitted: Fitted, classes: Array, joined: Mapping[Any, Fitted]
    ) -> None:
        self._names, self._fitted, self._classes = [*names, *joined], fitted, classes
        self._joined = joined  # clients that joined after training

    def __getitem__(self, name: Any) -> Predictor:
        if name not in self._names:
            known = [str(each) for each in self._names]
            hint = did_you_mean(str(name), known, otherwise=f"there are {shorten(known)}")
            raise UserError(f"There is no client {name!r}{hint}")
        fitted = self._joined.get(name, self._fitted)
        return Predictor(fitted, str(name), "personal", self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<personal models of {len(self)} clients>"


def raw_points(X: Any, preparation: Preparation) -> Tensor:
    """An array or a DataFrame as training had it, before scaling."""
    if preparation.kind == "table":
        named = [column.name for column in preparation.columns]
        if frames.is_frame(X):
            return frames.encode(preparation.columns, frames.read(X), "X")
        if len(named) < sum(column.width for column in preparation.columns):
            raise UserError(
                "This model was trained on a table with categories or gaps; give a DataFrame with "
                "its columns, or the path of a file."
            )
        return memory.points(X, "X", preparation.shape).double()  # by place, not by name
    if preparation.kind != "array":
        raise UserError(
            f"This model was trained on {preparation.kind}; give the path of a file of points, "
            "of the kind that it was trained on."
        )
    raw = memory.points(X, "X", preparation.shape)
    if preparation.levels and getattr(X, "dtype", None) in (np.uint8, torch.uint8):
        raw = raw / 255
    return raw


def _flat(values: Array) -> Array:
    """[n] for one target, [n, targets] for several."""
    return values[:, 0] if values.shape[1] == 1 else values
