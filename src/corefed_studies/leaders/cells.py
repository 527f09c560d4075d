"""One cell: a method on a setting. Two parts: the search, then the seeds that are shown."""

from __future__ import annotations

import time
from typing import Any

from corefed.base.errors import UserError
from corefed.settings.config import resolve
from corefed.training import rounds
from corefed_studies.leaders.points import points_of
from corefed_studies.leaders.rows import LeadersRow, row_of
from corefed_studies.leaders.settings import LeadersSetting, settings_of
from corefed_studies.leaders.tuning import flags_of, lowered, tune

Line = dict[str, Any]
"""A part of a cell as results.jsonl has it: setting, row, part, what defines it, what was found."""

TUNED, SHOWN = "tuned", "shown"
HALVED = 3
"""Times that learning rates are halved before a row counts as diverged."""


def identity(setting: LeadersSetting, row: LeadersRow, part: str) -> Line:
    """What a line must have to be used again."""
    flags = {k: list(v) if isinstance(v, tuple) else v for k, v in setting.flags.items()}
    return {
        "setting": setting.name, "row": row.name, "part": part,
        "about": {
            **flags, **row.flags, "seeds": list(setting.seeds),
            "candidates": setting.candidates, "tuning_rounds": setting.tuning_rounds,
        },
    }  # fmt: skip


def work(scale: str, setting_name: str, row_name: str, part: str, tuned: Line, device: str) -> Line:
    """Train a part of a cell; what fails is a line with its sentence.

    A divergence is a result. Anything else (a file that is missing, memory that was taken by
    others) is tried `again` by the next call, and does not stop the other cells.
    """
    setting = next(each for each in settings_of(scale) if each.name == setting_name)
    row = row_of(setting, row_name)
    line = identity(setting, row, part)
    began = time.perf_counter()
    try:
        found = tune(setting, row, device) if part == TUNED else show(setting, row, tuned, device)
    except UserError as error:
        found = {"failure": str(error)}
    except Exception as error:
        found = {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    if "diverged" not in found.get("failure", "diverged"):
        found["again"] = True
    return {**line, **found, "wall_seconds": time.perf_counter() - began}


def show(setting: LeadersSetting, row: LeadersRow, tuned: Line, device: str) -> Line:
    """Metrics by seed with the chosen settings, and costs.

    Where training diverges, it is repeated with learning rates of half, as anybody would: a rate
    that a search on one seed chose may be too large for another. Only training losses decide it.
    """
    flags = {**flags_of(setting, row, device), **tuned["chosen"], "seeds": setting.seeds}
    for power in range(HALVED + 1):
        experiment = resolve(flags=lowered(flags, 2**power))
        try:
            summary = rounds.train(experiment, data=points_of(experiment)).summary
            break
        except UserError as error:
            if "diverged" not in str(error) or power == HALVED:
                raise
    cost, seeds = summary["cost"], len(setting.seeds)
    return {
        "metrics": {
            kind: metrics
            for kind, models in (("personal", row.personal), ("global", ("global",)))
            if (metrics := _metrics(summary["metrics"], models))
        },
        "cost": {
            "seconds": cost["seconds"] / seeds,  # seeds train together
            "bytes": (cost["bytes_up"] + cost["bytes_down"]) / seeds,
        },
        "rates": 1 / 2**power,
        "environment": {k: summary["environment"].get(k) for k in ("device", "torch")},
    }


def _metrics(found: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, list[float]]:
    """By seed, of the first kind of model that there is."""
    for kind in kinds:
        if f"{kind}_accuracy" in found:
            return {
                name: found[f"{kind}_{name}"]["per_seed"] for name in ("accuracy", "nll", "ece")
            }
    return {}
