"""Per-example gradients of the last linear layer, kept as the two factors that make them up.

For output f = W h(x) + b and residual r_j = d log p(D_j) / d f, the gradient of log p(D_j) with
respect to (W, b) is the outer product of r_j and [h_j; 1]. What selectors need follows from the
factors; the outer product is only made on request:

    <g_i, g_j> = <r_i, r_j> (<h_i, h_j> + 1),      ||g_j||^2 = ||r_j||^2 (||h_j||^2 + 1)

theta is the posterior mean, the point estimate of the published methods, or F draws of the
posterior. With draws, norms and inner products are averaged over them, as if the gradients at all
draws were concatenated and divided by sqrt F.

For a model without a linear head the gradient is that with respect to the outputs, r_j alone, and
the outputs are its features.

Non-finite values, and those above `LARGEST`, are set to 0, so a diverged posterior cannot stall a
selector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.bayes import gaussian
from corefed.models.likelihood import Gaussian
from corefed.selectors.frame import Look

LARGEST = 1e12
"""Outputs and features above this come from no network in training; below it, fourth powers fit a
float64."""


class LastLayer(NamedTuple):
    """Gradients of log p of n points with respect to the last layer, at F draws of theta."""

    residual: Tensor  # [C, F, n, out] d log p / d output; 0 on padding
    features: Tensor  # [C, F, n, h] what the last layer sees; h = 0 for a model without a head

    @property
    def width(self) -> int:
        """D, the length of an explicit gradient: F out (h + 1)."""
        draws, _, outputs = self.residual.shape[1:]
        return draws * outputs * (self.features.shape[-1] + 1)

    def take(self, at: Tensor) -> LastLayer:
        """Rows at [G, m] of all clients' points, concatenated: G groups in place of C clients."""
        return LastLayer(*(f.movedim(1, 2).flatten(0, 1)[at].movedim(2, 1) for f in self))

    def squared_norms(self) -> Tensor:
        """||g_j||^2: [C, n]."""
        size = self.features.square().sum(-1).add_(1.0)
        return self.residual.square().sum(-1).mul_(size).mean(1)

    def inner(self, other: LastLayer) -> Tensor:
        """<g_i, g_j> with the points of another: [C, n, m]."""
        product = torch.matmul(self.features, other.features.mT).add_(1.0)
        return product.mul_(torch.matmul(self.residual, other.residual.mT)).mean(1)

    def gram(self) -> Tensor:
        """<g_i, g_j>: [C, n, n]."""
        return self.inner(self)

    def explicit(self) -> Tensor:
        """The gradients themselves, [C, n, D]; within a draw and output, [h; 1]."""
        ones = torch.ones_like(self.residual[..., :1])
        layer = torch.cat([self.features, ones], -1).unsqueeze(-2)  # [C, F, n, 1, h + 1]
        outer = self.residual.unsqueeze(-1) * layer
        return outer.movedim(1, 2).flatten(2).mul_(self.residual.shape[1] ** -0.5)

    def sketch(self, dimension: int, streams: Streams, purpose: str = "sketch") -> Tensor:
        """[C, n, dimension] whose inner products are those of the gradients in expectation.

        Each column is <a, r><b, [h; 1]> with standard normal a, b: a projection on a random matrix
        of rank one, for which no outer product is needed. A squared norm comes out with a relative
        standard deviation of sqrt(8 / dimension), twice that of a full Gaussian projection.
        """
        draws, _, outputs = self.residual.shape[1:]
        h = self.features.shape[-1]
        a = streams.normal(f"{purpose}/residual", draws, outputs, dimension)
        b = streams.normal(f"{purpose}/features", draws, h + 1, dimension)
        projected = torch.matmul(self.features, b[:, :, :h]).add_(b[:, :, h:])
        # a is independent between draws, so products of different draws cancel in expectation.
        total = projected.mul_(torch.matmul(self.residual, a)).sum(1)
        return total.mul_((draws * dimension) ** -0.5)

    def rows(self, most: int, streams: Streams, purpose: str) -> Tensor:
        """The gradients where D is at most `most`, else a sketch of that dimension."""
        if self.width <= most:
            return self.explicit()
        return self.sketch(most, streams, purpose)


class Pass(NamedTuple):
    """One look at all points at F values of theta; rows of padding are 0."""

    theta: Tensor  # [C, F, P]
    output: Tensor  # [C, F, n, out]
    features: Tensor | None  # [C, F, n, h] below the head, where there is one


def forward(look: Look, draws: int = 0, purpose: str = "gradients") -> Pass:
    """Outputs and features at the posterior mean, or at `draws` draws of the posterior."""
    model, head = look.model, look.model.head
    mean = look.q[:, :1]  # [C, 1, P]
    with torch.no_grad():
        theta = mean
        if draws:
            theta = gaussian.sample(look.q, look.streams.normal(purpose, draws, model.size))
        if head is None:
            return Pass(
                theta, zero_where_unusable(model.forward(theta, look.data.x), look.mask), None
            )
        features = zero_where_unusable(head.features(theta, look.data.x), look.mask)
        return forward_on(look, theta, features)


def forward_on(look: Look, theta: Tensor, features: Tensor) -> Pass:
    """The same from known features below the head."""
    head = look.model.head
    assert head is not None
    with torch.no_grad():
        weight = theta[..., head.weight].unflatten(-1, (look.model.outputs, head.width))
        output = torch.matmul(features, weight.mT) + theta[..., head.bias].unsqueeze(-2)
        return Pass(theta, zero_where_unusable(output, look.mask), features)


def last_layer(look: Look, draws: int = 0, purpose: str = "gradients") -> LastLayer:
    """The gradients of log p of all points; see above for theta and for models without a head."""
    return layer_at(look, forward(look, draws, purpose))


def layer_at(look: Look, seen: Pass) -> LastLayer:
    """The gradients at a forward pass that was made already."""
    theta, output, features = seen
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        log_p = look.model.likelihood.log_prob(theta.detach(), leaf, look.data.y.unsqueeze(1))
        (residual,) = torch.autograd.grad(log_p.sum(), leaf)
    if features is None:
        features = output[..., :0]
    return LastLayer(zero_where_unusable(residual, look.mask), features)


def features(look: Look) -> Tensor:
    """What the last layer sees of each point at the posterior mean, [C, n, h]; the outputs of a
    model without a head."""
    _, output, below = forward(look)
    return (output if below is None else below).squeeze(1)


def losses(look: Look, draws: int = 0, purpose: str = "losses") -> Tensor:
    """-log p(D_j) above that of a perfect fit, averaged over draws: [C, n], at least 0."""
    theta, output, _ = forward(look, draws, purpose)
    y = look.data.y.unsqueeze(1)
    likelihood = look.model.likelihood
    with torch.no_grad():
        loss = -likelihood.log_prob(theta, output, y)
        if isinstance(likelihood, Gaussian):  # whose density may exceed 1
            loss = loss + likelihood.log_prob(theta, y.expand_as(output), y)
        return (
            zero_where_unusable(loss.unsqueeze(-1), look.mask).squeeze(-1).mean(1).clamp_min_(0.0)
        )


def zero_where_unusable(values: Tensor, mask: Tensor) -> Tensor:
    """[C, F, n, ...] with 0 for padding and for values that are not finite."""
    usable = (values.abs() < LARGEST) & mask[:, None, :, None]  # false for NaN
    return torch.where(usable, values, 0.0)
