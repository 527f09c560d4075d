"""Importance sampling: k points by scores, with the inverse of their probabilities as weights.

Point j is taken with probability pi_j and then has weight 1 / pi_j, so that sum_j w_j f_j is
unbiased for sum_j f_j whatever f is. With scores s_j,

    p_j = (1 - floor) s_j / sum_i s_i + floor / n,      pi_j = min(1, c p_j),      sum_j pi_j = k,

and no weight exceeds n / (k floor). The scores:

    random          1
    loss            -log p(D_j) above that of a perfect fit
    gradient-norm   ||g_j|| of the last-layer gradient (Katharopoulos and Fleuret, ICML 2018)
    leverage        tau_j = g_j^T (G^T G + lambda I)^-1 g_j of the last-layer gradients, with
                    lambda = ||G||_F^2 / k, for which they sum to k at most

all at the posterior mean, or at `draws` draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.selectors import gradients
from corefed.selectors.frame import Choice, Look

FLOOR = 0.1
"""Part of the probability that is spread evenly: a weight is at most ten times n / k."""
WIDEST = 1024
"""Longest gradient whose leverages are exact; longer ones are sketched to this length."""


def random(look: Look) -> Choice:
    return sample(look, torch.ones_like(look.data.weight), 1.0, "random")


def loss(look: Look, *, draws: int = 0, floor: float = FLOOR) -> Choice:
    return sample(look, gradients.losses(look, draws, "loss"), floor, "loss")


def gradient_norm(look: Look, *, draws: int = 0, floor: float = FLOOR) -> Choice:
    layer = gradients.last_layer(look, draws, "gradient-norm")
    return sample(look, layer.squared_norms().sqrt_(), floor, "gradient-norm")


def leverage(look: Look, *, draws: int = 0, floor: float = FLOOR) -> Choice:
    layer = gradients.last_layer(look, draws, "leverage")
    g = layer.rows(WIDEST, look.streams, "leverage/sketch")
    return sample(look, leverages(g, look.k), floor, "leverage")


def leverages(g: Tensor, k: Tensor) -> Tensor:
    """Ridge leverage scores [C, n] of rows g [C, n, D], with lambda = ||G||_F^2 / k."""
    # In float64: lambda is small beside the largest eigenvalue, and rounding must be smaller still.
    g = g.double()
    ridge = g.square().sum((1, 2)) / k.clamp_min(1)
    ridge = ridge.clamp_min(torch.finfo(g.dtype).tiny)
    g = g / ridge.sqrt().view(-1, 1, 1)
    system = torch.bmm(g.mT, g)
    system.diagonal(dim1=-2, dim2=-1).add_(1.0)
    lower = torch.linalg.cholesky(system)
    half: Tensor = torch.linalg.solve_triangular(lower, g.mT, upper=False)
    return half.square_().sum(1)


def sample(look: Look, scores: Tensor, floor: float, purpose: str) -> Choice:
    """k points by their scores, with the weights that make sums unbiased."""
    pi = inclusion(scores, look.mask, look.k, floor)
    chosen = draw(pi, look.k, look.mask, look.streams, purpose)
    weight = torch.where(chosen, pi.clamp_min(torch.finfo(pi.dtype).tiny).reciprocal(), 0.0)
    return Choice(weight.to(look.data.weight.dtype), look.memory)


def inclusion(scores: Tensor, mask: Tensor, k: Tensor, floor: float = FLOOR) -> Tensor:
    """pi [C, n] in float64, with sum_j pi_j = min(k, n) and pi_j >= k floor / n on real points.

    Scores [C, n] are at least 0; one that is not finite counts as 0. If all are 0, they count as
    equal.
    """
    if not 0 < floor <= 1:
        raise UserError(f"floor is {floor}; it must be above 0, so that weights are bounded, to 1.")
    n = mask.sum(-1, keepdim=True).clamp_min(1).double()
    keep = torch.minimum(k, mask.sum(-1)).unsqueeze(-1).double()
    s = torch.where(mask & scores.isfinite(), scores.double(), 0.0).clamp_min(0.0)
    s = torch.where((s > 0).any(-1, keepdim=True), s, 1.0) * mask
    s = s / s.amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).tiny)  # sums stay finite
    p = (1 - floor) * s / s.sum(-1, keepdim=True).clamp_min(1.0) + floor / n
    p = p * mask
    # With the m largest certain, c = (k - m) / (sum of the others); m is the first that leaves
    # none of the others above 1.
    ordered = p.sort(-1, descending=True).values
    others = ordered.flip(-1).cumsum(-1).flip(-1)  # [C, n] sums from each place to the end
    left = keep - torch.arange(p.shape[-1], device=p.device)
    fits = (left * ordered <= others) & (left >= 0)
    m = fits.to(torch.int8).argmax(-1, keepdim=True)
    c = left.gather(-1, m) / others.gather(-1, m).clamp_min(torch.finfo(p.dtype).tiny)
    certain = (p > ordered.gather(-1, m)) | (keep >= n)
    return torch.where(certain, 1.0, c * p).clamp(0.0, 1.0) * mask


def draw(
    pi: Tensor,
    k: Tensor,
    mask: Tensor,
    streams: Streams,
    purpose: str,
    group: Tensor | None = None,
) -> Tensor:
    """[C, n] bool: k_i points of each client, point j with probability pi_j exactly.

    pi [C, n] sums to k_i. Systematic sampling (Madow 1949): the points are laid end to end in
    random order, each as long as its pi_j. Those that cover one of u, u + 1, .., u + k - 1 are
    taken, for a uniform u on [0, 1). With equal pi this is a simple random sample.

    With `group` [C, n] the order is random within groups, one group after the other. Then each
    group has its expected number of points, rounded up or down.
    """
    words = streams.words(f"sample/{purpose}", mask.shape[-1]).squeeze(1)
    order = words.masked_fill(~mask, torch.iinfo(words.dtype).max).argsort(-1)  # padding is last
    if group is not None:
        group = group.masked_fill(~mask, torch.iinfo(group.dtype).max)
        order = order.gather(-1, group.gather(-1, order).argsort(stable=True))
    u = streams.uniform(f"sample/{purpose}/start", 1).double()  # 24 bits: k + u is exact
    length = (pi * mask).double().gather(-1, order)
    certain = length >= 1
    end = torch.where(certain, 0.0, length).cumsum(-1)
    left = torch.minimum(k, mask.sum(-1)).unsqueeze(-1) - certain.sum(-1, keepdim=True)
    end = end * (left / end[:, -1:].clamp_min(torch.finfo(end.dtype).tiny))  # k, but for rounding
    end = torch.where(end >= end[:, -1:], left.double(), end)
    passed = (end + u).floor()
    hit = passed.diff(dim=-1, prepend=torch.zeros_like(passed[:, :1])) > 0
    return torch.zeros_like(mask).scatter(-1, order, hit | certain)
