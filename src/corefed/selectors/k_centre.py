"""Greedy k-centre (Sener and Savarese, ICLR 2018): cover all points by balls around k of them.

The first centre is the point nearest to the mean of the features, each further one the point that
is farthest from all centres so far (Gonzalez 1985): the radius that covers all points is at most
twice the smallest possible. Features are those below the head at the posterior mean. Classes play
no part, as in the paper.

The paper trains on the centres with equal weights. Here the weight of a centre is the number of
points nearest to it, so weights sum to n. The weighted log-likelihood is then that of all data with
every point moved to its centre, by at most the radius. Equal weights would favour outliers, which
the rule picks first.
"""

from __future__ import annotations

import torch

from corefed.selectors import gradients
from corefed.selectors.frame import Choice, Look


def select(look: Look) -> Choice:
    h, mask = gradients.features(look), look.mask
    mean = h.sum(1, keepdim=True) / look.n.clamp_min(1).view(-1, 1, 1)  # rows of padding are 0
    pick = (h - mean).square_().sum(-1).masked_fill_(~mask, torch.inf).argmin(-1, keepdim=True)
    far = torch.full_like(h[..., 0], torch.inf)  # squared distance to the nearest centre so far
    place = torch.zeros_like(mask, dtype=torch.int64)  # which of the centres that is
    taken = ~mask
    picks = []
    most = int(look.k.max())
    for t in range(most):
        if t > 0:
            pick = far.masked_fill(taken, -1.0).argmax(-1, keepdim=True)
        taken = taken.scatter(-1, pick, True)
        picks.append(pick)
        apart = (h - h.take_along_dim(pick.unsqueeze(-1), 1)).square_().sum(-1)
        # A centre stands for itself, even beside one that is its equal.
        apart = apart.scatter(-1, pick, -1.0)
        nearer = (apart < far) & (t < look.k).unsqueeze(-1)
        far = torch.where(nearer, apart, far)
        place = torch.where(nearer, t, place)
    count = torch.zeros_like(h[:, :1, 0].expand(-1, most)).scatter_add_(-1, place, mask.to(h.dtype))
    weight = torch.zeros_like(far).scatter_add_(-1, torch.cat(picks, -1), count)
    return Choice(weight.to(look.data.weight.dtype), look.memory)
