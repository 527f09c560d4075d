"""One coreset of k points for given draws: potentials, solver, judgement.

    potentials   one pass over the data, in chunks: those of the fitted draws go to the store; for
                 the fresh draws only two sums are kept. Many points: see `pool.py`
    solver       works on the store; see `problem.py`
    judgement    the fresh potentials of the k chosen points, against the sums of all points

Memory: at most a quarter of `memory_mb` for draws, a quarter for a pass, and half for potentials in
memory (16 MiB for those on disk). In addition k x S numbers for the support, a few vectors of n
numbers for the solver, and the user's data.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.errors import UserError
from corefed.coreset import likelihoods, options, passes, pool, solvers
from corefed.coreset.coreset import Coreset, Diagnostics
from corefed.coreset.draws import Draws, Posterior, hold, wrap_stacked
from corefed.coreset.likelihoods import LogLikelihood
from corefed.coreset.passes import Check, DataPass, Progress
from corefed.coreset.problem import Problem, Solution, norm2
from corefed.coreset.refit import choose_shrink, refit
from corefed.coreset.region import Region
from corefed.coreset.sources import PointSource

Resample = Callable[[Tensor, Tensor, int, torch.Generator], Any]
"""(indices, weights, number of draws, generator) -> stacked draws of the coreset's posterior."""

CHUNK = 4096
"""Points of a pass at once, where memory allows."""
TILE = 1 << 22
"""Numbers of one intermediate result at once, at most: 16 MiB stay near a CPU's cache."""


class Origin(NamedTuple):
    """Where a coreset comes from: enough to check it elsewhere, and to make another one."""

    recipe: Recipe
    region: Region | None  # where its draws lay


@dataclass(frozen=True)
class Recipe:
    """All that makes a coreset but its posterior and its size: what a second one is made by."""

    call: LogLikelihood
    source: PointSource
    solver: str
    samples: int
    shrink: float | str
    seed: int
    device: str | torch.device | None
    chunk: int
    memory: int  # bytes
    store: str
    scratch: Path | None
    iterations: int
    show: Progress
    resample: Resample | None
    pool: int | str
    threads: int


class _Posed(NamedTuple):
    """A problem for a solver, over all points or a pool of them."""

    problem: Problem
    check: Check
    at: Tensor | None  # where the pool's points are in the data
    chance: Tensor | None
    store: str


def make(
    recipe: Recipe, posterior: Posterior, sizes: Sequence[int], target: float = 0.0
) -> Coreset:
    """A coreset of the recipe's data over this posterior: the first of the ascending `sizes` whose
    error on fresh draws is at most `target`, else the last."""
    r, n = recipe, recipe.source.n
    where, _ = options.place(posterior, r.device)
    fitted, fresh = options.draws_for(posterior, sizes[-1], n, r.samples, r.seed, where, r.memory)
    with torch.no_grad(), passes.exact_products(), ExitStack() as stack:
        work = prepared(r, fitted, fitted.number + fresh.number, where)
        begun = time.perf_counter()
        posed = _posed(stack, r, work, fitted, fresh, sizes[-1])
        seconds = time.perf_counter() - begun
        for k in sizes:
            coreset = _one(stack, r, work, fitted, fresh, posed, k, seconds)
            if coreset.diagnostics.held_out_error <= target:
                break
    return dataclasses.replace(coreset, origin=Origin(recipe, Region.of(fitted)))


def _one(
    stack: ExitStack,
    r: Recipe,
    work: DataPass,
    fitted: Draws,
    fresh: Draws,
    posed: _Posed,
    k: int,
    seconds: float,
) -> Coreset:
    """Solve for k points, and judge them."""
    n, begun = work.source.n, time.perf_counter()
    r.show("solving", 0, 1)
    problem = posed.problem._replace(k=posed.problem.k.clamp_max(k))
    solution, pull = _solved(stack, r, work, fitted.number, problem, posed.store)
    solved = time.perf_counter() - begun
    r.show("solving", 1, 1)
    inside = (solution.w[0] > 0).nonzero().squeeze(-1)
    if not len(inside):
        raise UserError(f"The solver {r.solver!r} kept no point; choose another one.")
    indices, weights = inside, solution.w[0, inside]
    few = inside[: passes.AGAIN]
    stored = problem.points.gather(few.unsqueeze(0))[0]
    if posed.at is not None and posed.chance is not None:
        indices = posed.at.to(work.device)[inside]
        weights = weights / posed.chance[inside]
        stored = stored * posed.chance[few].unsqueeze(-1)
    points = work.take(indices)
    passes.refuse_changing(work, fitted, points, stored)
    judged = passes.judge(work, fresh, posed.check, points, weights, k)
    diagnostics = Diagnostics(
        n=n,
        size=k,
        kept=len(indices),
        solver=r.solver,
        draws=fitted.number,
        fresh_draws=fresh.number,
        fitted_error=float(solution.objective / norm2(problem.y)),
        held_out_error=judged.error,
        uniform_error=judged.uniform,
        ratio=judged.error / max(judged.uniform, 1e-12),
        degenerate=fitted.number - 1 <= k < n,
        shrink=pull,
        weight_sum=float(weights.sum()),
        iterations=solution.iterations,
        converged=bool(solution.converged.all()),
        store=posed.store,
        potentials_seconds=seconds,
        solver_seconds=solved,
        seed=r.seed,
        dtype=str(work.function.dtype).removeprefix("torch."),
        pool=0 if posed.at is None else len(posed.at),
    )
    full, approximate = judged.full.cpu(), judged.approximate.cpu()
    return Coreset(indices.cpu(), weights.cpu(), diagnostics, full, approximate, r.call, points)


def prepared(recipe: Recipe, draws: Draws, number: int, where: torch.device) -> DataPass:
    """Passes over the data under `number` draws at once, after a trial on a few points."""
    x, y = next(iter(recipe.source.batches(likelihoods.PROBE)))
    move = passes.mover(where)
    function = likelihoods.prepare(recipe.call, draws, move(x), move(y))
    chunk = recipe.chunk or max(1, min(CHUNK, recipe.memory // (48 * number)))
    return DataPass(function, recipe.source, where, chunk, min(TILE, max(1, recipe.memory // 128)))


def _posed(
    stack: ExitStack, r: Recipe, work: DataPass, fitted: Draws, fresh: Draws, k: int
) -> _Posed:
    """The problem over all points, or over a pool of many."""
    size = pool.size_for(r.pool, k, work.source.n, solvers.find(r.solver).pooled)
    numbers = (size or work.source.n) * fitted.number
    kind = options.store_for(r.store, numbers * work.function.dtype.itemsize, r.memory, r.scratch)
    if not size:
        sink = passes.sink_for(kind, work, fitted, r.scratch)
        stack.callback(sink.close)
        total, check = passes.survey(work, fitted, sink, fresh, r.show)
        return _Posed(passes.as_problem(sink.points(), total, k), check, None, None, kind)
    found, drawn = pool.survey(work, fitted, fresh, size, r.seed, r.threads, r.show)
    sink = pool.potentials(drawn, fitted, kind, r.scratch)
    stack.callback(sink.close)
    problem = passes.as_problem(sink.points(), found.y, min(k, len(drawn.at)))
    return _Posed(problem, found.check, drawn.at, drawn.chance, kind)


def _solved(
    stack: ExitStack, r: Recipe, work: DataPass, draws: int, problem: Problem, kind: str
) -> tuple[Solution, float]:
    """The solver's weights, and how far they were pulled towards n/k."""
    k, n = problem.most, problem.points.shape[1]
    arguments: dict[str, Any] = {
        "iterations": r.iterations,
        "generators": [rng.generator(r.seed, 0, 0, "solver")],
    }
    if r.resample is not None:
        arguments["resample"] = _resampler(
            stack, work, r.resample, k, draws, r.seed, kind, r.scratch
        )
    solve = solvers.get(r.solver)
    solution = _everything(problem) if k == n else solve(problem, **arguments)
    chosen = solution.w > 0
    plain = n / chosen.sum(-1).clamp_min(1)
    pull = _pull(r.shrink, r.solver, problem, chosen, plain)
    if pull > 0:
        w = refit(problem, chosen, plain, pull)
        solution = solution._replace(w=w, objective=problem.objective(w))
    return solution, pull


def _pull(
    shrink: float | str, solver: str, problem: Problem, chosen: Tensor, plain: Tensor
) -> float:
    """The shrinkage: weights that the draws do not determine go to n/k, not to 0 or infinity."""
    _, n, draws = problem.points.shape
    if problem.most == n:
        return 0.0
    if not isinstance(shrink, str):
        return float(shrink)
    if not solvers.SOLVERS[solver].refit or draws >= 2 * problem.most:
        return 0.0
    return choose_shrink(problem, chosen, plain)


def _everything(problem: Problem) -> Solution:
    """k = n: the coreset is the data."""
    w = problem.mask.to(problem.y.dtype)
    return Solution(w, torch.zeros_like(problem.y[:, 0]), 0, torch.ones_like(problem.k).bool())


def _resampler(
    stack: ExitStack,
    work: DataPass,
    resample: Resample,
    k: int,
    draws: int,
    seed: int,
    kind: str,
    scratch: Path | None,
) -> Callable[[Tensor, int], Problem]:
    """sparse-vi's (w, step) -> Problem: draws from the user, and a pass over the data each time."""
    before = stack.enter_context(ExitStack())  # closes the store of the previous step

    def again(w: Tensor, step: int) -> Problem:
        before.close()
        index = (w[0] > 0).nonzero().squeeze(-1)
        generator = rng.generator(seed, step, 0, "resample")
        drawn = wrap_stacked(resample(index.cpu(), w[0, index].cpu(), draws, generator))
        held = hold(drawn, work.device, 0)
        sink = passes.sink_for(kind, work, held, scratch)
        before.callback(sink.close)
        return passes.as_problem(sink.points(), passes.survey(work, held, sink)[0], k)

    return again
