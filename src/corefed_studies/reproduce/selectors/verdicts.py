"""What the numbers of `bench selectors` show: paired differences, their counts, costs to a target.

Up is better everywhere. A difference in accuracy is in points; in RMSE it is by how many percent
the RMSE is smaller. Seeds share splits, initial weights and minibatches, so differences are paired
by seed, and Student's t gives an interval for their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.passes import FORWARD
from corefed.show.pairs import holm
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.reproduce.selectors.study import FULL, Spot, spot_of

SURE = 0.05
"""One less the level of intervals, and the family-wise level of Holm's correction."""
SHARE = 0.99
"""Part of full data's last accuracy that is the target; an RMSE may be larger by 1 - this."""


class Mean(NamedTuple):
    """Mean over seeds, half of its 95 % interval and p of its being 0; NaN of a single seed."""

    value: float
    half: float
    p: float

    @property
    def above(self) -> bool:
        return self.value - self.half > 0

    @property
    def below(self) -> bool:
        return self.value + self.half < 0


def mean_of(each: Sequence[float]) -> Mean:
    """Of independent values, one per seed."""
    from scipy.stats import t

    values = np.asarray(each, float)
    seeds, value = len(values), float(values.mean())
    if seeds < 2:
        return Mean(value, math.nan, math.nan)
    error = float(values.std(ddof=1)) / math.sqrt(seeds)
    # Differences that are all the same leave nothing to doubt; scipy would divide 0 by 0.
    p = 2 * float(t.sf(abs(value) / error, seeds - 1)) if error else float(value == 0)
    return Mean(value, float(t.ppf(1 - SURE / 2, seeds - 1)) * error, p)


# --- of cells -------------------------------------------------------------------------------------


def scores(result: Result, model: str = "personal") -> tuple[list[float], bool]:
    """Accuracies in percent, or RMSEs and True, by seed; empty where there are none."""
    metrics = result.get("metrics", {})
    if f"{model}_accuracy" in metrics:
        return [100 * value for value in metrics[f"{model}_accuracy"]], False
    return metrics.get(f"{model}_rmse", []), f"{model}_rmse" in metrics


def gap(mine: Result, other: Result, model: str = "personal") -> Mean | None:
    """By how much mine is better than another, paired; None where one is missing."""
    (a, smaller), (b, _) = scores(mine, model), scores(other, model)
    if not a or len(a) != len(b):
        return None
    if smaller:
        return mean_of([100 * (y - x) / y for x, y in zip(a, b, strict=True)])
    return mean_of([x - y for x, y in zip(a, b, strict=True)])


class Compared(NamedTuple):
    spot: Spot
    gap: Mean


def compare(found: Results, row: str, other: str, percent: int | None = None) -> list[Compared]:
    """A row with another in every cell that both have, or in those of a percentage."""
    cells = []
    for name, column in found:
        spot = spot_of(column)
        if name != row or spot.machine or percent not in (None, spot.percent):
            continue
        there = spot._replace(percent=100) if other == FULL else spot
        difference = gap(found[row, column], found.get((other, str(there)), {}))
        if difference is not None:
            cells.append(Compared(spot, difference))
    return sorted(cells)


class Counts(NamedTuple):
    """Of cells; those with a single seed are neither above nor below."""

    cells: int
    above: int
    below: int
    surely_above: int  # with Holm's correction over the cells
    surely_below: int

    @property
    def at_or_above(self) -> int:
        return self.cells - self.below


def count(compared: Iterable[Compared]) -> Counts:
    gaps = [each.gap for each in compared]
    corrected = holm([1.0 if math.isnan(each.p) else each.p for each in gaps])
    sure = [p <= SURE for p in corrected]
    return Counts(
        len(gaps),
        sum(each.above for each in gaps),
        sum(each.below for each in gaps),
        sum(s and each.value > 0 for s, each in zip(sure, gaps, strict=True)),
        sum(s and each.value < 0 for s, each in zip(sure, gaps, strict=True)),
    )


# --- costs ----------------------------------------------------------------------------------------


def target(full: Result) -> float | None:
    """What full data's last personal metric asks for, as curves have it: fractions, or RMSE."""
    last, smaller = scores(full)
    if not last:
        return None
    mean = math.fsum(last) / len(last)
    return (2 - SHARE) * mean if smaller else SHARE * mean / 100


def cost_to(result: Result, goal: float, what: str) -> float:
    """Seconds, examples or all passes at which the curve meets the goal; infinite if it does not.

    Between two evaluations the curve is a straight line; before the first there is none.
    """
    curve = result.get("curve", {})
    cost = passes(curve) if what == "passes" else np.asarray(curve.get(what, []))
    _, smaller = scores(result)
    margin = np.asarray(curve.get("personal", [])) - goal
    margin = -margin if smaller else margin
    met = np.flatnonzero(margin >= 0)
    if not len(met):
        return math.inf
    i = int(met[0])
    if i == 0:
        return float(cost[0])
    part = margin[i - 1] / (margin[i - 1] - margin[i])
    return float(cost[i - 1] + part * (cost[i] - cost[i - 1]))


def passes(curve: Mapping[str, Sequence[float]]) -> npt.NDArray[np.float64]:
    """Examples through gradients so far, and a third for each forward pass of a selection."""
    examples = np.asarray(curve.get("examples", []), dtype=np.float64)
    looked = curve.get("selection_examples", np.zeros_like(examples))
    return np.asarray(examples + FORWARD * np.asarray(looked), dtype=np.float64)


def costs(found: Results) -> dict[str, str]:
    """What is counted, and in words; the work of selections only where it was recorded."""
    words = {"seconds": "seconds", "examples": "examples through gradients"}
    if any("selection_examples" in result.get("cost", {}) for result in found.values()):
        words["passes"] = "gradients and selection (a forward pass is a third of a gradient)"
    return words


class Saving(NamedTuple):
    """How many times full data's cost to the target is a row's; 0 where it is not reached."""

    spot: Spot
    ratio: float


def savings(found: Results, row: str, what: str, *, alone: bool = False) -> list[Saving]:
    """Of every cell of a row that has a curve; of those timed alone, or of the others."""
    cells = []
    for name, column in found:
        spot = spot_of(column)
        if name != row or bool(spot.machine) != alone or "curve" not in found[name, column]:
            continue
        full = found.get((FULL, str(spot._replace(percent=100))), {})
        goal = target(full)
        if goal is not None and "curve" in full:
            mine, whole = (cost_to(each, goal, what) for each in (found[name, column], full))
            cells.append(Saving(spot, 0.0 if math.isinf(mine) else whole / mine))
    return cells
