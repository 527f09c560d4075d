"""`corefed predict`: predictions for new points, their uncertainty, and a review flag.

One row per point. Classification: the predicted class and its probability, all probabilities,
total, aleatoric and epistemic uncertainty in nats. Regression, in the target's unit: mean,
interval, standard deviation and its aleatoric and epistemic parts. `review` means that a person
should look; `selective.py` chooses the threshold on the run's held-out points.

The interval is that of a Gaussian with the mean and variance of the mixture over posterior samples.
Quantiles of the mixture are worse with few samples: with means spread three times as wide as the
noise, 95 % quantiles of ten samples covered 87.5 % of the targets, the Gaussian interval 90 %
(fifty samples: both 94 to 95 %).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.bayes.uncertainty import Prediction
from corefed.data.inputs import Inputs
from corefed.data.preparation import Preparation
from corefed.training import fitted
from corefed.training.fitted import Fitted
from corefed.use import selective
from corefed.use.selective import Threshold

BLOCK = 4096
"""Points per forward pass."""
BY = ("total", "epistemic", "confidence")
NEAREST = 1e-6
"""Nearest to 0 and 1 for errors and confidences: beyond, millions of held-out points are needed."""


@dataclass(frozen=True)
class PredictionSettings:
    """How to flag predictions, and which interval to give."""

    by: str = "total"
    """The uncertainty that decides on review; confidence means 1 - the largest probability."""
    target_error: float = 0.05
    """Largest error rate among unflagged predictions."""
    confidence: float = 0.9
    """Confidence level of the target_error guarantee, over the draw of the held-out points."""
    tolerance: float | None = None
    """Regression: a prediction is wrong if the target is further than this from its mean."""
    level: float = 0.95
    """Coverage of the prediction interval (regression)."""

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise UserError(f"--by is {self.by!r}; it must be {', '.join(BY[:-1])} or {BY[-1]}.")
        for flag in ("target_error", "confidence", "level"):
            value = getattr(self, flag)
            if not NEAREST <= value <= 1 - NEAREST:
                name = flag.replace("_", "-")
                raise UserError(f"--{name} is {value:g}; it must be above 0 and below 1.")
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise UserError(f"--tolerance is {self.tolerance:g}; it must be above 0 and finite.")


class Flag(NamedTuple):
    """A threshold and its source."""

    threshold: Threshold
    source: str  # "client", "run" (all its clients) or "none"
    notes: tuple[str, ...]


class Predictions(NamedTuple):
    """Of n points, in the target's own unit."""

    said: Prediction
    review: Tensor | None  # [n] bool; None for a regression without a tolerance
    flag: Flag | None
    notes: tuple[str, ...]


def predict(
    model: Fitted,
    client: str,
    inputs: Inputs,
    settings: PredictionSettings,
    *,
    seed: int | None = None,
    kind: str = "",
    on_block: Callable[[int], None] = lambda done: None,
) -> Predictions:
    """Predictions with review flags; `on_block` gets the number of points done."""
    g, _ = model.place(client, seed)
    preparation = model.preparations[g]
    kind = kind_of(model, kind)
    check(settings, preparation)
    notes, flag = list(inputs.notes), None
    if preparation.labels or settings.tolerance is not None:
        flag = flag_for(model, client, settings, seed=seed, kind=kind)
        notes += flag.notes
    else:
        notes.append("There is no column `review`: give --tolerance to say what an error is.")
    parts = []
    for x in inputs.x.split(BLOCK):
        parts.append(model.predict(client, x, seed=seed, kind=kind))
        on_block(sum(len(part.mean) for part in parts))
    said = Prediction(*(torch.cat(field) for field in zip(*parts, strict=True)))
    review = None
    if flag is not None:
        review = ~(score(said.mean, said.total, said.epistemic, settings.by) < flag.threshold.value)
    return Predictions(said, review, flag, tuple(notes))


def kind_of(model: Fitted, wanted: str) -> str:
    """personal or global: as wanted, or by default the first that the run has."""
    if wanted and wanted not in model.kinds:
        has = " and ".join(model.kinds)
        raise UserError(f"The run in {model.folder} has no {wanted} model; it has {has}.")
    return wanted or model.kinds[0]


def check(settings: PredictionSettings, preparation: Preparation) -> None:
    """Refuse settings that do not fit the task."""
    if preparation.labels and settings.tolerance is not None:
        raise UserError("--tolerance is for regressions; this run predicts classes.")
    if not preparation.labels and settings.by == "confidence":
        raise UserError("--by confidence is for classes; a regression has total and epistemic.")


def score(mean: Tensor, total: Tensor, epistemic: Tensor, by: str) -> Tensor:
    """[n] the uncertainty that is compared with the threshold, in float32 as in the files.

    With several targets it is the largest standard deviation.
    """
    if by == "confidence":
        return 1 - mean.float().amax(-1)
    value = (epistemic if by == "epistemic" else total).float()
    return value if value.ndim == 1 else value.sqrt().amax(-1)


# --- the threshold --------------------------------------------------------------------------------


def flag_for(
    model: Fitted,
    client: str,
    settings: PredictionSettings,
    *,
    seed: int | None = None,
    kind: str = "",
) -> Flag:
    """The threshold for a client, from its own held-out points, or from those of all clients.

    These are two guarantees, each at the confidence level. The second is about the average over
    clients. Clients' numbers of points are fixed, which makes its tests conservative: a sum of
    errors at different rates varies less than a binomial (Hoeffding 1956).
    """
    kind, (g, i) = kind_of(model, kind), model.place(client, seed)
    u, wrong, row = held_out(model, settings, g, kind)
    target, confidence = settings.target_error, settings.confidence
    own = row == i
    mine = selective.threshold(u[own], wrong[own], target, confidence)
    if mine.kept:
        return Flag(mine, "client", ())
    why = _why(mine.points, target, confidence)
    promise = f"an error of {target:.3g} among the kept at confidence {confidence:.3g}"
    if len(model.names) > 1:
        everyone = selective.threshold(u, wrong, target, confidence)
        if everyone.kept:
            note = (
                f"{client} has {why} to promise {promise}; the threshold is from the "
                f"{everyone.points} held-out points of all {len(model.names)} clients, and the "
                "promise is about their average."
            )
            return Flag(everyone, "run", (note,))
        why = _why(everyone.points, target, confidence)
    needed = selective.points_needed(u, wrong, target, confidence)
    advice = (
        f"it takes about {needed} held-out points"
        if needed is not None
        else "more points like these would not help; raise --target-error"
    )
    note = f"Everything is flagged: there are {why} to promise {promise}; {advice}."
    return Flag(Threshold(-math.inf, len(u), 0, 0), "none", (note,))


def _why(points: int, target: float, confidence: float) -> str:
    few = points < selective.fewest(target, confidence)
    words = "too few held-out points" if few else "too many errors in the held-out points"
    return f"{words} ({points})"


def held_out(
    model: Fitted, settings: PredictionSettings, g: int, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Uncertainty, wrong or not, and client of the held-out points of a seed."""
    tensors = fitted.read_tensors(model.folder, fitted.HELD_OUT)
    per_run, preparation = len(model.names), model.preparations[g]
    mine = (tensors["row"] // per_run) == g
    y, row = tensors["y"][mine], tensors["row"][mine] % per_run
    mean, total, epistemic = (
        tensors[f"{kind}.{name}"][mine] for name in ("mean", "total", "epistemic")
    )
    if preparation.labels:
        return score(mean, total, epistemic, settings.by), mean.argmax(-1) != y, row
    off = (y.double() - mean.double()).abs()
    far = (off > (settings.tolerance or math.inf)).any(-1)
    return score(mean, total, epistemic, settings.by), far, row


# --- against the truth ----------------------------------------------------------------------------


def truth(
    found: Predictions, y: Tensor, settings: PredictionSettings, labels: int
) -> dict[str, Any]:
    """Metrics of the predictions where the input has the truth."""
    said, review = found.said, found.review
    result: dict[str, Any] = {}
    if labels:
        wrong = said.mean.argmax(-1) != y
        result["accuracy"] = 1 - _mean(wrong)
    else:
        off = (y.double() - said.mean).abs()
        result["rmse"] = math.sqrt(_mean(off.square()))
        result["interval_coverage"] = _mean(off <= half_width(said, settings.level))
        wrong = (off > (settings.tolerance or math.inf)).any(-1)
    if review is not None:
        result["error"] = _mean(wrong)
        result["error_kept"] = _mean(wrong[~review]) if bool((~review).any()) else None
        result["error_flagged"] = _mean(wrong[review]) if bool(review.any()) else None
    return result


def half_width(said: Prediction, level: float) -> Tensor:
    """[n, d] half width of the central interval of N(mean, total)."""
    return NormalDist().inv_cdf((1 + level) / 2) * said.total.sqrt()


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
