"""Are probabilities too bold or too cautious? One test and one wording, for sentences and pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corefed.show.pairs import FEWEST_SEEDS, by_seed


def direction(gaps: Sequence[float]) -> tuple[str, str]:
    """Too bold or too cautious, and by how much: mean confidence minus accuracy, by seed."""
    if not gaps or not all(map(math.isfinite, gaps)):
        return "Too bold or too cautious is not recorded", ""
    mean = math.fsum(gaps) / len(gaps)
    size = f"by {100 * abs(mean):.1f} points"
    way = "Too bold on average" if mean > 0 else "Too cautious on average"
    if len(gaps) < FEWEST_SEEDS:
        seeds = "one seed" if len(gaps) == 1 else f"{len(gaps)} seeds"
        return f"{way} in {seeds}, where a small gap may be chance", size
    _, low, high, _, _ = by_seed(gaps, [0.0] * len(gaps))
    if not (low > 0 or high < 0):  # also where there is no interval
        return "Neither clearly too bold nor too cautious", f"{100 * mean:+.1f} points"
    return way, size
