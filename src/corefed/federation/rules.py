"""What the server's operator decides about a federation: waiting, trust, robustness, privacy.

They stand in federation.toml, apart from the experiment: the same experiment can be simulated, and
none of these has a meaning in a simulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from corefed.base.errors import UserError
from corefed.settings import ranges, toml


@dataclass(frozen=True)
class Rules:
    """Every rule with what it does."""

    deadline: float = 600.0
    """Seconds a round waits for answers; who has not answered by then is left out of it."""
    quorum: float = 0.5
    """Part of a round's cohort that must send acceptable updates for the round to count."""
    join_wait: float = 120.0
    """Seconds a run waits for clients that are not connected, before a round begins without."""
    attempts: int = 3
    """Times a round without quorum is tried before the run stops; it can be resumed."""
    max_examples: int = 10_000_000
    """Training examples a client may claim at most; set it to the largest site's."""
    max_message_mb: float = 0.0
    """Bound on a client's message; 0 takes twice the expected size and a megabyte."""
    outlier: float = 20.0
    """Updates so many times larger than the cohort's median are refused; 0 refuses none."""
    aggregation: Literal["plain", "median", "trimmed-mean", "krum", "clip"] = "plain"
    """How updates are joined: by the method's own rule, or made robust before it."""
    trim: float = 0.2
    """Of trimmed-mean: part of the values left out at each end, coordinate by coordinate."""
    byzantine: int = 1
    """Of krum: bad clients to withstand in a round; it needs twice as many and three more."""
    clip: float = 1.0
    """Of clip: updates longer than this many times the cohort's median are shortened to it."""
    upload: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision in which clients send what they trained."""
    difference: bool = False
    """Clients send the difference from what they received: small numbers, which halves keep."""
    dp_clip: float = 0.0
    """Differential privacy: norm that a client's difference is clipped to; 0 switches it off."""
    dp_noise: float = 1.0
    """Differential privacy: standard deviation of the noise over dp_clip."""
    dp_delta: float = 1e-5
    """Differential privacy: delta at which epsilon is printed."""


BOUNDS: dict[str, ranges.Range] = {
    "deadline": ranges.POSITIVE,
    "quorum": ranges.PART,
    "join_wait": ranges.NOT_NEGATIVE,
    "attempts": ranges.AT_LEAST_ONE,
    "max_examples": ranges.AT_LEAST_ONE,
    "max_message_mb": ranges.NOT_NEGATIVE,
    "outlier": ranges.Range(lambda v: v == 0 or v >= 1, "0, or at least 1"),
    "trim": ranges.Range(lambda v: 0 <= v < 0.5, "at least 0 and below 0.5"),
    "byzantine": ranges.NOT_NEGATIVE,
    "clip": ranges.POSITIVE,
    "dp_clip": ranges.NOT_NEGATIVE,
    "dp_noise": ranges.POSITIVE,
    "dp_delta": ranges.Range(lambda v: 0 < v < 1, "between 0 and 1"),
}


def resolve(given: Mapping[str, object], where: str) -> Rules:
    """The rules that a table of a TOML file defines, checked."""
    rules = toml.table(given, Rules, where)
    check(rules, where)
    return rules


def check(rules: Rules, where: str) -> None:
    """Refuse values out of range."""
    for key, value in dataclasses.asdict(rules).items():
        bound = BOUNDS.get(key)
        if bound is not None and not (abs(value) < float("inf") and bound.holds(value)):
            raise UserError(f"{key} ({where}) is {value}; it must be {bound.words}.")
