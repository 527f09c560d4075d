"""Judge the defaults on problems that no default was chosen on.

Each cell is a problem and a row: a method as it comes, or with the settings that were chosen for it
(`choosing.py`). Five seeds, the same for every row, train together; differences are paired by seed.
Metrics are of the test points in the last round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base import files
from corefed.base.errors import UserError
from corefed.settings.config import resolve
from corefed.training import calibration, fitted, rounds, saving
from corefed.use import selective
from corefed_studies.defaults.problems import DefaultsProblem, flags
from corefed_studies.reproduce.cells import Flags

SEEDS = (0, 1, 2, 3, 4)


class Row(NamedTuple):
    flags: Flags
    model: str  # personal, global or localized (after the local steps: fine-tuned)


_BEFORE: Flags = {
    "eta_1": 0.001, "eta_2": 0.001, "initial_rho": -3.0, "anneal": 0.0, "by_layer": False,
}  # fmt: skip
_CORESET: Flags = {"method": "coreset-pfedbayes", "fraction": 0.1}

FULL, CORESET, REDRAWN = "pfedbayes", "coreset, 10 %", "random, redrawn, 10 %"
ALONE, TUNED = "independent", "fedavg, fine-tuned"
CALIBRATED, ONE_RATE = "pfedbayes, calibrated", "pfedbayes, one rate"

ROWS = {
    FULL: Row({"method": "pfedbayes"}, "personal"),
    CORESET: Row(_CORESET, "personal"),
    REDRAWN: Row({**_CORESET, "selector": "random"}, "personal"),
    ALONE: Row({"method": "independent"}, "personal"),
    TUNED: Row({"method": "fedavg"}, "localized"),
    "fedavg, falling rate": Row(
        {"method": "fedavg", "schedule": "cosine", "learning_rate": 0.55, "initial_std": 0.07},
        "global",
    ),
    "pfedme": Row({"method": "pfedme"}, "personal"),
    "per-fedavg": Row({"method": "per-fedavg"}, "personal"),
    CALIBRATED: Row({"method": "pfedbayes", "validation": 0.2}, "personal"),
    ONE_RATE: Row({"method": "pfedbayes", "by_layer": False}, "personal"),
    "pfedbayes, before": Row({"method": "pfedbayes", **_BEFORE}, "personal"),
    "coreset, 10 %, before": Row({**_CORESET, **_BEFORE}, "personal"),
}
"""`before`: with the defaults that corefed had before this study. `falling rate`: what was chosen
for a shared model. `calibrated`: with a fifth of the training points for temperatures. `one rate`:
for all layers."""

WIDE = ("cifar10-cnn", "cifar10-features", "chest-xray")
"""Problems with layers of more than 100 inputs; elsewhere `one rate` is pfedbayes itself."""

Cell = dict[str, Any]


def place_of(folder: Path, problem: str, row: str) -> Path:
    name = row.replace(" %", "").replace(",", "").replace(" ", "-")
    return folder / "judging" / f"{problem}--{name}.json"


def train(problem: DefaultsProblem, row: str, files_in: Path, device: str) -> Cell:
    """Train a row on a problem: metrics by seed, and costs of all seeds together."""
    more: Flags = {"seeds": SEEDS, "device": device, "checkpoint_every": 0, "evaluate_every": 1000}
    own, model = ROWS[row]
    return measure({**flags(problem, files_in), **own, **more}, model)


def measure(settings: Flags, model: str) -> Cell:
    """A run's metrics by seed of one kind of model, and its costs, or the sentence it failed by."""
    try:
        trained = rounds.train(resolve(flags=settings))
    except UserError as error:  # it diverged
        return {"failure": str(error)}
    summary = trained.summary
    metrics = {
        name.removeprefix(f"{model}_"): value["per_seed"]
        for name, value in summary["metrics"].items()
        if name.startswith(f"{model}_")
    }
    cost = {name: summary["cost"][name] for name in ("seconds", "passes")}
    found: Cell = {"metrics": metrics, "cost": cost}
    if "ece" in metrics and model in fitted.KINDS:
        found["calibration"] = _calibration(trained, model)
    return found


def _calibration(trained: rounds.Result, model: str) -> dict[str, Any]:
    """The ECE of the test points of all seeds together, and what chance alone would make of it.

    The ECE of a finite sample is above 0 even for a perfectly calibrated model.
    """
    trees = trained.setup.trees(trained.servers, trained.temperature)
    held = saving.held_out_of(trees, saving.models_of(trees))
    per_run = len(trees.data.names) // len(trees.servers)
    run, predicted = held["row"] // per_run, held[f"{model}.mean"].double()
    confidence = predicted.max(-1).values
    return {
        "pooled": selective.reliability(predicted, held["y"]).ece,
        "pooled_by_chance": calibration.chance_ece(confidence),
        "by_chance": [
            calibration.chance_ece(confidence[run == g], seed)
            for g, seed in enumerate(trees.run.seeds)
        ],
    }


def keep(path: Path, cell: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, (json.dumps(cell, indent=1) + "\n").encode())


def read(path: Path) -> Cell:
    found: Cell = json.loads(path.read_text(encoding="utf-8"))
    return found
