"""Synthetic federations with a known truth.

* `linear_gaussian`: y = x . b_i + noise, where b_i is shared plus a client's own part. Posteriors
  are known in closed form.
* `smooth_regression`: y = f_i(u) + noise, where x is a linear image of a point u of lower
  dimension: rates depend on the intrinsic dimension.

A client's data depend on (seed, client) only: more clients do not change the earlier ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError

_LINEAR, _SMOOTH = 0x11EA, 0x5300  # make the draws of one seed independent
WAVES = 4  # sines per function: more than one ridge, few enough to learn


class LinearGaussian(NamedTuple):
    """C clients of m points; x and y are float32, as models see them."""

    x: Tensor  # [C m, d]
    y: Tensor  # [C m, 1]
    groups: Tensor  # [C m] int64 client of each point
    coefficients: Tensor  # [C, d] float64 true coefficients
    noise: float  # std of y around x . b_i


class SmoothRegression(NamedTuple):
    """C clients of m points; `signal` is y without noise."""

    x: Tensor  # [C m, ambient]
    y: Tensor  # [C m, 1]
    groups: Tensor  # [C m] int64 client of each point
    signal: Tensor  # [C m, 1]
    noise: float  # std of y around signal


def linear_gaussian(
    clients: int = 10,
    per_client: int = 100,
    dimension: int = 10,
    noise: float = 0.5,
    heterogeneity: float = 0.3,
    seed: int = 0,
    *,
    correlation: float = 0.5,
) -> LinearGaussian:
    """b_i = b + heterogeneity N(0, I), b ~ N(0, I).

    Features have unit variance and pairwise `correlation`. At 0 the posterior is nearly diagonal,
    so a mean-field approximation would look exact.
    """
    _require(clients, per_client, dimension, noise, heterogeneity, seed)
    if not 0 <= correlation < 1:
        raise UserError(f"The correlation of synthetic features is in [0, 1), not {correlation}.")
    shared = _generator(_LINEAR, seed, 0).standard_normal(dimension)
    xs, ys, coefficients = [], [], []
    for client in range(clients):
        rng = _generator(_LINEAR, seed, client + 1)
        own = shared + heterogeneity * rng.standard_normal(dimension)
        common = rng.standard_normal((per_client, 1))
        x = rng.standard_normal((per_client, dimension))
        x = math.sqrt(1 - correlation) * x + math.sqrt(correlation) * common
        xs.append(x)
        ys.append(x @ own + noise * rng.standard_normal(per_client))
        coefficients.append(own)
    return LinearGaussian(
        x=_single(np.concatenate(xs)),
        y=_single(np.concatenate(ys)[:, None]),
        groups=torch.arange(clients).repeat_interleave(per_client),
        coefficients=torch.from_numpy(np.stack(coefficients)),
        noise=noise,
    )


def smooth_regression(
    clients: int = 10,
    per_client: int = 200,
    ambient: int = 20,
    intrinsic: int = 2,
    noise: float = 0.1,
    heterogeneity: float = 0.5,
    seed: int = 0,
) -> SmoothRegression:
    """f_i = shared + heterogeneity x own, each a sum of sines of random ridges with variance 1.

    u is uniform on [-1, 1]^intrinsic and x = u Q. Q has orthogonal rows and is scaled so that the
    coordinates of x have variance 1 on average.
    """
    _require(clients, per_client, ambient, noise, heterogeneity, seed)
    if not 1 <= intrinsic < ambient:
        raise UserError(
            f"The intrinsic dimension must be in 1..{ambient - 1}, below the ambient {ambient}; "
            f"it is {intrinsic}."
        )
    shared_rng = _generator(_SMOOTH, seed, 0)
    orthogonal = np.linalg.qr(shared_rng.standard_normal((ambient, intrinsic)))[0]
    embedding = orthogonal.T * math.sqrt(3 * ambient / intrinsic)  # var of U[-1, 1] is 1/3
    shared = _Waves.draw(intrinsic, shared_rng)
    xs, signals, ys = [], [], []
    for client in range(clients):
        rng = _generator(_SMOOTH, seed, client + 1)
        own = _Waves.draw(intrinsic, rng)
        latent = rng.uniform(-1, 1, (per_client, intrinsic))
        signal = shared.at(latent) + heterogeneity * own.at(latent)
        xs.append(latent @ embedding)
        signals.append(signal)
        ys.append(signal + noise * rng.standard_normal(per_client))
    return SmoothRegression(
        x=_single(np.concatenate(xs)),
        y=_single(np.concatenate(ys)[:, None]),
        groups=torch.arange(clients).repeat_interleave(per_client),
        signal=_single(np.concatenate(signals)[:, None]),
        noise=noise,
    )


class _Waves(NamedTuple):
    """u -> sum_m sqrt(2 / M) sin(pi direction_m . u + phase_m): infinitely smooth, variance 1."""

    directions: npt.NDArray[np.float64]
    phases: npt.NDArray[np.float64]

    @classmethod
    def draw(cls, dimension: int, rng: np.random.Generator) -> _Waves:
        directions = rng.standard_normal((WAVES, dimension)) / math.sqrt(dimension)
        return cls(directions, rng.uniform(0, 2 * math.pi, WAVES))

    def at(self, latent: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        angles = math.pi * latent @ self.directions.T + self.phases
        total: npt.NDArray[np.float64] = math.sqrt(2 / WAVES) * np.sin(angles).sum(-1)
        return total


def _generator(purpose: int, seed: int, stream: int) -> np.random.Generator:
    """Stream 0 is shared, client i has stream i + 1."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([purpose, seed, stream])))


def _single(values: npt.NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values).to(torch.float32)


def _require(
    clients: int, per_client: int, dimension: int, noise: float, heterogeneity: float, seed: int
) -> None:
    for name, count in (
        ("clients", clients),
        ("points per client", per_client),
        ("dimension", dimension),
    ):
        if count < 1:
            raise UserError(f"Synthetic data: {name} must be at least 1, not {count}.")
    if not (noise > 0 and math.isfinite(noise)):
        raise UserError(f"Synthetic data: noise must be a positive number, not {noise}.")
    if not (heterogeneity >= 0 and math.isfinite(heterogeneity)):
        raise UserError(f"Synthetic data: heterogeneity must be 0 or more, not {heterogeneity}.")
    if seed < 0:
        raise UserError(f"A seed is a whole number from 0 up, not {seed}.")
