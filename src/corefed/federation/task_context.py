"""From a task of the server to all that a client needs for it: settings, data, method, store."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

import torch

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.base.types import ClientData, Method
from corefed.data.preparation import Preparation, TargetUnit
from corefed.data.table import Settings
from corefed.federation.protocol import Task
from corefed.federation.reading import fitting, local_data
from corefed.federation.store import Store
from corefed.methods import registry
from corefed.models import own
from corefed.settings import config
from corefed.settings.run import Experiment
from corefed.training import setup, variants

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
    test_fraction: float = 0.2  # of data without a test part of their own
    share_metrics: bool = True  # whether losses, sums over test points and so on are sent
    min_noise: float = 0.0  # trains only under differential privacy with at least this noise
    max_epsilon: float = 0.0  # stops when its uploads have spent this; 0: no bound
    delta: float = 1e-5
    model: str = ""  # the package.module:factory that it runs if the server asks for that one
    models: Path | None = None  # folder for its model at the end of a run; None: it keeps none


class TaskContext(NamedTuple):
    """Per-task context, rebuilt for each because Flower starts a new process."""

    settings: ClientSettings
    experiment: Experiment
    method: Method
    preparation: Preparation
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


def prepare(task: Task, settings: ClientSettings, wanted: Experiment) -> TaskContext:
    agreement = task.agreement
    if agreement is None:
        raise PublicError("The server sent no agreement about the data.")
    data = read(task, wanted, settings)
    try:
        train, test, preparation = fitting.fit(data, agreement, settings.name)
        validation = fitting.fit_validation(data, agreement, preparation, settings.name)
    except UserError as error:  # speaks of shapes and names, which are sent at the join anyway
        raise PublicError(str(error)) from error
    device = device_for(settings.device)
    sizes = len(agreement.classes), agreement.targets
    # Code that the client's own file lists, which `refuse_code` has made sure of.
    model = setup.network(wanted.run, agreement.shape, *sizes, own.named(wanted.run.model))
    now = variants.at_round(wanted.settings, wanted.run, task.round)
    method = registry.build(wanted.run.method, now, model)
    store = Store(settings.state)
    store.claim(
        task.run,
        config.fingerprint(config.to_dict(wanted)),
        local_data.fingerprint(data),
        name=settings.name,
        agreement=agreement.to_json(),
    )
    return TaskContext(
        settings,
        wanted,
        method,
        preparation,
        train.to(device),
        test.to(device),
        None if validation is None else validation.to(device),
        device,
        wanted.run.seeds[0],
        store,
    )


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
    """The client's points. A table is read as in a simulation, with the client's own target."""
    run = wanted.run
    ignored = (*run.ignore, run.client_column) if run.client_column else run.ignore
    return local_data.read(
        settings.data,
        test_fraction=settings.test_fraction,
        seed=SPLIT_SEED,
        reading=Settings(settings.target, "", run.categorical, ignored, run.missing, run.task),
        classes=run.classes,
        embedding=run.embedding,
        bad_images=run.bad_images,
        memory_mb=run.memory_mb,
        validation=local_data.HeldBack(run.validation, run.seeds[0], task.client),
    )
