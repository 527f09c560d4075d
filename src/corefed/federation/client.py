"""The client's half of a federation: its data, its private state, one answer a task.

Data and private state stay in folders of the client's own machine. What leaves it is a `Reply`, and
nothing but what this file puts into one: the method's message, counts, sums over test points, and
figures about training. An error leaves as one of the sentences below, which quote no data, no path
and no text of another error; the client's own log has the rest.

Private state is kept before an answer is sent, under the number of the round that comes next. A
server that was killed and asks a round again finds the state of before that round, and, randomness
being a function of (seed, round, client), is given the same answer.
"""

from __future__ import annotations

import sys
import time
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Method, Tree, Work
from corefed.data.preparation import Preparation, TargetUnit
from corefed.data.table import Settings
from corefed.federation import digest, keeping, wire
from corefed.federation.protocol import Reply, Task
from corefed.federation.reading import local_data
from corefed.federation.store import Store
from corefed.federation.trust import privacy
from corefed.methods import registry
from corefed.models import own
from corefed.settings import config
from corefed.settings.config import Experiment
from corefed.training import client_side, setup
from corefed.training.evaluate import evaluate_clients

SPLIT_SEED = 0
"""Of the test part of data without one: the client's own, the same in every run."""


class PublicError(UserError):
    """A sentence that may leave the client's machine."""


class Place(NamedTuple):
    """What a client decides for itself."""

    name: str
    state: Path  # folder of its private state
    data: str  # what it learns from: a path, with or without its kind before it
    device: str = "cpu"
    target: str = ""  # column of a table that is predicted
    test_fraction: float = 0.2  # of data without a test part of their own
    share_metrics: bool = True  # whether sums over its test points, losses and figures are sent
    min_noise: float = 0.0  # trains only under differential privacy with at least this noise
    max_epsilon: float = 0.0  # stops when its uploads have spent this; 0: no bound
    delta: float = 1e-5
    model: str = ""  # the package.module:factory that it runs if the server asks for that one
    models: Path | None = None  # folder for its model at the end of a run; None: it keeps none


class Desk(NamedTuple):
    """Everything about a task but the task: made anew for each, since Flower starts a process."""

    experiment: Experiment
    method: Method
    preparation: Preparation
    train: ClientData  # one client: [1, n, ...]
    test: ClientData
    classes: int
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


def answer(task: Task, place: Place) -> Reply:
    """What the client replies; never raises."""
    try:
        wanted = _experiment(task)
        _refuse_code(wanted, place)
        if task.kind == "join":
            data = _read(wanted, place)
            _note(data.notes)
            return _reply(task, local_data.describe(data))
        desk = _prepare(task, place, wanted)
        return _train(task, place, desk) if task.kind == "train" else _evaluate(task, place, desk)
    except PublicError as error:
        return _reply(task, {}, error=str(error))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return _reply(task, {}, error="The client cannot do the task; its own log says why.")
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__
        return _reply(task, {}, error=f"The client failed ({kind}); its own log says where.")


def _reply(task: Task, figures: dict[str, Any], tree: Tree | None = None, error: str = "") -> Reply:
    return Reply(task.kind, task.run, task.round, task.client, figures, tree or {}, error)


def _train(task: Task, place: Place, desk: Desk) -> Reply:
    method, run = desk.method, desk.experiment.run
    private_upload = task.dp_clip > 0 and bool(task.tree)
    _check_privacy(task, place)
    kept = desk.store.upload(task.run, task.round, _digest(task)) if private_upload else None
    if kept is not None:  # asked again: the same noise, or it would be a second release
        return _reply(task, *kept)
    began = time.perf_counter()
    broadcast = _broadcast(task.tree, desk.device)
    streams = Streams([Who(desk.seed, task.client)], task.round, desk.device)
    work = Work(run.local_steps, run.batch_size)
    private = _private(task, desk)
    trained = client_side.train(method, broadcast, private, desk.train, streams, work)
    message = {name: value[0].cpu() for name, value in trained.message.items()}
    figures: dict[str, Any] = {
        "examples": int(desk.train.size.item()),
        "seconds": time.perf_counter() - began,
    }
    if place.share_metrics:
        figures["loss"] = trained.loss.item()
        figures["processed"] = int(trained.examples.item())
        numbers = client_side.report(method, trained.private)
        figures["coreset"] = {name: float(value[0]) for name, value in numbers.items()}
    if private_upload:
        message = _privatised(task, place, method, message)
    if task.difference and method.traits.aligned:
        message = wire.difference(message, task.tree)
    message = wire.narrowed(message, task.upload)
    desk.store.save(task.run, task.round + 1, {k: v.cpu() for k, v in trained.private.items()})
    if private_upload:
        desk.store.keep_upload(task.run, task.round, _digest(task), figures, message)
    return _reply(task, figures, message)


def _evaluate(task: Task, place: Place, desk: Desk) -> Reply:
    """Sums over the test points of each model the client has; none where it keeps them."""
    if task.round + 1 == desk.experiment.run.rounds:
        _keep(task, place, desk)
    if not place.share_metrics or desk.test.weight.shape[1] == 0:
        return _reply(task, {"models": {}})
    began = time.perf_counter()
    streams = Streams([Who(desk.seed, task.client)], task.round, desk.device)
    models = evaluate_clients(
        desk.method,
        _broadcast(task.tree, desk.device),
        _private(task._replace(round=task.round + 1), desk),  # as it is after the round
        desk.train,
        desk.test,
        streams,
        desk.experiment.run.evaluate_draws,
        desk.classes,
        desk.unit,
    )
    sums = {name: {k: v.tolist() for k, v in each.items()} for name, each in models.items()}
    return _reply(task, {"models": sums, "seconds": time.perf_counter() - began})


def _keep(task: Task, place: Place, desk: Desk) -> None:
    """The model that the run ends with; a disk without room for it does not spoil the run."""
    if place.models is None:
        return
    try:
        keeping.keep(
            place.models / task.run,
            place.name,
            desk.experiment,
            desk.preparation,
            desk.train,
            desk.test,
            desk.method,
            _broadcast(task.tree, desk.device),
            _private(task._replace(round=task.round + 1), desk),
        )
    except UserError as error:
        _note([f"The model of this run is not kept in {place.models / task.run}: {error}"])


def _prepare(task: Task, place: Place, wanted: Experiment) -> Desk:
    agreement = task.agreement
    if agreement is None:
        raise PublicError("The server sent no agreement about the data.")
    data = _read(wanted, place)
    try:
        train, test, preparation = local_data.fit(data, agreement, place.name)
    except UserError as error:  # speaks of shapes and names, which are sent at the join anyway
        raise PublicError(str(error)) from error
    device = device_for(place.device)
    model = setup.network(wanted.run, agreement.shape, len(agreement.classes), agreement.targets)
    method = registry.build(wanted.run.method, wanted.settings, model)
    store = Store(place.state)
    store.claim(
        task.run,
        config.fingerprint(config.to_dict(wanted)),
        local_data.fingerprint(data),
        name=place.name,
        agreement=agreement.to_json(),
    )
    seed = wanted.run.seeds[0]
    return Desk(
        wanted,
        method,
        preparation,
        train.to(device),
        test.to(device),
        len(agreement.classes),
        device,
        seed,
        store,
    )


def _experiment(task: Task) -> Experiment:
    try:
        return config.resolve(flags=tomllib.loads(task.settings))
    except (UserError, tomllib.TOMLDecodeError) as error:
        raise PublicError(f"The server's settings cannot be used: {error}") from error


def _refuse_code(wanted: Experiment, place: Place) -> None:
    """A server may choose among networks of corefed; what else it names is not even imported."""
    model = wanted.run.model
    if own.is_own(model) and model != place.model:
        raise PublicError(
            f"This client runs no code that a server names; for the model {model} its operator "
            f'must write model = "{model}" into client.toml.'
        )


def _read(wanted: Experiment, place: Place) -> local_data.LocalData:
    """The points; a table as a simulation would read it, but for the client's own target."""
    run = wanted.run
    ignored = (*run.ignore, run.client_column) if run.client_column else run.ignore
    return local_data.read(
        place.data,
        test_fraction=place.test_fraction,
        seed=SPLIT_SEED,
        reading=Settings(place.target, "", run.categorical, ignored, run.missing, run.task),
        classes=run.classes,
        embedding=run.embedding,
        bad_images=run.bad_images,
        memory_mb=run.memory_mb,
    )


def _private(task: Task, desk: Desk) -> Tree:
    """State before the task's round; that of a client that has none is made from the run's seed.

    Every client can draw the server's first state itself, so one that is first asked in a later
    round begins where it would have begun in the first.
    """
    kept = desk.store.load(task.run, task.round)
    _note(desk.store.notes)
    if kept is not None:
        return {name: value.to(desk.device) for name, value in kept.items()}
    first = desk.method.init_server(Streams([Who(desk.seed, SERVER)], 0))
    return client_side.start(desk.method, _broadcast(first, desk.device), desk.train)


def _note(notes: Sequence[str]) -> None:
    """For the client's operator, in its own log."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)


def _broadcast(tree: Tree, device: torch.device) -> Tree:
    return {name: value.to(device).unsqueeze(0) for name, value in tree.items()}


def _digest(task: Task) -> str:
    """Of what a stored upload answers: the same question, or another with the same number."""
    terms = (task.upload, task.difference, task.dp_clip, task.dp_noise, task.agreement)
    return digest.of(task.tree, task.settings, repr(terms))


def _check_privacy(task: Task, place: Place) -> None:
    """The client's own floor: what it asks for is not the server's to decide."""
    noise = task.dp_noise if task.dp_clip > 0 else 0.0
    if not noise >= place.min_noise:
        raise PublicError(
            f"This client trains only with noise of at least {place.min_noise:g}; the server's "
            f"rules have {noise:g}."
        )
    if place.max_epsilon and not noise:
        raise PublicError(
            "This client bounds what its uploads spend (max_epsilon), and an upload without noise "
            "spends everything; switch on differential privacy by dp_clip."
        )


def _privatised(task: Task, place: Place, method: Method, message: Tree) -> Tree:
    """The upload with its noise, entered in the client's ledger before it can be sent."""
    ledger = privacy.Ledger(place.state / "privacy.json")
    if place.max_epsilon and not ledger.allows(task.dp_noise, place.max_epsilon, place.delta):
        raise PublicError(
            f"Another upload would spend more than the epsilon of {place.max_epsilon:g} that this "
            "client allows."
        )
    noisy, _ = privacy.privatise(
        message,
        task.tree,
        method.traits.posteriors,
        task.dp_clip,
        task.dp_noise,
        privacy.secret_generator(),
    )
    ledger.record(task.run, task.round, task.dp_noise, task.dp_clip)
    return noisy
