"""The paper's recipe: potentials of Eq. 4 matched by a solver (A-IHT is Algorithm 2).

    minimise || y - Phi w ||^2   over   w >= 0, ||w||_0 <= k,

then a refit that pulls the weights towards n/k (`coreset/refit.py`). With `pool` below 1 only a
part of the points, taken in turn, may join, against the target of all: the support then changes
from one choice to the next, and a client comes to see more of its data.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from corefed.selectors import selection
from corefed.selectors.calibrated import in_turn
from corefed.selectors.frame import Choice, Look
from corefed.selectors.guard import part
from corefed.selectors.sketches import centres, sketch

THRESHOLDING = {"aiht-2": 100, "aiht": 100, "iht": 100}
"""Iterations in a federation; 300, their own bound, trained no better (docs/coresets.md)."""


def select(look: Look) -> Choice:
    """In groups of clients with equal S: it follows from a client's own k and n alone."""
    settings = look.settings
    weight, memory = torch.zeros_like(look.data.weight), look.memory.clone()
    everyone = torch.ones_like(look.k, dtype=torch.bool)
    for rows, draws in selection.groups(
        everyone, look.data, look.k, settings.draws, settings.selection_mb
    ):
        own = part(look, rows)
        n = own.mask.shape[1]
        weight[rows, :n], memory[rows, :n] = _solve(own, draws)
    return Choice(weight, memory)


def _solve(look: Look, draws: int) -> Choice:
    settings, mask, memory = look.settings, look.mask, look.memory
    if settings.match == "potentials" and len(centres(look)) == 1:
        plain = selection.Sketch(settings.widths, draws, settings.feature_draws)
        g = selection.stacked_potentials(
            look.model, centres(look)[0], look.data, plain, look.streams, "coreset"
        )
    else:
        g = sketch(look._replace(settings=replace(settings, draws=draws))).g
    y = g.sum(1)
    if settings.pool < 1:
        many = torch.ceil(look.n * settings.pool).long()
        many = torch.minimum(torch.maximum(many, look.k + 1), look.n)
        pi = mask * (many / look.n).unsqueeze(-1)
        every = torch.zeros_like(mask, dtype=torch.int64)
        mask, memory = in_turn(pi, many, mask, every, memory, look.streams)
    weight = selection.solve(
        g * mask.unsqueeze(-1), y, look.k, mask,
        solver=settings.solver,
        iterations=settings.max_iterations or THRESHOLDING.get(settings.solver, 0),
        shrink=settings.shrink,
        generators=look.streams.generators("solver", host=True),
        plain=look.n / look.k,
    )  # fmt: skip
    return Choice(weight.to(look.data.weight.dtype), memory)
