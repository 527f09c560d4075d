"""Temperatures of a finished run, fitted on validation points, and what they change.

Each kind of model has one temperature for all clients' points together, shrunk towards 1. The
global model keeps it. Each client's personal and localized model has its own, shrunk towards that
of all (`bayes/temperature.py` has the rule). So a client without validation points has the
temperature of all. Test points take no part: metrics on them, and thresholds for review that are
chosen on them, are of points that the temperatures have not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.types import ClientData, Method, Tree, places
from corefed.bayes import temperature
from corefed.data.preparation import TargetUnit
from corefed.settings.run import Run
from corefed.training.evaluate import Evaluation
from corefed.training.local import LocalClients
from corefed.training.predicting import chunks
from corefed.training.scoring import BINS, bins

SHARED = "global"
"""The kind of model that has one temperature for all clients."""
DRAWS = 200
"""Simulated sets of labels. The standard error of their mean ECE is about 2 % of it."""

PREFIX = "temperature."
"""Of the tensors of fitted.safetensors that are no part of a model."""
NEWCOMER = f"{PREFIX}newcomer"


class Temperatures(NamedTuple):
    """By kind of model, for G runs of N clients."""

    pooled: Tree  # [G] of all clients' points together
    clients: Tree  # [G N]


def is_wanted(run: Run, t: int) -> bool:
    """Whether temperatures are fitted after round t (from 0) of a run with validation points.

    A run that stops early fits those of the models that it keeps (`stopping.py`).
    """
    return run.calibrate == "auto" and t + 1 == run.rounds and not run.patience


# --- fitting --------------------------------------------------------------------------------------


def slopes(
    clients: LocalClients,
    method: Method,
    servers: Sequence[Tree],
    points: ClientData,
    round_: int,
    draws: int,
    classes: int,
    unit: TargetUnit | None = None,
    who: Sequence[int] | None = None,
) -> Tree:
    """By kind of model, slopes of each client's points, [C, 65]; it predicts as `evaluate` does.

    With `who`, those of other clients are 0, as if they had no points: their temperature is that of
    all points together.
    """
    found: dict[str, list[Tensor]] = {}
    for rows, own, models, noise in chunks(clients, method, servers, round_, draws, who):
        here = unit.at(places(rows)) if unit else None
        each = slopes_of(own, models, points.of(rows), noise, classes, here)
        for kind, value in each.items():
            found.setdefault(kind, []).append(value)
    joined = {kind: torch.cat(parts) for kind, parts in found.items()}
    if who is None:
        return joined
    everyone = {kind: v.new_zeros(len(points.weight), v.shape[-1]) for kind, v in joined.items()}
    for kind, value in joined.items():
        everyone[kind][list(who)] = value
    return everyone


def slopes_of(
    method: Method,
    models: Mapping[str, Tree],
    points: ClientData,
    noise: Tensor,
    classes: int,
    unit: TargetUnit | None,
) -> Tree:
    """Slopes of these clients' models."""
    found = {}
    for kind, model in models.items():
        predicted = method.predict(model, points.x, noise)
        predicted = unit.convert(predicted) if unit else predicted
        found[kind] = temperature.slopes(predicted, points.y, points.weight > 0, classes)
    return found


def fit(slope: Tree, runs: int) -> Temperatures:
    """Temperatures from the slopes [G N, 65] of all clients of G runs."""
    pooled, clients = {}, {}
    for kind, each in slope.items():
        pooled[kind] = pool(each.view(runs, -1, each.shape[-1]).sum(1))
        clients[kind] = own(kind, each, pooled[kind].repeat_interleave(len(each) // runs))
    return Temperatures(pooled, clients)


def pool(slope: Tensor) -> Tensor:
    """The temperature of all clients' points, from the sums [G, 65] of their slopes."""
    ones = torch.ones(slope.shape[:-1], dtype=torch.float64)
    return temperature.solve(slope, ones, temperature.ALL)


def own(kind: str, slope: Tensor, around: Tensor) -> Tensor:
    """Each client's temperature [C], from its slopes [C, 65] and the pooled temperature [C]."""
    if kind == SHARED:
        return around
    return temperature.solve(slope, around, temperature.CLIENTS)


# --- what is recorded -----------------------------------------------------------------------------


def describe(
    found: Temperatures,
    seeds: Sequence[int],
    before: Evaluation,
    after: Evaluation,
    validated: Evaluation | None = None,
) -> dict[str, Any]:
    """The part `calibration` of the last line of rounds.jsonl; `record.py` says what is in it.

    `before` and `after` are of the test points, `validated` is of the validation points, after.
    """
    about: dict[str, Any] = {
        "pooled": {kind: each.tolist() for kind, each in found.pooled.items()},
        "temperature": {
            kind: each.view(len(seeds), -1).tolist()
            for kind, each in found.clients.items()
            if kind != SHARED
        },
        "metrics": _by_name(after),
        "overconfidence": after.line(())["overconfidence"],
    }
    if validated is not None:
        about["validation"] = _by_name(validated)
    chance = {
        name: {
            kind: [chance_ece(each[kind], seed) for each, seed in pairs]
            for kind in found.pooled
            if all(kind in each for each, _ in pairs)
        }
        for name, pairs in (
            ("before", list(zip(before.confidence, seeds, strict=True))),
            ("after", list(zip(after.confidence, seeds, strict=True))),
        )
    }
    return {**about, **({"chance": chance} if chance["after"] else {})}


def _by_name(found: Evaluation) -> dict[str, list[float]]:
    return {name: [each[name] for each in found.metrics] for name in found.metrics[0]}


def chance_ece(confidence: Tensor, seed: int = 0) -> float:
    """The mean ECE of points [n] that are right exactly as often as they are confident.

    With finitely many points the share that is right differs from the confidence by chance, and an
    ECE adds these differences up, so that even a perfect model has one above 0.
    """
    n = len(confidence)
    if not n:
        return math.nan
    generator = rng.generator(seed, 0, rng.SERVER, "chance ece")
    confidence, index = confidence.double().cpu(), bins(confidence.double().cpu())
    total = 0.0
    for _ in range(DRAWS):
        right = torch.rand(n, generator=generator, dtype=torch.float64) < confidence
        gap = torch.zeros(BINS, dtype=torch.float64)
        gap.index_add_(0, index, right.double() - confidence)
        total += gap.abs().sum().item() / n
    return total / DRAWS


def read(about: Mapping[str, Any]) -> Temperatures:
    """The temperatures in what `describe` gave."""
    pooled = {kind: _tensor(each) for kind, each in about["pooled"].items()}
    own = {kind: _tensor(each).flatten() for kind, each in about["temperature"].items()}
    return Temperatures(pooled, own)


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def stored(found: Temperatures) -> Tree:
    """What fitted.safetensors has of them."""
    tree = {}
    if "personal" in found.clients:
        tree[f"{PREFIX}personal"] = found.clients["personal"]
    if SHARED in found.pooled:
        tree[f"{PREFIX}{SHARED}"] = found.pooled[SHARED]
    for kind in ("personal", "localized"):  # what a newcomer trains, see `newcomers.py`
        if kind in found.pooled:
            tree.setdefault(NEWCOMER, found.pooled[kind].clone())
    return tree


def temperature_of(models: Tree, kind: str, row: int) -> float:
    """That of a kept model; 1 where the run has none."""
    found = models.get(f"{PREFIX}{kind}")
    return 1.0 if found is None else found[row].item()
