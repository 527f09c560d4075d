"""What each number in an experiment may be: one table, applied to whichever keys a run has.

A method whose settings depend on each other adds a `check(config)` to its own module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from corefed.base.errors import UserError


class Range(NamedTuple):
    holds: Callable[[Any], bool]
    words: str  # completes "it must be ..."


POSITIVE = Range(lambda v: v > 0, "above 0")
NOT_NEGATIVE = Range(lambda v: v >= 0, "0 or more")
AT_LEAST_ONE = Range(lambda v: v >= 1, "at least 1")
AT_LEAST_TWO = Range(lambda v: v >= 2, "at least 2")
ANY = Range(lambda v: True, "a number")  # finite, as every number must be
PART = Range(lambda v: 0 < v <= 1, "above 0 and at most 1")
FACTORS = Range(lambda v: len(v) > 0 and all(w > 0 for w in v), "one or more factors above 0")
CHANNELS = Range(lambda v: len(v) > 0 and min(v) >= 1, "one or more widths of at least 1")
WIDTHS = Range(lambda v: all(w >= 1 for w in v), "widths of at least 1")
SEEDS = Range(
    lambda v: len(v) > 0 and len(set(v)) == len(v) and min(v) >= 0,
    "one or more different whole numbers from 0 up",
)

RANGES: dict[str, Range] = {
    "clients": AT_LEAST_ONE,
    "smallest_client": AT_LEAST_ONE,
    "rounds": AT_LEAST_ONE,
    "local_steps": AT_LEAST_ONE,
    "batch_size": AT_LEAST_ONE,
    "seeds": SEEDS,
    "cohort": NOT_NEGATIVE,
    "channels": CHANNELS,
    "hidden": WIDTHS,
    "noise": POSITIVE,
    "memory_mb": AT_LEAST_ONE,
    "evaluate_every": NOT_NEGATIVE,
    "evaluate_draws": AT_LEAST_ONE,
    "checkpoint_every": NOT_NEGATIVE,
    "fraction": PART,
    "keep": PART,
    "beta": POSITIVE,
    "zeta": NOT_NEGATIVE,
    "eta_1": POSITIVE,
    "eta_2": POSITIVE,
    "learning_rate": POSITIVE,
    "personal_rate": POSITIVE,
    "penalty": POSITIVE,
    "inner_steps": AT_LEAST_ONE,
    "alpha": POSITIVE,
    "delta": POSITIVE,
    "adapt_steps": AT_LEAST_ONE,
    "sigma": POSITIVE,
    "sigma_0": POSITIVE,
    "gamma": POSITIVE,
    "sweeps": AT_LEAST_ONE,
    "growth": AT_LEAST_ONE,
    "monte_carlo": AT_LEAST_ONE,
    "initial_std": POSITIVE,
    "initial_rho": ANY,
    "redraw_every": NOT_NEGATIVE,
    "draws": NOT_NEGATIVE,
    "feature_draws": NOT_NEGATIVE,
    "widths": FACTORS,
    "max_iterations": NOT_NEGATIVE,
    "shrink": NOT_NEGATIVE,
    "floor": PART,
    "bound": AT_LEAST_ONE,
    "pool": PART,
    "budget": NOT_NEGATIVE,
    "moved": NOT_NEGATIVE,
    "refresh_every": NOT_NEGATIVE,
    "check_every": AT_LEAST_ONE,
    "check_draws": AT_LEAST_TWO,
    "stale": NOT_NEGATIVE,
    "kl_weight": NOT_NEGATIVE,
    "kl_rows": AT_LEAST_ONE,
    "outer": AT_LEAST_ONE,
    "selection_mb": AT_LEAST_ONE,
    "regulariser": Range(lambda v: v >= 1e-6, "at least 1e-06"),
}


def check(values: Mapping[str, Any]) -> None:
    """Raise a UserError for the first value out of its range."""
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} is {value}; it must be a finite number.")
        if key in RANGES and not RANGES[key].holds(value):
            raise UserError(f"{key} is {_words(value)}; it must be {RANGES[key].words}.")
    if not values["client_column"]:  # otherwise their number is known once they are read
        check_cohort(values["cohort"], values["clients"])


def check_cohort(cohort: int, clients: int) -> None:
    if cohort > clients:
        raise UserError(f"cohort is {cohort}; it must be at most the {clients} clients.")


def _words(value: object) -> str:
    return ",".join(map(str, value)) or "empty" if isinstance(value, list) else str(value)
