"""Several settings of one method, trained side by side on the same data, as seeds are.

Run k G + g has settings k and seed g. Its clients are rows (k G + g) N to (k G + g) N + N - 1 of
every tensor. Settings with the same seed have the same split, initial draw, minibatches and noise,
so that they differ by their settings alone.

Only numbers that are marked `PER_RUN` may differ, and not where a method's traits say that they may
not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.passes import FORWARD
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Tree, Update, Work
from corefed.data.preparation import TargetUnit
from corefed.methods import registry
from corefed.training import local, variants
from corefed.training.evaluate import Evaluation, evaluate
from corefed.training.setup import Setup, compiled_steps, stacked_clients

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Together:
    """Runs that differ in settings, in training."""

    def __init__(self, setup: Setup, settings: Sequence[DataclassInstance]) -> None:
        """`setup` gives data, network, seeds, rounds and steps, and all that settings share."""
        self.setup, self.settings = setup, list(settings)
        run = setup.experiment.run
        self.seeds = run.seeds
        device = torch.device(run.device)
        self.servers: list[Tree] = []
        for each in settings:
            method = registry.build(run.method, each, setup.model)
            for seed in run.seeds:
                state = method.init_server(Streams([Who(seed, SERVER)], 0))
                self.servers.append(_on(device, state))
        self.clients = local.LocalClients(
            setup.method,
            _repeat(setup.data.train, len(settings)),
            run.seeds * len(settings),
            self.servers,
            self._work(),
            self._chunk(),
            method_at=self._method_at(),
            compiled=self._compiled(),
        )
        self.examples = torch.zeros(len(settings), dtype=torch.int64)  # gradient passes

    def train(self, t: int) -> Tensor:
        """Round t (from 0) of all runs: [K, G] mean losses, NaN where a run diverged.

        Of such a run the server has only NaN: go on without its settings (`keep`).
        """
        run = self.setup.experiment.run
        size = run.cohort or run.clients
        chosen = [rng.choose(seed, t, run.clients, size) for seed in run.seeds]
        updates, loss, examples = self.clients.train(t, self.servers, chosen * len(self.settings))
        method = self.setup.method
        fine = [
            math.isfinite(value) and _is_finite(update)
            for value, update in zip(loss.tolist(), updates, strict=True)
        ]
        self.servers = [
            method.aggregate(server, update) if healthy else _lost(server)
            for server, update, healthy in zip(self.servers, updates, fine, strict=True)
        ]
        self.examples += examples.view(len(self.settings), -1).sum(-1)
        loss = loss.masked_fill(~torch.tensor(fine, device=loss.device), math.nan)
        return loss.view(len(self.settings), -1)

    def evaluate(self, t: int, points: ClientData) -> list[list[dict[str, float]]]:
        """Metrics by settings and seed, after round t."""
        found, seeds = self.evaluation(t, points), len(self.seeds)
        return [found.metrics[k * seeds : (k + 1) * seeds] for k in range(len(self.settings))]

    def evaluation(self, t: int, points: ClientData) -> Evaluation:
        """All runs after round t, one after the other as rows are."""
        run, data, many = self.setup.experiment.run, self.setup.data, len(self.settings)
        unit = data.unit
        if unit is not None:
            unit = TargetUnit(*(each.repeat(many, 1) for each in unit))
        return evaluate(
            self.clients, self.setup.method, self.servers, _repeat(points, many), t,
            run.evaluate_draws, data.classes, unit, elsewhere=False,
        )  # fmt: skip

    def passes(self) -> list[float]:
        """Points through the network so far, forward and backward, by settings.

        A forward pass of a selection counts a third.
        """
        method = self.setup.method
        found = self.examples.double() * math.prod(method.noise[:-1])
        looked = self.clients.selection_cost()
        if looked is not None:
            found += looked.double().cpu().view(len(self.settings), -1).sum(-1) * FORWARD
        numbers: list[float] = found.tolist()
        return numbers

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with some of the settings, in this order."""
        seeds, per_run = len(self.seeds), self.clients.per_run
        runs = [k * seeds + g for k in chosen for g in range(seeds)]
        rows = torch.tensor([r * per_run + i for r in runs for i in range(per_run)])
        self.settings = [self.settings[k] for k in chosen]
        self.servers = [self.servers[r] for r in runs]
        self.clients.data = _repeat(self.setup.data.train, len(chosen))
        self.clients.sizes = self.clients.data.size
        self.clients.points = self.clients.sizes.tolist()
        self.clients.who = [self.clients.who[int(row)] for row in rows]
        private = self.clients.private
        self.clients.private = {
            name: value[rows.to(value.device)] for name, value in private.items()
        }
        self.clients.chunk = self._chunk()
        self.clients.method_at = self._method_at()
        self.clients.compiled = self._compiled()
        self.examples = self.examples[list(chosen)]

    def park(self) -> None:
        """Let go of the copies of the data, and of the device's memory, until `wake`."""
        self.clients.data = self.setup.data.train
        self.clients.compiled = None  # its programs hold data and state
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        self.clients.data = _repeat(self.setup.data.train, len(self.settings))
        self._move(torch.device(self.setup.experiment.run.device))
        self.clients.compiled = self._compiled()

    def _move(self, device: torch.device) -> None:
        self.servers = [_on(device, server) for server in self.servers]
        self.clients.private = _on(device, self.clients.private)

    def _chunk(self) -> int:
        setup = self.setup
        return stacked_clients(
            setup.experiment.run, setup.model, setup.method, self.servers[0], setup.data.train,
            len(self.settings),
        )  # fmt: skip

    def _compiled(self) -> local.Compiled | None:
        setup = self.setup
        return compiled_steps(setup.experiment.run, self.settings, setup.model, self._work())

    def _work(self) -> Work:
        """The setup's, but for what candidates of a search may differ in."""
        run = self.setup.experiment.run
        return self.setup.clients.work._replace(steps=run.local_steps, batch=run.batch_size)

    def _method_at(self) -> variants.MethodAt:
        run = self.setup.experiment.run
        return variants.methods(run, self.settings, self.setup.model, torch.device(run.device))


def _repeat(data: ClientData, times: int) -> ClientData:
    """The same clients once for each of the settings."""
    if times == 1:
        return data
    return ClientData(*(field.repeat(times, *[1] * (field.dim() - 1)) for field in data))


def _on(device: torch.device, tree: Tree) -> Tree:
    return {name: value.to(device) for name, value in tree.items()}


def _lost(server: Tree) -> Tree:
    return {name: torch.full_like(value, math.nan) for name, value in server.items()}


def _is_finite(update: Update) -> bool:
    return all(bool(value.isfinite().all()) for value in update.message.values())
