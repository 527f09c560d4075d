"""Scores of predictions, their sums over points, and the metrics that follow from sums.

Sums can be added over clients and machines, so they are what is sent and pooled; no prediction is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from corefed.base.types import Tree

BINS = 15
"""Bins of the calibration error, as in Guo et al. (2017) and most papers."""

SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest probability in an NLL: 87 nats, not infinity, where one underflows to 0."""


def score_classes(probabilities: Tensor, y: Tensor) -> Tree:
    """The scores of each classified point: [C, n] each, in float64."""
    p = probabilities.double()
    confidence, guess = p.max(-1)
    true = p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return {
        "correct": (guess == y).double(),
        "confidence": confidence,
        "nll": -true.clamp_min(SMALLEST).log(),
        "brier": p.square().sum(-1) - 2 * true + 1,  # sum_c (p_c - [c = y])^2
    }


def score_targets(prediction: Tensor, y: Tensor) -> Tree:
    """Squared error (mean over targets) and NLL of each point, [C, n] each."""
    mean, variance = prediction.double().chunk(2, -1)
    error = (y.double() - mean).square()
    nll = 0.5 * (error / variance + variance.log() + math.log(2 * math.pi))
    return {"squared_error": error.mean(-1), "nll": nll.sum(-1)}


def totals(each: Tree, y: Tensor, classes: int) -> Tree:
    """Sums of M points' scores ([M] each), in float64; those of several clients can be added.

    They are all that a client of a federation sends about its test points.
    """
    count = torch.tensor(float(len(y)), dtype=torch.float64)
    if not classes:
        return {"points": count, **{name: value.sum() for name, value in each.items()}}
    # ECE = sum_b (M_b / M) |accuracy_b - confidence_b| over equal bins ((b-1)/B, b/B]
    index = bins(each["confidence"])
    gap = torch.zeros(BINS, dtype=torch.float64)
    return {
        "points": count,
        "correct": each["correct"].sum(),
        "nll": each["nll"].sum(),
        "brier": each["brier"].sum(),
        "gap": gap.index_add_(0, index, each["correct"] - each["confidence"]),
        "class_points": torch.bincount(y, minlength=classes).double(),
        "class_correct": torch.bincount(y, each["correct"], minlength=classes),
    }


def totals_by_client(each: Tree, y: Tensor, real: Tensor, classes: int) -> Tree:
    """`totals` of every client at once: scores are [C, n], totals [C] or [C, ...]."""
    zero = torch.zeros((), dtype=torch.float64)
    kept = {name: torch.where(real, value, zero) for name, value in each.items()}
    count = real.double()
    if not classes:
        return {"points": count.sum(1), **{name: value.sum(1) for name, value in kept.items()}}
    gap, (C, _) = kept["correct"] - kept["confidence"], real.shape

    def spread(width: int, index: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(C, width, dtype=torch.float64).scatter_add_(1, index, values)

    return {
        "points": count.sum(1),
        **{name: kept[name].sum(1) for name in ("correct", "nll", "brier")},
        "gap": spread(BINS, bins(kept["confidence"]), gap),
        "class_points": spread(classes, y, count),
        "class_correct": spread(classes, y, kept["correct"]),
    }


def bins(confidence: Tensor) -> Tensor:
    """The bin of each confidence, from 0."""
    return (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)


def metrics_of(sums: Tree) -> dict[str, float]:
    """Metrics from totals; NaN without points."""
    mean = {name: (value / sums["points"]).abs().sum().item() for name, value in sums.items()}
    nll = (sums["nll"] / sums["points"]).item()  # the only one that can be negative
    if "squared_error" in sums:
        return {"rmse": math.sqrt(mean["squared_error"]), "nll": nll}
    return {
        "accuracy": mean["correct"],
        "nll": nll,
        "ece": mean["gap"],  # the sum over bins of absolute gaps
        "brier": mean["brier"],
    }


def named_metrics(models: Mapping[str, Tree]) -> dict[str, float]:
    """personal_accuracy, personal_nll, global_accuracy, ..."""
    return {
        f"{name}_{metric}": value
        for name, sums in models.items()
        for metric, value in metrics_of(sums).items()
    }


def overconfidence(sums: Tree) -> float:
    """Mean confidence - accuracy: above 0 too bold on average, below 0 too cautious."""
    return -(sums["gap"].sum() / sums["points"]).item()


def accuracy_by_class(sums: Tree) -> list[float | None]:
    """Accuracy per class; None for a class without test points."""
    shares = (sums["class_correct"] / sums["class_points"]).tolist()
    has = sums["class_points"].tolist()
    return [share if points else None for share, points in zip(shares, has, strict=True)]


def first_metric(sums: Tree) -> float | None:
    """Accuracy or RMSE; None without points."""
    return next(iter(metrics_of(sums).values())) if sums["points"] > 0 else None


def add(many: Sequence[Tree]) -> Tree:
    """The totals of several clients together."""
    return {name: torch.stack([one[name] for one in many]).sum(0) for name in many[0]}


def means_of(report: Tree, runs: int) -> dict[str, list[float | None]]:
    """Means over the clients that have a number, per run; None where none has."""
    means = {k: v.double().view(runs, -1).nanmean(-1).tolist() for k, v in report.items()}
    return {k: [None if math.isnan(mean) else mean for mean in v] for k, v in means.items()}


def by_label(
    classes: list[dict[str, list[float | None]]], labels: tuple[str, ...]
) -> dict[str, dict[str, list[float | None]]]:
    """model -> class -> accuracy per seed, for the classes that some seed tests."""
    names = classes[0] if classes else {}
    table = {
        name: {label: [run[name][c] for run in classes] for c, label in enumerate(labels)}
        for name in names
    }
    return {
        name: {label: each for label, each in row.items() if set(each) != {None}}
        for name, row in table.items()
    }
