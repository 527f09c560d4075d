"""Every solver by name, with one interface (`problem.Solver`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from corefed.base.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from corefed.coreset.problem import Solver


class Entry(NamedTuple):
    module: str  # has `solve`; imported when used, since names and texts need no torch
    description: str
    refit: bool = True  # its weights are fitted to the potentials, and a refit may shrink them
    resample: bool = False  # it needs draws of the coreset's own posterior at every step
    options: Mapping[str, bool] = MappingProxyType({})  # of `solve`
    pooled: bool = True  # may choose from a pool drawn by importance instead of all points


SOLVERS: dict[str, Entry] = {
    "exchange": Entry(
        "exchange", "forward selection in blocks, then exchanges of points while they help"
    ),
    "omp": Entry("omp", "orthogonal matching pursuit with a non-negative refit, a point at a time"),
    "omp-block": Entry("omp", "the same, k/20 points at a time", options={"in_blocks": True}),
    "aiht-2": Entry(
        "aiht", "accelerated iterative hard thresholding, de-biased", options={"debias": True}
    ),
    "aiht": Entry("aiht", "accelerated iterative hard thresholding (Algorithm 2)"),
    "iht": Entry(
        "aiht", "iterative hard thresholding with exact steps", options={"momentum": False}
    ),
    "giga": Entry("giga", "greedy iterative geodesic ascent"),
    "frank-wolfe": Entry("frank_wolfe", "Frank-Wolfe on the scaled simplex"),
    "sparse-vi": Entry(
        "sparse_vi",
        "greedy, with draws from the coreset's own posterior at each step",
        refit=False,
        resample=True,
        pooled=False,
    ),
    "uniform": Entry("uniform", "k points at random with weights n/k", refit=False, pooled=False),
    "uniform-refit": Entry(
        "uniform",
        "k points at random, weights fitted",
        options={"fit_weights": True},
        pooled=False,
    ),
}

DEFAULT = "exchange"


def find(name: str) -> Entry:
    """The entry of a solver, or a UserError with the nearest name."""
    if name not in SOLVERS:
        hint = did_you_mean(name, SOLVERS)
        raise UserError(f"There is no solver {name!r}.{hint} There are {', '.join(SOLVERS)}.")
    return SOLVERS[name]


def get(name: str) -> Solver:
    """The solver of that name."""
    entry = find(name)
    return partial(import_module(f"corefed.coreset.{entry.module}").solve, **entry.options)
