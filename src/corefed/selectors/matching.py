"""The paper's recipe: potentials of Eq. 4 matched by a solver (A-IHT is Algorithm 2).

    minimise || y - Phi w ||^2   over   w >= 0, ||w||_0 <= k,

then a refit that pulls the weights towards n/k (`coreset/refit.py`). With `pool` below 1 only a
part of the points, taken in turn, may be chosen; the target is still that of all points. The
support then changes from one selection to the next, and a client sees more of its data.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.coreset import refit, solvers
from corefed.coreset.problem import problem
from corefed.models.network import Model
from corefed.selectors.calibrated import take_turns
from corefed.selectors.frame import Choice, Look
from corefed.selectors.guard import take_clients
from corefed.selectors.potentials import stack, widen
from corefed.selectors.settings import Selection
from corefed.selectors.sketches import centres, sketch

THRESHOLDING = {"aiht-2": 100, "aiht": 100, "iht": 100}
"""Iterations in a federation; 300, their own bound, trained no better (docs/coresets.md)."""


def select(look: Look) -> Choice:
    """In groups of clients with equal S, which depends only on a client's k and n."""
    settings = look.settings
    weight, memory = torch.zeros_like(look.data.weight), look.memory.clone()
    everyone = torch.ones_like(look.k, dtype=torch.bool)
    for rows, draws in groups(everyone, look.data, look.k, settings.draws, settings.selection_mb):
        own = take_clients(look, rows)
        n = own.mask.shape[1]
        weight[rows, :n], memory[rows, :n] = _solve(own, draws)
    return Choice(weight, memory)


def _solve(look: Look, draws: int) -> Choice:
    settings, mask, memory = look.settings, look.mask, look.memory
    if settings.match == "potentials" and len(centres(look)) == 1:
        (q,) = centres(look)
        g = matched_potentials(look.model, q, look.data, settings, draws, look.streams)
    else:
        g = sketch(look._replace(settings=replace(settings, draws=draws))).g
    y = g.sum(1)
    if settings.pool < 1:
        many = torch.ceil(look.n * settings.pool).long()
        many = torch.minimum(torch.maximum(many, look.k + 1), look.n)
        pi = mask * (many / look.n).unsqueeze(-1)
        every = torch.zeros_like(mask, dtype=torch.int64)
        mask, memory = take_turns(pi, many, mask, every, memory, look.streams)
    g = g * mask.unsqueeze(-1)
    weight = solve(settings, g, y, look.k, mask, look.streams, plain=look.n / look.k)
    return Choice(weight.to(look.data.weight.dtype), memory)


def matched_potentials(
    model: Model, q: Tensor, data: ClientData, settings: Selection, draws: int, streams: Streams
) -> Tensor:
    """g [C, n, S] around q; with several widths each block is scaled to ||y|| = 1."""
    places = widen(q, settings.widths, "coreset")
    many = len(places) > 1
    return stack(model, places, data, draws, settings.feature_draws, streams, scaled=many)


def solve(
    settings: Selection,
    g: Tensor,
    y: Tensor,
    k: Tensor,
    mask: Tensor,
    streams: Streams,
    plain: Tensor | None = None,
) -> Tensor:
    """Weights [C, n] by the solver, then refitted towards n/k if `shrink` > 0 and it is a fit.

    `plain` is n/k where `mask` is not all of a client's points.
    """
    solver, shrink = settings.solver, settings.shrink
    iterations = settings.max_iterations or THRESHOLDING.get(solver, 0)
    posed = problem(g, k, mask, y)
    generators = streams.generators("solver", host=True)
    w = solvers.get(solver)(posed, iterations=iterations, generators=generators).w
    if shrink > 0 and solvers.SOLVERS[solver].refit:
        w = refit.refit(posed, w > 0, mask.sum(-1) / k if plain is None else plain, shrink)
    everything = (k >= mask.sum(-1)).unsqueeze(-1)  # k = n: the coreset is the data
    return torch.where(everything, mask.to(w.dtype), w)


def draws_for(k: int, n: int, asked: int, memory_mb: int) -> int:
    """S for one client: as asked, or 2k and at least 200, within a bound on memory.

    With S - 1 <= k the problem is degenerate: an exact fit always exists. S depends on the client
    alone, not on others in the call, and is rounded up to one of a few sizes so that clients of
    similar size can be solved together.
    """
    wanted = asked or round_up(max(2 * k, MINIMUM_DRAWS))
    return min(wanted, max(2, memory_mb * 2**20 // bytes_for(1, n)))


def bytes_for(draws: int, n: int) -> int:
    """Memory of a selection for one client: about four float32 matrices [S, n]."""
    return 4 * 4 * draws * n


def round_up(number: int) -> int:
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
"""For tiny coresets 2k draws are too few for an estimate; 200 cost little beside the features."""
