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
    module: str  # imported when used: names and texts need no torch
    function: str
    description: str
    refit: bool = True  # its weights are a fit to the potentials, which a refit may shrink
    resample: bool = False  # it needs draws of the coreset's own posterior at every step
    options: Mapping[str, bool] = MappingProxyType({})  # that make this solver of the function


SOLVERS: dict[str, Entry] = {
    "exchange": Entry(
        "exchange", "solve", "forward selection in blocks, then exchanges of points while they help"
    ),
    "omp": Entry(
        "omp", "solve", "orthogonal matching pursuit with a non-negative refit, a point at a time"
    ),
    "omp-block": Entry("omp", "solve_in_blocks", "the same, k/20 points at a time"),
    "aiht-2": Entry(
        "aiht",
        "solve",
        "accelerated iterative hard thresholding, de-biased",
        options={"debias": True},
    ),
    "aiht": Entry("aiht", "solve", "accelerated iterative hard thresholding (Algorithm 2)"),
    "iht": Entry(
        "aiht",
        "solve",
        "iterative hard thresholding with exact steps",
        options={"momentum": False},
    ),
    "giga": Entry("giga", "solve", "greedy iterative geodesic ascent"),
    "frank-wolfe": Entry("frank_wolfe", "solve", "Frank-Wolfe on the scaled simplex"),
    "sparse-vi": Entry(
        "sparse_vi",
        "solve",
        "greedy, with draws from the coreset's own posterior at each step",
        refit=False,
        resample=True,
    ),
    "uniform": Entry("uniform", "solve", "k points at random with weights n/k", refit=False),
    "uniform-refit": Entry("uniform", "solve_refitted", "k points at random, weights fitted"),
}

DEFAULT = "exchange"


def find(name: str) -> Entry:
    """What is known of a solver; an unknown one is a sentence with the nearest."""
    if name not in SOLVERS:
        hint = did_you_mean(name, SOLVERS)
        raise UserError(f"There is no solver {name!r}.{hint} There are {', '.join(SOLVERS)}.")
    return SOLVERS[name]


def get(name: str) -> Solver:
    """The solver of that name."""
    entry = find(name)
    function = getattr(import_module(f"corefed.coreset.{entry.module}"), entry.function)
    solver: Solver = partial(function, **entry.options) if entry.options else function
    return solver
