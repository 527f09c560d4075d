"""The KL term of Eqs. 7 and 8 as rows of A-IHT's quadratic.

The paper adds KL(q_w || q) to the coreset objective, but its gradient in w cannot be evaluated as
printed. Two expansions make it a least-squares term. With v = (mu, sigma) and v_w the minimiser of
the weighted objective (Eq. 5), the implicit-function theorem gives

    d v_w / d w_j = -H^{-1} grad_v l_j =: J e_j,
    H = sum_j w_j Hess l_j + zeta Hess KL(. || z),   l_j(v) = E_g[ -log p_{mu + sigma g}(D_j) ]

and for nearby Gaussians KL(q_w || q) = 1/2 || F^{1/2} (v_w - v_q) ||^2, F = diag(1/sigma^2,
2/sigma^2). Linearised at w_t, the term is || b - A w ||^2 with

    A = 2^{-1/2} F^{1/2} J,    b = A w_t - 2^{-1/2} F^{1/2} (v_w(w_t) - v_q)

so its rows join those of (Phi, y) and A-IHT's closed-form steps stay exact. A has 2P rows; a random
projection Omega with N(0, 1/s) entries keeps s of them in expectation: row r needs one solve
u = H^{-1} F^{1/2} omega_r, by conjugate gradients on Gauss-Newton products, and one
Jacobian-vector product of all n losses. A learnt noise of the likelihood enters H only through its
KL part. `diagonal=True` replaces H by an estimate of its diagonal: cheap, but much less accurate.

A Jacobian-vector product is taken in reverse mode twice: J^T c is linear in c, and its derivative
in c along u is J u. Forward mode has levels that all threads of a process share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.models.attention import PlainAttention
from corefed.models.network import Model

BLOCK = 1 << 27
"""Most activations of all clients and draws in memory at once: 512 MiB."""

Linear = Callable[[Tensor], Tensor]


def kl_rows(
    model: Model,
    q_w: Tensor,
    q: Tensor,
    z: Tensor,
    data: ClientData,
    w: Tensor,
    zeta: float,
    noise: Tensor,
    sketch: Tensor,
    *,
    diagonal: bool = False,
    iterations: int = 10,
) -> tuple[Tensor, Tensor]:
    """(A [C, s, n], b [C, s]) for sketch [C, s, 2, P] of N(0, 1/s) and noise g [C, K, P].

    q_w, q and z are posteriors in (mu, rho), w [C, n] the weights q_w was trained with.
    """
    v_w, v_q, v_z = _mu_sigma(q_w), _mu_sigma(q), _mu_sigma(z)
    root_fisher = torch.stack([v_q[:, 1].reciprocal(), 2**0.5 / v_q[:, 1]], 1)
    prior = _kl_curvature(v_w, v_z) * zeta
    blocks = _blocks(model, data, w, noise.shape[:2].numel())
    with torch.enable_grad(), PlainAttention():
        v = v_w.detach().requires_grad_()
        theta = v[:, 0].unsqueeze(1) + v[:, 1].unsqueeze(1) * noise
        curvatures = _each(blocks, lambda block: _likelihood_curvature(model, v, theta, block))

        def curvature(us: Tensor) -> Tensor:  # H u of every row u [s, C, 2, P]
            parts = [torch.stack([apply(u) for u in us]) for apply in curvatures()]
            return prior * us + sum(parts)

        omega = sketch.movedim(1, 0)  # [s, C, 2, P]
        if diagonal:
            us = root_fisher * omega / _diagonal(curvature, prior, omega)
        else:
            us = _conjugate_gradients(curvature, prior, root_fisher * omega, iterations)
        changes = []
        for block in blocks:
            losses = -model.log_likelihood(theta, block.x, block.y).mean(1)  # [C, b]
            along = _push(losses, v)
            changes.append(torch.stack([along(u) for u in us]))
    rows = -(2**-0.5) * torch.cat(changes, -1) * (data.weight > 0)  # [s, C, n]
    gap = (omega * root_fisher * (v_w - v_q)).sum((-2, -1))
    offsets = (rows * w).sum(-1) - 2**-0.5 * gap
    return rows.movedim(0, 1), offsets.movedim(0, 1)


def _likelihood_curvature(model: Model, v: Tensor, theta: Tensor, block: ClientData) -> Linear:
    """u -> the weighted likelihood's part of H u, by Gauss and Newton."""
    output = model.forward(theta, block.x)
    push = _push(output, v)
    free = output.detach().requires_grad_()
    log_p = model.likelihood.log_prob(theta.detach(), free, block.y.unsqueeze(1))
    (slope,) = torch.autograd.grad(-log_p.sum(), free, create_graph=True)
    per_point = (block.weight / theta.shape[1]).unsqueeze(1).unsqueeze(-1)

    def apply(u: Tensor) -> Tensor:
        (bent,) = torch.autograd.grad(slope, free, push(u), retain_graph=True)  # symmetric
        (back,) = torch.autograd.grad(output, v, bent * per_point, retain_graph=True)
        return back

    return apply


def _push(output: Tensor, v: Tensor) -> Linear:
    """u -> the change of the output along u."""
    c = torch.zeros_like(output, requires_grad=True)
    (pulled,) = torch.autograd.grad(output, v, c, create_graph=True)
    return lambda u: torch.autograd.grad(pulled, c, u, retain_graph=True)[0]


def _each(
    blocks: list[ClientData], linear: Callable[[ClientData], Linear]
) -> Callable[[], Iterator[Linear]]:
    """The linear maps of all blocks: that of a single block is kept, others are made each time."""
    if len(blocks) > 1:
        return lambda: map(linear, blocks)
    kept = [*map(linear, blocks)]
    return lambda: iter(kept)


def kl_term(
    model: Model,
    q_w: Tensor,
    q: Tensor,
    z: Tensor,
    data: ClientData,
    w: Tensor,
    streams: Streams,
    *,
    zeta: float,
    weight: float,
    rows: int,
    draws: int,
    diagonal: bool,
) -> tuple[Tensor, Tensor]:
    """`kl_rows` for a sketch of `rows` rows and at least four draws, scaled to weight * KL."""
    sketch = streams.normal("kl-sketch", rows, 2, model.size) * rows**-0.5
    noise = streams.normal("kl-noise", max(4, draws), model.size)
    a, b = kl_rows(model, q_w, q, z, data, w, zeta, noise, sketch, diagonal=diagonal)
    root = weight**0.5
    return root * a, root * b


def _blocks(model: Model, data: ClientData, w: Tensor, networks: int) -> list[ClientData]:
    """Points, with the weights w, to push through the network together: all of them, unless
    their activations are many."""
    n = w.shape[1]
    size = max(1, BLOCK // (model.activation * networks)) if model.activation else n
    fields = (field.split(size, 1) for field in (data.x, data.y, w))
    return [ClientData(*block) for block in zip(*fields, strict=True)]


def _conjugate_gradients(
    curvature: Callable[[Tensor], Tensor], prior: Tensor, target: Tensor, iterations: int
) -> Tensor:
    """H^{-1} target for every row of the sketch and client, preconditioned by the KL part of H."""
    u = torch.zeros_like(target)
    residual = target
    direction = residual / prior
    energy = _dot(residual, direction)
    for _ in range(iterations):
        image = curvature(direction)
        alpha = _ratio(energy, _dot(direction, image))
        u = u + alpha * direction
        residual = residual - alpha * image
        scaled = residual / prior
        following = _dot(residual, scaled)
        direction = scaled + _ratio(following, energy) * direction
        energy = following
    return u


def _diagonal(curvature: Callable[[Tensor], Tensor], prior: Tensor, omega: Tensor) -> Tensor:
    """diag(H) by Hutchinson's estimator, with the signs of the sketch as probes; not below the
    KL part."""
    signs = torch.sign(omega)
    return torch.maximum((signs * curvature(signs)).mean(0), prior)


def _mu_sigma(v: Tensor) -> Tensor:
    return torch.stack([v[:, 0], gaussian.sigma(v[:, 1])], 1)


def _kl_curvature(v: Tensor, z: Tensor) -> Tensor:
    """The diagonal Hessian of KL(q || z) in (mu, sigma)."""
    precision = z[:, 1].pow(-2)
    return torch.stack([precision, precision + v[:, 1].pow(-2)], 1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b.clamp_min(torch.finfo(b.dtype).tiny), 0.0)
