"""Metrics of a model on the held-out points of its run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from corefed.training import fitted, scoring
from corefed.training.fitted import Fitted
from corefed.use import selective


def held_out(model: Fitted, kind: str, g: int, client: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and total of the held-out points of a client, or of all clients of a seed."""
    tensors = fitted.read_tensors(model.folder, fitted.HELD_OUT)
    per_run = len(model.names)
    row = tensors["row"]
    mine = row // per_run == g
    if client is not None:
        mine &= row % per_run == model.names.index(client)
    if not bool(mine.any()) or f"{kind}.mean" not in tensors:
        width = len(model.preparations[g].labels) or len(model.preparations[g].targets)
        return tensors["y"][:0], torch.zeros(0, width), torch.zeros(0, width)
    return tensors["y"][mine], tensors[f"{kind}.mean"][mine], tensors[f"{kind}.total"][mine]


def measure(model: Fitted, kind: str, g: int, client: str | None) -> dict[str, Any]:
    """Metrics on held-out points, with a 95 % interval where there is a simple one."""
    y, mean, total = held_out(model, kind, g, client)
    n = len(y)
    found: dict[str, Any] = {"points": n}
    if not n:
        return found
    if model.preparations[g].labels:
        each = scoring.score_classes(mean, y)
        right = int(each["correct"].sum())
        found["accuracy"] = {"value": right / n, "interval": _wilson(right, n)}
        found["nll"] = _mean(each["nll"])
        found["brier"] = _mean(each["brier"])
        found["ece"] = {"value": selective.reliability(mean, y).ece}
        return found
    each = scoring.score_targets(torch.cat([mean, total], -1), y)
    squares = _mean(each["squared_error"])
    low, high = squares["interval"]
    found["rmse"] = {
        "value": math.sqrt(squares["value"]),
        "interval": [math.sqrt(max(0.0, low)), math.sqrt(high)],
    }
    found["nll"] = _mean(each["nll"])
    return found


def _wilson(right: int, n: int) -> list[float]:
    from scipy.stats import binomtest

    interval = binomtest(right, n).proportion_ci(0.95, method="wilson")
    return [float(interval.low), float(interval.high)]


def _mean(values: Tensor) -> dict[str, Any]:
    """With the interval of a normal distribution, which is right for many points."""
    value = float(values.mean())
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return {"value": value, "interval": [value - 1.96 * error, value + 1.96 * error]}
