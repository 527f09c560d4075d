"""Similarities s_ij of points x_i, x_j with p features, some rows at a time.

cosine      s_ij = <x_i, x_j> / (|x_i| |x_j|), 0 where a norm is 0
euclidean   s_ij = exp(-|x_i - x_j| / p)
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError

Metric = Literal["cosine", "euclidean"]


class ComparedPoints(NamedTuple):
    """Features made ready for products: unit rows, or centred ones."""

    metric: Metric
    rows: Tensor  # [n, p] float64
    squares: Tensor  # [n] |row|^2
    own: Tensor  # [n] similarity of each point with itself

    def similarity(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        """[a, b]: the similarities of points a with points b, or with all points."""
        others = self.rows if b is None else self.rows[b]
        product = self.rows[a] @ others.T
        if self.metric == "cosine":
            return product
        size = self.squares[a].unsqueeze(-1) + (self.squares if b is None else self.squares[b])
        apart = torch.add(size, product, alpha=-2)
        # Equal points differ by rounding, about 1e-15 of size, whose root would be far from 0.
        apart = apart.masked_fill_(apart < 1e-13 * size, 0.0).sqrt_()
        return apart.div_(-self.rows.shape[1]).exp_()


def prepare(x: Tensor, metric: Metric) -> ComparedPoints:
    """The points x [n, p], read as float32 and worked on in float64."""
    x = x.float()
    if not bool(x.isfinite().all()):
        raise UserError("The features hold a value that is no finite number; mend the data.")
    rows = x.double()
    if metric == "euclidean":
        rows -= rows.mean(0)  # smaller squares, so differences keep more digits
        squares = rows.square().sum(-1)
        return ComparedPoints(metric, rows, squares, torch.ones_like(squares))
    norm = rows.norm(dim=-1)
    rows /= torch.where(norm > 0, norm, 1.0).unsqueeze(-1)
    own = (norm > 0).double()
    return ComparedPoints(metric, rows, own, own)
