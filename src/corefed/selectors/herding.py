"""Herding (Welling, ICML 2009; as in iCaRL, Rebuffi et al., CVPR 2017): follow the class mean.

Within a class, points are picked one after the other so that the mean of the picks' features stays
nearest to the mean m of all: pick t + 1 is

    argmin_j || m - (h_j + sum of the t picks) / (t + 1) ||,

so the first is the point nearest to m. Features h are those below the head at the posterior mean,
not scaled to length 1. Each pick of class c has the weight n_c / k_c. `classes.py` splits k between
classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.selectors import classes, gradients
from corefed.selectors.classes import Groups
from corefed.selectors.frame import Choice, Look

ROOM = 1 << 26
"""Features of a stack of groups, at most: 256 MiB."""
TIE = 1e-6
"""Difference of costs that counts as a tie, as a part of the largest: rounding of float32. The two
points of a class are equally far from their mean, and so are equal points."""


def select(look: Look) -> Choice:
    h = gradients.features(look)
    weight = look.data.weight.new_zeros(look.mask.shape)
    for groups in classes.stacks(look, classes.parts(look), ROOM, h.shape[-1]):
        own = h.flatten(0, 1)[groups.at]
        groups.place(weight, follow(own, groups))
    return Choice(weight, look.memory)


def follow(h: Tensor, groups: Groups) -> Tensor:
    """Weights [G, m] of the k_g points that follow the mean of h [G, m, d]."""
    size = groups.real.sum(-1, keepdim=True)
    mean = (h * groups.real.unsqueeze(-1)).sum(1) / size
    h = h - mean.unsqueeze(1)  # from the mean: smaller squares, and m is 0
    half = h.square().sum(-1).mul_(0.5)
    tie = TIE * (half * groups.real).amax(-1, keepdim=True)
    taken = ~groups.real
    ahead = torch.zeros_like(mean)  # the sum of the picks, to be kept near 0
    picks = []
    for _ in range(groups.most):
        cost = torch.bmm(h, ahead.unsqueeze(-1)).squeeze(-1) + half
        cost.masked_fill_(taken, torch.inf)
        best = cost.amin(-1, keepdim=True) + tie  # of those that tie, the first
        pick = (cost <= best).byte().argmax(-1, keepdim=True)
        taken = taken.scatter(-1, pick, True)
        ahead = ahead + h.take_along_dim(pick.unsqueeze(-1), 1).squeeze(1)
        picks.append(pick)
    wanted = torch.arange(groups.most, device=h.device) < groups.k.unsqueeze(-1)
    each = wanted * (size / groups.k.unsqueeze(-1)).to(h.dtype)
    return torch.zeros_like(half).scatter_add_(-1, torch.cat(picks, -1), each)
