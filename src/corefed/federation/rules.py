"""What the server's operator decides about a federation: waiting, trust, robustness, privacy.

They stand in federation.toml, apart from the experiment: the same experiment can be simulated, and
none of these has a meaning in a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from corefed.base.settings import (
    NotNegative,
    NotNegativeInt,
    Part,
    Positive,
    PositiveInt,
    Probability,
    Range,
    Unit,
)


@dataclass(frozen=True)
class Rules:
    """Every rule with what it does."""

    deadline: Annotated[Positive, Unit("seconds")] = 600.0
    """Seconds a round waits for answers at most; who has not answered by then is left out of it."""
    grace: NotNegative = 3.0
    """After the quorum, wait this many times as long as it took; 0 waits until the deadline."""
    grace_seconds: Annotated[NotNegative, Unit("seconds")] = 30.0
    """Seconds that a round waits for the others after the quorum in any case."""
    strikes: NotNegativeInt = 3
    """A client silent this often in a row is not waited for until it answers; 0 always waits."""
    quorum: Part = 0.5
    """Part of a round's cohort that must send acceptable updates for the round to count."""
    join_wait: Annotated[NotNegative, Unit("seconds")] = 120.0
    """Seconds a run waits for clients that are not connected, before a round begins without."""
    attempts: PositiveInt = 3
    """Times a round without quorum is tried before the run stops; it can be resumed."""
    max_examples: PositiveInt = 10_000_000
    """Training or test examples a client may claim at most; set it to the largest site's."""
    max_weight: Annotated[float, Range(lambda v: v == 0 or v >= 1, "0, or at least 1")] = 5.0
    """From 3 clients on, one counts as at most so many times the median's examples; 0: no bound."""
    join: Literal["robust", "pooled"] = "robust"
    """Scales of features: medians over clients (from 3 on), or as if all rows were in one place."""
    class_quorum: PositiveInt = 2
    """From 3 clients on, clients that must name a class that the experiment does not name."""
    max_classes: PositiveInt = 1000
    """Classes at most where the experiment names none; those that most clients have are taken."""
    max_message_mb: Annotated[NotNegative, Unit("MB")] = 0.0
    """Bound on a client's message; 0 takes twice the expected size and a megabyte."""
    outlier: Annotated[float, Range(lambda v: v == 0 or v >= 1, "0, or at least 1")] = 20.0
    """Updates so many times larger than the cohort's median are refused; 0 refuses none."""
    sigma_factor: Annotated[float, Range(lambda v: v == 0 or v > 1, "0, or above 1")] = 30.0
    """Updates with a sigma this many times smaller or larger than sent are refused; 0: none."""
    aggregation: Literal["auto", "plain", "median", "trimmed-mean", "krum", "clip"] = "auto"
    """How updates are joined; auto: robustly from 3 clients on, plain for fewer."""
    trim: Annotated[float, Range(lambda v: 0 <= v < 0.5, "at least 0 and below 0.5")] = 0.34
    """Of trimmed-mean: part of the values left out at each end, coordinate by coordinate."""
    byzantine: NotNegativeInt = 1
    """Of krum: bad clients to withstand in a round; it needs twice as many and three more."""
    clip: Positive = 1.0
    """Of clip: updates longer than this many times the cohort's median are shortened to it."""
    upload: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision in which clients send what they trained."""
    difference: bool = False
    """Clients send the difference from what they received: small numbers, which halves keep."""
    dp_clip: NotNegative = 0.0
    """Differential privacy: norm that a client's difference is clipped to; 0 switches it off."""
    dp_noise: Positive = 1.0
    """Differential privacy: standard deviation of the noise over dp_clip."""
    dp_delta: Probability = 1e-5
    """Differential privacy: delta at which epsilon is printed."""
