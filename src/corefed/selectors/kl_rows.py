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
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.models.network import Model

BLOCK = 1 << 27
"""Most activations of all clients, draws and sketch rows in memory at once: 512 MiB."""


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
    blocks = _blocks(model, data, w, sketch.shape[1] * noise.shape[:2].numel())

    def theta(v: Tensor) -> Tensor:
        return v[:, 0].unsqueeze(1) + v[:, 1].unsqueeze(1) * noise

    prior = _kl_curvature(v_w, v_z) * zeta
    fixed = theta(v_w)

    def likelihood_curvature(u: Tensor, block: ClientData) -> Tensor:
        def network(v: Tensor) -> Tensor:
            return model.forward(theta(v), block.x)

        def negative_log_p(output: Tensor) -> Tensor:
            return -model.likelihood.log_prob(fixed, output, block.y.unsqueeze(1)).sum()

        output, pull = vjp(network, v_w)[:2]
        change = jvp(network, (v_w,), (u,))[1]
        slope = jvp(grad(negative_log_p), (output,), (change,))[1]
        per_point = (block.weight / noise.shape[1]).unsqueeze(1).unsqueeze(-1)
        back: Tensor = pull(slope * per_point)[0]
        return back

    def curvature(u: Tensor) -> Tensor:  # H u
        total = prior * u
        for block in blocks:
            total = total + likelihood_curvature(u, block)
        return total

    def change_of_losses(u: Tensor, block: ClientData) -> Tensor:  # of each point along u: [C, b]
        def losses(v: Tensor) -> Tensor:
            return -model.log_likelihood(theta(v), block.x, block.y).mean(1)

        change: Tensor = jvp(losses, (v_w,), (u,))[1]
        return change

    # All s right-hand sides at once: they share every forward pass of the network.
    omega = sketch.movedim(1, 0)  # [s, C, 2, P]
    if diagonal:
        u = root_fisher * omega / _diagonal(vmap(curvature), prior, omega)
    else:
        u = _conjugate_gradients(vmap(curvature), prior, root_fisher * omega, iterations)
    parts = [vmap(lambda one, block=block: change_of_losses(one, block))(u) for block in blocks]
    rows = -(2**-0.5) * torch.cat(parts, -1) * (data.weight > 0)  # [s, C, n]
    gap = (omega * root_fisher * (v_w - v_q)).sum((-2, -1))
    offsets = (rows * w).sum(-1) - 2**-0.5 * gap
    return rows.movedim(0, 1), offsets.movedim(0, 1)


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
