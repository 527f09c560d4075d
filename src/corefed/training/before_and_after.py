"""The part `calibration` of summary.json: temperatures, and metrics before and after them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

Line = dict[str, Any]
Spread = Callable[[list[float]], dict[str, Any]]
"""Values of seeds -> their mean and standard deviation."""

CHANGED = ("nll", "ece", "brier")
"""Metrics that temperatures change."""


def section(line: Line, spread: Spread) -> dict[str, Any]:
    """From the last line of a run, by kind of model; empty where no temperatures were fitted.

    temperature        all_clients: of all clients' points together, by seed; min, median and max of
                       the clients' own, over all seeds
    test, validation   before and after: nll, ece, brier, and of the test points chance_ece, the ECE
                       that a perfect model with these confidences has by chance alone
    """
    about: Line = line.get("calibration", {})
    found = {}
    for kind, pooled in about.get("pooled", {}).items():
        T: dict[str, Any] = {"all_clients": spread(pooled)}
        own = [one for seed in about["temperature"].get(kind, []) for one in seed if one]
        if own:
            T |= {"min": min(own), "median": statistics.median(own), "max": max(own)}
        parts = {"test": "metrics", "validation": "validation"}
        found[kind] = {"temperature": T} | {
            part: {
                "before": _changed(kind, line[name], spread),
                "after": _changed(kind, about[name], spread),
            }
            for part, name in parts.items()
            if name in about
        }
        for when, each in about.get("chance", {}).items():
            if kind in each:
                found[kind]["test"][when]["chance_ece"] = spread(each[kind])
    return {"calibration": found} if found else {}


def _changed(kind: str, metrics: Mapping[str, list[float]], spread: Spread) -> dict[str, Any]:
    return {m: spread(metrics[f"{kind}_{m}"]) for m in CHANGED if f"{kind}_{m}" in metrics}
