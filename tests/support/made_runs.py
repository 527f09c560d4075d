"""Summaries of runs that were never trained, for tests of what is said about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corefed.show.report import RunResult
from corefed.training.summaries import over_seeds

RUN = {
    "data": "digits", "partition": "shards-medium", "clients": 10, "classes": [], "rounds": 30,
    "local_steps": 20, "device": "cpu", "hidden": [100],
}  # fmt: skip
BAYES = {"zeta": 1.0, "eta_1": 0.001, "monte_carlo": 1}
OWN: dict[str, dict[str, Any]] = {
    "pfedbayes": BAYES,
    "coreset-pfedbayes": {**BAYES, "preset": "fast", "fraction": 0.2},
    "random-subset": {
        **BAYES, "base": "pfedbayes", "learning_rate": 0.02, "fraction": 0.2, "redraw_every": 20,
    },
    "independent": {"learning_rate": 0.1},
    "fedavg": {"learning_rate": 0.02},
}  # fmt: skip


def made(
    method: str,
    scores: Sequence[float],
    nll: Sequence[float],
    *,
    path: str = "",
    score: str = "accuracy",
    model: str = "personal",
    seeds: Sequence[int] | None = None,
    gaps: Sequence[float] | None = None,
    passes: float = 1000.0,
    complete: bool = True,
    seconds: float = 10.0,
    rounds: int = 30,
    **settings: Any,
) -> RunResult:
    """A run with these scores by seed; `gaps` is by how much confidence is above accuracy."""
    each = list(range(len(scores))) if seeds is None else list(seeds)
    config = {"method": method, **RUN, "seeds": each, **OWN[method], **settings}
    metrics = {f"{model}_{score}": over_seeds(scores), f"{model}_nll": over_seeds(nll)}
    if score == "accuracy":
        metrics[f"{model}_ece"] = over_seeds([0.1] * len(each))
    summary = {
        "method": method,
        **{key: config[key] for key in ("data", "partition", "clients", "seeds")},
        "rounds": rounds,
        "config": config,
        "metrics": metrics,
        "overconfidence": {} if gaps is None else {model: over_seeds(gaps)},
        "coreset": {"fraction": config.get("fraction", 1.0)},
        "cost": {"seconds": seconds, "passes": passes, "passes_complete": complete},
        "environment": {"device": "x86_64"},
    }
    return RunResult(Path(path or f"runs/{method}"), summary, [])
