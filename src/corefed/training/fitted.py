"""Save the models of a finished run, and load them for predictions.

    data.json               how points are prepared, and what each client has (written first)
    fitted.safetensors      personal.NAME [G N, ...], global.NAME [G, ...], the server's own state
                            server.NAME [G, ...], and weight [G N, n] of methods with a subset;
                            of a calibrated run temperature.personal [G N], temperature.global [G]
                            and temperature.newcomer [G], the one that a newcomer gets
    held_out.safetensors    predictions of the clients' test points, one row per point

G seeds of N clients; row g N + i is client i of the g-th seed. Neither training data nor checkpoint
are needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base import files
from corefed.base.errors import UserError, did_you_mean
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Method, Tree
from corefed.bayes import temperature, uncertainty
from corefed.bayes.uncertainty import Prediction
from corefed.data.cells import shorten
from corefed.data.clients import FederatedData
from corefed.data.preparation import Preparation
from corefed.methods import registry
from corefed.models.own import Factory, is_own
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.training import calibration, client_side, record
from corefed.training.setup import Trees, network

DATA, MODELS, HELD_OUT = "data.json", "fitted.safetensors", "held_out.safetensors"
SCHEMA = 1
"""Increase it when a name changes its meaning."""
KINDS = ("personal", "global")
"""Models that are kept, where the method has them."""
PERSONALIZED = "personalized"
"""Subfolder of clients that joined after training, one run's folder each (`use/newcomer.py`)."""


# --- writing --------------------------------------------------------------------------------------


def describe(data: FederatedData) -> dict[str, Any]:
    """The content of data.json."""
    runs = len(data.preparations)
    per_run = len(data.names) // runs
    rows = [_client(data, row) for row in range(len(data.names))]
    return {
        "schema": SCHEMA,
        "preparations": [each.to_dict() for each in data.preparations],
        "clients": [rows[g * per_run : (g + 1) * per_run] for g in range(runs)],
        "notes": list(data.notes),
    }


def _client(data: FederatedData, row: int) -> dict[str, Any]:
    train, test = (part.weight[row] > 0 for part in (data.train, data.test))
    about: dict[str, Any] = {
        "name": data.names[row], "train": int(train.sum()), "test": int(test.sum())
    }  # fmt: skip
    if data.classes:
        y = data.train.y[row][train]
        about["classes"] = torch.bincount(y, minlength=data.classes).tolist()
    return about


def models_of(trees: Trees) -> Tree:
    """The content of fitted.safetensors."""
    method, servers, total = trees.method, trees.servers, len(trees.data.names)
    per_run = total // len(servers)
    found: dict[str, list[Tensor]] = {}
    for start in range(0, total, trees.chunk):
        rows = range(start, min(start + trees.chunk, total))
        part = slice(rows.start, rows.stop)
        private = {name: value[part] for name, value in trees.private.items()}
        train = ClientData(*(field[part] for field in trees.data.train))
        sent = client_side.broadcast(servers, rows, per_run)
        models = client_side.models(method, sent, private, train)
        for kind in KINDS:
            for name, value in models.get(kind, {}).items():
                firsts = [i for i, row in enumerate(rows) if row % per_run == 0]
                kept = value if kind == "personal" else value[firsts]
                found.setdefault(f"{kind}.{name}", []).append(kept.cpu())
    tree = {name: torch.cat(parts).contiguous() for name, parts in found.items()}
    for name in servers[0]:
        tree[f"server.{name}"] = torch.stack([server[name].cpu() for server in servers])
    weight = client_side.weights(method, trees.private)
    if weight is not None:
        tree["weight"] = weight.cpu()
    return tree | (trees.temperature or {})


def held_out_of(trees: Trees, models: Tree) -> Tree:
    """The content of held_out.safetensors: predictions of all test points.

    row [M] is the client's row and point [M] the number among its test points; y [M] or [M, d] is
    the truth. For each kind of model: KIND.mean, .total, .aleatoric and .epistemic.
    """
    run, data, method = trees.run, trees.data, trees.method
    per_run = len(data.names) // len(trees.servers)
    real = data.test.weight > 0
    row, point = real.nonzero(as_tuple=True)
    tree = {"row": row.cpu(), "point": point.cpu(), "y": data.test.y[real].cpu()}
    parts: dict[str, list[Tensor]] = {}
    for one in range(len(real)):
        g, number = divmod(one, per_run)
        x = data.test.x[one][real[one]]
        # Drawn on the CPU, as later predictions are; a GPU has other random numbers.
        streams = Streams([Who(run.seeds[g], trees.first + number)], run.rounds, x.device, "cpu")
        noise = uncertainty.draws_for(method, streams, run.evaluate_draws)
        for kind in KINDS:
            place = one if kind == "personal" else g
            model = _model(models, kind, place, x.device)
            if model and len(x):
                each = x.unsqueeze(0)
                found = uncertainty.predict(method, model, each, noise, data.classes).client(0)
                found = _tempered(found, models, kind, place, data.classes)
                if data.unit is not None:
                    found = found.in_unit(*(each[one] for each in data.unit))
                for name in ("mean", "total", "aleatoric", "epistemic"):
                    value = getattr(found, name).float().cpu()
                    parts.setdefault(f"{kind}.{name}", []).append(value)
    return {**tree, **{name: torch.cat(each) for name, each in parts.items()}}


def keep_data(folder: Path, data: FederatedData) -> None:
    files.replace(folder / DATA, (json.dumps(describe(data), indent=1) + "\n").encode())


def keep_models(folder: Path, trees: Trees) -> None:
    """Write both files, or neither."""
    models = models_of(trees)
    keep_trees(folder, models, held_out_of(trees, models))


def keep_trees(folder: Path, models: Tree, held_out: Tree) -> None:
    """Write both files with these contents, or neither."""
    from safetensors.torch import save  # checked by `checkpoint.require_library`

    about = {"corefed": json.dumps({"schema": SCHEMA})}
    contents = {MODELS: models, HELD_OUT: held_out}
    encoded = [(name, save(tree, metadata=about)) for name, tree in contents.items()]
    files.replace_all(folder, encoded)


# --- reading --------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """A finished run, ready to predict."""

    folder: Path
    experiment: Experiment
    preparations: tuple[Preparation, ...]  # one per seed
    clients: list[list[dict[str, Any]]]  # by seed: name, train, test, classes of each client
    method: Method
    models: Tree  # fitted.safetensors

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

    def predict(
        self, client: str, x: Tensor, *, seed: int | None = None, kind: str = ""
    ) -> Prediction:
        """Predictions of a client's model for prepared points [n, ...]."""
        g, i = self.place(client, seed)
        run = self.experiment.run
        kind = kind or self.kinds[0]
        row = g * len(self.names) + i if kind == "personal" else g
        streams = Streams([Who(run.seeds[g], i)], run.rounds)
        noise = uncertainty.draws_for(self.method, streams, run.evaluate_draws)
        model = _model(self.models, kind, row, torch.device("cpu"))
        preparation = self.preparations[g]
        classes = len(preparation.labels)
        found = uncertainty.predict(self.method, model, x.unsqueeze(0), noise, classes).client(0)
        found = _tempered(found, self.models, kind, row, classes)
        return found.in_unit(*preparation.unit) if preparation.target_mean else found


def load(folder: Path, factory: Factory | None = None, *, client: str = "") -> Fitted:
    """The models in a run's folder; a user's own network is imported by name, unless given.

    A `client` that joined after training is read from its own folder.
    """
    if not record.begun(folder):
        raise UserError(f"{folder} holds no run of corefed: it has no {record.EXPERIMENT}.")
    data = read_data(folder)
    if client in newcomers(folder) and client not in (each["name"] for each in data["clients"][0]):
        return load(folder / PERSONALIZED / client, factory)
    preparations = tuple(Preparation.from_dict(each) for each in data["preparations"])
    experiment = resolve(folder / record.EXPERIMENT)
    first = preparations[0]
    sizes = len(first.labels), len(first.targets)
    model = network(experiment.run, first.shape, *sizes, factory)
    method = registry.build(experiment.run.method, experiment.settings, model)
    models = read_tensors(folder, MODELS)
    if factory is not None or is_own(experiment.run.model):
        _refuse_changed(folder, experiment, method, models)
    return Fitted(folder, experiment, preparations, data["clients"], method, models)


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
        found: dict[str, Any] = dict(json.loads((folder / DATA).read_text(encoding="utf-8")))
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
        return load_file(folder / name)
    except FileNotFoundError as error:
        raise UserError(_absent(folder, name)) from error
    except OSError as error:
        raise UserError(f"Cannot read {folder / name}: {error.strerror}.") from error
    except SafetensorError as error:
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


def _tempered(found: Prediction, models: Tree, kind: str, row: int, classes: int) -> Prediction:
    T = calibration.temperature_of(models, kind, row)
    return found if T == 1 else temperature.temper_prediction(found, T, classes)


def _model(models: Tree, kind: str, row: int, device: torch.device) -> Tree:
    """One client's model, with a client axis of length 1; empty where there is none."""
    mine = {k: v for k, v in models.items() if k.startswith(f"{kind}.")}
    return {k.removeprefix(f"{kind}."): v[row : row + 1].to(device) for k, v in mine.items()}
