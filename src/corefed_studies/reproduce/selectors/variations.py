"""Variations of the default selector, one setting at a time: the ablation of `bench selectors`."""

from __future__ import annotations

from typing import NamedTuple

from corefed_studies.reproduce.cells import Flags


class Ablated(NamedTuple):
    """Where variations of the default are tried, and which."""

    problem: str
    percent: int
    steps: int
    refresh_every: int  # what the budget comes to here, so that a costlier variation has it too
    labels: tuple[str, ...] = ()  # empty: all


PLAIN: Flags = {"shrink": 1e9}
"""A ridge that leaves the weights of the drawing as they are."""
ABLATION: tuple[tuple[str, Flags], ...] = (
    ("weights as drawn, not calibrated", PLAIN),
    ("chances equal, no importance", {"score": "none"}),
    ("neither: a random subset, points in turn", {"score": "none", **PLAIN}),
    ("each choice drawn independently", {"in_turn": False}),
    ("chances by potentials", {"score": "potential"}),
    ("chances by loss", {"score": "loss"}),
    ("a tenth of the chances even", {"floor": 0.1}),
    ("half of the chances even", {"floor": 0.5}),
    ("turns whatever the class", {"balance": False}),
    ("ridge 0.01", {"shrink": 0.01}),
    ("ridge 1", {"shrink": 1.0}),
    ("weights within a factor 20", {"bound": 20.0}),
    ("widths 1 and 4", {"widths": (1.0, 4.0)}),
    ("width 4", {"widths": (4.0,)}),
    ("around the path", {"around": "path"}),
    ("around the global model", {"around": "global"}),
    ("gradients matched", {"match": "gradients"}),
    ("every layer drawn", {"feature_draws": 0}),
    ("16 draws of the lower layers, 256 in all", {"feature_draws": 16, "draws": 256}),
    ("matching as often", {"preset": "matching"}),
    ("matching as often, half of the points in turn", {"preset": "matching", "pool": 0.5}),
    ("renewed every 100 steps", {"refresh_every": 100}),
    ("renewed every 200 steps or when it moved by 0.3", {"refresh_every": 200, "moved": 0.3}),
    ("renewed every 200 steps or when stale", {"refresh_every": 200, "stale": 0.2,
                                               "check_every": 20}),
)  # fmt: skip
DECISIVE = (
    *(label for label, _ in ABLATION[:4]), "chances by potentials", "half of the chances even",
    "matching as often", "renewed every 100 steps",
)  # fmt: skip
ABLATED = (
    Ablated("fashion-medium", 10, 20, 20),
    Ablated("fashion-medium", 1, 20, 20),
    Ablated("housing", 10, 20, 60),
    Ablated("cifar10", 10, 20, 40, DECISIVE),
)
