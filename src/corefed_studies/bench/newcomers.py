"""`corefed bench newcomers`: is a newcomer's model ever worse than the shared one?

Eight of ten clients train a federation at the default settings, the other two join, each with the
first m of its points in a random order. NLL and accuracy on their test points of four models: the
shared one; the newcomer's own training kept as far as its points say, without and with a start at
its own class shares (`--no-own-classes`, and the default); and kept whole (`--share 1`).
Differences to the shared model have 95 % intervals over newcomers and seeds.

Sets whose clients are alike are where own training has least to gain: random shares of the digits
and of the breast-cancer data. In the others clients differ: five classes each (two kinds of
clients), shares of classes by a Dirichlet distribution (no two alike), or quantiles of a column,
which make sites of patients or of places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from corefed.base.rng import generator
from corefed.base.types import ClientData
from corefed.data import memory
from corefed.data.clients import FederatedData
from corefed.settings.config import resolve
from corefed.settings.run import MEMORY, Experiment
from corefed.training import fitted, newcomers, rounds
from corefed.training.setup import concrete, load

CLIENTS, MEMBERS, ROUNDS, TESTED = 10, 8, 20, 1000
WAYS = (("kept", None, True), ("run's classes", None, False), ("own", 1.0, True))
"""Name, share of its own training, and whether it starts at its own class shares."""
PARTITIONS = {"alike": "iid", "dirichlet": "dirichlet:0.5", "five classes": "shards-medium"}
SIZES = (5, 10, 20, 50, 100, 200)
SEEDS = {"quick": (0, 1), "paper": (0, 1, 2)}
SETS = {
    "quick": ("digits, alike", "breast cancer, alike"),
    "paper": (
        "digits, alike",
        "digits, five classes",
        "breast cancer, alike",
        "breast cancer, by texture",
        "diabetes, by blood pressure",
        "mnist, five classes",
        "mnist, dirichlet",
        "fashion-mnist, five classes",
    ),
}


def bench(device: torch.device, scale: str, out: Path | None) -> list[dict[str, Any]]:
    """One row per set and number of points."""
    rows = []
    for name in SETS[scale]:
        found: dict[int, list[dict[str, float]]] = {}
        for seed in SEEDS[scale]:
            for points, nll in _measured(name, seed, device):
                found.setdefault(points, []).append(nll)
        rows += [{"data": name, "points": m, **_row(found[m])} for m in sorted(found)]
    return rows


def _measured(name: str, seed: int, device: torch.device) -> Iterator[tuple[int, dict[str, float]]]:
    """Number of points and NLLs of every newcomer."""
    experiment, everyone = federation(name, seed, device)
    members = _of(everyone, range(MEMBERS))
    with TemporaryDirectory() as place:
        rounds.train(experiment, Path(place) / "run", data=members)
        model = fitted.load(Path(place) / "run")
        for client in range(MEMBERS, CLIENTS):
            whole = _of(everyone, [client])
            n = int(whole.train.size)
            order = torch.randperm(n, generator=generator(seed, 0, client, "newcomer"))
            for m in (m for m in SIZES if m <= n):
                train = ClientData(*(field[:, order[:m]] for field in whole.train))
                test = ClientData(*(field[:, :TESTED] for field in whole.test))
                data = whole._replace(train=train, test=test)
                found: dict[str, float] = {}
                for way, share, start in WAYS:
                    joined = newcomers.join(
                        model, data, compare=False, device=str(device), share=share,
                        own_classes=start,
                    )  # fmt: skip
                    metrics = joined.summary["metrics"]
                    for one, kind in (("shared", "global"), (way, "personal")):
                        found[f"{one} NLL"] = metrics[f"{kind}_nll"]["mean"]
                        if f"{kind}_accuracy" in metrics:
                            found[f"{one} %"] = 100 * metrics[f"{kind}_accuracy"]["mean"]
                    if way == "kept":
                        found["share"] = joined.summary["personalized"]["share"]
                yield m, found


def _of(data: FederatedData, rows: range | list[int]) -> FederatedData:
    train, test = (ClientData(*(field[list(rows)] for field in d)) for d in (data.train, data.test))
    return data._replace(train=train, test=test, names=[data.names[row] for row in rows])


def federation(name: str, seed: int, device: torch.device) -> tuple[Experiment, FederatedData]:
    """The settings of the members, and the data of all ten clients."""
    kind, _, how = name.partition(", ")
    flags: dict[str, Any] = {"seeds": seed, "device": str(device), "rounds": ROUNDS}
    flags |= {"evaluate_every": ROUNDS, "clients": CLIENTS}
    if kind in ("digits", "mnist", "fashion-mnist"):
        partition = PARTITIONS[how]
        experiment = concrete(resolve(flags={**flags, "data": kind, "partition": partition}))
        return resolve(flags={**flags, "data": kind, "partition": partition,
                              "clients": MEMBERS}), load(experiment.run)  # fmt: skip
    flags |= {"data": MEMORY, "partition": "natural", "scale": "features"}
    pool = memory.gather(_sites(kind, how), None, "auto")
    data = memory.federate(pool, resolve(flags=flags).run, 0.2)
    return resolve(flags={**flags, "clients": MEMBERS}), data


def _sites(kind: str, how: str) -> dict[int, tuple[Any, Any]]:
    from sklearn.datasets import load_breast_cancer, load_diabetes

    if kind == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        key = x[:, 3]
    else:
        x, y = load_breast_cancer(return_X_y=True)
        key = x[:, 1]
    if how == "alike":
        key = np.random.default_rng(0).permutation(len(y))
    rank = np.argsort(np.argsort(key, kind="stable"), kind="stable")
    site = rank * CLIENTS // len(y)
    # The sites that join last are neither the lowest nor the highest: 4 and 7.
    order = [0, 1, 2, 3, 5, 6, 8, 9, 4, 7]
    return {one: (x[site == one], y[site == one]) for one in order}


def _row(each: list[dict[str, float]]) -> dict[str, Any]:
    from scipy.stats import t as student

    n = len(each)
    row: dict[str, Any] = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
    for name, _, _ in WAYS:
        gaps = np.array([one[f"{name} NLL"] - one["shared NLL"] for one in each])
        reach = student.ppf(0.975, n - 1) * gaps.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
        row |= {f"{name} - shared": float(gaps.mean()), f"{name} +-": float(reach)}
    return {**row, "newcomers": n}
