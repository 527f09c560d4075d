"""Draws of a network that share its lower layers: many draws of the head for one forward pass.

A coreset of k points needs S >= 2k draws. Through a 784-100-10 network, S full draws cost 78 times
as much as S draws of the head. So there are B draws of everything below the last linear layer, each
with S / B draws of that layer (`bayes/heads.py`), as in the federated method. Each draw has the
posterior's distribution. Draws that share a body are correlated, which makes the error on the
fitted draws a little too small; fresh draws have their own bodies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.bayes import gaussian, heads
from corefed.models.network import Model

BODIES = 50
"""Draws of the lower layers: their part of the Gram matrix is smaller by a factor 1 - 1/50."""


class SharedBodies:
    """A mean-field posterior v [2, P] of a model with a head, as `build` takes it: the posterior
    (`sample`) and the log-likelihood (a call) are one object, because draws name their bodies."""

    def __init__(self, model: Model, v: Tensor) -> None:
        assert model.head is not None
        self.model, self.head = model, model.head
        self.span = heads.span(self.head)
        self.mean, self.scale = v[0], gaussian.sigma(v[1])
        self.width = 2 * model.outputs  # numbers per draw and point: output, and log-softmax
        self.bodies = v[:0]  # [bodies drawn so far, P]

    def sample(self, shape: torch.Size) -> dict[str, Tensor]:
        """`body` [S], the number of the body of each draw, and `head` [S, H]."""
        draws, bodies = shape[0], min(shape[0], BODIES)
        body = torch.arange(draws) * bodies // draws + len(self.bodies)
        self.bodies = torch.cat([self.bodies, self._normal(bodies, slice(None))])
        head = self._normal(draws, self.span)
        return {"body": body.to(head), "head": head}  # exact in float32 up to 2^24

    def __call__(self, theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.stacked({name: t.unsqueeze(0) for name, t in theta.items()}, x, y)[0]

    def stacked(self, thetas: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """[S, b] log-likelihoods; neighbours with one body share its forward pass."""
        numbers, counts = thetas["body"].long().unique_consecutive(return_counts=True)
        rows = []
        parts = thetas["head"].split(counts.tolist())
        for number, many in zip(numbers.tolist(), parts, strict=True):
            body = self.bodies[number]
            h = self.head.features(body.view(1, 1, -1), x.unsqueeze(0))[0, 0]  # [b, width]
            rows.append(heads.log_likelihoods(self.model, body, h, many, y))
        return torch.cat(rows, 1).T

    def _normal(self, draws: int, part: slice) -> Tensor:
        mean, scale = self.mean[part], self.scale[part]
        noise = torch.randn(draws, len(mean), dtype=mean.dtype)  # the same draws on every device
        return mean + scale * noise.to(mean.device)
