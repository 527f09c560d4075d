"""Predictions and their uncertainty, split into an aleatoric and an epistemic part.

With K draws theta_k of the weights (Depeweg et al. 2018; a point estimate has K = 1):

    classification   p = (1/K) sum_k p_k         total      H[p]
                                                 aleatoric  (1/K) sum_k H[p_k]
    regression       m = (1/K) sum_k m_k         total      the variance of the mixture
                                                 aleatoric  (1/K) sum_k noise_k^2

and epistemic = total - aleatoric: the mutual information of label and weights, or the variance of
the means. More data of the same kind lower it; they do not lower the aleatoric part. Entropies are
in nats, variances in the square of the target's unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import Method, Tree


class Prediction(NamedTuple):
    """Of n points of C clients, in float64; `client` takes one of them, without the first axis."""

    mean: Tensor  # [C, n, classes] probabilities, or [C, n, d] means of the targets
    total: Tensor  # [C, n] entropy, or [C, n, d] variance
    aleatoric: Tensor  # as total

    @property
    def epistemic(self) -> Tensor:
        return (self.total - self.aleatoric).clamp_min(0)  # below 0 by rounding alone

    def client(self, row: int) -> Prediction:
        return Prediction(*(field[row] for field in self))

    def in_unit(self, mean: Tensor, std: Tensor) -> Prediction:
        """A regression's prediction for standardised targets, in the targets' own unit."""
        return Prediction(
            self.mean * std + mean, self.total * std.square(), self.aleatoric * std.square()
        )


def draws_for(method: Method, streams: Streams, draws: int) -> Tensor:
    """[C, K, P] standard normals for the predictions of these clients."""
    size = method.noise[-1]
    return streams.normal("predict", draws if size else 1, size)


def predict(method: Method, model: Tree, x: Tensor, noise: Tensor, classes: int) -> Prediction:
    """The prediction of a model for x [C, n, ...], draw by draw; `classes` is 0 for regression."""
    each = (method.predict(model, x, one).double() for one in noise.split(1, dim=1))
    return combine(each, noise.shape[1], classes)


def combine(each: Iterable[Tensor], draws: int, classes: int) -> Prediction:
    """From the prediction of each draw: probabilities, or means and variances side by side."""
    return _of_classes(each, draws) if classes else _of_targets(each, draws)


def entropy(p: Tensor) -> Tensor:
    """In nats; 0 log 0 is 0."""
    return -torch.xlogy(p, p).sum(-1)


def _of_classes(each: Iterable[Tensor], draws: int) -> Prediction:
    mean = aleatoric = torch.zeros(())
    for p in each:
        mean, aleatoric = mean + p / draws, aleatoric + entropy(p) / draws
    return Prediction(mean, entropy(mean), aleatoric)


def _of_targets(each: Iterable[Tensor], draws: int) -> Prediction:
    """By Welford's update, which loses no digits if the means are far from 0."""
    mean = spread = aleatoric = torch.zeros(())
    for k, p in enumerate(each, 1):
        m, noise = p.chunk(2, -1)
        off = m - mean
        mean = mean + off / k
        spread = spread + off * (m - mean) / draws
        aleatoric = aleatoric + noise / draws
    return Prediction(mean, aleatoric + spread, aleatoric)
