"""Load the models of a finished run for predictions; `saving.py` writes them.

    data.json               how points are prepared, and what each client has (written first)
    fitted.safetensors      personal.NAME [G N, ...], global.NAME [G, ...], the server's own state
                            server.NAME [G, ...], and weight [G N, n] of methods with a subset;
                            of a calibrated run temperature.personal [G N], temperature.global [G]
                            and temperature.newcomer [G], the one that a newcomer gets
    held_out.safetensors    predictions of the clients' test points, one row per point
    validation.safetensors  the same of validation points, where a run has them
    reach.safetensors       how far the training points reach (`reach.py`)

G seeds of N clients; row g N + i is client i of the g-th seed. Neither training data nor checkpoint
are needed.

Where all clients' state is large, only clients that took part in a round are kept. Then `rows` [K]
of fitted.safetensors says which: personal.NAME and weight have K rows, and held_out.safetensors has
the test points of these clients. The others predict with the shared model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base import digests, tensor_file
from corefed.base.errors import UserError, did_you_mean
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Method, Tree, places
from corefed.bayes import temperature, uncertainty
from corefed.bayes.uncertainty import Prediction
from corefed.data.cells import shorten
from corefed.data.preparation import Preparation
from corefed.methods import registry
from corefed.models.own import Factory
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.training import calibration, reach, record
from corefed.training.reach import Outside, Reach
from corefed.training.setup import network

DATA, MODELS, HELD_OUT = "data.json", "fitted.safetensors", "held_out.safetensors"
VALIDATION = "validation.safetensors"
"""Predictions of the validation points, where a run in one process has any."""
SCHEMA = 1
"""Increase it when a name changes its meaning."""
SHARED = "global"
KINDS = ("personal", SHARED)
"""Models that are kept, where the method has them."""
SOURCE = "source"
"""Which point of the data each held-out one is, of runs of several seeds that split one pool."""
ROWS = "rows"
"""Which clients have a personal model, where not all have."""
PERSONALIZED = "personalized"
"""Subfolder of clients that joined after training, one run's folder each (`use/newcomer.py`)."""


class Fitted(NamedTuple):
    """A finished run, ready to predict."""

    folder: Path
    experiment: Experiment
    preparations: tuple[Preparation, ...]  # one per seed
    clients: list[list[dict[str, Any]]]  # by seed: name, train, test, classes of each client
    method: Method
    models: Tree  # fitted.safetensors
    factory: Factory | None = None  # of a user's own network
    reach: tuple[Reach, ...] = ()  # one per seed; empty in the folder of an older version

    @property
    def names(self) -> list[str]:
        """Of the clients, the same for every seed."""
        return [each["name"] for each in self.clients[0]]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(k for k in KINDS if any(name.startswith(f"{k}.") for name in self.models))

    def place(self, client: str, seed: int | None = None) -> tuple[int, int]:
        """(g, i) of a client and a seed, by default the first seed."""
        if client not in self.names:
            known = [*self.names, *newcomers(self.folder)]
            hint = did_you_mean(client, known, otherwise=f"it has {shorten(known)}")
            raise UserError(f"The run in {self.folder} has no client {client!r}{hint}")
        seeds = self.experiment.run.seeds
        if seed is not None and seed not in seeds:
            raise UserError(
                f"The run in {self.folder} has no seed {seed}, only {', '.join(map(str, seeds))}."
            )
        return seeds.index(seed) if seed is not None else 0, self.names.index(client)

    def kept(self, client: str, g: int, i: int, kind: str) -> tuple[str, int, float]:
        """The kind of model that a client predicts with, its row, and its temperature.

        It is as asked for, except for a client that took part in no round of a large run: that one
        has the shared model.
        """
        row, rows = g * len(self.names) + i, self.models.get(ROWS)
        if kind == "personal" and rows is not None:
            place = int(torch.searchsorted(rows, row))
            if place < len(rows) and int(rows[place]) == row:
                return kind, place, calibration.temperature_of(self.models, kind, row)
            if SHARED not in self.kinds:
                raise UserError(
                    f"Client {client!r} took part in no round of the run in {self.folder}, so it "
                    "has no model."
                )
            kind = SHARED
        row = row if kind == "personal" else g
        return kind, row, calibration.temperature_of(self.models, kind, row)

    def outside(self, x: Tensor, client: str | None, seed: int | None = None) -> Outside | None:
        """Which prepared points are unlike what a client was trained on; None: nothing says.

        Without a client, unlike what all clients were trained on.
        """
        g, i = self.place(self.names[0] if client is None else client, seed)
        if not self.reach:
            return None
        known = self.reach[g]
        return reach.judge(known, self.preparations[g], client or "", i if client else None, x)

    def widen(self, said: Prediction, far: Tensor, seed: int | None = None) -> Prediction:
        """The prediction with the uncertainty of points outside raised, by its epistemic part.

        Classes: to the most there is, log of their number. Targets: by the variance of the training
        targets at least, as if nothing were known of the point. The means stay.
        """
        g, _ = self.place(self.names[0], seed)
        classes = len(self.preparations[g].labels)
        if classes:
            most = torch.full_like(said.total, math.log(classes))
            return said._replace(total=torch.where(far, most, said.total))
        own = self.reach[g].target.to(said.total)
        wide = said.aleatoric + said.epistemic.maximum(own)
        return said._replace(total=torch.where(far.unsqueeze(-1), wide, said.total))

    def predict(
        self, client: str, x: Tensor, *, seed: int | None = None, kind: str = ""
    ) -> Prediction:
        """Predictions of a client's model for prepared points [n, ...]."""
        g, i = self.place(client, seed)
        run = self.experiment.run
        kind, row, T = self.kept(client, g, i, kind or self.kinds[0])
        streams = Streams([Who(run.seeds[g], i)], run.rounds)
        noise = uncertainty.draws_for(self.method, streams, run.evaluate_draws)
        model = model_at(self.models, kind, row, torch.device("cpu"))
        preparation = self.preparations[g]
        classes = len(preparation.labels)
        found = uncertainty.predict(self.method, model, x.unsqueeze(0), noise, classes).client(0)
        found = tempered(found, T, classes)
        return found.in_unit(*preparation.unit) if preparation.target_mean else found


def load(folder: Path, factory: Factory | None = None, *, client: str = "") -> Fitted:
    """The models in a run's folder. A user's own network needs its factory: see `own.named`.

    A `client` that joined after training is read from its own folder.
    """
    if not record.begun(folder):
        raise UserError(f"{folder} holds no run of corefed: it has no {record.EXPERIMENT}.")
    data = read_data(folder)
    if client in newcomers(folder) and client not in (each["name"] for each in data["clients"][0]):
        return load(folder / PERSONALIZED / client, factory)
    preparations = tuple(Preparation.from_dict(each) for each in data["preparations"])
    experiment = resolve(record.settings_file(folder))
    first = preparations[0]
    sizes = len(first.labels), len(first.targets)
    model = network(experiment.run, first.shape, *sizes, factory)
    method = registry.build(experiment.run.method, experiment.settings, model)
    models = read_tensors(folder, MODELS)
    if factory is not None:
        _refuse_changed(folder, experiment, method, models)
    known = tuple(reach.read(folder, len(preparations)))
    return Fitted(folder, experiment, preparations, data["clients"], method, models, factory, known)


def weights(models: Tree, clients: int) -> Tensor:
    """[C, n] weights of the subsets of the first seed's clients; 0 where they are not kept."""
    weight = models["weight"]
    if ROWS not in models:
        return weight[:clients]
    mine = models[ROWS] < clients
    every = weight.new_zeros(clients, weight.shape[1])
    every[models[ROWS][mine]] = weight[mine]
    return every


def newcomers(folder: Path) -> list[str]:
    """Names of the clients that joined a run after its training."""
    found = (folder / PERSONALIZED).glob(f"*/{record.SUMMARY}")
    return sorted(summary.parent.name for summary in found)


def _refuse_changed(folder: Path, experiment: Experiment, method: Method, models: Tree) -> None:
    """Refuse a user's network whose code has changed since training."""
    fresh = method.init_server(Streams([Who(experiment.run.seeds[0], SERVER)], 0))
    for name, value in fresh.items():
        kept = models.get(f"server.{name}")
        if kept is not None and kept.shape[1:] != value.shape:
            raise UserError(
                f"The model {experiment.run.model} has {value.shape[-1]:,} parameters now and had "
                f"{kept.shape[-1]:,} in the run in {folder}; restore the code it was trained with."
            )


def read_data(folder: Path) -> dict[str, Any]:
    """data.json, checked."""
    try:
        found = digests.read_json(folder / DATA)
    except FileNotFoundError as error:
        raise UserError(_absent(folder, DATA)) from error
    except OSError as error:
        raise UserError(f"Cannot read {folder / DATA}: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder / DATA} is damaged: {error}.") from error
    if found.get("schema") != SCHEMA:
        raise UserError(f"{folder / DATA} is not of schema {SCHEMA}, which this version reads.")
    return found


def read_tensors(folder: Path, name: str) -> Tree:
    """fitted.safetensors or held_out.safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensor_file.check(folder / name)
        return load_file(folder / name)
    except FileNotFoundError as error:
        raise UserError(_absent(folder, name)) from error
    except OSError as error:
        raise UserError(f"Cannot read {folder / name}: {error.strerror}.") from error
    except (SafetensorError, digests.DamagedError) as error:
        raise UserError(f"{folder / name} is truncated or damaged ({error}).") from error


def _absent(folder: Path, name: str) -> str:
    if not (folder / record.SUMMARY).exists():
        return (
            f"The run in {folder} is not finished, so it has no {name}; go on with it by "
            f"corefed run --resume {folder}."
        )
    return (
        f"{folder} has no {name}: it was made without (checkpoint_every = 0), or by an older "
        "version; run it again."
    )


def tempered(found: Prediction, T: float, classes: int) -> Prediction:
    """The prediction at a temperature."""
    return found if T == 1 else temperature.temper_prediction(found, T, classes)


def model_at(models: Tree, kind: str, row: int, device: torch.device) -> Tree:
    """One client's model, with a client axis of length 1; empty where there is none."""
    return models_at(models, kind, [row], device)


def models_at(models: Tree, kind: str, rows: Sequence[int], device: torch.device) -> Tree:
    """The models of some clients; empty where there are none."""
    mine = {k: v for k, v in models.items() if k.startswith(f"{kind}.")}
    return {k.removeprefix(f"{kind}."): v[places(rows)].to(device) for k, v in mine.items()}
