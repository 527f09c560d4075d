"""An evaluation, both halves: what the server asks, and what a client answers.

A client sends sums over its test and its validation points.

A run with validation points is calibrated after its last round, in two questions:

    1. slopes   each client's validation points, as 65 sums per kind of model
       (the server adds them up, and finds the temperature of all clients' points)
    2. that temperature goes to the clients; each fits its own around it, keeps it with its model,
       and sends its sums again, as they are at its temperatures

Both fits are those of a simulation (`training/calibration.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.types import ClientData, Method, Tree
from corefed.bayes.temperature import GRID, LEAST, MOST
from corefed.federation import answers, collecting, joining
from corefed.federation.link import mismatch
from corefed.federation.protocol import Reply, Task
from corefed.federation.told import Part
from corefed.federation.trust import robust
from corefed.training import calibration, client_side
from corefed.training.calibration import Temperatures
from corefed.training.evaluate import evaluate_clients
from corefed.training.loop import Line
from corefed.training.predicting import posterior_noise

if TYPE_CHECKING:
    from corefed.federation.server import ServerContext
    from corefed.federation.task_context import TaskContext

ATTEMPTS = 2
"""Times an evaluation without a quorum is asked."""


# --- the client -----------------------------------------------------------------------------------


class Models(NamedTuple):
    """The models that are evaluated."""

    method: Method
    broadcast: Tree
    private: Tree
    streams: Streams


def temperatures(task: Task, context: TaskContext, models: Models) -> Temperatures | None:
    """The client's own, where the server tells those of all clients."""
    if not task.temperature:
        return None
    told: dict[str, float] = json.loads(task.temperature)
    if any(answers.number(T, LEAST, MOST) is None for T in told.values()):
        raise UserError(f"The server sent temperatures that are not between {LEAST} and {MOST}.")
    pooled = {kind: torch.tensor([T], dtype=torch.float64) for kind, T in told.items()}
    nothing = torch.zeros(1, len(GRID), dtype=torch.float64)
    found = _slopes(context, models)
    own = {
        kind: calibration.own(kind, found.get(kind, nothing), around)
        for kind, around in pooled.items()
    }
    return Temperatures(pooled, own)


def figures(
    task: Task, context: TaskContext, models: Models, found: Temperatures | None
) -> dict[str, Any]:
    """What the client sends, at its temperatures where it has some."""
    sent: dict[str, Any] = {"models": _sums(context, models, context.test, found)}
    if context.validation is not None:
        sent["validation"] = _sums(context, models, context.validation, found)
        if found is None and calibration.is_wanted(context.experiment.run, task.round):
            slopes = _slopes(context, models)
            sent["slopes"] = {kind: each[0].tolist() for kind, each in slopes.items()}
    if found is not None:
        sent["temperature"] = {kind: each.item() for kind, each in found.clients.items()}
    return sent


def _sums(
    context: TaskContext, models: Models, points: ClientData, found: Temperatures | None
) -> dict[str, Any]:
    """By kind of model; empty without points."""
    if points.weight.shape[1] == 0:
        return {}
    sums = evaluate_clients(
        models.method,
        models.broadcast,
        models.private,
        context.train,
        points,
        models.streams.restart(),
        context.experiment.run.evaluate_draws,
        len(context.preparation.labels),
        context.unit,
        None if found is None else found.clients,
    )
    return {kind: {k: v.tolist() for k, v in each.items()} for kind, each in sums.items()}


def _slopes(context: TaskContext, models: Models) -> Tree:
    """By kind of model, [1, 65]; empty without validation points."""
    if context.validation is None:
        return {}
    method, draws = models.method, context.experiment.run.evaluate_draws
    return calibration.slopes_of(
        method,
        client_side.models(method, models.broadcast, models.private, context.train),
        context.validation,
        posterior_noise(method, models.streams.restart(), draws),
        len(context.preparation.labels),
        context.unit,
    )


# --- the server -----------------------------------------------------------------------------------


class Evaluated(NamedTuple):
    """A client's answer, by kind of model."""

    tested: dict[str, Tree]  # sums over its test points
    validated: dict[str, Tree]  # over its validation points
    slopes: Tree  # of its validation points, [65]
    temperature: dict[str, float]


def evaluate(context: ServerContext, t: int, server: Tree) -> Line:
    """Metrics over the points of all clients that answer, for the line of round t (from 0).

    Without a quorum of answers, after a second try, there are none: what a few clients say is no
    result of the federation.
    """
    first = _ask(context, t, server, "")
    quorum = joining.quorum_size(context.rules, len(context.names))
    if len(first) < quorum:
        reason = f"{len(first)} acceptable answers in the evaluation, {quorum} needed"
        context.log("no-quorum", t + 1, reason=reason)
        return {}
    line = _metrics(context, {name: each.tested for name, each in first.items()}, "test")
    validated = _metrics(context, {name: each.validated for name, each in first.items()}, "train")
    if validated:
        line["validation"] = validated["metrics"]
    if (
        line
        and any(each.slopes for each in first.values())
        and calibration.is_wanted(context.run, t)
    ):
        line["calibration"] = _calibrate(context, t, server, first)
    return line


def _calibrate(
    context: ServerContext, t: int, server: Tree, first: Mapping[str, Evaluated]
) -> Line:
    """Tell the clients the temperature of all of them; each then answers at its own."""
    sums = _pooled_slopes(context, first)
    pooled = {kind: calibration.pool(each).item() for kind, each in sums.items()}
    second = _ask(context, t, server, json.dumps(pooled))
    own = [second[name].temperature if name in second else {} for name in context.names]
    validated = _metrics(context, {name: each.validated for name, each in second.items()}, "train")
    tested = _metrics(context, {name: each.tested for name, each in second.items()}, "test")
    return {
        "pooled": {kind: [T] for kind, T in pooled.items()},
        "temperature": {
            kind: [[each.get(kind) for each in own]]
            for kind in pooled
            if kind != calibration.SHARED
        },
        "metrics": tested.get("metrics", {}),
        "overconfidence": tested.get("overconfidence", {}),
        "validation": validated.get("metrics", {}),
    }


def _pooled_slopes(context: ServerContext, first: Mapping[str, Evaluated]) -> Tree:
    """By kind of model. Under a robust rule, the median over clients of the slope per point."""
    found: dict[str, list[tuple[Tensor, float]]] = {}
    for each in first.values():
        for kind, slopes in each.slopes.items():
            points = each.validated[kind]["points"].item()
            found.setdefault(kind, []).append((slopes, points))
    pooled = {}
    for kind, rows in found.items():
        if context.rules.aggregation == "plain" or len(rows) < robust.FEWEST:
            pooled[kind] = torch.stack([slopes for slopes, _ in rows]).sum(0)
            continue
        per_point = torch.stack([slopes / points for slopes, points in rows])
        pooled[kind] = per_point.quantile(0.5, dim=0) * sum(points for _, points in rows)
    return pooled


def _metrics(context: ServerContext, found: Mapping[str, Mapping[str, Tree]], part: Part) -> Line:
    """`part` is whose numbers, told at the join, bound what a client counts for.

    Validation points are held back from the training points, and are bounded by their number.
    """
    given = {name: sums for name, sums in found.items() if sums}
    most = context.told.weight(part, context.rules)
    return answers.score_numbers(given, context.names, context.agreement.classes, most)


def _ask(context: ServerContext, t: int, server: Tree, temperature: str) -> dict[str, Evaluated]:
    """The acceptable answers of all clients that are connected, asked twice without a quorum."""
    sent = client_side.sent(context.method, server)
    quorum = joining.quorum_size(context.rules, len(context.names))
    found: dict[str, Evaluated] = {}
    for attempt in range(ATTEMPTS):
        online = context.link.online()
        tasks = {
            name: context.task_for("evaluate", t, name, sent)._replace(temperature=temperature)
            for name in context.names
            if name in online and name not in found
        }
        if not tasks:
            break
        needed = min(len(tasks), quorum - len(found))
        for name, reply in collecting.ask(context, tasks, needed, whole=attempt > 0).items():
            if isinstance(reply, str):
                context.log("missing", t + 1, name, f"in the evaluation: {reply}")
                continue
            read = _read(context, name, tasks[name], reply)
            if isinstance(read, str):
                context.log("refused", t + 1, name, f"in the evaluation: {read}")
            else:
                found[name] = read
        if len(found) >= quorum:
            break
    return found


def _read(context: ServerContext, name: str, task: Task, reply: Reply) -> Evaluated | str:
    """A client's answer, or why it is unacceptable."""
    classes, told, rules = len(context.agreement.classes), context.told, context.rules
    problem = mismatch(task, reply)
    if problem:
        return problem
    try:
        tested = answers.read_totals(reply.figures, classes, told.most(name, "test", rules))
        validated = answers.read_totals(reply.figures, classes, rules.max_examples, "validation")
        slopes = answers.read_slopes(reply.figures, validated, classes)
    except ValueError as error:
        return str(error)
    return Evaluated(tested, validated, slopes, answers.read_temperatures(reply.figures))
