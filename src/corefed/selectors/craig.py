"""CRAIG (Mirzasoleiman, Bilmes, Leskovec, ICML 2020): medoids of the gradients, class by class.

Within a class, points A are picked one after the other so that they lower most the sum of the
distances from each point's last-layer gradient to the nearest gradient of A,

    L(A) = sum_i min_{j in A} ||g_i - g_j||,

the greedy choice for facility location. It bounds the error of the weighted gradient, with weights

    w_j = number of points whose nearest gradient in A is g_j,

which sum to n. Gradients are at the posterior mean, or at `draws` draws. `classes.py` splits k
between classes.

A pick looks at all pairs of points of a class, which for thousands of points takes much time and
memory. A class of more than `BLOCK` points is split at random into blocks of at most that size.
Each block gets its part of k and is chosen from alone (the first stage of distributed greedy,
Mirzasoleiman et al., NeurIPS 2013). A block gets at least `FEWEST` picks, since the first few of
every block are alike; if k is too small for that, blocks are larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.selectors import classes
from corefed.selectors.classes import Groups, Part
from corefed.selectors.frame import Choice, Look
from corefed.selectors.gradients import LastLayer, last_layer

BLOCK = 1000
"""Most points of a block, if k allows."""
FEWEST = 8
"""Picks of a block, at least."""
MEMORY = 1 << 31
"""Bytes of a stack of groups, at most."""
CACHE = 1 << 24
"""The same on a CPU: distances in its cache are read faster."""
PAIR = 20
"""Bytes that a pair of points takes: two inner products in float64, then a distance in float32."""
TIE = 1e-6
"""Relative difference of sums that counts as a tie: rounding of float32. The best of m points
lowers the sum by at least 1/m, so among 1000 points no pick is 0.1 % worse than the best."""


def select(look: Look, *, draws: int = 0) -> Choice:
    layer = last_layer(look, draws, "craig")
    room = (CACHE if look.q.device.type == "cpu" else MEMORY) // PAIR
    weight = look.data.weight.new_zeros(look.mask.shape)
    for groups in classes.stacks(look, blocks(look), room):
        own = LastLayer(*(factor.double() for factor in layer.take(groups.at)))
        groups.place(weight, medoids(distances(own.gram()).float(), groups))
    return Choice(weight, look.memory)


def blocks(look: Look) -> list[Part]:
    """The classes, large ones split into blocks."""
    generators = look.streams.generators("craig/blocks", host=True)
    found = []
    for part in classes.parts(look):
        size = len(part.at)
        least = -(-size // int((MEMORY / PAIR) ** 0.5))
        number = max(least, min(-(-size // BLOCK), part.k // FEWEST), 1)
        if number > part.k:
            raise UserError(
                f"CRAIG cannot compare {size} points in pairs to keep {part.k} of them; raise "
                "fraction, or take another selector."
            )
        if number == 1:
            found.append(part)
            continue
        order = torch.randperm(size, generator=generators[part.client])
        members = [part.at[some.sort().values] for some in order.tensor_split(number)]
        shares = classes.apportion([len(at) for at in members], part.k)
        found += [Part(part.client, at, k) for at, k in zip(members, shares, strict=True)]
    return found


def distances(gram: Tensor) -> Tensor:
    """||g_i - g_j|| from inner products [G, m, m], in place.

    The inner products must be float64. In float32 the differences would keep four digits at best,
    too few for the same medoids whatever the shapes of the products.
    """
    squares = gram.diagonal(dim1=-2, dim2=-1).clone()
    apart = gram.mul_(-2.0).add_(squares.unsqueeze(-1)).add_(squares.unsqueeze(-2))
    apart.diagonal(dim1=-2, dim2=-1).zero_()
    return apart.clamp_min_(0.0).sqrt_()


def medoids(d: Tensor, groups: Groups) -> Tensor:
    """Weights [G, m] of the k_g medoids that greedy picks by distances d [G, m, m]."""
    d = d.masked_fill_(~groups.real.unsqueeze(-2), 0.0)  # padding is near to everything
    nearest = torch.where(groups.real, torch.inf, 0.0)  # distance to the nearest pick so far
    taken = ~groups.real
    working = torch.empty_like(d)
    picks = []
    # A group with a smaller k goes on picking; picks beyond its k are ignored.
    for _ in range(groups.most):
        torch.minimum(d, nearest.unsqueeze(-2), out=working)
        total = working.sum(-1).masked_fill_(taken, torch.inf)
        # The first of those that tie, as the points of a group of two do, up to rounding.
        best = total.amin(-1, keepdim=True)
        pick = (total <= best * (1 + TIE)).to(torch.int8).argmax(-1, keepdim=True)
        taken = taken.scatter(-1, pick, True)
        nearest = torch.minimum(nearest, d.take_along_dim(pick.unsqueeze(-1), -2).squeeze(-2))
        picks.append(pick)
    del working
    chosen = torch.cat(picks, -1)  # [G, most]
    beyond = torch.arange(groups.most, device=d.device) >= groups.k.unsqueeze(-1)
    near = d.take_along_dim(chosen.unsqueeze(-1), -2)  # [G, most, m]
    # A pick stands for itself, even beside one that is its equal.
    near.scatter_(-1, chosen.unsqueeze(-1), -1.0).masked_fill_(beyond.unsqueeze(-1), torch.inf)
    count = torch.zeros_like(near[..., 0]).scatter_add_(
        -1, near.argmin(-2), groups.real.to(d.dtype)
    )
    return torch.zeros_like(nearest).scatter_add_(-1, chosen, count)
