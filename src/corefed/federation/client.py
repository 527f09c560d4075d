"""The client's half of a federation: its data, its private state, one answer per task.

Data and private state stay in folders of the client's own machine. Only a `Reply` leaves it, and
every reply is in the client's own log before it is sent (`audit.py`). What is in it is for the
client's own settings to decide, never for the server's:

    no noise     the method's message, counts, and with `share_metrics` sums over test and
                 validation points and numbers about training
    with noise   the message under noise, and numbers that client.toml has. Nothing else depends on
                 the data: not which fields there are, not whether training or reading failed

An error leaves as one of a few sentences, which quote no data, no path and no text of another
error. The client's own log has the rest.

Private state is kept before an answer is sent, under the number of the next round. A server that
was killed asks a round again. The client then starts from the state before that round and gives the
same answer, because randomness is a function of (seed, round, client).
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.shown import say, say_note
from corefed.base.types import Tree
from corefed.federation import asked, audit, evaluating, keeping, limits, local_work, wire
from corefed.federation.asked import Asked
from corefed.federation.limits import LimitError, TimeUpError, time_limit
from corefed.federation.protocol import Reply, Task, check_run
from corefed.federation.task_context import (
    ClientSettings,
    Plan,
    PublicError,
    TaskContext,
    describe,
    experiment_of,
    make_plan,
    prepare,
    refuse_code,
)
from corefed.federation.trust import checks, privacy
from corefed.federation.trust.privacy import SpentError
from corefed.federation.trust.terms import Terms, TermsError, terms_of
from corefed.settings.run import Experiment
from corefed.training import client_side
from corefed.training.calibration import Temperatures

FAILED = "The client cannot do the task; its own log says why."
UNLOGGED = "The client cannot write its audit log, so it sends nothing; its own log says why."


def answer(task: Task, settings: ClientSettings) -> Reply:
    """What the client replies; never raises. It is in the audit log."""
    reply = _answer(task, settings)
    try:
        audit.enter(settings.state, reply, _spent(settings))
    except UserError as error:
        say(f"error: {error}", file=sys.stderr)
        return _reply(task, {}, error=UNLOGGED)
    return reply


def _answer(task: Task, settings: ClientSettings) -> Reply:
    try:
        check_run(task.run)
        wanted = experiment_of(task)
        refuse_code(wanted, settings)
        _check_question(task, wanted.run.rounds)
        limits.check_settings(wanted, settings.limits)
        asked.check_room(settings.state, task.run, settings.limits)
        if task.kind == "join":
            return _join(task, settings, wanted)
        plan = make_plan(task, settings, wanted)
        history = Asked(settings.state / task.run)
        history.note(task, wanted.run.rounds, settings.limits)
        return _train(task, plan) if task.kind == "train" else _evaluate(task, plan, history)
    except (PublicError, LimitError, TermsError, SpentError) as error:
        return _reply(task, {}, error=str(error))
    except TimeUpError:
        return _reply(task, {}, error=limits.late_sentence(settings.limits))
    except UserError as error:
        say(f"error: {error}", file=sys.stderr)
        return _reply(task, {}, error=FAILED)
    except Exception:
        traceback.print_exc()
        return _reply(task, {}, error=FAILED)


def _check_question(task: Task, rounds: int) -> None:
    """Refuse what is no task: others than these three, and rounds that the run does not have."""
    first, last = (-1, -1) if task.kind == "join" else (0, rounds - 1)
    known = task.kind in ("join", "train", "evaluate")
    if not known or not first <= task.round <= last:
        raise PublicError("The server asked for a task, or for a round, that there is not.")


def _reply(task: Task, figures: dict[str, Any], tree: Tree | None = None, error: str = "") -> Reply:
    return Reply(task.kind, task.run, task.round, task.client, figures, tree or {}, error)


# --- join -----------------------------------------------------------------------------------------


def _join(task: Task, settings: ClientSettings, wanted: Experiment) -> Reply:
    """A description of the data, once per run: asked again, the same one."""
    told = asked.told(settings.state, task)
    if told is None:
        with time_limit(settings.limits.seconds):
            told = describe(task, wanted, settings)
        asked.keep_told(settings.state, task, told, settings.limits)
    return _reply(task, told)


# --- train ----------------------------------------------------------------------------------------


def _train(task: Task, plan: Plan) -> Reply:
    settings, store, question = plan.settings, plan.store, asked.question_of(task)
    terms = terms_of(task, settings) if task.tree else None
    if terms is None and not settings.private:
        with time_limit(settings.limits.seconds):
            message, private, figures = _work(task, prepare(task, plan))
        store.save(task.run, task.round + 1, private)
        return _reply(task, figures, _packed(task, plan, message))
    kept = store.upload(task.run, task.round, question)
    if kept is not None:  # asked again: the same noise, or it would be a second release
        return _reply(task, *kept)
    if terms is not None:
        _book(task, plan, terms)
    message, after, figures = _work_quietly(task, plan)
    sent = {} if terms is None else _packed(task, plan, _privatise(task, plan, terms, message))
    if after is not None:
        store.save(task.run, task.round + 1, after)
    store.keep_upload(task.run, task.round, question, figures, sent)
    return _reply(task, figures, sent)


def _book(task: Task, plan: Plan, terms: Terms) -> None:
    """Enter a release before the training: one that does not end is counted too."""
    settings = plan.settings
    if not plan.method.traits.aligned:
        raise PublicError(f"The uploads of {plan.method.name} cannot be made private.")
    ledger = privacy.Ledger(settings.state / "privacy.json")
    most = settings.max_epsilon or math.inf
    ledger.record(task.run, task.round, *terms, most=most, delta=settings.delta)


def _work(task: Task, context: TaskContext) -> tuple[Tree, Tree, dict[str, Any]]:
    """Train: the message, the private state after it, and the numbers that are sent with it."""
    method = context.method
    began = time.perf_counter()
    private = _private(task.run, task.round, context)
    before = client_side.selection_cost(method, private)
    trained = local_work.train(task, context, _broadcast(task.tree, context.device), private)
    message = {name: value[0] for name, value in trained.message.items()}
    figures: dict[str, Any] = {
        "examples": int(context.train.size.item()),
        "seconds": time.perf_counter() - began,
    }
    if context.settings.share_metrics:
        figures["loss"] = trained.loss.item()
        figures["processed"] = int(trained.examples.item())
        cost = client_side.selection_cost(method, trained.private)
        if before is not None and cost is not None:
            figures["selection"] = (cost - before.cpu()).item()
        numbers = client_side.report(method, trained.private)
        figures["coreset"] = {name: float(value[0]) for name, value in numbers.items()}
    return message, trained.private, figures


def _work_quietly(task: Task, plan: Plan) -> tuple[Tree, Tree | None, dict[str, Any]]:
    """Train for an upload under noise. Where that fails, the difference is zero, and the state that
    of before.

    A client that itself asks for noise does not show that its data could not be read either, and
    sends no number that depends on them.
    """
    settings, message = plan.settings, task.tree
    told = asked.told_points(settings.state, task.run)
    figures: dict[str, Any] = {"examples": told or settings.examples}
    state: Tree | None = None
    with _quietly(settings.private), time_limit(settings.limits.seconds):
        context = prepare(task, plan)
        if not settings.private:
            figures = {"examples": int(context.train.size.item())}
        with _quietly():
            private = _private(task.run, task.round, context)
            state = {name: value.cpu() for name, value in private.items()}
            message, state, exact = _work(task, context)
            figures = figures if settings.private else exact
    return message, state, figures


@contextmanager
def _quietly(quiet: bool = True) -> Iterator[None]:
    """Errors end the block and are printed. None of them reaches the server."""
    try:
        yield
    except (Exception, TimeUpError):
        if not quiet:
            raise
        say("error: a task failed, and the server is not told so:", file=sys.stderr)
        traceback.print_exc()


def _privatise(task: Task, plan: Plan, terms: Terms, message: Tree) -> Tree:
    """The message under noise, with the names that the method's messages have.

    Where training failed it is the broadcast, which may have more of them.
    """
    agreement = plan.agreement
    first = plan.method.init_server(Streams([Who(plan.seed, SERVER)], 0))  # also what is not sent
    server = {**first, **task.tree}
    names = checks.template(plan.method, server, agreement.shape, agreement.targets)
    noisy, _ = privacy.privatise(
        {name: message[name] for name in names},
        task.tree,
        plan.method.traits.posteriors,
        terms.clip,
        terms.noise,
        privacy.system_normals,
    )
    return noisy


def _packed(task: Task, plan: Plan, message: Tree) -> Tree:
    """In the form and precision that the server asks for."""
    if task.difference and plan.method.traits.aligned:
        message = wire.difference(message, task.tree)
    return wire.narrow(message, task.upload)


# --- evaluate -------------------------------------------------------------------------------------


def _evaluate(task: Task, plan: Plan, history: Asked) -> Reply:
    """Sums over the test points for each model; none where the client does not share them."""
    settings, rounds = plan.settings, plan.experiment.run.rounds
    last = history.keeps(task, rounds)
    shares = settings.share_metrics and not settings.private
    figures: dict[str, Any] = {"models": {}}
    if not last and not shares:
        return _reply(task, figures)
    with _quietly(settings.private), time_limit(settings.limits.seconds):
        began = time.perf_counter()
        context = prepare(task, plan)
        models = evaluating.Models(
            context.method,
            _broadcast(task.tree, context.device),
            _private(task.run, task.round + 1, context),
            Streams([Who(context.seed, task.client)], task.round, context.device),
        )
        found = evaluating.temperatures(task, context, models)
        if last and _keep_model(task, context, models, found):
            history.finish(task, rounds)
        if shares:
            figures = evaluating.figures(task, context, models, found)
            figures["seconds"] = time.perf_counter() - began
    return _reply(task, figures)


def _keep_model(
    task: Task,
    context: TaskContext,
    models: evaluating.Models,
    temperatures: Temperatures | None,
) -> bool:
    """Keep the model that the run ends with. A full disk does not stop the run."""
    folder = context.settings.models
    if folder is None:
        return True
    try:
        _note(keeping.keep(folder, task.run, context, models, temperatures))
    except UserError as error:
        _note([f"The model of this run is not kept in {folder / task.run}: {error}"])
        return False
    return True


# --- state ----------------------------------------------------------------------------------------


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


def _spent(settings: ClientSettings) -> float | None:
    """epsilon of all uploads so far, for the log; None without any, or where it cannot be read."""
    try:
        ledger = privacy.Ledger(settings.state / "privacy.json")
    except UserError:
        return None
    return ledger.spent(settings.delta) if ledger.releases else None


def _note(notes: Sequence[str]) -> None:
    """For the client's operator, in its own log."""
    for note in notes:
        say_note(note)


def _broadcast(tree: Tree, device: torch.device) -> Tree:
    return {name: value.to(device).unsqueeze(0) for name, value in tree.items()}
