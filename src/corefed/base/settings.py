'''How a setting is declared.

A setting is a field of a frozen dataclass. What it may be stands beside it in the type, what it
means in the docstring under it:

    @dataclass(frozen=True)
    class Config:
        proximal: Positive = 0.1
        """How strongly a client is kept near the broadcast (mu)."""
        every: Annotated[NotNegativeInt, Unit("local steps"), ABLATION] = 0
        """Steps between two corrections; 0 makes none."""

Nothing else is needed: `settings/fields.py` reads it, a value is parsed by its type, one out of
range is refused, and `corefed methods` shows the rest. A field whose type is a frozen dataclass is
a group of settings. Names are unique over all groups, so a setting can be named with its group or
without.
'''

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """Which values a setting may have. Floats are finite in any case."""

    holds: Callable[[Any], bool]
    words: str  # completes "it must be ..."


class Unit(NamedTuple):
    """What a number counts."""

    name: str


class OneOf(NamedTuple):
    """Names that a text may be, asked for when they are shown: more can be registered."""

    names: Callable[[], Iterable[str]]


class Ablation:
    """A setting that only ablation studies change. Lists for users leave it out."""


ABLATION = Ablation()


class PerRun:
    """A number in which runs that are trained side by side may differ.

    The method then finds a tensor [C] in its place, one value per client (`training/variants.py`).
    """


PER_RUN = PerRun()


class Rate(PerRun):
    """A learning rate of training. A schedule scales it from round to round."""


RATE = Rate()


class Times(NamedTuple):
    """`corefed tune` searches from `low` to `high` times the value, evenly on a log scale."""

    low: float
    high: float


class Plus(NamedTuple):
    """`corefed tune` searches from `low` to `high` added to the value, evenly."""

    low: float
    high: float


class Factors(NamedTuple):
    """`corefed tune` tries the value times each of these numbers."""

    values: tuple[float, ...]


class Follows(NamedTuple):
    """`corefed tune` changes the setting with another one, in the same proportion."""

    name: str


Searched = Times | Plus | Factors | Follows
"""What the search of `corefed tune` does to a setting unasked. Of several, the last one counts."""


def at_least(least: float) -> Range:
    return Range(lambda v: v >= least, f"at least {least:g}")


POSITIVE = Range(lambda v: v > 0, "above 0")
NOT_NEGATIVE = Range(lambda v: v >= 0, "0 or more")

Finite = Annotated[float, Range(math.isfinite, "a finite number")]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Part = Annotated[float, Range(lambda v: 0 < v <= 1, "above 0 and at most 1")]
Probability = Annotated[float, Range(lambda v: 0 < v < 1, "between 0 and 1")]
PositiveInt = Annotated[int, at_least(1)]
NotNegativeInt = Annotated[int, NOT_NEGATIVE]


class Usual(float):
    """A default learning rate of SGD, for steps on 100 points; `settings/config.py` fits it to a
    run. A rate that a user gives is a plain number."""


LearningRate = Annotated[float, POSITIVE, RATE, Times(1 / 8, 4)]
Start = Annotated[float, POSITIVE, PER_RUN]
