"""The client's half of a federation: its data, its private state, one answer per task.

Data and private state stay in folders of the client's own machine. Only a `Reply` leaves it: the
method's message, counts, sums over test and validation points, and numbers about training. An error
leaves as one of the sentences below, which quote no data, no path and no text of another error. The
client's own log has the rest.

Private state is kept before an answer is sent, under the number of the next round. A server that
was killed asks a round again. The client then starts from the state before that round and gives the
same answer, because randomness is a function of (seed, round, client).
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.shown import say, say_note
from corefed.base.types import Tree, Work
from corefed.federation import digest, evaluating, keeping, wire
from corefed.federation.protocol import Reply, Task
from corefed.federation.reading import local_data
from corefed.federation.task_context import (
    ClientSettings,
    PublicError,
    TaskContext,
    experiment_of,
    prepare,
    read,
    refuse_code,
)
from corefed.federation.trust import privacy
from corefed.training import calibration, client_side
from corefed.training.calibration import Temperatures


def answer(task: Task, settings: ClientSettings) -> Reply:
    """What the client replies; never raises."""
    try:
        wanted = experiment_of(task)
        refuse_code(wanted, settings)
        if task.kind == "join":
            data = read(task, wanted, settings)
            _note(data.notes)
            return _reply(task, local_data.describe(data))
        context = prepare(task, settings, wanted)
        return _train(task, context) if task.kind == "train" else _evaluate(task, context)
    except PublicError as error:
        return _reply(task, {}, error=str(error))
    except UserError as error:
        say(f"error: {error}", file=sys.stderr)
        return _reply(task, {}, error="The client cannot do the task; its own log says why.")
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__
        return _reply(task, {}, error=f"The client failed ({kind}); its own log says where.")


def _reply(task: Task, figures: dict[str, Any], tree: Tree | None = None, error: str = "") -> Reply:
    return Reply(task.kind, task.run, task.round, task.client, figures, tree or {}, error)


def _train(task: Task, context: TaskContext) -> Reply:
    method, settings, run = context.method, context.settings, context.experiment.run
    private_upload = task.dp_clip > 0 and bool(task.tree)
    _check_privacy(task, settings)
    kept = context.store.upload(task.run, task.round, _digest(task)) if private_upload else None
    if kept is not None:  # asked again: the same noise, or it would be a second release
        return _reply(task, *kept)
    began = time.perf_counter()
    private = _private(task.run, task.round, context)
    before = client_side.selection_cost(method, private)
    trained = client_side.train(
        method,
        _broadcast(task.tree, context.device),
        private,
        context.train,
        Streams([Who(context.seed, task.client)], task.round, context.device),
        Work(run.local_steps, run.batch_size),
    )
    message = {name: value[0].cpu() for name, value in trained.message.items()}
    figures: dict[str, Any] = {
        "examples": int(context.train.size.item()),
        "seconds": time.perf_counter() - began,
    }
    if settings.share_metrics:
        figures["loss"] = trained.loss.item()
        figures["processed"] = int(trained.examples.item())
        after = client_side.selection_cost(method, trained.private)
        if before is not None and after is not None:
            figures["selection"] = (after - before).item()
        numbers = client_side.report(method, trained.private)
        figures["coreset"] = {name: float(value[0]) for name, value in numbers.items()}
    if private_upload:
        message = _privatise(task, context, message)
    if task.difference and method.traits.aligned:
        message = wire.difference(message, task.tree)
    message = wire.narrow(message, task.upload)
    context.store.save(task.run, task.round + 1, {k: v.cpu() for k, v in trained.private.items()})
    if private_upload:
        context.store.keep_upload(task.run, task.round, _digest(task), figures, message)
    return _reply(task, figures, message)


def _evaluate(task: Task, context: TaskContext) -> Reply:
    """Sums over the test points for each model; none where the client does not share them."""
    began = time.perf_counter()
    models = evaluating.Models(
        context.method,
        _broadcast(task.tree, context.device),
        _private(task.run, task.round + 1, context),
        Streams([Who(context.seed, task.client)], task.round, context.device),
    )
    found = evaluating.temperatures(task, context, models)
    if task.round + 1 == context.experiment.run.rounds:
        _keep_model(task, context, models, found)
    if not context.settings.share_metrics:
        return _reply(task, {"models": {}})
    figures = evaluating.figures(task, context, models, found)
    return _reply(task, {**figures, "seconds": time.perf_counter() - began})


def _keep_model(
    task: Task,
    context: TaskContext,
    models: evaluating.Models,
    temperatures: Temperatures | None,
) -> None:
    """Keep the model that the run ends with. A full disk does not stop the run."""
    if context.settings.models is None:
        return
    folder = context.settings.models / task.run
    try:
        keeping.keep(
            folder,
            context.settings.name,
            context.experiment,
            context.preparation,
            context.train,
            context.test,
            models.method,
            models.broadcast,
            models.private,
            None if temperatures is None else calibration.stored(temperatures),
        )
    except UserError as error:
        _note([f"The model of this run is not kept in {folder}: {error}"])


def _private(run: str, round_: int, context: TaskContext) -> Tree:
    """State with which a round begins. A client without one starts from the run's seed.

    Every client can draw the server's first state itself. So a client that is first asked in a
    later round starts as it would have started in the first.
    """
    kept = context.store.load(run, round_)
    _note(context.store.notes)
    if kept is not None:
        return {name: value.to(context.device) for name, value in kept.items()}
    first = context.method.init_server(Streams([Who(context.seed, SERVER)], 0))
    return client_side.start(context.method, _broadcast(first, context.device), context.train)


def _note(notes: Sequence[str]) -> None:
    """For the client's operator, in its own log."""
    for note in notes:
        say_note(note)


def _broadcast(tree: Tree, device: torch.device) -> Tree:
    return {name: value.to(device).unsqueeze(0) for name, value in tree.items()}


def _digest(task: Task) -> str:
    """Of the question, to tell whether a stored upload answers it."""
    terms = (task.upload, task.difference, task.dp_clip, task.dp_noise, task.agreement)
    return digest.hash_tree(task.tree, task.settings, repr(terms))


def _check_privacy(task: Task, settings: ClientSettings) -> None:
    """Refuse less noise than the client itself asks for, whatever the server's rules are."""
    noise = task.dp_noise if task.dp_clip > 0 else 0.0
    if not noise >= settings.min_noise:
        raise PublicError(
            f"This client trains only with noise of at least {settings.min_noise:g}; the server's "
            f"rules have {noise:g}."
        )
    if settings.max_epsilon and not noise:
        raise PublicError(
            "This client bounds what its uploads spend (max_epsilon), and an upload without noise "
            "spends everything; switch on differential privacy by dp_clip."
        )


def _privatise(task: Task, context: TaskContext, message: Tree) -> Tree:
    """Add noise to an upload, and enter it in the client's ledger before it can be sent."""
    settings, posteriors = context.settings, context.method.traits.posteriors
    ledger, most = privacy.Ledger(settings.state / "privacy.json"), settings.max_epsilon
    if most and not ledger.allows(task.dp_noise, most, settings.delta):
        raise PublicError(
            f"Another upload would spend more than the epsilon of {most:g} that this client allows."
        )
    noisy, _ = privacy.privatise(
        message, task.tree, posteriors, task.dp_clip, task.dp_noise, privacy.system_normals
    )
    ledger.record(task.run, task.round, task.dp_noise, task.dp_clip)
    return noisy
