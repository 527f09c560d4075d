"""log p_theta(D_j): the likelihood of a label or a target, given a network's output.

`Categorical` for classification; `Gaussian` for regression y = f_theta(x) + noise, the model of the
paper's theory, with a known noise or one that is learnt as the last entry of theta.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Categorical(NamedTuple):
    classes: int
    extra: int = 0  # entries of theta that belong to the likelihood, at its end
    weights: tuple[float, ...] = ()  # of a point, by its class; empty: all are 1

    @property
    def outputs(self) -> int:
        return self.classes

    def log_prob(self, theta: Tensor, output: Tensor, y: Tensor) -> Tensor:
        """output [..., n, classes], y [..., n] -> [..., n]. Leading axes of y broadcast.

        With weights it is w_y log p: a point of class y counts as w_y points.
        """
        y = y.expand(output.shape[:-1]).unsqueeze(-1)
        # log_softmax and logsumexp took five times as long on a CPU for rows of 10 classes.
        top = output.detach().amax(-1, keepdim=True)
        log_total = _total((output - top).exp_()).log() + top
        log_p = (output.gather(-1, y) - log_total).squeeze(-1)
        if not self.weights:
            return log_p
        return log_p * _on(output.device, output.dtype, self.weights)[y.squeeze(-1)]

    def predictive(self, theta: Tensor, output: Tensor) -> Tensor:
        """Class probabilities averaged over draws: [..., K, n, classes] -> [..., n, classes]."""
        return torch.softmax(output, -1).mean(-3)


def _total(parts: Tensor) -> Tensor:
    """The sum over classes. Of two it is the same as one addition, ten times as fast on a CPU."""
    if parts.shape[-1] == 2 and not parts.requires_grad:
        return parts[..., :1] + parts[..., 1:]
    return parts.sum(-1, keepdim=True)


@lru_cache(16)
def _on(device: torch.device, dtype: torch.dtype, weights: tuple[float, ...]) -> Tensor:
    """Copied to a device once: a recorded step must not copy."""
    return torch.tensor(weights, dtype=dtype, device=device)


class Gaussian(NamedTuple):
    targets: int
    noise: float = 1.0  # standard deviation; the initial value if it is learnt
    learn_noise: bool = False

    @property
    def outputs(self) -> int:
        return self.targets

    @property
    def extra(self) -> int:
        return int(self.learn_noise)

    def log_noise(self, theta: Tensor) -> Tensor:
        """log of the noise's standard deviation, shaped to broadcast against [..., n, targets]."""
        if self.learn_noise:
            return theta[..., -1][..., None, None]
        return torch.full((), math.log(self.noise), device=theta.device, dtype=theta.dtype)

    def log_prob(self, theta: Tensor, output: Tensor, y: Tensor) -> Tensor:
        """output and y [..., n, targets] -> [..., n]."""
        log_noise = self.log_noise(theta)
        z = (y - output) * torch.exp(-log_noise)
        return (-0.5 * z.square() - log_noise - 0.5 * math.log(2 * math.pi)).sum(-1)

    def predictive(self, theta: Tensor, output: Tensor) -> Tensor:
        """Mean and variance of the mixture over draws, side by side: [..., n, 2 targets]."""
        noise = torch.exp(2 * self.log_noise(theta)).expand_as(output).mean(-3)
        spread = output.var(-3, unbiased=False)
        return torch.cat([output.mean(-3), noise + spread], -1)


Likelihood = Categorical | Gaussian
