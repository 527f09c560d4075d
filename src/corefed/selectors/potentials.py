"""Potentials: log-likelihoods of every point under draws from pi-hat, as in Eq. 4.

    g_j = S^{-1/2} [ log p_{theta_s}(D_j) - mean_s log p_{theta_s}(D_j) ]_{s = 1..S}
    Phi = [g_1 .. g_n],   y = Phi 1

kept as one row per point, g [C, n, S] (`problem.py` says why).

`stack` draws from several pi-hats, one block of draws each. A narrow pi-hat only sees points that
are still hard, and a client trained on those alone forgets the rest. A wide one mostly sees how
points behave far away.

A draw costs a forward pass of all n points, and S must exceed the coreset's size k (with S - 1 <= k
an exact fit always exists). So a network with a linear head shares F draws of everything below the
head between S / F draws each of the head (`bayes/heads.py`). These are still draws from pi-hat, and
the cost falls from S to about F forward passes. Draws that share their lower layers are correlated,
and centring over all draws removes part of the variation between them: the contribution of the
lower layers to the Gram matrix is smaller by a factor 1 - 1/F.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.streamed import Streamed, values
from corefed.base.types import ClientData
from corefed.bayes import gaussian, heads
from corefed.models.network import Model
from corefed.selectors.gradients import zero_where_unusable

BLOCK = 1 << 23
"""Parameters per client that are drawn at once where no layers are shared: 32 MiB."""

FEATURES = 1 << 25
"""Features of all clients and draws that are held at once: 128 MiB. A client with more points is
gone through in parts."""


STREAMED = 1 << 22
"""Numbers that are held at once of points that are read from their files, and of their features:
16 MiB each."""


class Place(NamedTuple):
    """One pi-hat, and the name of its random stream."""

    name: str
    pi: Tensor  # [C, 2, P]


Visit = Callable[[slice, Tensor, Tensor], None]
"""Called with some of the points, the shared draws theta [C, F, P] of all layers, and the points'
features [C, F, n, h] below the head."""


def widen(q: Tensor, widths: Sequence[float], purpose: str) -> list[Place]:
    """The posterior with its sigma times each of the widths."""
    return [Place(f"{purpose}/{width:g}", gaussian.widen(q, width)) for width in widths]


def stack(
    model: Model,
    places: Sequence[Place],
    data: ClientData,
    draws: int,
    feature_draws: int,
    streams: Streams,
    *,
    scaled: bool,
    visit: Visit | None = None,
) -> Tensor:
    """g [C, n, S]; `visit` sees the features at the first place's draws, where draws share them.

    S and F are split between the places. With `scaled` each block has ||y|| = 1, so that none
    outweighs the others.
    """
    each, shared = -(-draws // len(places)), -(-feature_draws // len(places))
    blocks: list[Tensor] = []
    for name, pi in places:
        first = visit if not blocks else None
        g = potentials(draw(model, pi, data, each, streams, name, shared, first), data.weight > 0)
        if scaled:
            length = g.sum(1).norm(dim=-1).clamp_min(torch.finfo(g.dtype).tiny)
            g.div_(length.view(-1, 1, 1))
        blocks.append(g)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)


def draw(
    model: Model,
    pi: Tensor,
    data: ClientData,
    draws: int,
    streams: Streams,
    purpose: str,
    feature_draws: int = 0,
    visit: Visit | None = None,
) -> Tensor:
    """log p_{theta_s}(D_j) at S draws, [C, n, S]. `feature_draws` 0 draws all of theta S times; so
    does S, whose points are gone through in parts."""
    if model.head is None or feature_draws == 0 or feature_draws > draws:
        block = max(1, BLOCK // model.size)
        parts = []
        for start in range(0, draws, block):
            noise = streams.normal(purpose, min(block, draws - start), model.size)
            parts.append(model.log_likelihood(gaussian.sample(pi, noise), data.x, data.y).mT)
        return torch.cat(parts, 2)
    theta = gaussian.sample(pi, streams.normal(purpose, feature_draws, model.size))
    each = -(-draws // feature_draws)
    posterior = pi[..., heads.span(model.head)]
    noise = streams.normal(purpose + "/head", feature_draws * each, posterior.shape[-1])
    tops = gaussian.sample(posterior, noise).split(each, 1)  # F times [C, S / F, H]
    (clients, points), found = data.weight.shape, []
    held, each_point = FEATURES, feature_draws * model.head.width
    if isinstance(data.x, Streamed):  # what is read at once is no more than what is computed
        held, each_point = STREAMED, max(each_point, data.x.shape[2:].numel())
    step = max(1, held // (clients * each_point))
    for start in range(0, points, step):
        some = slice(start, min(start + step, points))
        x, y, real = values(data.x[:, some]), data.y[:, some], data.weight[:, some] > 0
        features = zero_where_unusable(model.head.features(theta, x), real)
        log_p = [
            heads.log_likelihoods(model, theta[:, f], features[:, f], top, y)
            for f, top in enumerate(tops)
        ]
        found.append(torch.cat(log_p, -1)[..., :draws])
        if visit is not None:
            visit(some, theta, features)
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def potentials(log_p: Tensor, mask: Tensor) -> Tensor:
    """g [C, n, S] of Eq. 4 from log-likelihoods; rows of padding are zero."""
    centred = log_p - log_p.mean(-1, keepdim=True)
    return centred.mul_(mask.unsqueeze(-1)).mul_(log_p.shape[-1] ** -0.5)


def relative_error(g: Tensor, w: Tensor) -> Tensor:
    """||y - Phi w||^2 / ||y||^2 with y = Phi 1: [C]. On fresh draws, the coreset's quality."""
    y = g.sum(1)
    residual = y - torch.bmm(w.unsqueeze(1), g).squeeze(1)
    return residual.square().sum(-1) / y.square().sum(-1).clamp_min(torch.finfo(y.dtype).tiny)
