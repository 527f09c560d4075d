"""The numbers in clients' answers, checked before they are used.

They come as JSON from machines that the server does not control. They do not change the model, and
a value that is no plausible number does not change a table either. Slopes alone go further: they
decide on the temperature that clients fit their own around, between 0.2 and 5.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from corefed.base.types import Method, Tree
from corefed.bayes.temperature import GRID, LEAST, MOST
from corefed.federation.protocol import Reply
from corefed.training import cost, scoring
from corefed.training.scoring import BINS, by_label, means_of

MODELS = ("personal", "global", "localized")
LARGEST = 100.0
"""Bound of a point's slope: no probability counts as less than e^-88."""


def number(value: object, least: float = -math.inf, most: float = math.inf) -> float | None:
    """A finite number within bounds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and least <= found <= most else None


def read_seconds(reply: Reply) -> float:
    """How long a client says it worked; 0 where that is missing or implausible."""
    return number(reply.figures.get("seconds"), 0.0, 1e9) or 0.0


def training_numbers(method: Method, replies: Sequence[Reply]) -> dict[str, Any]:
    """The numbers of a round's line about training, from the clients that share them."""
    losses = [number(reply.figures.get("loss")) for reply in replies]
    known = [loss for loss in losses if loss is not None]
    processed = [number(reply.figures.get("processed"), 0, 1e15) for reply in replies]
    tables = [reply.figures.get("coreset") for reply in replies]
    rows = [table if isinstance(table, dict) else {} for table in tables]
    names = sorted({name for row in rows for name in row if isinstance(name, str)})[:20]
    values = {name: [number(row.get(name)) for row in rows] for name in names}
    report = {
        name: torch.tensor([math.nan if each is None else each for each in found])
        for name, found in values.items()
    }
    looked = [number(reply.figures.get("selection"), 0, 1e15) for reply in replies]
    spent = None if None in looked else [sum(each or 0.0 for each in looked)]
    line: dict[str, Any] = {
        "loss": [sum(known) / len(known) if known else None],
        "examples": [int(sum(each or 0 for each in processed))],
        "coreset": means_of(report, 1),
    }
    complete = None not in processed
    return line | cost.of_round(method, line["examples"], spent, complete=complete)


def read_totals(
    figures: Mapping[str, Any], classes: int, most: int, part: str = "models"
) -> dict[str, Tree]:
    """A client's sums over its test points, by model; ValueError where they cannot be such sums.

    Those over its validation points are the part "validation", which it need not have.
    """
    models = figures.get(part, None if part == "models" else {})
    if not isinstance(models, dict) or not set(models) <= set(MODELS):
        raise ValueError("its test results are of unknown models")
    return {name: _totals(name, each, classes, most) for name, each in models.items()}


def read_slopes(figures: Mapping[str, Any], validated: Mapping[str, Tree], classes: int) -> Tree:
    """A client's slopes by model, [65] each; ValueError where they cannot be slopes.

    They rise with the temperature, and of classes no point has one above the largest NLL.
    """
    models = figures.get("slopes", {})
    if not isinstance(models, dict) or not set(models) <= set(validated):
        raise ValueError("its slopes are of models without validation points")
    found = {}
    for model, values in models.items():
        most = LARGEST * validated[model]["points"].item() if classes else math.inf
        read = [number(v, -most, most) for v in values] if isinstance(values, list) else []
        if len(read) != len(GRID) or None in read:
            raise ValueError(f"its slopes of the {model} model are not {len(GRID)} such numbers")
        found[model] = torch.tensor(read, dtype=torch.float64)
        slack = 1e-9 * found[model].abs().amax()  # sums round
        if bool((found[model].diff() < -slack).any()):
            raise ValueError(f"its slopes of the {model} model fall")
    return found


def read_temperatures(figures: Mapping[str, Any]) -> dict[str, float]:
    """A client's own temperatures by model; those that are none are left out."""
    models = figures.get("temperature")
    given = models if isinstance(models, dict) else {}
    read = {model: number(given.get(model), LEAST, MOST) for model in MODELS}
    return {model: T for model, T in read.items() if T is not None}


def _totals(model: str, sums: object, classes: int, most: int) -> Tree:
    """The sums of one model. Each has a bound that follows from the number of points."""
    if not isinstance(sums, dict):
        raise ValueError(f"its test results of the {model} model are no table")
    points = number(sums.get("points"), 1, most)
    if points is None or points != int(points):
        raise ValueError(f"its number of test points is {sums.get('points')!r}")
    if classes:
        bounds = {
            "correct": (0.0, points, 0),
            "nll": (0.0, 1e3 * points, 0),  # no probability counts as less than e^-88
            "brier": (0.0, 2 * points, 0),
            "gap": (-points, points, BINS),
            "class_points": (0.0, points, classes),
            "class_correct": (0.0, points, classes),
        }
    else:
        bounds = {"squared_error": (0.0, 1e30, 0), "nll": (-1e30, 1e30, 0)}
    if set(sums) != {"points", *bounds}:
        raise ValueError(f"its test results of the {model} model have other names than expected")
    found = {"points": torch.tensor(points, dtype=torch.float64)}
    for name, (least, most_, width) in bounds.items():
        slack = 1e-6 * max(1.0, abs(most_))  # sums of probabilities round
        values = sums[name] if width else [sums[name]]
        if not isinstance(values, list) or len(values) != max(1, width):
            raise ValueError(f"its {name} of the {model} model has another length than expected")
        read = [number(value, least - slack, most_ + slack) for value in values]
        if None in read:
            raise ValueError(f"its {name} of the {model} model is out of bounds")
        each = torch.tensor(read, dtype=torch.float64)
        found[name] = each if width else each[0]
    return found


def share(points: float, most: float) -> float:
    """The part of its weight with which a client of so many points counts; 1 unless it has more."""
    return min(1.0, most / points) if points > 0 else 1.0


def bounded(sums: Tree, most: float) -> Tree:
    """The totals as if they were of at most so many points."""
    part = share(sums["points"].item(), most)
    return sums if part == 1 else {name: value * part for name, value in sums.items()}


def medians(found: Mapping[str, Mapping[str, Tree]]) -> dict[str, list[float]]:
    """The median over clients of each metric, which a minority of them cannot choose."""
    rows = [scoring.named_metrics(each) for each in found.values()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [statistics.median(row[name] for row in rows if name in row)] for name in names}


def score_numbers(
    found: Mapping[str, Mapping[str, Tree]],
    names: Sequence[str],
    classes: Sequence[str],
    most: float = math.inf,
) -> dict[str, Any]:
    """An evaluation as rounds.jsonl has it, from the totals of the clients that sent some.

    `most` is the number of points that one client counts for at most. `coverage` says how many
    clients the metrics are of, and what their median is.
    """
    models = list(dict.fromkeys(model for each in found.values() for model in each))
    if not models:
        return {}
    pooled = {
        model: scoring.add([bounded(each[model], most) for each in found.values() if model in each])
        for model in models
    }
    first = "personal" if "personal" in models else models[0]
    own = [found.get(name, {}).get(first) for name in names]
    line: dict[str, Any] = {
        "metrics": {k: [v] for k, v in scoring.named_metrics(pooled).items()},
        "clients": [[None if sums is None else scoring.first_metric(sums) for sums in own]],
        "classes": {},
        "overconfidence": {},
        "coverage": {"clients": len(found), "of": len(names), "median": medians(found)},
    }
    if classes:
        bold = {model: [scoring.overconfidence(sums)] for model, sums in pooled.items()}
        line["overconfidence"] = bold
        by_class = {model: scoring.accuracy_by_class(sums) for model, sums in pooled.items()}
        line["classes"] = by_label([by_class], tuple(classes))
    return line
