"""The default: points drawn by importance, each in its turn, with weights calibrated to all data.

1. Draw. Point j is taken with probability pi_j: one part is equal for all points (`floor`), the
   rest is in proportion to a score, the norm of the point's last-layer gradient under the
   posterior. With weights 1 / pi_j an independent draw is unbiased for the log-likelihood of all
   data, wherever training goes.
2. In turn. Each point is owed sum_t pi_j(t) less the number of times it was taken, and each class
   the sum over its points. Both are remembered. The classes that are owed most come first, and in
   each class the points that are owed most. Over many selections each point is taken as often as
   its pi says, and evenly in time. Independent draws would leave some points out for long, and
   small draws whole classes.
3. Calibrate. The weights change as little as needed for the coreset to match all data on the
   potentials g_j at S draws of pi-hat (`sketches.py`; y = sum_j g_j):

       minimise || y - sum_j w_j g_j ||^2 + lambda sum_j (w_j - 1 / pi_j)^2 pi_j,

   within a factor `bound` of 1 / pi_j. lambda is `shrink` times the mean of ||g_j||^2 / pi_j. In
   survey statistics this is a ridge-calibrated estimator (Deville and Sarndal 1992; Rao and Singh
   1997): what the potentials explain is matched, the rest keeps the unbiased weights.

A solver of Eq. 4 (`matching.py`) fits the same potentials more closely, but is accurate only while
the posterior stays where they were drawn. This selector is nearly unbiased everywhere, over a few
selections: later turns make up for what a small selection rounds off.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.models.likelihood import Categorical
from corefed.selectors import gradients, newton, sampling
from corefed.selectors.frame import Choice, Look
from corefed.selectors.sketches import Sketch, sketch
from corefed.selectors.subset import random_order


def select(look: Look) -> Choice:
    settings = look.settings
    if settings.pool < 1:
        return _in_two_phases(look)
    seen = sketch(look)
    pi = sampling.inclusion(_scores(look, seen), look.mask, look.k, settings.floor)
    if settings.in_turn:
        chosen, memory = take_turns(
            pi, look.k, look.mask, _groups(look), look.memory, look.streams,
            look.model.outputs if look.most else 0,
        )  # fmt: skip
    else:
        chosen = sampling.draw(pi, look.k, look.mask, look.streams, "calibrated")
        memory = look.memory
    drawn = torch.where(chosen, pi.clamp_min(torch.finfo(pi.dtype).tiny).reciprocal(), 0.0)
    weight = calibrate(seen.g, drawn, settings.shrink, settings.bound, look.most)
    return Choice(weight.to(look.data.weight.dtype), memory)


def _in_two_phases(look: Look) -> Choice:
    """Look at m of the n points only, taken in turn: they stand for all with weights n/m. The
    coreset is drawn from them, class by class, and calibrated to them."""
    wanted = torch.ceil(look.n * look.settings.pool).long()
    many = torch.minimum(torch.maximum(wanted, look.k + 1), look.n)
    share = (many / look.n.clamp_min(1)).unsqueeze(-1)
    pi, mask = share * look.mask, look.mask
    seen, memory = take_turns(pi, many, mask, _groups(look), look.memory, look.streams)
    index = seen.to(torch.int8).argsort(stable=True, descending=True)[:, : int(many.max())]
    rows = torch.arange(len(index), device=index.device).unsqueeze(-1)
    data = look.data
    part = ClientData(data.x[rows, index], data.y[rows, index], seen.gather(-1, index) * 1.0)
    small = look._replace(
        data=part,
        memory=torch.zeros_like(part.weight),
        settings=replace(look.settings, pool=1.0),
    )
    weight = (select(small).weight / share).to(data.weight.dtype)
    return Choice(torch.zeros_like(data.weight).scatter(-1, index, weight), memory)


def _groups(look: Look) -> Tensor:
    """[C, n] groups that are balanced: the classes, or all points as one."""
    if look.settings.balance and isinstance(look.model.likelihood, Categorical):
        return look.data.y
    return torch.zeros_like(look.mask, dtype=torch.int64)


def _scores(look: Look, seen: Sketch) -> Tensor:
    match look.settings.score:
        case "gradient":
            return seen.norms
        case "potential":
            return seen.g.square().sum(-1).sqrt_()
        case "loss":
            return gradients.losses(look, 1)
        case "none":
            return look.mask.to(seen.g.dtype)


def take_turns(
    pi: Tensor,
    k: Tensor,
    mask: Tensor,
    group: Tensor,
    owed: Tensor,
    streams: Streams,
    groups: int = 0,
) -> tuple[Tensor, Tensor]:
    """The k points per client whose turn it is, [C, n] bool, and what each point is owed then.

    Debts start evenly spread over [0, 1) in each group [C, n] of points, in random order. A group
    starts with half its size, and is owed what exceeds that. After T selections point j has been
    taken sum_t pi_j(t) times up to a debt of order 1, and so has each group.

    `groups` is how many there are at most, where every client has debts already: nothing is then
    read from the tensors. 0: look.
    """
    fresh = (owed == 0).all(-1, keepdim=True)
    known = groups > 0
    group = torch.where(mask, group, groups if known else int(group.max()) + 1)  # padding has one
    groups = groups + 1 if known else int(group.max()) + 1
    members = group.unsqueeze(-1) == torch.arange(groups, device=group.device)
    members = members.double()  # [C, n, groups]
    if not known and bool(fresh.any()):
        rows = fresh.squeeze(-1).nonzero().squeeze(-1).tolist()
        order = torch.zeros_like(owed)  # the others draw nothing, whoever is in the call
        order[rows] = random_order(mask[rows], streams.subset(rows), "in-turn").to(owed)
        sizes = torch.bmm(members, members.sum(1).unsqueeze(-1)).squeeze(-1)
        start = (_rank_inside(group, -order) + 0.5) / sizes
        owed = torch.where(fresh & mask, start.to(owed.dtype), owed)
    owed = owed + pi.to(owed.dtype)
    excess = torch.bmm(owed.double().unsqueeze(1), members).squeeze(1) - members.sum(1) / 2
    # The r-th point of a group (from 0) has the claim that its group has when r are taken.
    claim = excess.gather(-1, group) - _rank_inside(group, owed)
    order = claim.masked_fill(~mask, -torch.inf).argsort(stable=True, descending=True)
    chosen = (order.argsort(-1) < k.unsqueeze(-1)) & mask
    return chosen, torch.where(mask, owed - chosen.to(owed.dtype), 0.0)


def _rank_inside(group: Tensor, value: Tensor) -> Tensor:
    """[C, n] how many points of the same group have a larger value; of equal ones, the first."""
    order = value.argsort(stable=True, descending=True)
    within = group.gather(-1, order).argsort(stable=True)  # by group, and in it by value
    order = order.gather(-1, within)
    sorted_group = group.gather(-1, order)
    place = torch.arange(group.shape[-1], device=group.device).expand_as(group)
    begin = torch.searchsorted(sorted_group, sorted_group)
    return torch.zeros_like(group).scatter(-1, order, place - begin)


def calibrate(g: Tensor, drawn: Tensor, shrink: float, bound: float, most: int = 0) -> Tensor:
    """[C, n] weights near `drawn` whose sum of g comes near that of all points; float64.

    With B_j = sqrt(d_j) g_j, d the drawn weights and r = y - sum_j d_j g_j, the minimiser is
    w_j = d_j + sqrt(d_j) B_j (B^T B + lambda I)^-1 r: a system of S equations, whatever k.

    `most` is the largest number of drawn points, where it is known; then nothing is read from the
    tensors, and no library is asked to solve the system (cuSOLVER cannot be recorded).
    """
    d = drawn.double()
    taken = d > 0
    size = most or int(taken.sum(-1).max())
    index = taken.to(torch.int8).argsort(stable=True, descending=True)[:, :size]
    root = d.gather(-1, index).sqrt_()
    rows = (
        root.unsqueeze(-1) * g.gather(1, index.unsqueeze(-1).expand(-1, -1, g.shape[-1])).double()
    )
    r = g.sum(1, dtype=d.dtype) - torch.bmm(root.unsqueeze(1), rows).squeeze(1)
    total = rows.square().sum((1, 2))
    ridge = shrink * total / taken.sum(-1).clamp_min(1)
    system = torch.bmm(rows.mT, rows)
    # Never singular, also where the potentials are all 0 or there is no shrinkage.
    least = torch.finfo(d.dtype).eps * total + torch.finfo(d.dtype).tiny
    system.diagonal(dim1=-2, dim2=-1).add_((ridge + least).unsqueeze(-1))
    if most:
        steps = newton.steps_for(g.shape[-1] + most / shrink)
        solved = newton.solve(system, r.unsqueeze(-1), (ridge + least).view(-1, 1, 1), steps)
    else:
        solved = torch.linalg.solve(system, r.unsqueeze(-1))
    moved = root * torch.bmm(rows, solved).squeeze(-1)
    near = root.square()
    w = torch.minimum(torch.maximum(near + moved, near / bound), near * bound)
    w = torch.where(w.isfinite(), w, near)
    return torch.zeros_like(d).scatter(-1, index, w)
