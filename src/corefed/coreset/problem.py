"""The problem every solver solves, and the few products with the potentials it may use.

    minimise f(w) = ||y - Phi w||^2   subject to   w >= 0,  ||w||_0 <= k,      Phi = [g_1 .. g_n]

for C clients at once, each with its own mask of real points and its own k. Potentials have one row
per point, g [C, n, S]. A solver takes one product with all of Phi^T per iteration (`correlate`) and
otherwise works on the few columns of its support (`gather`), which are contiguous in this layout.
`Dense` holds potentials in memory; `store.py` keeps them in a file, or computes them again in each
pass. A solver cannot tell which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Potentials(Protocol):
    """Potentials g_j of n points for C clients, as S numbers each."""

    @property
    def shape(self) -> tuple[int, int, int]: ...  # C, n, S
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def correlate(self, r: Tensor) -> Tensor: ...  # Phi^T r: [C, S] -> [C, n]
    def gather(self, index: Tensor) -> Tensor: ...  # [C, m] -> [C, m, S]
    def squares(self) -> Tensor: ...  # [C, n] ||g_j||^2


class Dense:
    """Potentials in memory: g [C, n, S]."""

    def __init__(self, g: Tensor) -> None:
        self.g = g
        self._squares: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        clients, n, rows = self.g.shape
        return clients, n, rows

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    @property
    def device(self) -> torch.device:
        return self.g.device

    def correlate(self, r: Tensor) -> Tensor:
        return torch.bmm(self.g, r.unsqueeze(-1)).squeeze(-1)

    def gather(self, index: Tensor) -> Tensor:
        if len(self.g) == 1:  # rows are contiguous: index_select copies them at once
            return self.g[0].index_select(0, index[0]).unsqueeze(0)
        return self.g.take_along_dim(index.unsqueeze(-1), 1)

    def squares(self) -> Tensor:
        if self._squares is None:
            self._squares = torch.linalg.vector_norm(self.g, dim=-1).square()
        return self._squares


class Problem(NamedTuple):
    points: Potentials
    y: Tensor  # [C, S]
    k: Tensor  # [C] int, at most the number of real points
    mask: Tensor  # [C, n] bool: real points

    @property
    def most(self) -> int:
        """The largest k of all clients."""
        return int(self.k.max())

    def combine(self, v: Tensor, width: int) -> Tensor:
        """Phi v, [C, S], for v [C, n] with at most `width` non-zero entries per client."""
        n = v.shape[-1]
        if isinstance(self.points, Dense) and 2 * width >= n:
            return torch.bmm(v.unsqueeze(1), self.points.g).squeeze(1)
        index = v.abs().topk(min(width, n), sorted=False).indices
        return torch.bmm(v.gather(-1, index).unsqueeze(1), self.points.gather(index)).squeeze(1)

    def objective(self, w: Tensor) -> Tensor:
        """f(w): [C]."""
        return (self.y - self.combine(w, int((w != 0).sum(-1).max()))).square().sum(-1)


class Solution(NamedTuple):
    w: Tensor  # [C, n], at most k_i positive entries per client
    objective: Tensor  # [C] f(w), recomputable from w
    iterations: int
    converged: Tensor  # [C] bool: it stopped by its own test, not by the bound on iterations


class Solver(Protocol):
    """What every solver is. `iterations` 0 takes the solver's own bound; `generators`, one per
    client, are for solvers that draw. A solver ignores arguments that it does not need."""

    def __call__(
        self,
        problem: Problem,
        *,
        iterations: int = 0,
        generators: Sequence[torch.Generator] = (),
    ) -> Solution: ...


def problem(
    g: Tensor, k: Tensor | int, mask: Tensor | None = None, y: Tensor | None = None
) -> Problem:
    """From potentials in memory [C, n, S]; y is Phi 1 unless it has further rows of its own."""
    mask = torch.ones(g.shape[:2], dtype=torch.bool, device=g.device) if mask is None else mask
    k = torch.as_tensor(k, device=g.device).expand(len(g))
    y = g.sum(1) if y is None else y
    return Problem(Dense(g), y, torch.minimum(k, mask.sum(-1)), mask.bool())


def largest(score: Tensor, k: Tensor, top: int) -> Tensor:
    """Mask of the k_i largest scores of each row."""
    index = score.topk(top, dim=-1).indices
    wanted = torch.arange(top, device=score.device) < k.unsqueeze(-1)
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, wanted)


def norm2(v: Tensor) -> Tensor:
    return v.square().sum(-1)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b > 0, a / b.clamp_min(torch.finfo(b.dtype).tiny), 0.0)
