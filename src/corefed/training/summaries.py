"""The content of summary.json, from the settings and the lines of a run.

Where temperatures are fitted, the last line has `calibration` (`calibration.py`): the temperatures,
and the metrics of the test and the validation points at them. Metrics in rounds.jsonl are without
temperatures in every line, so that they make one curve. `metrics` in summary.json are of the models
as they are kept and predict, with temperatures; `calibration` has the values before and after.
Accuracy and RMSE are the same in both. `validation` is without: settings are compared by it.

A run that stops early keeps the models of each seed's best round. The line of its last round has
their metrics in `kept`, and `stopping` says which rounds these are (`early.py`).
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from corefed import __version__
from corefed.training import before_and_after, cost, early
from corefed.training.cost import Line

SCHEMA = 1
"""Of summary.json; increase it when a key changes its meaning."""


def summarise(
    values: Mapping[str, Any], lines: Sequence[Line], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of summary.json.

    Metrics are of the last evaluated round, not of the best, except where a run stops early.
    Metrics of a calibrated run are at its temperatures, as the module says. Costs are sums over
    seeds. Seconds are of training, selection included and evaluation not; passes include selection
    (`cost.py`). A simulation adds passes over its training points and wall_seconds, which start-up,
    evaluation and files take part in. `evaluated_clients` is there where metrics are of a sample,
    `simulated` where devices are simulated.
    """
    last = early.final(lines)
    calibrated: Line = last.get("calibration", {})
    evaluated: dict[str, list[float]] = last.get("metrics", {}) | calibrated.get("metrics", {})
    bold: Line = last.get("overconfidence", {}) | calibrated.get("overconfidence", {})
    coreset = last["kept"]["coreset"] if "kept" in last else lines[-1]["coreset"] if lines else {}
    seconds = sum(line["seconds"] for line in lines)
    return {
        "schema": SCHEMA,
        **{key: values[key] for key in ("method", "data", "partition", "clients")},
        "rounds": len(lines),
        **early.section(values, lines),
        "seeds": values["seeds"],
        **({"evaluated_clients": last["evaluated_clients"]} if "evaluated_clients" in last else {}),
        "config": dict(values),
        "metrics": {name: over_seeds(each) for name, each in evaluated.items()},
        **_validation(last),
        **before_and_after.section(last, over_seeds),
        "classes": {
            model: {label: over_seeds(each) for label, each in row.items() if None not in each}
            for model, row in last.get("classes", {}).items()
        },
        "overconfidence": {model: over_seeds(each) for model, each in bold.items()},
        "coreset": {
            "fraction": values.get("fraction", 1.0),  # a method without one trains on all data
            **{name: statistics.fmean(each) for name, each in coreset.items() if None not in each},
        },
        "cost": {
            "seconds": seconds,
            "seconds_per_round": seconds / max(1, len(lines)),
            "evaluate_seconds": sum(line.get("evaluate_seconds", 0.0) for line in lines),
            "examples_processed": sum(sum(line["examples"]) for line in lines),
            **cost.of_lines(values, lines),
            "bytes_up": sum(sum(line["bytes_up"]) for line in lines),
            "bytes_down": sum(sum(line["bytes_down"]) for line in lines),
            "peak_memory_mb": max((line["peak_memory_mb"] for line in lines), default=0.0),
        },
        **_simulated(lines),
        "environment": dict(environment),
    }


def _simulated(lines: Sequence[Line]) -> dict[str, Any]:
    """Simulated seconds in all, and late clients per round, where devices are simulated."""
    timed = [line for line in lines if "simulated_seconds" in line]
    if not timed:
        return {}
    seconds = [
        math.fsum(each) for each in zip(*(x["simulated_seconds"] for x in timed), strict=True)
    ]
    late = [statistics.fmean(each) for each in zip(*(x["late"] for x in timed), strict=True)]
    return {"simulated": {"seconds": over_seeds(seconds), "late_clients": over_seeds(late)}}


def _validation(line: Line) -> dict[str, Any]:
    """Metrics of the validation points, where the run has some."""
    found = line.get("validation", {})
    return {"validation": {k: over_seeds(v) for k, v in found.items()}} if found else {}


def over_seeds(each: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation (divisor: seeds - 1; 0 for a single seed)."""
    std = 0.0
    if len(each) > 1:  # of Python 3.11, stdev of NaN raises
        std = statistics.stdev(each) if all(map(math.isfinite, each)) else math.nan
    return {"mean": statistics.fmean(each), "std": std, "per_seed": list(each)}


def environment(device: str) -> dict[str, Any]:
    """What results may depend on beside the settings."""
    import numpy  # torch takes a second
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "corefed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
