"""IVON (Shen et al., ICML 2024): a mean-field Gaussian by natural gradients, no rho to train.

Per point, with k = zeta / n and a prior N(m_0, s_0^2) of each weight, the objective is

    L(m, s) = E_q[ l(theta) ] + k KL( N(m, s^2) || N(m_0, s_0^2) ),

    dL/dm       = E_q[g] + k (m - m_0) / s_0^2                       g = grad l(theta)
    dL/d(s^2)   = 1/2 ( E_q[h] + k / s_0^2 - k / s^2 )               h = diag Hessian of l(theta)

where E_q[h] = E_q[g (theta - m)] / s^2 (Stein), so the gradient at the sampled weight is enough. In
terms of the precision S = 1 / s^2, a natural-gradient step of length r is linear,

    S <- S + r G,       G = E_q[h] / k + 1 / s_0^2 - S,

and its fixed point is the mean-field posterior's precision. An estimate of h may be negative, and S
with it. One more term of the Riemannian exponential map (Lin et al. 2020) keeps S above 0:

    S <- S + r G + (r G)^2 / (2 S) = (S / 2) ( (1 + r G / S)^2 + 1 ).

The mean takes a part of a Newton step with the same curvature, k S:

    m <- m - rate ( momentum of g + k (m - m_0) / s_0^2 ) / (k S),

which is stable for rates below 1 however narrow the prior is. In the paper's letters lambda is
1 / k, delta is k / s_0^2 and h is k S - delta: with a prior that stays, this is its Algorithm 1,
with momentum and bias correction (a test compares the two). Here S is the state, so that the prior
may move (that of PFedBayes is z) and be another one for each weight. A message stays (mu, rho), rho
read off S.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from corefed.base.types import Tree
from corefed.bayes import gaussian, optim

BETA_1 = 0.9
BETA_2 = 0.999
"""Of the curvature. The paper's 0.99999 is for a million steps; a run here has thousands."""


def init(mu: Tensor) -> Tree:
    """The state beside (mu, rho): the momentum of the gradient, and how many steps it has seen."""
    step = torch.zeros(mu.shape[0], dtype=torch.float64, device=mu.device)
    return {"m": torch.zeros_like(mu), "step": step}


def update(
    mu: Tensor,
    rho: Tensor,
    slope: tuple[Tensor, Tensor],
    prior: tuple[Tensor | float, Tensor, Tensor],
    rate: float | Tensor,
    state: Tree,
    mask: Tensor | None = None,
) -> None:
    """One step of C clients, in place.

    `slope` has the gradients of E_q[l] in (mu, sigma), each [C, P] (`elbo.gradient`). `prior` is
    m_0, 1 / s_0^2 and k [C, 1]. Where `mask` [P] is false, a weight is a point estimate: its S
    stays.
    """
    by_mu, by_sigma = slope
    mean, precision, k = prior
    sigma = gaussian.sigma(rho)
    S = sigma.square().reciprocal()
    G = by_sigma / (sigma * k) + precision - S
    if mask is not None:
        G = G * mask
    G *= 1 - BETA_2
    S_new = S + G + G.square() / (2 * S)
    state["step"].add_(1)
    momentum = state["m"].lerp_(by_mu, 1 - BETA_1)
    seen = -torch.expm1(state["step"].to(mu.dtype) * math.log(BETA_1))  # 1 - BETA_1^step
    whole = momentum / optim.column(seen, mu) + k * precision * (mu - mean)
    optim.descend(mu, whole / (k * S_new), rate)
    new = gaussian.rho_of(S_new.rsqrt().clamp_min(gaussian.SIGMA_FLOOR))
    rho.copy_(new if mask is None else torch.where(mask, new, rho))
