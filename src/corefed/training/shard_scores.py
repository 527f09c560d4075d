"""Test the models of some clients, one total per client, and metrics from the totals of all.

A worker tests its own clients. It sends sums over each client's points (`scoring.totals`), not
predictions. Metrics are of the sums over all clients, added in the order of clients, so that they
do not depend on the number of workers beyond the predictions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.types import ClientData, Method, Tree, places
from corefed.data.clients import FederatedData
from corefed.training import others
from corefed.training.evaluate import Evaluation, score
from corefed.training.predicting import chunks
from corefed.training.scoring import (
    accuracy_by_class,
    named_metrics,
    overconfidence,
    totals_by_client,
)
from corefed.training.setup import Setup

OTHERS = "others"
"""The personal models on the points of the other clients, where clients share nothing."""


class Scores(NamedTuple):
    """Of C clients, by kind of model."""

    sums: dict[str, Tree]  # totals of each client, [C, ...] each
    confidence: Tree  # [C, m] of every point, padding included; empty for a regression


def score_clients(
    setup: Setup,
    servers: Sequence[Tree],
    points: ClientData,
    t: int,
    temperature: Mapping[str, Tensor],
    everyone: FederatedData | None = None,
    who: Sequence[int] | None = None,
) -> Scores:
    """Every model of the clients that are here, or of the rows `who`, on their own points.

    `everyone` has the test points of all clients, on which the models of clients that share nothing
    are tested too (`others.py`). Without anybody to test, names and shapes are as ever.
    """
    if who is not None and not who:
        some = score_clients(setup, servers, points, t, temperature, everyone, [0])
        none = {k: {n: v[:0] for n, v in sums.items()} for k, sums in some.sums.items()}
        return Scores(none, {k: v[:0] for k, v in some.confidence.items()})
    data, clients, run = setup.data, setup.clients, setup.experiment.run
    found: dict[str, list[Tree]] = {}
    sure: dict[str, list[Tensor]] = {}
    for rows, method, models, noise in chunks(
        clients, setup.method, servers, t, run.evaluate_draws, who
    ):
        part = places(rows)
        unit = data.unit.at(part) if data.unit else None
        y, real = points.y[part], points.weight[part] > 0
        for kind, model in models.items():
            own = temperature[kind][part] if kind in temperature else None
            each = score(method.predict(model, points.x[part], noise), y, data.classes, unit, own)
            found.setdefault(kind, []).append(
                totals_by_client(each, y.cpu(), real.cpu(), data.classes)
            )
            if data.classes:
                sure.setdefault(kind, []).append(each["confidence"])
        if everyone is not None and method.traits.sent == () and run.clients > 1:
            own = temperature["personal"][part] if "personal" in temperature else None
            away = _elsewhere(setup, method, models["personal"], everyone, rows, noise, own)
            found.setdefault(OTHERS, []).append(away)
    sums = {
        kind: {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        for kind, parts in found.items()
    }
    return Scores(sums, {kind: torch.cat(parts) for kind, parts in sure.items()})


def _elsewhere(
    setup: Setup,
    method: Method,
    model: Tree,
    everyone: FederatedData,
    rows: Sequence[int],
    noise: Tensor,
    temperature: Tensor | None,
) -> Tree:
    """Totals of each client's model on the test points of others of its run."""
    total, per_run = setup.experiment.run.clients, setup.clients.per_run
    # Row g n + i here is row g N + first + i of everyone.
    mine = [row // per_run * total + setup.first + row % per_run for row in rows]
    test, unit, device = everyone.test, everyone.unit, noise.device
    sums: Tree = {}
    for shift in others.shifts(total):
        there = others.neighbours(mine, shift, total)
        here = unit.at(there) if unit else None
        x, y, real = test.x[there].to(device), test.y[there], test.weight[there] > 0
        predicted = method.predict(model, x, noise).cpu()
        own = temperature.cpu() if temperature is not None else None
        each = score(predicted, y, everyone.classes, here, own)
        one = totals_by_client(each, y, real, everyone.classes)
        sums = {name: sums[name] + value for name, value in one.items()} if sums else one
    return sums


def summarise(
    scores: Scores, real: Tensor, runs: int, classes: int, who: Sequence[int] | None = None
) -> Evaluation:
    """Metrics of the clients of all runs; `real` [G N, m] says which points are no padding.

    `who` are the rows whose scores these are; by default all.
    """
    clients, per_run = len(real), len(real) // runs
    who = range(clients) if who is None else who
    real, evaluated = real[places(who)], len(who) // runs
    spans = [slice(g * evaluated, (g + 1) * evaluated) for g in range(runs)]
    every = [
        {kind: {k: v[span].sum(0) for k, v in sums.items()} for kind, sums in scores.sums.items()}
        for span in spans
    ]
    own = [{kind: sums for kind, sums in run.items() if kind != OTHERS} for run in every]
    first = scores.sums["personal" if "personal" in scores.sums else next(iter(scores.sums))]
    each: list[float | None] = [None] * clients
    for row, value in zip(who, _first_metrics(first), strict=True):
        each[row] = value
    return Evaluation(
        metrics=[named_metrics(run) for run in every],
        clients=[each[g * per_run : (g + 1) * per_run] for g in range(runs)],
        classes=[{k: accuracy_by_class(v) for k, v in run.items()} for run in own if classes],
        overconfidence=[{k: overconfidence(v) for k, v in run.items() if classes} for run in own],
        confidence=[
            {kind: value[span][real[span]] for kind, value in scores.confidence.items()}
            for span in spans
        ],
        points={},
        sampled=evaluated if evaluated < per_run else 0,
    )


def _first_metrics(sums: Tree) -> list[float | None]:
    """`scoring.first_metric` of every client, without a loop over their tensors."""
    points = sums["points"]
    error = sums.get("squared_error")
    each = sums["correct"] / points if error is None else (error / points).sqrt()
    pairs = zip(each.tolist(), points.tolist(), strict=True)
    return [value if count else None for value, count in pairs]
