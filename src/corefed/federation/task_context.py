"""From a task of the server to all that a client needs for it: settings, data, method, store."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.shown import say_note
from corefed.base.types import ClientData, Method
from corefed.data.class_names import MOST
from corefed.data.preparation import Preparation, TargetUnit
from corefed.data.table import Settings
from corefed.federation import limits
from corefed.federation.limits import Limits
from corefed.federation.protocol import Agreement, Task
from corefed.federation.reading import fitting, local_data
from corefed.federation.reading.outline import outline
from corefed.federation.store import Store
from corefed.methods import registry
from corefed.models import own
from corefed.settings import config, devices
from corefed.settings.run import Experiment, Run
from corefed.training import client_side, setup, tasks, variants

SPLIT_SEED = 0
"""Of the test part of data without one: the client's own, the same in every run."""


class PublicError(UserError):
    """A sentence that may leave the client's machine."""


class ClientSettings(NamedTuple):
    """What a client decides for itself."""

    name: str
    state: Path  # folder of its private state
    data: str  # what it learns from: a path, with or without its kind before it
    device: str = "cpu"
    target: str = ""  # column of a table that is predicted
    classes: tuple[str, ...] = ()  # those it takes part with; empty: all
    test_fraction: float = 0.2  # of data without a test part of their own
    share_metrics: bool = True  # whether losses, sums over test points and so on are sent
    min_noise: float = 0.0  # least noise of an upload, in units of the clip
    clip: float = 0.0  # length that a difference is clipped to; 0: the server's
    max_epsilon: float = 0.0  # stops when its uploads have spent this; 0: no bound
    delta: float = 1e-5
    join: str = "auto"  # what it tells about its data: full, shape, or auto
    examples: int = 100  # told in place of the number of training points, with noise
    model: str = ""  # the package.module:factory that it runs if the server asks for that one
    models: Path | None = None  # folder for its model at the end of a run; None: it keeps none
    limits: Limits = Limits()

    @property
    def private(self) -> bool:
        """Whether the client itself asks for noise: then no exact number leaves it."""
        return self.min_noise > 0 or self.max_epsilon > 0

    @property
    def tells_all(self) -> bool:
        """Whether it describes its data in full when it joins."""
        return self.join == "full" or (self.join == "auto" and not self.private)


class Plan(NamedTuple):
    """Per-task context without the data: what follows from the task and the client's settings."""

    settings: ClientSettings
    experiment: Experiment
    agreement: Agreement
    method: Method
    device: torch.device
    seed: int
    store: Store


class TaskContext(NamedTuple):
    """Per-task context, rebuilt for each because Flower starts a new process."""

    settings: ClientSettings
    experiment: Experiment
    method: Method
    preparation: Preparation
    data: local_data.LocalData
    train: ClientData  # one client: [1, n, ...]
    test: ClientData
    validation: ClientData | None
    device: torch.device
    seed: int
    store: Store

    @property
    def unit(self) -> TargetUnit | None:
        """Of the test targets, where the network learns standardised ones."""
        if not self.preparation.target_mean:
            return None
        mean, std = (each.unsqueeze(0).to(self.device) for each in self.preparation.unit)
        return TargetUnit(mean, std)


def make_plan(task: Task, settings: ClientSettings, wanted: Experiment) -> Plan:
    """All that needs no data. What is refused here depends on none."""
    agreement, run, store = task.agreement, wanted.run, Store(settings.state)
    if agreement is None:
        raise PublicError("The server sent no agreement about the data.")
    foreign = [name for name in settings.classes if not _spelt(name, agreement.classes)]
    if foreign:
        raise PublicError(
            f"client.toml of this client names the class {foreign[0]!r}, which is none of this "
            f"run's: {', '.join(agreement.classes)}."
        )
    if len(agreement.classes) > MOST:
        raise PublicError(f"The run has {len(agreement.classes)} classes; at most {MOST} can be.")
    bounded = dataclasses.replace(run, memory_mb=min(run.memory_mb, settings.limits.memory_mb))
    sizes = len(agreement.classes), agreement.targets
    # Code that the client's own file lists, which `refuse_code` has made sure of.
    model = setup.network(bounded, agreement.shape, *sizes, own.named(bounded.model))
    limits.check_size(model.size, settings.limits)
    now = variants.at_round(wanted.settings, run, task.round)
    method = registry.build(run.method, now, model)
    _check_time(run, method)
    _check_broadcast(task, method, run.seeds[0])
    store.claim(
        task.run,
        config.fingerprint(config.to_dict(wanted)),
        None,
        name=settings.name,
        agreement=agreement.to_json(),
    )
    device = device_for(settings.device)
    return Plan(settings, wanted, agreement, method, device, run.seeds[0], store)


def prepare(task: Task, plan: Plan) -> TaskContext:
    """Read the data, in the terms of the agreement."""
    settings, wanted, agreement, device = (
        plan.settings,
        plan.experiment,
        plan.agreement,
        plan.device,
    )
    data = read(task, wanted, settings)
    try:
        train, test, preparation = fitting.fit(data, agreement, settings.name)
        validation = fitting.fit_validation(data, preparation, settings.name)
    except UserError as error:
        if settings.tells_all:  # it speaks of shapes and names, which were sent at the join
            raise PublicError(str(error)) from error
        raise
    plan.store.claim(
        task.run,
        config.fingerprint(config.to_dict(wanted)),
        local_data.fingerprint(data),
        name=settings.name,
        agreement=agreement.to_json(),
    )
    return TaskContext(
        settings,
        wanted,
        plan.method,
        preparation,
        data,
        train.to(device),
        test.to(device),
        None if validation is None else validation.to(device),
        device,
        plan.seed,
        plan.store,
    )


def _check_time(run: Run, method: Method) -> None:
    """Refuse deadlines and speeds that a client on a machine of its own cannot follow."""
    try:
        devices.refuse_on_machines(run)
        tasks.refuse_uncounted(run, method)
    except UserError as error:
        raise PublicError(str(error)) from error


def _check_broadcast(task: Task, method: Method, seed: int) -> None:
    """Refuse a broadcast that is none of the method's: how training fails on it could tell data."""
    first = client_side.sent(method, method.init_server(Streams([Who(seed, SERVER)], 0)))
    forms = [
        {name: (value.shape, value.dtype) for name, value in tree.items()}
        for tree in (first, task.tree)
    ]
    if forms[0] != forms[1]:
        raise PublicError("The server sent other tensors than its settings say.")
    if not all(bool(value.isfinite().all()) for value in task.tree.values()):
        raise PublicError("The server sent numbers that are not finite.")


def experiment_of(task: Task) -> Experiment:
    try:
        return config.resolve(flags=tomllib.loads(task.settings))
    except (UserError, tomllib.TOMLDecodeError) as error:
        raise PublicError(f"The server's settings cannot be used: {error}") from error


def refuse_code(wanted: Experiment, settings: ClientSettings) -> None:
    """A server may choose among corefed's networks; other code that it names is not imported."""
    model = wanted.run.model
    if own.is_own(model) and model != settings.model:
        raise PublicError(
            f"This client runs no code that a server names; for the model {model} its operator "
            f'must write model = "{model}" into client.toml.'
        )


def read(task: Task, wanted: Experiment, settings: ClientSettings) -> local_data.LocalData:
    """The client's points. A table is read as in a simulation, with the client's own target.

    Classes are the client's own to choose. Those of the experiment are only compared with them: a
    server that names one class does not get what the client says of that class alone.
    """
    run = wanted.run
    ignored = (*run.ignore, run.client_column) if run.client_column else run.ignore
    # Classes that too few clients have are left out of training. At the join the server must not
    # choose: the mean of one class would tell more than that of all.
    chosen = run.classes if settings.tells_all and task.kind != "join" else ()
    return local_data.read(
        settings.data,
        test_fraction=settings.test_fraction,
        seed=SPLIT_SEED,
        reading=Settings(settings.target, "", run.categorical, ignored, run.missing, run.task),
        classes=settings.classes or chosen,
        spelling=run.classes,
        embedding=run.embedding,
        bad_images=run.bad_images,
        memory_mb=settings.limits.memory_mb,
        validation=local_data.HeldBack(run.validation, run.seeds[0], task.client),
    )


def describe(task: Task, wanted: Experiment, settings: ClientSettings) -> dict[str, Any]:
    """What the client tells when it joins: a description of its data, or their outline alone."""
    run = wanted.run
    if settings.tells_all:
        data = read(task, wanted, settings)
        for note in data.notes:
            say_note(note)
        return local_data.describe(data)
    ignored = (*run.ignore, run.client_column) if run.client_column else run.ignore
    return outline(
        settings.data,
        target=settings.target,
        classes=[_spelt(name, run.classes) or name for name in settings.classes],
        examples=settings.examples,
        ignored=ignored,
        embedding=run.embedding,
        memory_mb=settings.limits.memory_mb,
    )


def _spelt(name: str, classes: Sequence[str]) -> str:
    """A class in the spelling of the experiment; empty where it has none."""
    lower = {each.casefold(): each for each in classes}
    return name if name in classes else lower.get(name.casefold(), "")
