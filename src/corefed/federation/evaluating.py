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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.types import ClientData, Method, Tree
from corefed.bayes.temperature import GRID, LEAST, MOST
from corefed.federation import answers
from corefed.federation.link import mismatch
from corefed.federation.protocol import Task
from corefed.training import calibration, client_side
from corefed.training.calibration import Temperatures
from corefed.training.evaluate import evaluate_clients
from corefed.training.loop import Line
from corefed.training.predicting import posterior_noise

if TYPE_CHECKING:
    from corefed.federation.server import ServerContext
    from corefed.federation.task_context import TaskContext


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
    """Metrics over the points of all clients that answer, for the line of round t (from 0)."""
    first = _ask(context, t, server, "")
    line = _metrics(context, {name: each.tested for name, each in first.items()})
    validated = _metrics(context, {name: each.validated for name, each in first.items()})
    if validated:
        line["validation"] = validated["metrics"]
    slopes = [each.slopes for each in first.values() if each.slopes]
    if line and slopes and calibration.is_wanted(context.run, t):
        line["calibration"] = _calibrate(context, t, server, slopes)
    return line


def _calibrate(context: ServerContext, t: int, server: Tree, slopes: Sequence[Tree]) -> Line:
    """Tell the clients the temperature of all of them; each then answers at its own."""
    sums = {
        kind: torch.stack([each[kind] for each in slopes if kind in each]).sum(0)
        for kind in dict.fromkeys(kind for each in slopes for kind in each)
    }
    pooled = {kind: calibration.pool(each).item() for kind, each in sums.items()}
    second = _ask(context, t, server, json.dumps(pooled))
    own = [second[name].temperature if name in second else {} for name in context.names]
    validated = _metrics(context, {name: each.validated for name, each in second.items()})
    tested = _metrics(context, {name: each.tested for name, each in second.items()})
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


def _metrics(context: ServerContext, found: Mapping[str, Mapping[str, Tree]]) -> Line:
    given = {name: sums for name, sums in found.items() if sums}
    return answers.score_numbers(given, context.names, context.agreement.classes)


def _ask(context: ServerContext, t: int, server: Tree, temperature: str) -> dict[str, Evaluated]:
    """The acceptable answers of all clients that are connected."""
    sent = client_side.sent(context.method, server)
    online = context.link.online()
    tasks = {
        name: context.task_for("evaluate", t, name, sent)._replace(temperature=temperature)
        for name in context.names
        if name in online
    }
    classes, most = len(context.agreement.classes), context.rules.max_examples
    found: dict[str, Evaluated] = {}
    for name, reply in context.link.ask(tasks, context.rules.deadline).items():
        if isinstance(reply, str):
            context.log("missing", t + 1, name, f"in the evaluation: {reply}")
            continue
        problem = mismatch(tasks[name], reply)
        try:
            tested = answers.read_totals(reply.figures, classes, most)
            validated = answers.read_totals(reply.figures, classes, most, "validation")
            slopes = answers.read_slopes(reply.figures, validated, classes)
        except ValueError as error:
            problem = problem or str(error)
        if problem:
            context.log("refused", t + 1, name, f"in the evaluation: {problem}")
        else:
            own = answers.read_temperatures(reply.figures)
            found[name] = Evaluated(tested, validated, slopes, own)
    return found
