"""Every solver by name: one file each, one interface (`problem.Solver`)."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from corefed.errors import UserError

if TYPE_CHECKING:
    from corefed.coreset.problem import Solver


class Entry(NamedTuple):
    module: str  # imported when used: names and texts need no torch
    function: str
    description: str


SOLVERS: dict[str, Entry] = {
    "exchange": Entry(
        "exchange", "solve", "forward selection in blocks, then exchanges of points while they help"
    ),
    "omp": Entry(
        "omp", "solve", "orthogonal matching pursuit with a non-negative refit, a point at a time"
    ),
    "omp-block": Entry("omp", "solve_in_blocks", "the same, k/20 points at a time"),
    "aiht-2": Entry("aiht", "solve_debiased", "accelerated iterative hard thresholding, de-biased"),
    "aiht": Entry("aiht", "solve", "accelerated iterative hard thresholding (Algorithm 2)"),
    "iht": Entry("iht", "solve", "iterative hard thresholding with exact steps"),
    "giga": Entry("giga", "solve", "greedy iterative geodesic ascent"),
    "frank-wolfe": Entry("frank_wolfe", "solve", "Frank-Wolfe on the scaled simplex"),
    "sparse-vi": Entry(
        "sparse_vi", "solve", "greedy, with draws from the coreset's own posterior at each step"
    ),
    "uniform": Entry("uniform", "solve", "k points at random with weights n/k"),
    "uniform-refit": Entry("uniform", "solve_refitted", "k points at random, weights fitted"),
}

DEFAULT = "exchange"


def get(name: str) -> Solver:
    """The solver of that name; an unknown one is a sentence with the nearest."""
    if name not in SOLVERS:
        nearest = get_close_matches(name, SOLVERS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise UserError(f"There is no solver {name!r}.{hint} There are {', '.join(SOLVERS)}.")
    entry = SOLVERS[name]
    solver: Solver = getattr(import_module(f"corefed.coreset.{entry.module}"), entry.function)
    return solver
