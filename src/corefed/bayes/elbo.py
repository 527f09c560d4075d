"""The weighted client objective (Eqs. 1 and 5) and its stochastic estimator (Eq. 9).

Per datum, with n the client's number of points, whatever the size of its subset:

    Omega(v) = (1/n) [ sum_j w_j E_q[ -log p_theta(D_j) ] + zeta KL(q || z) ]

Eq. 9 as printed lost its w_j; here a minibatch carries it in `Batch.scale`, which also holds the
factor that makes the sum over the batch unbiased for the sum over the support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.types import Batch
from corefed.bayes import gaussian
from corefed.models.network import Model


def weighted_nll(model: Model, theta: Tensor, batch: Batch) -> Tensor:
    """(1/K) sum_k sum_j scale_j (-log p_{theta_k}(D_j)): [C]."""
    log_p = model.log_likelihood(theta, batch.x, batch.y)  # [C, K, b]
    return -(log_p * batch.scale.unsqueeze(1)).sum(-1).mean(-1)


def objective(
    model: Model, q: Tensor, z: Tensor, zeta_over_n: Tensor, batch: Batch, noise: Tensor
) -> Tensor:
    """Eq. 9, differentiable in q and z: [C]. The hot path uses `gradient` and closed forms."""
    theta = gaussian.sample(q, noise)
    return weighted_nll(model, theta, batch) + zeta_over_n * gaussian.kl(q, z)


def gradient(
    model: Model, mu: Tensor, sigma: Tensor, batch: Batch, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The likelihood part of Eq. 9 and its gradients in (mu, sigma): [C], [C, P], [C, P].

    theta = mu + sigma g, so d/dmu = d/dtheta and d/dsigma = g d/dtheta: one backward pass through
    the network, none through the sampling.
    """
    theta = torch.addcmul(mu.unsqueeze(1), sigma.unsqueeze(1), noise).requires_grad_()
    with torch.enable_grad():
        loss = weighted_nll(model, theta, batch)
        (by_theta,) = torch.autograd.grad(loss.sum(), theta)  # clients do not interact
    return loss.detach(), *_over_draws(by_theta, noise)


def _over_draws(by_theta: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients in (mu, sigma) from those in theta [C, K, P]."""
    by_sigma = by_theta * noise
    if noise.shape[1] == 1:
        return by_theta.squeeze(1), by_sigma.squeeze(1)
    return by_theta.sum(1), by_sigma.sum(1)


def scored_gradient(
    model: Model, mu: Tensor, sigma: Tensor, batch: Batch, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gradient`, and of each point the squared norm of its last-layer gradient, [C, b].

    With residual r_j = d log p(D_j) / d output and features h_j that is ||r_j||^2 (||h_j||^2 + 1),
    the mean over the K draws. Both are there in the pass that is made anyway: no other is needed.
    A model without a linear head has ||r_j||^2. 0 on padding.
    """
    theta = torch.addcmul(mu.unsqueeze(1), sigma.unsqueeze(1), noise).requires_grad_()
    both = (model.head and model.head.both) or model.forward
    with torch.enable_grad():
        whole = both(theta, batch.x)
        features, output = whole.split([whole.shape[-1] - model.outputs, model.outputs], -1)
        log_p = model.likelihood.log_prob(theta, output, batch.y.unsqueeze(1))
        loss = -(log_p * batch.scale.unsqueeze(1)).sum(-1).mean(-1)
        by_theta, by_output = torch.autograd.grad(loss.sum(), (theta, output))
    size = features.detach().square().sum(-1) + 1.0  # [C, K, b]; 1 without features
    share = batch.scale / noise.shape[1]  # what a point's gradient was multiplied by
    real = share > 0
    squares = (by_output.square().sum(-1) * size).mean(1)
    squares = torch.where(real, squares / torch.where(real, share, 1.0).square(), 0.0)
    return loss.detach(), *_over_draws(by_theta, noise), squares


def gradients(
    model: Model, mu: Tensor, sigma: Tensor, batch: Batch, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradient` of A posteriors of each client in one pass: [C, A], [C, A, P], [C, A, P].

    mu and sigma are [C, A, P]; noise [C, A K, P] has the K draws of the first posterior first.
    """
    of = (mu.shape[1], noise.shape[1] // mu.shape[1])  # A, K
    g = noise.unflatten(1, of)
    theta = torch.addcmul(mu.unsqueeze(2), sigma.unsqueeze(2), g).requires_grad_()
    with torch.enable_grad():
        log_p = model.log_likelihood(theta.flatten(1, 2), batch.x, batch.y)  # [C, A K, b]
        loss = -(log_p * batch.scale.unsqueeze(1)).sum(-1).unflatten(1, of).mean(-1)
        (by_theta,) = torch.autograd.grad(loss.sum(), theta)
    return loss.detach(), by_theta.sum(2), (by_theta * g).sum(2)
