"""How good a coreset is: its error on fresh draws of the posterior, and that of a uniform subset.

The error is ||y - Phi w||^2 / ||y||^2 on draws that the weights were not fitted to. The expected
error of a uniform subset of the same size has a closed form. A ratio below 1 means a better fit
than a random subset.

Draws of a measurement share no layer: those that do leave out what the shared layers add to the
error, most of it in a deep network. So each costs a forward pass of all points.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.coreset.uniform import uniform_error
from corefed.models.network import Model
from corefed.selectors import potentials
from corefed.selectors.frame import trim
from corefed.selectors.matching import groups
from corefed.selectors.settings import Renewal, Selection


class Quality(NamedTuple):
    error: Tensor  # [C] ||y - Phi w||^2 / ||y||^2 on fresh draws
    uniform: Tensor  # [C] its expectation for a uniform subset of k points with weights n/k

    @property
    def over_uniform(self) -> Tensor:
        """[C] error over uniform; 0 where both are 0, as for a coreset of all points."""
        return self.error / self.uniform.clamp_min(1e-12)


def measure(
    model: Model,
    q: Tensor,
    w: Tensor,
    data: ClientData,
    k: Tensor,
    streams: Streams,
    settings: tuple[Selection, Renewal],
    due: Tensor,
) -> Quality:
    """How well w [C, n] stands in for all data on fresh draws around q; NaN for clients not due."""
    how, when = settings
    found = Quality(*(torch.full_like(data.weight[:, 0], torch.nan) for _ in range(2)))
    for rows, _ in groups(due, data, k, when.check_draws, how.selection_mb):
        part = trim(data, rows)
        places = potentials.widen(q[rows], how.widths, "check")
        g = potentials.stack(
            model, places, part, when.check_draws, when.check_draws, streams.subset(rows),
            scaled=len(places) > 1,
        )  # fmt: skip
        mine = w[rows][:, : part.weight.shape[1]]
        found.error[rows], found.uniform[rows] = judge(g, mine, k[rows], part.weight > 0)
    return found


def passes(how: Selection, when: Renewal) -> int:
    """Forward passes per point that a measurement costs."""
    return len(how.widths) * -(-when.check_draws // len(how.widths))


def judge(g: Tensor, w: Tensor, k: Tensor, mask: Tensor) -> Quality:
    """The error of w on these potentials, and that expected of a uniform subset of k_i points."""
    n = mask.sum(-1).to(g.dtype)
    expected = uniform_error(g.sum(1).square().sum(-1), g.square().sum((1, 2)), n, k.to(g.dtype))
    return Quality(potentials.relative_error(g, w), expected)
