"""When a coreset is reselected: by its age, by how far the posterior has moved, by its error.

A coreset gets no older than `refresh_every` local steps. If that is 0, a budget decides. A
selection costs n forward passes per draw of the lower layers, and some for the heads. A training
step on all data costs three for each of b points (one forward, two back). The coreset is reselected
so often that selection costs `budget` times as much as training, to the nearest multiple of `LEAST`
steps. Costs are counted in passes, not in seconds, so the schedule is the same on every machine.
They are those of the default selector, so other selectors have the same schedule and can be
compared with it.

It is reselected earlier if the posterior's mean has moved far (`moved`) or, which the method checks
itself, if its error on fresh draws has grown (`stale`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from corefed.base.passes import STEP as STEP
from corefed.base.types import Tree, Work
from corefed.bayes import gaussian
from corefed.models.network import Model
from corefed.selectors import look_up, sketches
from corefed.selectors.matching import draws_for
from corefed.selectors.settings import Renewal, Selection

MEASURED = 0.05
"""What measurements that are only recorded may cost, as a part of training on all data."""
LEAST = 20
"""Local steps: a budget's interval is at least this long, and a multiple of it."""


def question_interval(rule: Renewal) -> int:
    """Local steps between two questions whether a coreset is due."""
    often = [rule.refresh_every or LEAST]
    often += [LEAST] if rule.moved > 0 else []
    often += [rule.check_every] if rule.stale > 0 else []
    return min(often)


def interval(rule: Renewal, cost: float, n: Tensor, work: Work, draws: int) -> Tensor:
    """[C] local steps between two selections, for clients of n points and K draws per step.

    `cost` is that of a selection by the default selector, in forward passes per point.
    """
    if rule.refresh_every:
        return torch.full_like(n, rule.refresh_every)
    step = STEP * work.batch * draws
    wanted = cost * n / (rule.budget * step)
    return torch.round(wanted / LEAST).long().clamp_min(1) * LEAST


def check_interval(rule: Renewal, cost: float, n: Tensor, work: Work, draws: int) -> Tensor:
    """[C] local steps between two measurements that cost so many passes per point."""
    if rule.stale > 0:
        return torch.full_like(n, rule.check_every)
    allowed = replace(rule, refresh_every=0, budget=MEASURED)
    return interval(allowed, cost, n, work, draws).clamp_min(rule.check_every)


def ask(
    rule: Renewal, state: Tree, n: Tensor, k: Tensor, every: Tensor, check_every: Tensor
) -> Tree:
    """[C] each: k; who keeps all points; whose coreset is old; is due by its age; is to be measured
    if it is reselected; who has selected nothing yet."""
    age = state["age"]
    whole = k >= n  # the coreset is the data
    old = (age < 0) | (age >= every)
    return {
        "k": k, "whole": whole, "old": old, "due": old & ~whole,
        "check": (age < 0) | (state["checked"] >= check_every),
        "fresh": (state["owed"] == 0).all(-1),
    }  # fmt: skip


def has_moved(rule: Renewal, state: Tree, q: Tensor) -> Tensor:
    """[C] whether the posterior's mean has moved far since the last selection: by the root mean
    square over parameters, in standard deviations."""
    if rule.moved == 0:
        return torch.zeros_like(state["age"], dtype=torch.bool)
    then, now = state["before"], q
    steps = (now[:, 0] - then[:, 0]) / gaussian.sigma(then[:, 1])
    return steps.square().mean(-1).sqrt() > rule.moved


def selection_cost(selector: str, model: Model, settings: Selection) -> float:
    """Forward passes per point that a selection by this selector costs."""
    own = look_up(selector).passes
    if own is not None:
        return own
    passes = sketches.passes(model, settings)
    if selector != "calibrated":  # a solver looks at all points, whatever the pool
        return passes
    return settings.pool * (passes + (settings.score == "loss"))  # losses need another pass


def passes(selector: str, model: Model, settings: Selection, n: Tensor, k: Tensor) -> Tensor:
    """[C] forward passes per point that a selection costs clients of n points."""
    each = [settings] * len(k)
    if selector == "matching":  # whose S follows k
        pairs = zip(k.tolist(), n.tolist(), strict=True)
        bound, asked = settings.selection_mb, settings.draws
        drawn = (draws_for(kept, points, asked, bound) for kept, points in pairs)
        each = [replace(settings, draws=draws) for draws in drawn]
    return torch.tensor([selection_cost(selector, model, one) for one in each], device=k.device)
