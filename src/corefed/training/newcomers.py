"""Train a model for a client that joins after training: `corefed personalize`.

The server does not change, and nothing is sent. The newcomer starts from the server's state v,
with its own class shares (`class_shares.py`), and trains on its own data alone:

    a personal model (pfedbayes and what builds on it, pfedme, ditto), or a personal part of one
                     (fedrep, feddbe): q starts at v, then rounds of the run's local steps; each
                     starts from v again, so that q stays near it
    a start to adapt (per-fedavg, fedavg-ft, fedbabu)   the method's own steps of adapting to the
                     newcomer's training data
    one model for all (fedavg, fedprox, scaffold, bnfed, submodular-*, shared-start)   fine-tuned:
                     all steps from the shared model

A method that shares nothing (independent) is refused. The newcomer's model has the temperature of
all clients of the run, or its own, shrunk to that, where it has validation points. How much of its
own training it keeps is fitted to its points (`shrinking.py`), so that few points do no harm.
docs/newcomers-study.md has the measurements behind STEPS, and behind a coreset of at least one
minibatch: smaller ones save no time per step, and were less accurate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Augment, ClientData, Method, Tree, Update, Work
from corefed.data.clients import FederatedData
from corefed.methods import registry
from corefed.models.network import Model
from corefed.settings.config import check, to_dict
from corefed.settings.run import LOCAL, Experiment
from corefed.training import (
    calibration,
    class_shares,
    client_side,
    cost,
    local,
    newcomer_scores,
    reach,
    shrinking,
    summaries,
)
from corefed.training.augmenting import work_of
from corefed.training.fitted import Fitted
from corefed.training.loop import Answer, Line, run_rounds, size_of
from corefed.training.reach import Reach
from corefed.training.scoring import means_of
from corefed.training.setup import Setup, network

STEPS = 200
"""Local steps. Between 40 and 640 accuracy changed by less than a percentage point on MNIST, and by
two or three on Fashion-MNIST with 10 points."""

Start = Callable[[Tree, ClientData], Tree]
"""(what the server sent, data) -> where newcomers start."""


class Newcomer(NamedTuple):
    """A client that has joined, as a finished run of one client."""

    setup: Setup
    server: Tree
    summary: dict[str, Any]
    lines: list[Line]
    temperature: Tree | None = None  # of its models; None: they are not calibrated
    reach: tuple[Reach, ...] = ()  # of the run's training points and its own


# --- training -------------------------------------------------------------------------------------


def rounds_of(method: Method, server: Tree, data: ClientData, steps: int, each: int) -> list[int]:
    """Steps of each round, at most `each` where the method keeps a personal model.

    Fine-tuning has one round, because every round starts from the server's model.
    """
    if method.traits.restarts:
        return [steps]
    one = ClientData(*(field[:1, :1] for field in data))
    broadcast = {name: value.unsqueeze(0) for name, value in server.items()}
    if "personal" not in method.models(broadcast, method.init_client(broadcast, one), one):
        return [steps]
    whole, rest = divmod(steps, each)
    return [each] * whole + [rest] * (rest > 0)


def adapt(
    method: Method,
    server: Tree,
    data: ClientData,
    who: Sequence[Who],
    rounds: Sequence[int],
    batch: int,
    augment: Augment | None = None,
    start: Start | None = None,
) -> Iterator[client_side.Trained]:
    """Rounds of C newcomers, from a server that does not change."""
    broadcast = {name: value.expand(len(who), *value.shape) for name, value in server.items()}
    if start is not None:
        broadcast = start(broadcast, data)
    private = client_side.start(method, broadcast, data)
    for t, steps in enumerate(rounds):
        streams = Streams(who, t, data.weight.device)
        work = Work(steps, batch, augment)
        trained = client_side.train(method, broadcast, private, data, streams, work)
        private = trained.private
        yield trained


class Joining:
    """A newcomer beside a finished run, as the round loop sees it."""

    def __init__(
        self, setup: Setup, server: Tree, who: Who, plan: Sequence[int], start: Start | None
    ) -> None:
        self.setup = setup
        work, data, method = setup.clients.work, setup.clients.data, setup.method
        self.rounds = adapt(method, server, data, [who], plan, work.batch, work.augment, start)

    def train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> Answer:
        method = self.setup.method
        before = self.setup.clients.selection_cost()
        trained = next(self.rounds)
        self.setup.clients.private = trained.private
        _refuse_divergence(trained.loss.item())
        update = Update((0,), trained.message, self.setup.clients.sizes)
        numbers: Line = {
            "loss": trained.loss.tolist(),
            "examples": trained.examples.tolist(),
            "bytes_up": [0],
            "bytes_down": [0 if t else size_of(client_side.sent(method, servers[0]))],  # once
            "coreset": means_of(client_side.report(method, trained.private), 1),
        }
        after = client_side.selection_cost(method, trained.private)
        looked = None if before is None or after is None else (after - before).tolist()
        numbers |= cost.of_round(method, numbers["examples"], looked)
        return Answer([update], numbers)

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        setup = self.setup
        found = newcomer_scores.metrics(setup, setup.method, setup.clients, servers[0])
        return found.line(setup.data.labels)


def with_personal(method: Method) -> Method:
    """The method with a personal model; where it has none, the fine-tuned one."""

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        found = method.models(broadcast, private, data)
        return found if "personal" in found else {"personal": found.pop("localized"), **found}

    return method._replace(models=models)


def settings_for(
    experiment: Experiment, points: int, steps: int | None, fraction: float | None
) -> tuple[Experiment, int]:
    """The checked experiment of a newcomer with `points` training points, and its steps."""
    run, settings = experiment.run, experiment.settings
    own = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    if steps is not None and steps < 1:
        raise UserError(f"--steps is {steps}; it must be at least 1.")
    if fraction is not None and "fraction" not in own:
        raise UserError(f"{run.method} trains on all data and takes no --fraction.")
    changed: dict[str, Any] = {}
    if "fraction" in own:
        least = min(1.0, run.batch_size / points)
        changed["fraction"] = fraction if fraction is not None else max(own["fraction"], least)
    settings = dataclasses.replace(settings, **changed)
    own_steps = registry.adaptation_steps(run.method, settings, steps)
    if own_steps is not None:  # the personal model is made by these steps alone
        settings, steps = own_steps
    found = Experiment(run, settings)
    check(found)
    return found, steps if steps is not None else STEPS


def join(
    model: Fitted,
    data: FederatedData,
    *,
    steps: int | None = None,
    fraction: float | None = None,
    seed: int | None = None,
    device: str = "auto",
    compare: bool = True,
    share: float | None = None,
    own_classes: bool = True,
) -> Newcomer:
    """Train the one client of `data` from the run's server; `compare` it with training alone.

    `share` is how much of its own training it keeps; None: what its points say (`shrinking.py`).
    `own_classes`: it starts at its own class shares, where those of the run are known
    (`class_shares.py`).
    """
    if share is not None and not 0 <= share <= 1:
        raise UserError(f"--share is {share:g}; it must be from 0 to 1.")
    seeds = model.experiment.run.seeds
    g = model.place(model.names[0], seed)[0]
    who = Who(seeds[g], len(model.names))  # numbered as the next client of the run
    experiment, steps = settings_for(model.experiment, int(data.train.size.sum()), steps, fraction)
    place = device_for(device)
    data = data.to(place)
    shape = data.train.x.shape[2:]
    made = network(experiment.run, shape, data.classes, data.targets, model.factory)
    method = registry.build(experiment.run.method, experiment.settings, made)
    if method.traits.sent == ():
        raise UserError(
            f"Clients of {method.name} share nothing, so a new one has nothing to start from; "
            "train it alone."
        )
    prefix = "server."
    server = {
        name.removeprefix(prefix): value[g].to(place)
        for name, value in model.models.items()
        if name.startswith(prefix)
    }
    plan = rounds_of(method, server, data.train, steps, experiment.run.local_steps)
    if registry.adaptation_steps(method.name, experiment.settings, None) is not None:
        plan = [1]  # the personal model is made by `models`
    method, start = with_personal(method), None
    known = class_shares.of_run(model.clients[g], data.classes, method) if own_classes else None
    T = newcomer_scores.known_temperatures(experiment.run.calibrate, model.models, g)
    if known is not None and class_shares.able(server, made):
        shared_T = T.get("global", 1.0)
        start = partial(class_shares.moved, model=made, known=known, temperature=shared_T)
        method = class_shares.starting(method, start)
    run = dataclasses.replace(
        experiment.run,
        data=LOCAL, partition="natural", clients=1, cohort=0, keep=1.0, client_column="",
        validation=_validation_share(data), patience=0, local_epochs=0, speeds="", deadline=0.0,
        rounds=len(plan), local_steps=plan[0], seeds=(who.seed,), device=str(place),
    )  # fmt: skip
    work = work_of(run, data.train.x.shape[2:], experiment.run.data)
    experiment = dataclasses.replace(experiment, run=run)
    if share is None:
        share = shrinking.fit(
            method, server, data.train, who,
            lambda points, each: adapt(
                method, server, points, each, plan, work.batch, work.augment, start
            ),
            run.evaluate_draws, data.classes, (T.get("global", 1.0), T.get("personal", 1.0)),
        ).share  # fmt: skip
    method = shrinking.shrunk(method, share)
    clients = local.LocalClients(method, data.train, run.seeds, [server], work, 1)
    setup = Setup(experiment, data, made, method, clients, [server])
    tested = bool((data.test.weight > 0).any())
    lines: list[Line] = []
    run_rounds(
        method._replace(aggregate=lambda server, update: server),  # nobody else is retrained
        Joining(setup, server, who, plan, start),
        [server],
        run,
        lines,
        evaluated=lambda t: tested and t + 1 == run.rounds,
    )
    if tested and compare:
        _compare(setup, server, who, plan, lines[-1])
    if "personal" in T:
        T["personal"] = shrinking.temperature(T.get("global", 1.0), T["personal"], share)
    around = {kind: torch.tensor([value], dtype=torch.float64) for kind, value in T.items()}
    found = newcomer_scores.temperatures(setup, server, around)
    if found is not None and tested:
        lines[-1] |= newcomer_scores.calibrated(setup, server, found)
    about = {**summaries.environment(run.device), "notes": list(data.notes)}
    summary = summaries.summarise(to_dict(experiment), lines, about)
    summary["personalized"] = {
        "name": data.names[0],
        "data": model.experiment.run.data,
        "clients": len(model.names),
        "steps": steps,
        "share": share,
        "own_classes": start is not None,
    }
    kept = None if found is None else calibration.stored(found)
    reached = tuple(reach.extend(each, data.train.x[0]) for each in model.reach[g : g + 1])
    return Newcomer(setup, server, summary, lines, kept, reached)


def _validation_share(data: FederatedData) -> float:
    """Of the training points."""
    held = 0 if data.validation is None else int(data.validation.size.sum())
    return held / (held + int(data.train.size.sum()))


def _refuse_divergence(loss: float) -> None:
    if not isfinite(loss):
        raise UserError(
            f"Training diverged: the loss is {loss}. The newcomer's numbers may be far from those "
            "that the run was trained on; compare their units."
        )


def _compare(setup: Setup, server: Tree, who: Who, plan: Sequence[int], line: Line) -> None:
    """Add the metrics of a model trained alone, with the same steps from the initial state."""
    run, data = setup.experiment.run, setup.data
    method, start = _alone(setup.experiment, setup.model, server, who.seed)
    clients = local.LocalClients(method, data.train, run.seeds, [start], setup.clients.work, 1)
    augment = setup.clients.work.augment
    for trained in adapt(method, start, data.train, [who], plan, run.batch_size, augment):
        clients.private = trained.private
    for name, value in newcomer_scores.metrics(setup, method, clients, start).metrics[0].items():
        if name.startswith("personal_"):
            line["metrics"][name.replace("personal", "alone")] = [value]


def _alone(experiment: Experiment, network: Model, like: Tree, seed: int) -> tuple[Method, Tree]:
    """The same method on all of the client's points, and the initial state of the run."""
    settings = experiment.settings
    if "fraction" in to_dict(experiment):
        settings = dataclasses.replace(settings, fraction=1.0)
    method = with_personal(registry.build(experiment.run.method, settings, network))
    start = method.init_server(Streams([Who(seed, SERVER)], 0))
    device = next(iter(like.values())).device
    return method, {name: value.to(device) for name, value in start.items()}
