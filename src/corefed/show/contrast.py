"""Two runs by one metric: the difference, whether it can be told from chance, and a clause.

With three or more seeds in common the difference has a 95 % interval and a p-value, which allow for
points of the same client and seed (`kept.py`); without predictions of both runs they are Student's
over paired seeds. One run is better if the p-value, corrected for all comparisons of a page by
Holm's method, is at most 0.05; otherwise the question is open. Fewer seeds leave it open always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from corefed.show import kept
from corefed.show.pairs import ALPHA, FEWEST_SEEDS, by_seed, holm
from corefed.training.record import main_model

if TYPE_CHECKING:  # numpy takes a while
    from corefed.show.report import RunResult
    from corefed.training.clustered import Spread

Outcome = Literal["better", "worse", "same", "open"]

ROUNDING = 1e-12
"""A difference of means below this is none."""


class Metric(NamedTuple):
    key: str
    word: str
    higher: bool = False  # is better
    factor: float = 1.0  # to the number that is shown
    digits: int = 3
    unit: str = ""

    def value(self, number: float) -> str:
        """A mean: 97.44 %."""
        return f"{self.factor * number:.{self.digits}f}{' %' if self.factor > 1 else ''}"

    def amount(self, number: float) -> str:
        """The size of a difference: 0.53 points."""
        return f"{self._shown(abs(number))}{self.unit}"

    def interval(self, low: float, high: float) -> str:
        return f"95 % interval {self._shown(low)} to {self._shown(high)}"

    def _shown(self, number: float) -> str:
        """A number that is not 0 is not shown as 0."""
        number *= self.factor
        fixed = f"{number:.{self.digits}f}"
        return fixed if float(fixed) or not number else f"{number:.1g}"


NLL = Metric("nll", "NLL")
ACCURACY = Metric("accuracy", "accuracy", higher=True, factor=100.0, digits=2, unit=" points")
RMSE = Metric("rmse", "RMSE")
AUROC = Metric("auroc", "AUROC", higher=True)


class Contrast(NamedTuple):
    """A run against another, over the same seeds."""

    metric: Metric
    mine: float
    other: float
    low: float  # of mine - other; NaN: there is no interval
    high: float
    seeds: int
    p: float = math.nan  # NaN: there is no test
    over: str = ""  # what the interval is over
    corrected: float = math.nan  # the p-value, corrected for all comparisons beside it

    @property
    def difference(self) -> float:
        return self.mine - self.other

    @property
    def outcome(self) -> Outcome:
        if abs(self.difference) <= ROUNDING:
            return "same"
        if not (self.p if math.isnan(self.corrected) else self.corrected) <= ALPHA:
            return "open"  # also where there is no test
        return "better" if (self.difference > 0) == self.metric.higher else "worse"

    @property
    def clause(self) -> str:
        """`accuracy is 0.53 points higher (95 % interval 0.12 to 0.94)`."""
        m, d = self.metric, self.difference
        if self.outcome == "same":
            return f"{m.word} is the same ({m.value(self.mine)})"
        if self.outcome != "open":
            way = "higher" if d > 0 else "lower"
            return f"{m.word} is {m.amount(d)} {way} ({self.size})"
        both = f"{m.value(self.mine)} against {m.value(self.other)}"
        if math.isnan(self.low):
            return f"{m.word} is {both}"
        return f"{m.word} cannot be told apart ({both}, {self.between})"

    @property
    def size(self) -> str:
        """The interval of the size of a difference that is not open."""
        return self.metric.interval(*sorted((abs(self.low), abs(self.high))))

    @property
    def between(self) -> str:
        """The interval of an open difference, and the p-value where the interval leaves 0 out."""
        ends = self.metric.interval(self.low, self.high)
        if self.low <= 0 <= self.high or math.isnan(self.corrected):
            return ends
        return f"{ends}, corrected p {self.corrected:.2g}"

    @property
    def turned(self) -> Contrast:
        """The other run against this one."""
        low, high = -self.high, -self.low
        return self._replace(mine=self.other, other=self.mine, low=low, high=high)

    @property
    def why_open(self) -> str:
        """Why an open question stays open."""
        if self.seeds == 1:
            return "one seed cannot tell a difference from chance: run three"
        if self.seeds < FEWEST_SEEDS:
            return f"{self.seeds} seeds are too few to tell a difference from chance: run three"
        if math.isnan(self.low):
            return f"the difference is the same in all {self.seeds} seeds, so it has no interval"
        return f"{self.seeds} seeds cannot tell it from chance"


def values(summary: Mapping[str, Any], metric: Metric) -> dict[int, float]:
    """The metric of the main model by seed; empty where a run has none, or none that is finite."""
    if metric.key == AUROC.key:
        each = summary.get("measures", {}).get("auroc", {}).get("per_seed", [])
    else:
        found = summary["metrics"].get(f"{main_model(summary['metrics'])}_{metric.key}", {})
        each = found.get("per_seed", [])
    if not each or any(one is None or not math.isfinite(one) for one in each):
        return {}
    return dict(zip(summary["seeds"], each, strict=True))


def contrast(one: RunResult, two: RunResult, metric: Metric, seeds: Sequence[int]) -> Contrast:
    """The first run against the second over seeds that both have."""
    mine, theirs = values(one.summary, metric), values(two.summary, metric)
    a, b = [mine[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    means = math.fsum(a) / len(a), math.fsum(b) / len(b)
    if len(seeds) < FEWEST_SEEDS:
        return Contrast(metric, *means, math.nan, math.nan, len(seeds))
    found = kept.spread((one.path, one.summary), (two.path, two.summary), metric.key, seeds)
    if isinstance(found, str):  # no predictions to go by
        _, low, high, p, _ = by_seed(a, b)
        return Contrast(metric, *means, low, high, len(seeds), p, "seeds")
    return interval(metric, *means, found, len(seeds))


def interval(metric: Metric, mine: float, other: float, found: Spread, seeds: int) -> Contrast:
    """The contrast with its interval; a p-value takes three seeds."""
    difference = mine - other
    if not found.error > ROUNDING * max(1.0, abs(difference)):
        return Contrast(metric, mine, other, math.nan, math.nan, seeds, math.nan, found.over)
    low, high = difference - found.reach, difference + found.reach
    p = found.p_value(difference) if seeds >= FEWEST_SEEDS else math.nan
    return Contrast(metric, mine, other, low, high, seeds, p, found.over)


class Comparisons:
    """All comparisons of a page, each made once, with p-values corrected for their number.

    So all must have been asked for before the first answer is told.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Contrast] = {}

    def of(self, one: RunResult, two: RunResult, metric: Metric, seeds: Sequence[int]) -> Contrast:
        """The first run against the second, corrected for what has been asked for so far."""
        first, second = sorted((one, two), key=lambda run: str(run.path))
        key = (first.path, second.path, metric.key, tuple(seeds))
        if key not in self._made:
            self._made[key] = contrast(first, second, metric, seeds)
        places = dict(zip(self._made, holm([each.p for each in self._made.values()]), strict=True))
        found = self._made[key]._replace(corrected=places[key])
        return found if first is one else found.turned

    @property
    def tests(self) -> int:
        """How many of them have a p-value."""
        return sum(not math.isnan(each.p) for each in self._made.values())
