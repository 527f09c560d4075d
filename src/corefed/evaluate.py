"""Metrics of every model a method has, on the clients' own test points, pooled over clients.

A method that asks for it has its personal models tried on the other clients' test points as well
("others"). Classification, from Monte-Carlo averaged probabilities p: accuracy, overall and by
class, NLL (nats a point), ECE and Brier score. Regression, from the predictive's mean and variance:
RMSE and the NLL of a Gaussian with these moments. Accuracies are fractions, not percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.runtime.local import Clients
from corefed.types import ClientData, Method, Tree

BINS = 15
"""Bins of the calibration error: Guo et al. (2017), the number that most papers quote."""

SMALLEST = torch.finfo(torch.float32).tiny
"""A probability that underflowed to 0 counts as this: 87 nats and not infinity."""


class Evaluation(NamedTuple):
    """One entry a run (seed) in each list."""

    metrics: list[dict[str, float]]  # personal_accuracy, personal_nll, global_accuracy, ...
    clients: list[list[float | None]]  # personal accuracy (or RMSE); None without test points
    classes: list[dict[str, list[float | None]]]  # model -> accuracy by class; empty for regression


def evaluate(
    clients: Clients,
    method: Method,
    servers: Sequence[Tree],
    test: ClientData,
    round_: int,
    draws: int,
    classes: int,
) -> Evaluation:
    """Every model of `method.models` on the test points; `classes` is 0 for regression.

    The models of a client are evaluated with the same draws, so that their differences are not
    noise. A client holds `draws` times its parameters, hence chunks that much smaller than those
    of training.
    """
    runs, per_run = len(servers), clients.per_run
    size = method.noise[-1] if method.noise else 0
    draws = draws if size else 1  # a point estimate needs none
    points: dict[str, list[Tree]] = {}
    away: list[Tree] = []
    chunk = max(1, clients.chunk // draws)
    for start in range(0, runs * per_run, chunk):
        rows = range(start, min(start + chunk, runs * per_run))
        part = slice(rows.start, rows.stop)
        noise = clients.streams(rows, round_).normal("evaluate", draws, size)
        private = {name: value[part] for name, value in clients.private.items()}
        broadcast = clients.broadcast(servers, rows)
        train = ClientData(*(field[part] for field in clients.data))
        models = method.models(broadcast, private, train)
        for name, model in models.items():
            each = _of(method.predict(model, test.x[part], noise), test.y[part], classes)
            points.setdefault(name, []).append(each)
        if method.elsewhere and per_run > 1:
            own = models["personal"]
            away.append(_elsewhere(method, own, test, rows, per_run, noise, classes))
    real = (test.weight > 0).cpu()
    joined = {name: _joined(parts) for name, parts in points.items()}
    pool = pooled_points if classes else pooled_targets
    spans = [slice(g * per_run, (g + 1) * per_run) for g in range(runs)]
    metrics = [
        {
            f"{name}_{metric}": value
            for name, each in joined.items()
            for metric, value in pool(_masked(each, real, span))
        }
        for span in spans
    ]
    if away:
        there, others = _joined(away), _roll(real, range(len(real)), per_run)
        for span, mine in zip(spans, metrics, strict=True):
            pooled = pool(_masked(there, others, span))
            mine.update({f"others_{metric}": value for metric, value in pooled})
    labels = test.y.cpu()
    by_class = [
        {name: _by_class(each, labels, real, span, classes) for name, each in joined.items()}
        for span in spans
        if classes
    ]
    first = joined["personal" if "personal" in joined else next(iter(joined))]
    return Evaluation(metrics, _per_client(first, real, runs, pool), by_class)


def _of(prediction: Tensor, y: Tensor, classes: int) -> Tree:
    each = of_points(prediction, y) if classes else of_targets(prediction, y)
    return {name: value.cpu() for name, value in each.items()}


def _elsewhere(
    method: Method,
    model: Tree,
    test: ClientData,
    rows: range,
    per_run: int,
    noise: Tensor,
    classes: int,
) -> Tree:
    """Each client's model on the test points of all others of its run, side by side."""
    parts = []
    for shift in range(1, per_run):
        there = _neighbours(rows, shift, per_run)
        parts.append(_of(method.predict(model, test.x[there], noise), test.y[there], classes))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def _roll(values: Tensor, rows: range, per_run: int) -> Tensor:
    """[C, n] as [C, (per_run - 1) n]: what the other clients of the run have, in their order."""
    shifts = range(1, per_run)
    return torch.cat([values[_neighbours(rows, shift, per_run)] for shift in shifts], 1)


def _neighbours(rows: range, shift: int, per_run: int) -> list[int]:
    """The client `shift` places on in the same run."""
    return [row - row % per_run + (row + shift) % per_run for row in rows]


def _joined(parts: list[Tree]) -> Tree:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _by_class(each: Tree, y: Tensor, real: Tensor, span: slice, classes: int) -> list[float | None]:
    """Accuracy on the points of each class; None for a class without test points."""
    labels, correct = y[span][real[span]], each["correct"][span][real[span]]
    count = torch.bincount(labels, minlength=classes).double()
    right = torch.bincount(labels, correct, minlength=classes)
    shares = (right / count).tolist()
    return [share if has else None for share, has in zip(shares, count.tolist(), strict=True)]


def of_points(probabilities: Tensor, y: Tensor) -> Tree:
    """What each classified point adds to the metrics: [C, n] each, in float64."""
    p = probabilities.double()
    confidence, guess = p.max(-1)
    true = p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return {
        "correct": (guess == y).double(),
        "confidence": confidence,
        "nll": -true.clamp_min(SMALLEST).log(),
        "brier": p.square().sum(-1) - 2 * true + 1,  # sum_c (p_c - [c = y])^2
    }


def of_targets(prediction: Tensor, y: Tensor) -> Tree:
    """What each regression point adds: squared error (mean over targets) and NLL, [C, n] each."""
    mean, variance = prediction.double().chunk(2, -1)
    error = (y.double() - mean).square()
    nll = 0.5 * (error / variance + variance.log() + math.log(2 * math.pi))
    return {"squared_error": error.mean(-1), "nll": nll.sum(-1)}


Pooled = list[tuple[str, float]]


def pooled_points(each: Tree) -> Pooled:
    """Metrics of M points, [M] each."""
    return [
        ("accuracy", each["correct"].mean().item()),
        ("nll", each["nll"].mean().item()),
        ("ece", calibration_error(each["confidence"], each["correct"])),
        ("brier", each["brier"].mean().item()),
    ]


def pooled_targets(each: Tree) -> Pooled:
    return [
        ("rmse", math.sqrt(each["squared_error"].mean().item())),
        ("nll", each["nll"].mean().item()),
    ]


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """ECE = sum_b (M_b / M) |accuracy_b - confidence_b| over equal bins ((b-1)/B, b/B]."""
    index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, correct - confidence)
    return gap.abs().sum().item() / max(1, len(confidence))


def _masked(each: Tree, real: Tensor, part: slice) -> Tree:
    """The real points of some clients, in one row."""
    return {name: value[part][real[part]] for name, value in each.items()}


def _per_client(
    each: Tree, real: Tensor, runs: int, pool: Callable[[Tree], Pooled]
) -> list[list[float | None]]:
    """The first metric of every client, by run."""
    values = [
        pool(_masked(each, real, slice(c, c + 1)))[0][1] if real[c].any() else None
        for c in range(len(real))
    ]
    per_run = len(values) // runs
    return [values[g * per_run : (g + 1) * per_run] for g in range(runs)]
