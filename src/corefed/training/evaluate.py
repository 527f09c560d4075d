"""Metrics of every model of a method on the clients' own held-out points, pooled over clients.

Classification, from probabilities averaged over posterior samples: accuracy, overall and by class,
NLL (nats per point), ECE and Brier score. Regression, from the predictive mean and variance: RMSE
and the NLL of a Gaussian, both in the target's own unit. Accuracies are fractions, not percent.
Where clients share nothing, personal models are also tested on the other clients' points
("others").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.streamed import Streamed, values
from corefed.base.types import ClientData, Method, Tree, places
from corefed.bayes import temperature as tempering
from corefed.data.preparation import TargetUnit
from corefed.training import client_side, others
from corefed.training.local import LocalClients
from corefed.training.predicting import chunks, posterior_noise
from corefed.training.scoring import (
    accuracy_by_class,
    by_label,
    named_metrics,
    overconfidence,
    score_classes,
    score_targets,
    totals,
)

MOSTLY_PADDING = 2
"""Padded points over real ones from which on padding is left out."""


AT_ONCE, NUMBERS = 1 << 11, 1 << 22
"""Streamed points that are predicted together, and the numbers in them; the fewer points."""


class Evaluation(NamedTuple):
    """One entry per run (seed) in each list."""

    metrics: list[dict[str, float]]  # personal_accuracy, personal_nll, global_accuracy, ...
    clients: list[list[float | None]]  # personal accuracy (or RMSE); None without test points, and
    # for clients that are not evaluated
    classes: list[dict[str, list[float | None]]]  # model -> accuracy by class; empty for regression
    overconfidence: list[dict[str, float]]  # model -> mean confidence - accuracy; the same
    confidence: list[Tree]  # model -> largest probability of every point; the same
    points: Tree  # scores of every point, [C, n] each, by the model of `clients`; with a sample of
    # clients, C are those
    sampled: int = 0  # evaluated clients per run; 0: all

    def line(self, labels: tuple[str, ...]) -> dict[str, Any]:
        """What a line of rounds.jsonl has of it."""
        metrics = {name: [each[name] for each in self.metrics] for name in self.metrics[0]}
        by_class = by_label(self.classes, labels)
        bold = {name: [run[name] for run in self.overconfidence] for name in self.overconfidence[0]}
        return {
            "metrics": metrics,
            "clients": self.clients,
            "classes": by_class,
            "overconfidence": bold,
            **({"evaluated_clients": self.sampled} if self.sampled else {}),
        }


def evaluate(
    clients: LocalClients,
    method: Method,
    servers: Sequence[Tree],
    test: ClientData,
    round_: int,
    draws: int,
    classes: int,
    unit: TargetUnit | None = None,
    *,
    elsewhere: bool = True,
    temperature: Mapping[str, Tensor] | None = None,
    who: Sequence[int] | None = None,
) -> Evaluation:
    """Every model of `method.models` on test (or validation) points; `classes` is 0 for regression.

    With `elsewhere`, models of clients that share nothing are also tested on the others' points
    (`others.py`). `temperature` has the clients' temperatures, [C] per kind of model. `who` are the
    rows to evaluate, equally many of every run; by default all.

    `unit` is that of the test targets, where networks learn standardised ones. All models of a
    client have the same posterior noise, so that their differences are not noise. `draws` samples
    need `draws` times the memory, so chunks are smaller than in training.
    """
    runs, per_run, T = len(servers), clients.per_run, temperature or {}
    everyone, all_labels = (test.weight > 0).cpu(), test.y.cpu()
    who = range(len(everyone)) if who is None else who
    sizes: list[int] = everyone.sum(-1).tolist()
    order, longest = _by_size(who, sizes, everyone.shape[1])
    points: dict[str, list[Tree]] = {}
    away: list[Tree] = []
    for chunk in chunks(clients, method, servers, round_, draws, order):
        rows, method, models, noise = chunk
        part = places(rows)
        length = longest(rows)
        x, y = test.x[part][:, :length], test.y[part][:, :length]
        predictions = _predict(method, models, x, noise)
        for name, predicted in predictions.items():
            here, own = unit.at(part) if unit else None, T[name][part] if name in T else None
            each = score(predicted, y, classes, here, own)
            points.setdefault(name, []).append(_lengthened(each, everyone.shape[1]))
        if elsewhere and method.traits.sent == () and per_run > 1:  # they share nothing
            own = T["personal"][part] if "personal" in T else None
            on_others = partial(
                _score_there, method, models["personal"], test, noise, classes, unit, own
            )
            away.append(others.score(on_others, rows, per_run))
    real, labels = everyone[places(who)], all_labels[places(who)]
    evaluated = len(who) // runs
    place = {row: at for at, row in enumerate(order)}
    back = torch.tensor([place[row] for row in who])
    joined = {name: _joined(parts, back) for name, parts in points.items()}
    spans = [slice(g * evaluated, (g + 1) * evaluated) for g in range(runs)]
    sums = [
        {name: totals(*_masked(each, labels, real, span), classes) for name, each in joined.items()}
        for span in spans
    ]
    metrics = [named_metrics(run) for run in sums]
    if away:
        there = _joined(away, back)
        count = others.roll(everyone, who, per_run)
        theirs = others.roll(all_labels, who, per_run)
        for span, mine in zip(spans, metrics, strict=True):
            run = totals(*_masked(there, theirs, count, span), classes)
            mine.update(named_metrics({"others": run}))
    by_class = [{k: accuracy_by_class(v) for k, v in run.items()} for run in sums if classes]
    bold = [{k: overconfidence(v) for k, v in run.items() if classes} for run in sums]
    first = joined["personal" if "personal" in joined else next(iter(joined))]
    scores: list[float | None] = [None] * len(everyone)
    for row, value in zip(who, _first_metrics(first, real), strict=True):
        scores[row] = value
    by_client = [scores[g * per_run : (g + 1) * per_run] for g in range(runs)]
    sure = [
        {name: each["confidence"][span][real[span]] for name, each in joined.items() if classes}
        for span in spans
    ]
    sampled = evaluated if evaluated < per_run else 0
    return Evaluation(metrics, by_client, by_class, bold, sure, first, sampled)


def evaluate_clients(
    method: Method,
    broadcast: Tree,
    private: Tree,
    train: ClientData,
    test: ClientData,
    streams: Streams,
    draws: int,
    classes: int,
    unit: TargetUnit | None = None,
    temperature: Mapping[str, Tensor] | None = None,
) -> dict[str, Tree]:
    """Totals of every model over the test points of these clients."""
    noise = posterior_noise(method, streams, draws)
    real, labels = (test.weight > 0).cpu(), test.y.cpu()
    found = {}
    for name, model in client_side.models(method, broadcast, private, train).items():
        own = (temperature or {}).get(name)
        each = score(method.predict(model, test.x, noise), test.y, classes, unit, own)
        found[name] = totals(*_masked(each, labels, real, slice(None)), classes)
    return found


def score(
    prediction: Tensor,
    y: Tensor,
    classes: int,
    unit: TargetUnit | None = None,
    temperature: Tensor | None = None,
) -> Tree:
    if unit is not None:
        prediction = unit.convert(prediction)
    if temperature is not None:
        prediction = tempering.temper(prediction, temperature, classes)
    each = score_classes(prediction, y) if classes else score_targets(prediction, y)
    if not prediction.is_cuda:
        return each
    return dict(zip(each, torch.stack(list(each.values())).cpu(), strict=True))  # one copy


def _predict(
    method: Method, models: Mapping[str, Tree], x: Tensor, noise: Tensor
) -> dict[str, Tensor]:
    """By every model. Points that are streamed are read once, some after the other, so that neither
    all of them nor a draw of all of them is in memory."""
    parts: Sequence[Tensor] = [x]
    if isinstance(x, Streamed):
        step = max(1, min(AT_ONCE, NUMBERS // max(1, x.shape[2:].numel())))
        parts = [x[:, first : first + step] for first in range(0, x.shape[1], step)]
    found: dict[str, list[Tensor]] = {name: [] for name in models}
    for some in map(values, parts):
        for name, model in models.items():
            found[name].append(method.predict(model, some, noise))
    return {name: each[0] if len(each) == 1 else torch.cat(each, 1) for name, each in found.items()}


def _score_there(
    method: Method,
    model: Tree,
    test: ClientData,
    noise: Tensor,
    classes: int,
    unit: TargetUnit | None,
    temperature: Tensor | None,
    there: list[int],
) -> Tree:
    """Each model on the test points of another client."""
    predicted = method.predict(model, test.x[there], noise)
    return score(predicted, test.y[there], classes, unit.at(there) if unit else None, temperature)


def _by_size(
    who: Sequence[int], sizes: Sequence[int], padded: int
) -> tuple[Sequence[int], Callable[[Sequence[int]], int]]:
    """Rows in the order of evaluation, and how many points of some of them to go through.

    Where padding is most of the points, as where one site has most of them, clients of about one
    size are in a chunk, which is as long as its largest. Otherwise all clients keep their padding,
    and their order.
    """
    if padded * len(who) <= MOSTLY_PADDING * sum(sizes[row] for row in who):
        return who, lambda rows: padded
    return (
        sorted(who, key=sizes.__getitem__),
        lambda rows: max(1, max(sizes[row] for row in rows)),
    )


def _joined(parts: list[Tree], order: Tensor) -> Tree:
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def _lengthened(each: Tree, length: int) -> Tree:
    """Scores [C, n] with zeros for the padding that was left out."""
    return {
        name: torch.nn.functional.pad(value, (0, length - value.shape[1]))
        for name, value in each.items()
    }


def _first_metrics(each: Tree, real: Tensor) -> list[float | None]:
    """Accuracy or RMSE of each client, from the scores [C, n] of its points that are real."""
    score = each.get("correct", each.get("squared_error"))
    assert score is not None
    count = real.sum(-1)
    mean = torch.full(count.shape, math.nan, dtype=torch.float64)
    for size in count.unique().tolist():  # clients of one size at a time, without their padding
        same = count == size
        if size:
            mean[same] = score[same][real[same]].view(-1, size).sum(-1) / size
    if "squared_error" in each:
        mean = mean.sqrt()
    pairs = zip(mean.tolist(), count.tolist(), strict=True)
    return [value if size else None for value, size in pairs]


def _masked(each: Tree, y: Tensor, real: Tensor, part: slice) -> tuple[Tree, Tensor]:
    """The points of some clients without padding, and their labels or targets."""
    mask = real[part]
    return {name: value[part][mask] for name, value in each.items()}, y[part][mask]
