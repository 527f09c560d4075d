"""Points whose picks submodlib's float32 decides by their values, and what it picked.

    python tests/support/submodular_cases.py

makes `data/submodlib_picks.json` again; that needs submodlib-py, which the tests do not.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from corefed.selectors import submodular
from corefed.selectors.similarity import ComparedPoints, Metric, prepare
from corefed.selectors.submodular import Objective
from corefed_studies.bench.submodular import OBJECTIVES, by_submodlib

STORED = Path(__file__).parent / "data" / "submodlib_picks.json"
N, K = 60, 40
METRICS: tuple[Metric, ...] = ("cosine", "euclidean")


class Case(NamedTuple):
    points: str
    metric: Metric
    objective: Objective

    @property
    def name(self) -> str:
        return " ".join(self)


def is_tied(metric: Metric, objective: Objective) -> bool:
    """L_jj is 1 + lambda for every point but 0: only rounding tells the first picks apart."""
    return metric == "cosine" and objective == "logdet"


@contextmanager
def rounded_like_submodlib() -> Iterator[None]:
    """Cosines of points with themselves as submodlib's float32 has them."""

    def rounded(x: Tensor, metric: Metric) -> ComparedPoints:
        ready = prepare(x, metric)
        return ready._replace(own=ready.own * own_cosine(x.float()))

    with mock.patch.object(submodular, "prepare", rounded):
        yield


def own_cosine(x: Tensor) -> Tensor:
    """[n] what float32 makes of the cosine of a point with itself, adding feature by feature.

    Roots and quotients are rounded from float64, since not every float32 root of torch is rounded
    to the nearest.
    """
    square = torch.zeros(len(x))
    for column in x.T.contiguous():
        square = square + column * column
    norm = square.double().sqrt().float()
    own = (square.double() / (norm * norm)).float().double()
    return own.nan_to_num(1.0)  # of points at 0


def points() -> dict[str, Tensor]:
    """Drawn by numpy's legacy generator, whose stream is frozen."""
    rng = np.random.RandomState(0)
    some = rng.standard_normal((N, 9))
    made = {
        "normal": some,
        "wide": rng.standard_normal((N, 200)),  # more features than picks
        "positive": np.abs(rng.standard_normal((N, 24))),
        "clusters": np.repeat(5 * rng.standard_normal((4, 7)), N // 4, 0)
        + rng.standard_normal((N, 7)),
        "thrice": rng.permutation(np.repeat(some[: N // 3], 3, 0)),  # ties of equal points
        "grid": rng.randint(0, 3, (N, 5)),  # many equal distances, and points at 0
    }
    return {name: torch.from_numpy(x.astype(np.float32)) for name, x in made.items()}


def cases() -> Iterator[Case]:
    for name in points():
        for metric in METRICS:
            for objective in OBJECTIVES:
                # Cosines of equal points are 1 but for float32's rounding, which would then pick.
                if (name, metric, objective) != ("thrice", "cosine", "dispmin"):
                    yield Case(name, metric, objective)


def main() -> None:
    every = points()
    picks = {
        case.name: by_submodlib(every[case.points], K, case.objective, metric=case.metric)
        for case in cases()
    }
    packages = {name: version(name) for name in ("submodlib-py", "numpy")}
    made_with = {**packages, "python": platform.python_version(), "machine": platform.machine()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(p)}" for name, p in picks.items())
    head = json.dumps(
        {"made_by": "tests/support/submodular_cases.py", "made_with": made_with}, indent=1
    )
    STORED.write_text(f'{head[:-2]},\n "picks": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
