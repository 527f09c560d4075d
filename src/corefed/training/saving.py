"""Save the models of a finished run; `fitted.py` says which files, and loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corefed.base import digests, files, tensor_file
from corefed.base.digests import Stream
from corefed.base.rng import Streams, Who
from corefed.base.streamed import values
from corefed.base.types import ClientData, Tree
from corefed.bayes import uncertainty
from corefed.bayes.uncertainty import Prediction
from corefed.data.clients import FederatedData
from corefed.training import calibration, client_side, clustered, reach, reach_fitting
from corefed.training.fitted import (
    DATA,
    HELD_OUT,
    KINDS,
    MODELS,
    ROWS,
    SCHEMA,
    SOURCE,
    VALIDATION,
    models_at,
    tempered,
)  # fmt: skip
from corefed.training.predicting import clients_at_once
from corefed.training.reach import Reach
from corefed.training.setup import Trees


def describe(data: FederatedData) -> dict[str, Any]:
    """The content of data.json."""
    runs = len(data.preparations)
    per_run = len(data.names) // runs
    train, test = data.train.size.tolist(), data.test.size.tolist()
    rows: list[dict[str, Any]] = [
        {"name": name, "train": trained, "test": tested}
        for name, trained, tested in zip(data.names, train, test, strict=True)
    ]
    if data.classes:
        for row, counts in zip(rows, _class_counts(data), strict=True):
            row["classes"] = counts
    return {
        "schema": SCHEMA,
        "preparations": [each.to_dict() for each in data.preparations],
        "clients": [rows[g * per_run : (g + 1) * per_run] for g in range(runs)],
        "notes": list(data.notes),
        **({"fingerprint": dict(data.fingerprint)} if data.fingerprint else {}),
    }


def _class_counts(data: FederatedData) -> list[list[int]]:
    """Training points of each class, by client."""
    client, point = (data.train.weight > 0).nonzero(as_tuple=True)
    place = client * data.classes + data.train.y[client, point]
    counts = torch.bincount(place, minlength=len(data.names) * data.classes)
    found: list[list[int]] = counts.view(-1, data.classes).tolist()
    return found


def models_of(trees: Trees) -> Tree:
    """The content of fitted.safetensors."""
    parts = [part for _, part in _parts(trees)]
    tree = {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}
    return {**tree, **_of_runs(trees)}


def _rows(trees: Trees) -> Sequence[int]:
    """The clients whose models are kept."""
    if trees.touched is None:
        return range(len(trees.data.names))
    found: list[int] = trees.touched.nonzero().flatten().tolist()
    return found


def _parts(trees: Trees) -> Iterator[tuple[Sequence[int], Tree]]:
    """Some rows after the other: personal.NAME and weight, where the method has them."""
    rows = _rows(trees)
    for start in range(0, len(rows), trees.chunk):
        here = rows[start : start + trees.chunk]
        private = trees.take(here)
        part = _named(trees, here, private, "personal")
        weight = client_side.weights(trees.method, private)
        yield here, part if weight is None else {**part, "weight": weight.cpu()}


def _named(trees: Trees, rows: Sequence[int], private: Tree, kind: str) -> Tree:
    """KIND.NAME of these clients; empty where the method has no such model."""
    per_run = len(trees.data.names) // len(trees.servers)
    sent = client_side.broadcast(trees.servers, rows, per_run)
    models = client_side.models(trees.method, sent, private, trees.data.train.of(rows))
    return {f"{kind}.{name}": value.cpu() for name, value in models.get(kind, {}).items()}


def _of_runs(trees: Trees) -> Tree:
    """What fitted.safetensors has once per seed, temperatures, and which rows are kept."""
    servers = trees.servers
    firsts = range(0, len(trees.data.names), len(trees.data.names) // len(servers))
    tree = {
        k: v.contiguous() for k, v in _named(trees, firsts, trees.take(firsts), "global").items()
    }
    for name in servers[0]:
        tree[f"server.{name}"] = torch.stack([server[name].cpu() for server in servers])
    if trees.touched is not None:
        tree[ROWS] = torch.tensor(_rows(trees))
    return tree | (trees.temperature or {})


def held_out_of(
    trees: Trees,
    models: Tree,
    rows: Sequence[int] | None = None,
    points: ClientData | None = None,
) -> Tree:
    """The content of held_out.safetensors: predictions of the test points of `rows`.

    row [M] is the client's row and point [M] the number among its test points; y [M] or [M, d] is
    the truth. For each kind of model: KIND.mean, .total, .aleatoric and .epistemic. The personal
    models in `models` are those of `rows`, by default of all clients that are kept. `points` take
    the place of the test points. Where seeds enough to be a sample split the same data, source [M]
    tells which point each test point is.
    """
    run, data, method = trees.run, trees.data, trees.method
    rows = _rows(trees) if rows is None else rows
    per_run = len(data.names) // len(trees.servers)
    test, unit = (data.test if points is None else points).of(rows), data.unit
    real = test.weight > 0
    client, point = (each.cpu() for each in real.nonzero(as_tuple=True))
    tree = {"row": torch.tensor(rows)[client], "point": point, "y": test.y[real].cpu()}
    if points is None and data.source is not None and len(trees.servers) >= clustered.SEEDS:
        tree[SOURCE] = data.source[list(rows)][client, point]
    parts: dict[str, list[Tensor]] = {}
    many = 1
    if test.x.is_cuda:  # a GPU waits for launches; a CPU goes client by client, as it does later
        many = clients_at_once(trees.chunk, method, run.evaluate_draws, test.x.device)
    masks = real.cpu()
    for first in range(0, len(rows), many):
        here = rows[first : first + many]
        span, runs = range(first, first + len(here)), [one // per_run for one in here]
        x = test.x[first : first + many]
        x = values(x[:, masks[first]] if len(here) == 1 else x)
        who = [Who(run.seeds[one // per_run], trees.first + one % per_run) for one in here]
        # As later predictions are drawn: on a CPU they are the same to the last bit.
        streams = Streams(who, run.rounds, x.device)
        noise = uncertainty.draws_for(method, streams, run.evaluate_draws)
        for kind in KINDS:
            model = models_at(models, kind, span if kind == "personal" else runs, x.device)
            if not model or not x.shape[1]:
                continue
            found = uncertainty.predict(method, model, x, noise, data.classes)
            found = Prediction(*(field.cpu() for field in found))
            for place, (one, g) in enumerate(zip(here, runs, strict=True)):
                each, mask = found.client(place), masks[first + place]
                if not mask.any():
                    continue
                if len(here) > 1:
                    each = Prediction(*(field[mask] for field in each))
                T = calibration.temperature_of(models, kind, one if kind == "personal" else g)
                each = tempered(each, T, data.classes)
                if unit is not None:
                    each = each.in_unit(*(scale[one].cpu() for scale in unit))
                for name in ("mean", "total", "aleatoric", "epistemic"):
                    parts.setdefault(f"{kind}.{name}", []).append(getattr(each, name).float())
    return {**tree, **{name: torch.cat(each) for name, each in parts.items()}}


def keep_data(folder: Path, data: FederatedData, known: Sequence[Reach] | None = None) -> None:
    """Write data.json, and how far the training points reach, unless that is given."""
    reach.keep(folder, reach_fitting.measure(data) if known is None else known)
    files.replace(folder / DATA, digests.to_json(describe(data)))


def keep_models(folder: Path, trees: Trees) -> None:
    """Write both files, or neither."""
    about = {"corefed": json.dumps({"schema": SCHEMA})}
    if trees.touched is not None:
        files.replace_all(folder, _in_parts(trees, about))
        return
    models = models_of(trees)
    contents = {MODELS: models, HELD_OUT: held_out_of(trees, models)}
    if trees.data.validation is not None:
        contents[VALIDATION] = held_out_of(trees, models, points=trees.data.validation)
    files.replace_all(folder, [(n, tensor_file.stream(t, about)) for n, t in contents.items()])


def _in_parts(trees: Trees, about: dict[str, str]) -> Iterator[tuple[str, Stream]]:
    """Both files, without all models in memory at once."""
    shared = _of_runs(trees)
    rows = _rows(trees)
    first = next(iter(_parts(trees)))[1]
    shapes = {k: (v.dtype, (len(rows), *v.shape[1:])) for k, v in first.items()}
    shapes |= {k: (v.dtype, tuple(v.shape)) for k, v in shared.items()}

    def content(name: str) -> Iterator[Tensor]:
        yield from [shared[name]] if name in shared else (part[name] for _, part in _parts(trees))

    yield MODELS, tensor_file.encode(shapes, content, about)
    found = [held_out_of(trees, {**shared, **part}, here) for here, part in _parts(trees)]
    tree = {name: torch.cat([each[name] for each in found]) for name in found[0]}
    yield HELD_OUT, tensor_file.stream(tree, about)
