"""Settings of choosing a client's coreset, and of when it is reselected.

`docs/selectors.md` has the measurements behind the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from corefed.base.errors import UserError
from corefed.base.settings import (
    ABLATION,
    NotNegative,
    NotNegativeInt,
    Part,
    PositiveInt,
    Range,
    Unit,
    at_least,
)

Around = Literal["posterior", "path", "global"]
Match = Literal["potentials", "gradients"]
Score = Literal["gradient", "potential", "loss", "none"]
Solver = Literal[
    "exchange", "omp", "omp-block", "aiht-2", "aiht", "iht", "giga", "frank-wolfe", "uniform",
    "uniform-refit",
]  # fmt: skip

_FACTORS = Range(lambda v: len(v) > 0 and min(v) > 0, "one or more factors above 0")


@dataclass(frozen=True)
class Selection:
    """How the project's own selectors choose; other selectors use none of these."""

    around: Annotated[Around, ABLATION] = "posterior"
    """Where pi-hat is centred: at the client's posterior, also ahead on its path since the last
    selection, or at the global model."""
    widths: Annotated[tuple[float, ...], _FACTORS, ABLATION] = (1.0,)
    """Factors on the sigma of pi-hat. Each factor has its own block of draws; the blocks are
    stacked."""
    match: Annotated[Match, ABLATION] = "potentials"
    """What is matched: potentials (Eq. 4), or gradients of the last layer."""
    draws: Annotated[NotNegativeInt, ABLATION] = 0
    """Draws from pi-hat per selection (S of Eq. 4). 0 takes 64 to calibrate weights, and 2k, at
    least 200, for a solver, which fits them freely."""
    feature_draws: Annotated[NotNegativeInt, ABLATION] = 2
    """Draws of the layers below the last that the S draws share; 0 draws every layer S times."""
    score: Annotated[Score, ABLATION] = "gradient"
    """What a point's inclusion probability follows (selector calibrated): the norm of its
    last-layer gradient, the norm of its potentials, its loss, or nothing."""
    floor: Annotated[Part, ABLATION] = 0.3
    """Part of the inclusion probabilities that is equal for all points (selectors calibrated and
    seen). No point is drawn with a weight above n / (k floor)."""
    in_turn: Annotated[bool, ABLATION] = True
    """Carry a skipped point's inclusion probability over to the next selection; if false, draw
    each selection independently (selector calibrated)."""
    balance: Annotated[bool, ABLATION] = True
    """Carry over by class as well, so that each class has its share of every selection (selectors
    calibrated and seen)."""
    batch_by_gain: Annotated[bool, ABLATION] = False
    """Take fewer points per step, at least a quarter of batch_size, as importance makes up for
    them; only for networks in which a point costs more than a weight (selector seen)."""
    shrink: Annotated[NotNegative, ABLATION] = 0.1
    """Ridge that pulls weights towards those they were drawn with, or a solver's towards n/k; 0:
    none."""
    bound: Annotated[float, at_least(1), ABLATION] = 4.0
    """Largest factor by which calibration may change a weight (selector calibrated)."""
    solver: Solver = "aiht-2"
    """How Eq. 4 is solved (selector matching); `docs/coresets.md` compares solvers."""
    max_iterations: Annotated[NotNegativeInt, ABLATION] = 0
    """Most iterations of the solver (selector matching). 0 takes 100 for hard thresholding, else
    the solver's own bound."""
    pool: Annotated[Part, ABLATION] = 1.0
    """Part of the points, taken in turn, that are looked at (selector calibrated), or that a
    solver may choose from (selector matching)."""
    selection_mb: Annotated[PositiveInt, Unit("MB"), ABLATION] = 2048
    """Memory bound of a selection; draws are reduced to fit it."""


USED_BY = {
    "calibrated": ("score", "floor", "in_turn", "balance", "bound"),
    "seen": ("floor", "balance", "batch_by_gain"),
    "matching": ("solver", "max_iterations"),
}
"""Settings that only these selectors use."""


def refuse_unused(selector: str, given: Selection) -> None:
    """Refuse a setting that differs from its default and that the selector does not use."""
    for owner, names in USED_BY.items():
        for name in names:
            value = getattr(given, name)
            used = name in USED_BY.get(selector, ())
            if not used and value != getattr(Selection, name):
                raise UserError(
                    f"{name} is {value}, but selector {selector} does not use it; leave it out, or "
                    f"take {'preset' if owner == 'matching' else 'selector'}={owner}."
                )


@dataclass(frozen=True)
class Renewal:
    """When a coreset is reselected, and how often its error is measured."""

    refresh_every: Annotated[NotNegativeInt, Unit("local steps")] = 0
    """Age at which a coreset is reselected; 0 lets `budget` decide."""
    budget: NotNegative = 0.5
    """What selection may cost, as a part of the cost of training on all data. The coreset is
    reselected as often as that allows, after a multiple of 20 local steps."""
    moved: Annotated[NotNegative, Unit("standard deviations"), ABLATION] = 0.0
    """Reselect when the posterior's mean has moved this far since the last selection, on average;
    0: never for this reason."""
    stale: Annotated[NotNegative, ABLATION] = 0.0
    """Reselect when the coreset's error on fresh draws exceeds this part of a uniform subset's,
    and use uniform weights where they are better; 0: never for this reason."""
    check_every: Annotated[PositiveInt, Unit("local steps"), ABLATION] = 200
    """Least time between two measurements of that error. Where they decide nothing (stale=0), they
    are no more frequent than at a twentieth of the cost of training on all data."""
    check_draws: Annotated[int, at_least(2), ABLATION] = 32
    """Fresh draws per measurement, of all layers."""
