"""Several settings of one method, trained side by side on the same data, as seeds are.

Run k G + g has settings k and seed g. Its clients are rows (k G + g) N to (k G + g) N + N - 1 of
every tensor. Settings with the same seed have the same split, initial draw, minibatches and noise,
so that they differ by their settings alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Tree
from corefed.data.preparation import TargetUnit
from corefed.methods import registry
from corefed.training import local, variants
from corefed.training.evaluate import Evaluation, evaluate
from corefed.training.setup import Setup, stacked_clients

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Together:
    """Runs that differ in settings, in training."""

    def __init__(self, setup: Setup, settings: Sequence[DataclassInstance]) -> None:
        """`setup` gives data, network, seeds and rounds; its own settings are not used."""
        self.setup, self.settings = setup, list(settings)
        run = setup.experiment.run
        self.seeds = run.seeds
        device = torch.device(run.device)
        self.servers: list[Tree] = []
        for each in settings:
            method = registry.build(run.method, each, setup.model)
            for seed in run.seeds:
                state = method.init_server(Streams([Who(seed, SERVER)], 0))
                self.servers.append({name: value.to(device) for name, value in state.items()})
        self.clients = local.LocalClients(
            setup.method,
            _repeat(setup.data.train, len(settings)),
            run.seeds * len(settings),
            self.servers,
            setup.clients.work,
            stacked_clients(
                run, setup.model, setup.method, self.servers[0], setup.data.train, len(settings)
            ),
            method_at=self._method_at(),
        )

    def train(self, t: int) -> Tensor:
        """Round t (from 0) of all runs: [K, G] mean losses, NaN or infinite where one diverged."""
        run = self.setup.experiment.run
        size = run.cohort or run.clients
        chosen = [rng.choose(seed, t, run.clients, size) for seed in run.seeds]
        updates, loss, _ = self.clients.train(t, self.servers, chosen * len(self.settings))
        method = self.setup.method
        pairs = zip(self.servers, updates, strict=True)
        self.servers = [method.aggregate(server, update) for server, update in pairs]
        return loss.view(len(self.settings), -1)

    def evaluate(self, t: int, points: ClientData) -> list[list[dict[str, float]]]:
        """Metrics by settings and seed, after round t."""
        run, data, many = self.setup.experiment.run, self.setup.data, len(self.settings)
        unit = data.unit
        if unit is not None:
            unit = TargetUnit(*(each.repeat(many, 1) for each in unit))
        found: Evaluation = evaluate(
            self.clients, self.setup.method, self.servers, _repeat(points, many), t,
            run.evaluate_draws, data.classes, unit, elsewhere=False,
        )  # fmt: skip
        seeds = len(self.seeds)
        return [found.metrics[k * seeds : (k + 1) * seeds] for k in range(many)]

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with some of the settings, in this order."""
        seeds, per_run = len(self.seeds), self.clients.per_run
        runs = [k * seeds + g for k in chosen for g in range(seeds)]
        rows = torch.tensor([r * per_run + i for r in runs for i in range(per_run)])
        self.settings = [self.settings[k] for k in chosen]
        self.servers = [self.servers[r] for r in runs]
        self.clients.data = _repeat(self.setup.data.train, len(chosen))
        self.clients.sizes = self.clients.data.size
        self.clients.who = [self.clients.who[int(row)] for row in rows]
        private = self.clients.private
        self.clients.private = {
            name: value[rows.to(value.device)] for name, value in private.items()
        }
        self.clients.method_at = self._method_at()

    def _method_at(self) -> variants.MethodAt:
        run, seeds = self.setup.experiment.run, len(self.seeds)
        at = variants.methods(run, self.settings, self.setup.model, torch.device(run.device))
        return lambda t, runs: at(t, [r // seeds for r in runs])


def _repeat(data: ClientData, times: int) -> ClientData:
    """The same clients once for each of the settings."""
    if times == 1:
        return data
    return ClientData(*(field.repeat(times, *[1] * (field.dim() - 1)) for field in data))
