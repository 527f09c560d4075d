"""Potentials: log-likelihoods of every point under draws from pi-hat, as in Eq. 4.

    g_j = S^{-1/2} [ log p_{theta_s}(D_j) - mean_s log p_{theta_s}(D_j) ]_{s = 1..S}
    Phi = [g_1 .. g_n],   y = Phi 1

kept a row a point, g [C, n, S] (`problem.py` says why).

A draw costs a forward pass of all n points, and S must exceed the coreset's size k (a fit with
S - 1 <= k has an exact zero that means nothing). So a network with a linear head shares F draws of
everything below the head between S / F draws each of the head: still draws from pi-hat, and the
cost falls from S to about F forward passes. Each draw is distributed as pi-hat, but those of one
group are correlated, and centring over all draws then removes part of the groups' variation: what
the layers below contribute to the Gram matrix comes out smaller, by a factor 1 - 1/F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.bayes import gaussian, heads
from corefed.models.network import Model

BLOCK = 1 << 23
"""Parameters a client draws at once where no layers are shared: 32 MiB."""


def log_likelihoods(
    model: Model,
    pi: Tensor,
    data: ClientData,
    draws: int,
    streams: Streams,
    purpose: str,
    feature_draws: int = 0,
) -> Tensor:
    """log p_{theta_s}(D_j): [C, n, S]. `feature_draws` 0 draws all of theta S times."""
    if model.head is None or feature_draws == 0 or feature_draws >= draws:
        block = max(1, BLOCK // model.size)
        parts = []
        for start in range(0, draws, block):
            noise = streams.normal(purpose, min(block, draws - start), model.size)
            theta = gaussian.sample(pi, noise)
            parts.append(model.log_likelihood(theta, data.x, data.y).mT)
        return torch.cat(parts, 2)
    theta = gaussian.sample(pi, streams.normal(purpose, feature_draws, model.size))
    features = model.head.features(theta, data.x)
    return with_heads(model, pi, data, theta, features, draws, streams, purpose)


def with_heads(
    model: Model,
    pi: Tensor,
    data: ClientData,
    theta: Tensor,
    features: Tensor,
    draws: int,
    streams: Streams,
    purpose: str,
) -> Tensor:
    """[C, n, S] where F draws theta [C, F, P] have these features [C, F, n, h] below the head, and
    share them between S / F draws each of the head."""
    head, (clients, n), groups = model.head, data.weight.shape, theta.shape[1]
    assert head is not None
    each = -(-draws // groups)
    posterior = pi[..., heads.span(head)]
    noise = streams.normal(purpose + "/head", groups * each, posterior.shape[-1])
    drawn = gaussian.sample(posterior, noise)  # [C, S, H]
    result = torch.empty(clients, n, groups * each, device=pi.device, dtype=pi.dtype)
    for f in range(groups):
        mine = slice(f * each, (f + 1) * each)
        result[..., mine] = heads.log_likelihoods(
            model, theta[:, f], features[:, f], drawn[:, mine], data.y
        )
    return result[..., :draws]


def potentials(log_p: Tensor, mask: Tensor) -> Tensor:
    """g [C, n, S] of Eq. 4 from log-likelihoods; rows of padding are zero."""
    centred = log_p - log_p.mean(-1, keepdim=True)
    return centred.mul_(mask.unsqueeze(-1)).mul_(log_p.shape[-1] ** -0.5)


def relative_error(g: Tensor, w: Tensor) -> Tensor:
    """||y - Phi w||^2 / ||y||^2 with y = Phi 1: [C]. On fresh draws, the coreset's quality."""
    y = g.sum(1)
    residual = y - torch.bmm(w.unsqueeze(1), g).squeeze(1)
    return residual.square().sum(-1) / y.square().sum(-1).clamp_min(torch.finfo(y.dtype).tiny)
