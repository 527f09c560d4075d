"""The local work of a client's task: its steps, in the time that the run gives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from corefed.base.rng import Streams, Who
from corefed.base.shown import say_note
from corefed.base.types import Method, Tree, Work
from corefed.federation import limits, own_speed
from corefed.federation.own_speed import OwnSpeed
from corefed.settings import devices
from corefed.training import client_side
from corefed.training.augmenting import work_of
from corefed.training.client_side import Trained
from corefed.training.tasks import Task as LocalTask
from corefed.training.tasks import needs_of, passes_taken, work_for

if TYPE_CHECKING:
    from corefed.federation.protocol import Task
    from corefed.federation.task_context import TaskContext


def train(
    task: Task,
    context: TaskContext,
    broadcast: Tree,
    private: Tree,
    clock: Callable[[], float] = time.perf_counter,
) -> Trained:
    """A round of this client, with its message and private state on the CPU.

    With a deadline it does what fits into it at the speed that it has measured, and measures again.
    """
    method, run, points = context.method, context.experiment.run, context.train
    work = work_of(run, points.x.shape[2:])

    def take(method: Method, work: Work) -> Trained:
        streams = Streams([Who(context.seed, task.client)], task.round, context.device)
        found = client_side.train(method, broadcast, private, points, streams, work)
        return found._replace(message=_on_cpu(found.message), private=_on_cpu(found.private))

    if not devices.simulated(run):
        return take(method, work)
    own = context.experiment.settings
    (need,) = needs_of(run, own, method, [int(points.size.item())])
    if not run.deadline:
        return take(method, _bounded(work, need.task, context))
    whole = method._replace(subset=None)  # a selection would take as long as many minibatches
    few = work._replace(steps=own_speed.STEPS)
    speed = OwnSpeed(context.store.folder(task.run))
    passes = speed.give(
        task.round, run.deadline, lambda: passes_taken(whole, take(whole, few).examples).item(),
        clock,
    )  # fmt: skip
    planned = own_speed.plan(run, need, passes)
    if planned.note:
        say_note(planned.note)
    work = _bounded(work, planned.task, context)
    began = clock()
    trained = take(method, work)
    seconds = clock() - began
    speed.note(task.round, _passes(method, private, trained), seconds)
    return trained


def _bounded(work: Work, task: LocalTask, context: TaskContext) -> Work:
    limits.check_steps(task.steps, context.settings.limits)
    return work_for(work, [task], context.device)


def _passes(method: Method, before: Tree, trained: Trained) -> float:
    """Of a round, selection included."""
    was, now = (client_side.selection_cost(method, each) for each in (before, trained.private))
    looked = 0.0 if was is None or now is None else now.double().cpu() - was.double().cpu()
    return passes_taken(method, trained.examples, looked).item()


def _on_cpu(tree: Tree) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in tree.items()}
