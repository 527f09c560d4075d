"""A search with an equal budget: candidates of a method, compared on validation points.

As `corefed tune` does: the method's own space (`settings/space.py`), all candidates side by side
(`training/groups.py`), the better half after a quarter and after half of the rounds
(`training/halving.py`). Two things differ. Candidates are compared by the model that the setting is
about, which may be the shared one. And the best one is taken, whether or not the difference to the
defaults could be chance: methods are compared here, and each has the same luck.

Training that diverges is what anybody would mend before comparing: where all candidates do, the
search is repeated around learning rates of a quarter (`lowered`). Only training losses decide it.
"""

from __future__ import annotations

import math
from typing import Any

from corefed.base.errors import UserError
from corefed.methods import registry
from corefed.settings import space as spaces
from corefed.settings.config import resolve
from corefed.settings.fields import list_settings, to_flat
from corefed.settings.run import Experiment
from corefed.training import halving
from corefed.training.groups import Group, split
from corefed.training.setup import prepare
from corefed_studies.leaders.points import points_of
from corefed_studies.leaders.rows import LeadersRow
from corefed_studies.leaders.settings import (
    MEMORY_MB,
    TUNING_SEED,
    VALIDATION,
    Flags,
    LeadersSetting,
)

LOWERED = 2
"""Times that learning rates are lowered before a row counts as diverged."""


def flags_of(setting: LeadersSetting, row: LeadersRow, device: str) -> Flags:
    """What defines the runs of a cell."""
    return {
        **setting.flags, **row.flags, "device": device, "memory_mb": MEMORY_MB,
        "checkpoint_every": 0, "evaluate_every": 100_000,
    }  # fmt: skip


def tune(setting: LeadersSetting, row: LeadersRow, device: str) -> dict[str, Any]:
    """The settings that are best on validation points, and how they were found."""
    flags = {
        **flags_of(setting, row, device), "seeds": (TUNING_SEED,), "validation": VALIDATION,
        "rounds": setting.tuning_rounds,
    }  # fmt: skip
    for power in range(LOWERED + 1):
        found = _tune(resolve(flags=lowered(flags, 4**power)), setting, row)
        if "failure" not in found:
            break
    return {**found, "rates": 1 / 4**power}


def lowered(flags: Flags, divisor: float) -> Flags:
    """The same with all learning rates of the method divided by a number."""
    values = to_flat(resolve(flags=flags).settings)
    rates = [
        each.name for each in list_settings(registry.config_class(flags["method"])) if each.rate
    ]
    return flags if divisor == 1 else {**flags, **{name: values[name] / divisor for name in rates}}


def _tune(given: Experiment, setting: LeadersSetting, row: LeadersRow) -> dict[str, Any]:
    try:
        axes = spaces.axes(given)
    except UserError:  # the method declares nothing to search
        return {"chosen": {}, "candidates": 1, "nll": []}
    candidates = spaces.candidates(given, axes, setting.candidates)
    nll = _search(given, candidates, judged(setting, row))
    ended = {number: value for number, value in nll.items() if math.isfinite(value)}
    if not ended:
        return {"failure": f"All {len(candidates)} candidates diverged."}
    best = min(ended, key=lambda number: (ended[number], number))
    return {
        "chosen": spaces.searched(candidates[best], axes),
        "number": best,  # 0: the defaults
        "candidates": len(candidates),
        "nll": [nll.get(0, math.inf), ended[best]],  # of the defaults, and of the best
    }


def judged(setting: LeadersSetting, row: LeadersRow) -> tuple[str, ...]:
    """Kinds of models to compare candidates by; the first that the method has."""
    kind = row.judged or setting.judged
    return ("global", *row.personal) if kind == "global" else (*row.personal, "global")


def _search(
    given: Experiment, candidates: list[Experiment], kinds: tuple[str, ...]
) -> dict[int, float]:
    """NLL of the candidates that were trained to the end; the defaults always are."""
    setup = prepare(given, points_of(given))
    points = setup.data.validation
    assert points is not None
    # Nothing in a search can look at test points: validation points stand in their place.
    setup = setup._replace(data=setup.data._replace(test=points))
    numbered = {
        n: spaces.changed(setup.experiment, to_flat(each.settings))
        for n, each in enumerate(candidates)
    }
    groups = split(setup, numbered)
    found: dict[int, float] = {}
    for end in halving.rungs(given.run.rounds):
        found = {}
        for group in groups:
            while group.members and group.round < end:
                group.train()
            if group.members:
                found |= _scores(group, points, kinds)
            if len(groups) > 1:
                group.park()
        if end < given.run.rounds:
            left = halving.survivors({n: v for n, v in found.items() if math.isfinite(v)})
            for group in groups:
                group.keep([n for n in group.numbers if n in left])
    return found


def _scores(group: Group, points: Any, kinds: tuple[str, ...]) -> dict[int, float]:
    each = group.together.evaluate(group.round - 1, points)
    found = {}
    for number, metrics in zip(group.numbers, each, strict=True):
        kind = next(kind for kind in kinds if f"{kind}_nll" in metrics[0])
        value = sum(one[f"{kind}_nll"] for one in metrics) / len(metrics)
        found[number] = value if math.isfinite(value) else math.inf
    return found
