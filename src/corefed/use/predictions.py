"""`corefed predict`: predictions for new points, their uncertainty, and a review flag.

One row per point. Classification: the predicted class and its probability, all probabilities,
total, aleatoric and epistemic uncertainty in nats. Regression, in the target's unit: mean,
interval, standard deviation and its aleatoric and epistemic parts. `review` means that a person
should look; `review.py` chooses the threshold on the run's held-out points. A point unlike what the
model was trained on (`training/reach.py`) is always for review, and its uncertainty is raised.

The interval is that of a Gaussian with the mean and variance of the mixture over posterior samples.
Quantiles of the mixture are worse with few samples: with means spread three times as wide as the
noise, 95 % quantiles of ten samples covered 87.5 % of the targets, the Gaussian interval 90 %
(fifty samples: both 94 to 95 %).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.bayes.uncertainty import Prediction
from corefed.data.inputs import Inputs
from corefed.training.fitted import SHARED, Fitted
from corefed.training.reach import Outside
from corefed.use import review
from corefed.use.review import Flag, PredictionSettings

BLOCK = 4096
"""Points per forward pass."""
FEW = 3
"""Points outside that a note names."""


class Predictions(NamedTuple):
    """Of n points, in the target's own unit."""

    said: Prediction
    review: Tensor | None  # [n] bool; None for a regression without a tolerance
    flag: Flag | None
    notes: tuple[str, ...]
    outside: Outside | None = None  # None: an older run, which does not say how far it reaches
    at_targets: tuple[tuple[float, int], ...] = ()  # targets in reach, and points flagged there


def predict(
    model: Fitted,
    client: str | None,
    inputs: Inputs,
    settings: PredictionSettings,
    *,
    seed: int | None = None,
    kind: str = "",
    on_block: Callable[[int], None] = lambda done: None,
) -> Predictions:
    """Predictions with review flags; `on_block` gets the number of points done.

    Without a client, by the shared model.
    """
    kind = review.kind_of(model, SHARED if client is None else kind)
    name = model.names[0] if client is None else client
    preparation = model.preparations[model.place(name, seed)[0]]
    review.check(settings, preparation)
    notes, flag = list(inputs.notes), None
    if preparation.labels or settings.tolerance is not None:
        flag = review.flag_for(model, client, settings, seed=seed, kind=kind)
        notes += flag.notes
    else:
        notes.append("There is no column `review`: give --tolerance to say what an error is.")
    parts, places = [], []
    for x in inputs.x.split(BLOCK):
        parts.append(model.predict(name, x, seed=seed, kind=kind))
        places.append(model.outside(x, client if kind == "personal" else None, seed))
        on_block(sum(len(part.mean) for part in parts))
    said = Prediction(*(torch.cat(field) for field in zip(*parts, strict=True)))
    outside = _joined(places)
    flagged, at_targets = None, list[tuple[float, int]]()
    if flag is not None:
        u = review.score(said.mean, said.total, said.epistemic, settings.by)
        if outside is not None:
            u = u.masked_fill(outside.far, math.inf)
        flagged = ~(u < flag.threshold.value)
        for target, threshold in flag.reachable:
            at_targets.append((target, int((~(u < threshold.value)).sum())))
    if outside is not None:
        said = model.widen(said, outside.far, seed)
    notes += _outside_notes(outside, inputs.ids)
    return Predictions(said, flagged, flag, tuple(notes), outside, tuple(at_targets))


def _joined(places: Sequence[Outside | None]) -> Outside | None:
    known = [each for each in places if each is not None]
    if not known:
        return None
    return Outside(torch.cat([each.far for each in known]), sum((each.why for each in known), ()))


def _outside_notes(outside: Outside | None, ids: Sequence[str]) -> list[str]:
    if outside is None:
        return [
            "The run was made by an older version, which kept nothing to notice points unlike its "
            "training points by; run it again, and they are flagged."
        ]
    rows = outside.far.nonzero().flatten().tolist()
    if not rows:
        return []
    few = "; ".join(f"{ids[row]}: {outside.why[row]}" for row in rows[:FEW])
    more = f"; and {len(rows) - FEW} more" if len(rows) > FEW else ""
    return [
        f"{len(rows)} of {len(ids)} points are outside what the model was trained on, and are for "
        f"review: {few}{more}."
    ]


# --- against the truth ----------------------------------------------------------------------------


def truth(
    found: Predictions, y: Tensor, settings: PredictionSettings, labels: int
) -> dict[str, Any]:
    """Metrics of the predictions where the input has the truth."""
    said, flagged = found.said, found.review
    result: dict[str, Any] = {}
    if labels:
        wrong = said.mean.argmax(-1) != y
        result["accuracy"] = 1 - _mean(wrong)
    else:
        off = (y.double() - said.mean).abs()
        result["rmse"] = math.sqrt(_mean(off.square()))
        result["interval_coverage"] = _mean(off <= half_width(said, settings.level))
        wrong = (off > (settings.tolerance or math.inf)).any(-1)
    if flagged is not None:
        result["error"] = _mean(wrong)
        result["error_kept"] = _mean(wrong[~flagged]) if bool((~flagged).any()) else None
        result["error_flagged"] = _mean(wrong[flagged]) if bool(flagged.any()) else None
    return result


def half_width(said: Prediction, level: float) -> Tensor:
    """[n, d] half width of the central interval of N(mean, total)."""
    return NormalDist().inv_cdf((1 + level) / 2) * said.total.sqrt()


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
