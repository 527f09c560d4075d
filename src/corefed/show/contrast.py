"""Two runs by one metric: the difference, whether seeds can tell it from chance, and a clause.

With three or more seeds in common the difference has Student's 95 % interval over paired seeds. If
0 is outside, one run is better; otherwise the question is open. Fewer seeds leave it open always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from corefed.show.pairs import FEWEST_SEEDS, by_seed
from corefed.training.record import main_model

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


class Contrast(NamedTuple):
    """A run against another, over the same seeds."""

    metric: Metric
    mine: float
    other: float
    low: float  # of mine - other; NaN: there is no interval
    high: float
    seeds: int

    @property
    def difference(self) -> float:
        return self.mine - self.other

    @property
    def outcome(self) -> Outcome:
        if abs(self.difference) <= ROUNDING:
            return "same"
        if math.isnan(self.low) or self.low <= 0 <= self.high:
            return "open"
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
        return f"{m.word} cannot be told apart ({both}, {m.interval(self.low, self.high)})"

    @property
    def size(self) -> str:
        """The interval of the size of a difference that is not open."""
        return self.metric.interval(*sorted((abs(self.low), abs(self.high))))

    @property
    def why_open(self) -> str:
        """Why an open question stays open."""
        if self.seeds == 1:
            return "one seed cannot tell a difference from chance"
        if self.seeds < FEWEST_SEEDS:
            return f"{self.seeds} seeds are too few to tell a difference from chance"
        if math.isnan(self.low):
            return f"the difference is the same in all {self.seeds} seeds, so it has no interval"
        return f"{self.seeds} seeds cannot tell it from chance"


def values(summary: Mapping[str, Any], metric: Metric) -> dict[int, float]:
    """The metric of the main model by seed; empty where a run has none, or none that is finite."""
    found = summary["metrics"].get(f"{main_model(summary['metrics'])}_{metric.key}")
    if found is None or not all(map(math.isfinite, found["per_seed"])):
        return {}
    return dict(zip(summary["seeds"], found["per_seed"], strict=True))


def contrast(
    one: Mapping[str, Any], two: Mapping[str, Any], metric: Metric, seeds: Sequence[int]
) -> Contrast:
    """The first run against the second over seeds that both have."""
    mine, theirs = values(one, metric), values(two, metric)
    a, b = [mine[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    low = high = math.nan
    if len(seeds) >= FEWEST_SEEDS:
        _, low, high, _, _ = by_seed(a, b)
    return Contrast(metric, math.fsum(a) / len(a), math.fsum(b) / len(b), low, high, len(seeds))
