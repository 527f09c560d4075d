"""Choosing a client's coreset, and judging one, on draws of its current posterior.

The weighting distribution pi-hat is the client's posterior with its sigma widened. One width does
not fit all: a narrow pi-hat sees only points that are still hard, and a client trained on those
alone forgets the rest; a wide one sees mostly how points behave far away. So potentials are drawn
at several widths, each block scaled to ||y|| = 1, and stacked.

A coreset's figure of merit is its relative error on fresh draws over the error that a uniform
subset of the same size has on them in expectation, which is in closed form. A solver's weights that
do not beat that expectation are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.coreset import refit, solvers
from corefed.coreset.problem import problem
from corefed.coreset.uniform import uniform_error
from corefed.models.network import Model
from corefed.selectors import potentials


class Quality(NamedTuple):
    error: Tensor  # [C] ||y - Phi w||^2 / ||y||^2 on fresh draws
    uniform: Tensor  # [C] the same, expected of a uniform subset of k points with weights n/k

    @property
    def over_uniform(self) -> Tensor:
        """[C] error over uniform; 0 where both are 0, as for a coreset of all points."""
        return self.error / self.uniform.clamp_min(1e-12)


class Sketch(NamedTuple):
    """How pi-hat is drawn from."""

    widths: tuple[float, ...]
    draws: int  # S, over all widths together
    feature_draws: int  # F, over all widths together; 0 draws all of theta each time


def stacked_potentials(
    model: Model, q: Tensor, data: ClientData, sketch: Sketch, streams: Streams, purpose: str
) -> Tensor:
    """g [C, n, S]; with several widths, a block of draws each, scaled to ||y|| = 1."""
    many = len(sketch.widths)
    draws = -(-sketch.draws // many)
    features = -(-sketch.feature_draws // many)
    blocks = []
    for width in sketch.widths:
        pi = gaussian.widen(q, width)
        name = f"{purpose}/{width:g}"
        log_p = potentials.log_likelihoods(model, pi, data, draws, streams, name, features)
        g = potentials.potentials(log_p, data.weight > 0)
        if many > 1:
            norm = g.sum(1).norm(dim=-1).clamp_min(torch.finfo(g.dtype).tiny)
            g = g / norm.view(-1, 1, 1)
        blocks.append(g)
    return torch.cat(blocks, -1)


def judge(g: Tensor, w: Tensor, k: Tensor, mask: Tensor) -> Quality:
    """The error of w on these potentials, beside what a uniform subset of k_i points expects."""
    n = mask.sum(-1).to(g.dtype)
    expected = uniform_error(g.sum(1).square().sum(-1), g.square().sum((1, 2)), n, k.to(g.dtype))
    return Quality(potentials.relative_error(g, w), expected)


def solve(
    g: Tensor,
    y: Tensor,
    k: Tensor,
    mask: Tensor,
    *,
    solver: str,
    iterations: int,
    shrink: float,
    generators: Sequence[torch.Generator] = (),
    plain: Tensor | None = None,
) -> Tensor:
    """Weights [C, n] by a solver, then refitted towards n/k if `shrink` > 0 and it is a fit.

    `plain` is n/k where `mask` is not all of a client's points.
    """
    posed = problem(g, k, mask, y)
    w = solvers.get(solver)(posed, iterations=iterations, generators=generators).w
    if shrink > 0 and solvers.SOLVERS[solver].refit:
        w = refit.refit(posed, w > 0, mask.sum(-1) / k if plain is None else plain, shrink)
    everything = (k >= mask.sum(-1)).unsqueeze(-1)  # k = n: the coreset is the data
    return torch.where(everything, mask.to(w.dtype), w)


def draws_for(k: int, n: int, asked: int, memory_mb: int) -> int:
    """S for one client: as asked, or 2k and at least 200, within a bound on memory.

    The solver is degenerate when S - 1 <= k: an exact zero exists and means nothing. S depends on
    the client alone, never on who is in the same call, and is rounded up to one of a few sizes so
    that clients of similar size can be solved together.
    """
    wanted = asked or rounded_up(max(2 * k, MINIMUM_DRAWS))
    return min(wanted, max(2, memory_mb * 2**20 // bytes_for(1, n)))


def bytes_for(draws: int, n: int) -> int:
    """Memory of a selection for one client: about four float32 matrices [S, n]."""
    return 4 * 4 * draws * n


def rounded_up(number: int) -> int:
    """The next multiple of an eighth of its power of two: at most an eighth more."""
    grain = max(1, 1 << max(0, number.bit_length() - 4))
    return -(-number // grain) * grain


def groups(
    due: Tensor, data: ClientData, k: Tensor, asked: int, memory_mb: int
) -> list[tuple[list[int], int]]:
    """Clients to select for together, with their S: those of equal S, as many as memory allows.

    On a CPU one after the other: one client's potentials stay in the cache through all iterations
    of the solver; those of ten do not, and took twice the time.
    """
    sizes, kept = data.size.tolist(), k.tolist()
    by_draws: dict[int, list[int]] = {}
    for row in due.nonzero().squeeze(-1).tolist():
        draws = draws_for(kept[row], sizes[row], asked, memory_mb)
        by_draws.setdefault(draws, []).append(row)
    found = []
    for draws, members in by_draws.items():
        most = max(1, memory_mb * 2**20 // bytes_for(draws, data.weight.shape[1]))
        size = 1 if data.weight.device.type == "cpu" else most
        found += [(members[i : i + size], draws) for i in range(0, len(members), size)]
    return found


MINIMUM_DRAWS = 200
"""For tiny coresets 2k draws would estimate nothing; 200 rows cost little beside the features."""
