"""`corefed bench review`: does the review flag keep its promise on real images?

A federation is trained (ten clients, shards-medium, coresets of a tenth; quick: the built-in
digits). The held-out points of its clients are halved at random many times. Each client's threshold
is chosen on one half and tried on the other, which the threshold has not seen.

    error       share of wrong predictions among the kept, over all clients and halvings
    coverage    share of points that are kept
    broken      share of (client, halving) pairs whose kept points on the second half have an error
                above the target. The promise allows 1 - confidence of them to have a true error
                above it; this count includes the sampling error of the second half.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from corefed.base.rng import SERVER, generator
from corefed.settings.config import resolve
from corefed.training import fitted, record, rounds
from corefed.training.fitted import Fitted
from corefed.use import selective
from corefed.use.review import PredictionSettings, held_out

TARGETS = (0.01, 0.02, 0.05, 0.10)
HALVINGS = 100
RUNS: dict[str, dict[str, dict[str, object]]] = {
    "paper": {
        name: {"data": name, "partition": "shards-medium", "fraction": 0.1, "rounds": 30}
        for name in ("mnist", "fashion-mnist")
    },
    "quick": {
        "digits": {
            "data": "digits",
            "partition": "iid",
            "clients": 2,
            "fraction": 0.5,
            "rounds": 20,
        }
    },
}


def review(device: torch.device, scale: str, out: Path | None) -> list[dict[str, Any]]:
    """One row per data set and target error; a run that is in `out` is not trained again."""
    rows = []
    with TemporaryDirectory() as temporary:
        for name, settings in RUNS[scale].items():
            folder = (out or Path(temporary)) / f"review-{name}"
            if not (folder / record.SUMMARY).exists():
                experiment = resolve(None, {**settings, "device": str(device)})
                rounds.train(experiment, folder, resume=record.begun(folder))
            model = fitted.load(folder)
            for target in TARGETS:
                rows.append({"data": name, "target %": 100 * target, **tried(model, target)})
    return rows


def tried(
    model: Fitted, target: float, by: str = "total", halvings: int = HALVINGS
) -> dict[str, Any]:
    """Thresholds on one half of each client's held-out points, tried on the other half."""
    settings = PredictionSettings(by=by, target_error=target)
    u, wrong, row = held_out(model, settings, 0, model.kinds[0])
    g = generator(0, 0, SERVER, "halves")
    points = kept = errors = broken = pairs = 0
    for _ in range(halvings):
        for client in range(len(model.names)):
            first, second = _halves((row == client).nonzero().squeeze(-1), g)
            found = selective.threshold(u[first], wrong[first], target, settings.confidence)
            keep = second[u[second] < found.value]
            wrongly = int(wrong[keep].sum())
            points, kept, errors = points + len(second), kept + len(keep), errors + wrongly
            broken += wrongly > target * len(keep)
            pairs += 1
    return {
        "error %": 100 * errors / kept if kept else 0.0,
        "coverage %": 100 * kept / points,
        "broken %": 100 * broken / pairs,
        "error of all %": 100 * wrong.double().mean().item(),
    }


def _halves(points: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    order = points[torch.randperm(len(points), generator=g)]
    return order[: len(order) // 2], order[len(order) // 2 :]
