"""A ReLU network layer by layer, in numpy and float64, from and to `models.mlp`'s flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class Network(NamedTuple):
    """A ReLU network by layers: weights [out, in] and biases [out]."""

    weights: list[Array]
    biases: list[Array]


def split(theta: Array, widths: Sequence[int]) -> Network:
    """The layers of a flat vector; what follows them is left."""
    weights, biases, at = [], [], 0
    for fan_in, fan_out in pairwise(widths):
        weights.append(theta[at : at + fan_in * fan_out].reshape(fan_out, fan_in))
        at += fan_in * fan_out
        biases.append(theta[at : at + fan_out])
        at += fan_out
    return Network(weights, biases)


def join(network: Network, widths: Sequence[int]) -> Array:
    """A network as a flat vector, with zeros up to the given widths."""
    parts = []
    for w, b, (fan_in, fan_out) in zip(*network, pairwise(widths), strict=True):
        padded = np.zeros((fan_out, fan_in))
        padded[: w.shape[0], : w.shape[1]] = w
        parts += [padded.ravel(), np.pad(b, (0, fan_out - len(b)))]
    return np.concatenate(parts)


def take(world: Network, assigned: Sequence[Index]) -> Network:
    """The part of the global network that a client has."""
    ends = [np.arange(world.weights[0].shape[1]), *assigned, np.arange(len(world.biases[-1]))]
    weights = [
        w[np.ix_(to, source)] for w, (source, to) in zip(world.weights, pairwise(ends), strict=True)
    ]
    return Network(weights, [b[to] for b, to in zip(world.biases, ends[1:], strict=True)])
