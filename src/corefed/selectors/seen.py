"""Points drawn by what training has seen of them anyway, with weights of exactly 1 / chance.

A local step passes the points of its minibatch through the network, and with that knows the norm of
each point's last-layer gradient at the step's draw of the weights (`elbo.scored_gradient`). A
point's score is their root mean square over the steps since the last selection, or what it was when
it was last trained on. No pass is made for it. The scores are the selector's memory; 0: never seen.

1. Catch up. The points that were not seen for longest are passed through the network once, in turn,
   those never seen first. These are the only passes of the selector, and at most `ALLOWED` of what
   training has cost since; none at the first selection. A look has a price of its own, a draw of
   all weights, so once every point was seen it waits until it may take in `WORTH` of them.
2. Draw. Point j is taken with probability pi_j exactly: one part is equal for all points (`floor`),
   the rest follows the scores. A point that is still unseen counts as the mean of the others. The
   classes come one after the other (`balance`), so that each has its expected number of points, up
   to rounding. The weight is 1 / pi_j, so that sum_j w_j f_j is unbiased for the sum over all data,
   whatever f is, and however old a score is: an old score costs variance only.

A selection of the default (`calibrated.py`) passes all points through the network at some draws,
which takes half as long as training; in return its weights are calibrated to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.passes import STEP
from corefed.base.types import ClientData
from corefed.models.likelihood import Categorical
from corefed.selectors import gain, gradients, guard, sampling
from corefed.selectors.frame import Choice, Look

ALLOWED = 0.02
"""Passes of selection over passes of training, at most. On MNIST (10 %, two
seeds) 0.05 gave no better points."""

WORTH = 0.25
"""Part of the points from which on a look is worth its draw of the weights."""


def select(look: Look) -> Choice:
    score = catch_up(look)
    _, pi = chances(look, score)
    by_class = look.settings.balance and isinstance(look.model.likelihood, Categorical)
    group = look.data.y if by_class else None
    chosen = sampling.draw(pi, look.k, look.mask, look.streams, "seen", group)
    weight = torch.where(chosen, pi.clamp_min(torch.finfo(pi.dtype).tiny).reciprocal(), 0.0)
    return Choice(weight.to(look.data.weight.dtype), score)


def chances(look: Look, score: Tensor) -> tuple[Tensor, Tensor]:
    """[C, n] scores, where a point never seen counts as the mean of the others, and pi."""
    known = (score > 0) & look.mask
    mean = (score * known).sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp_min(1)
    counted = torch.where(known, score, mean)
    return counted, sampling.inclusion(counted, look.mask, look.k, look.settings.floor)


def share(look: Look, score: Tensor) -> Tensor:
    """[C] part of a batch that a step needs, with points drawn by these scores (`gain.py`)."""
    counted, pi = chances(look, score)
    return gain.share(counted, pi, look.mask)


def room(steps: Tensor, points: Tensor, draws: int, unseen: Tensor, mask: Tensor) -> Tensor:
    """[C] points that are to be passed through the network, 0 or as many as may be, after so many
    local steps since the last time, each on so many points at K draws of the weights."""
    trained, n = (STEP * draws * steps * points).double(), mask.sum(-1)
    allowed = (ALLOWED * trained + 1e-6).floor().long().minimum(n)
    due = ((unseen < 0) & mask).any(-1) | (allowed >= WORTH * n)
    return torch.where(due, allowed, 0)


def catch_up(look: Look) -> Tensor:
    """[C, n] scores, after a look at the points that were not seen for longest."""
    if look.room is None or look.unseen is None:
        return look.memory
    rows = (look.room > 0).nonzero().squeeze(-1).tolist()
    if not rows:
        return look.memory
    own = guard.take_clients(look, rows)  # the others draw nothing, whoever is in the call
    score = look.memory.clone()
    score[rows, : own.mask.shape[1]] = _looked_at(own)
    return score


def _looked_at(look: Look) -> Tensor:
    score, unseen, mask = look.memory, look.unseen, look.mask
    assert look.room is not None and unseen is not None
    age = torch.where(unseen < 0, torch.inf, unseen).masked_fill(~mask, -torch.inf)
    words = look.streams.words("seen/turn", mask.shape[-1]).squeeze(1)  # of equal ages, any
    order = words.masked_fill(~mask, torch.iinfo(words.dtype).max).argsort(-1)
    order = order.gather(-1, age.gather(-1, order).argsort(stable=True, descending=True))
    index = order[:, : int(look.room.max())]
    taken = torch.arange(index.shape[1], device=index.device) < look.room.unsqueeze(-1)
    taken = taken & mask.gather(-1, index)
    rows = torch.arange(len(index), device=index.device).unsqueeze(-1)
    data = look.data
    part = ClientData(data.x[rows, index], data.y[rows, index], taken.to(data.weight.dtype))
    norms = gradients.last_layer(look._replace(data=part), 1, "seen/draw").squared_norms().sqrt()
    return score.scatter(-1, index, torch.where(taken, at_least(norms), score.gather(-1, index)))


def learnt(score: Tensor, unseen: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and steps since seen, after local steps whose `tally` is seen [C, 2, n + 1]."""
    total, count = seen[:, 0, :-1], seen[:, 1, :-1]
    now = count > 0
    norms = at_least((total / count.clamp_min(1.0)).sqrt())
    return torch.where(now, norms, score), torch.where(now, 0.0, unseen)


def at_least(norms: Tensor) -> Tensor:
    """Norms that cannot be mistaken for 0, which is a point that was never seen."""
    usable = norms < gradients.LARGEST  # false for NaN
    return torch.where(usable, norms, 0.0).clamp_min(torch.finfo(norms.dtype).tiny)
