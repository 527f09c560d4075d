"""`posterior="laplace"`: a Gaussian posterior from a pilot, where the user has none.

    U(theta) = -(n/m) sum_{j in part} log p_theta(D_j) - log prior(theta)

Newton's method on a random part of m points finds a mode and the curvature H there. The part's mode
is off by about sqrt(n/m) standard deviations of the posterior of all data, so a few steps
theta - H^-1 gradient follow whose gradient is that of all data: the error of each is that of the
last times the relative error of H, a few percent. The draws are of N(mode, H^-1).

Everything is checked: finite log-likelihoods, a curvature that is positive definite, and a last
gradient that is small in standard deviations, sqrt(g^T H^-1 g).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jacrev

from corefed.base import rng
from corefed.base.errors import UserError
from corefed.bayes.regression import Normal
from corefed.coreset import sources
from corefed.coreset.draws import Theta
from corefed.coreset.likelihoods import LogLikelihood
from corefed.coreset.sources import Batch, PointSource

PART = 20_000
"""Points of the pilot."""
WIDEST = 1000
"""Parameters up to which a full covariance is made."""
STEPS, ALL_STEPS = 100, 8
"""Bounds: Newton steps on the part, and steps with the gradient of all data."""
NEAR, CLOSE = 1e-3, 0.05
"""Distances to the mode, in standard deviations, at which the pilot and the last step end."""
CHUNK = 1 << 21
"""Numbers per chunk of a Hessian: points times parameters."""

LogPrior = Callable[[Any], Tensor]
Derivatives = Callable[[Tensor, Any, Any], tuple[Tensor, Tensor, Tensor]]
"""(theta [P], x, y) -> sum of log-likelihoods, its gradient [P] and Hessian [P, P]."""


class Shape(NamedTuple):
    """How a flat theta [P] becomes what the user's functions take."""

    names: tuple[str, ...]  # none: a tensor
    shapes: tuple[torch.Size, ...]

    def tree(self, flat: Tensor) -> Theta:
        """The tensors of theta; a leading axis of `flat` [.., P] leads in each."""
        sizes = [s.numel() for s in self.shapes]
        parts = flat.split(sizes, dim=-1)
        shaped = [
            part.reshape((*flat.shape[:-1], *shape))
            for part, shape in zip(parts, self.shapes, strict=True)
        ]
        return dict(zip(self.names, shaped, strict=True)) if self.names else shaped[0]


@dataclass(frozen=True)
class Pilot:
    """A posterior as draws can be made of it (`sample`), as what the user's function takes."""

    normal: Normal  # float64, flat
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    distance: float  # of the last step, in standard deviations

    def sample(self, count: torch.Size) -> Theta:
        noise = torch.randn(*count, len(self.normal.mean), dtype=torch.float64)
        factor = torch.linalg.cholesky(self.normal.covariance)
        flat = self.normal.mean + noise @ factor.T
        return self.shape.tree(flat.to(self.device, self.dtype))


def start_at(theta0: object) -> tuple[Tensor, Shape, torch.dtype, torch.device]:
    """A flat float64 start, and how to go back; `theta0` may be a dimension, which starts at 0."""
    if isinstance(theta0, bool) or theta0 is None:
        raise UserError(
            "posterior='laplace' needs theta0: where to start, as the log-likelihood takes it, or "
            "the number of parameters."
        )
    if isinstance(theta0, int):
        if theta0 < 1:
            raise UserError(f"theta0 is {theta0}; a number of parameters is at least 1.")
        theta0 = torch.zeros(theta0)
    named = dict(theta0) if isinstance(theta0, Mapping) else {"": theta0}
    tensors = {
        str(name): torch.tensor(value)
        if isinstance(value, np.ndarray)
        else torch.as_tensor(value).detach()
        for name, value in named.items()
    }
    if not tensors or not all(t.is_floating_point() for t in tensors.values()):
        raise UserError("theta0 must be a floating-point tensor or array, or a dict of such.")
    flat = torch.cat([t.reshape(-1).double().cpu() for t in tensors.values()])
    if not bool(torch.isfinite(flat).all()):
        raise UserError("theta0 holds NaN or infinite values.")
    if len(flat) > WIDEST:
        raise UserError(
            f"theta0 has {len(flat)} numbers; posterior='laplace' makes a full covariance of at "
            f"most {WIDEST}. Give draws or a (mean, scale) of your own."
        )
    first = next(iter(tensors.values()))
    names = tuple(tensors) if isinstance(theta0, Mapping) else ()
    return flat, Shape(names, tuple(t.shape for t in tensors.values())), first.dtype, first.device


def laplace(
    call: LogLikelihood,
    source: PointSource,
    theta0: object,
    log_prior: LogPrior | None,
    seed: int,
    device: torch.device | None = None,
) -> Pilot:
    """The posterior's mode and curvature, from a part of the data and a few gradients of all."""
    theta, shape, dtype, home = start_at(theta0)
    where = home if device is None else device
    n = source.n
    index = torch.randperm(n, generator=rng.generator(seed, 0, 0, "pilot"))[:PART].sort().values
    part = _moved(source.take(index), where)
    model = _Model(call, log_prior, shape, dtype, where)
    theta, factor = _newton(model, part, n / len(index), theta)
    distance = 0.0
    if len(index) < n:
        theta, distance = _on_all_data(model, source, theta, factor)
    value, _, curvature = model.derivatives(theta, part, n / len(index))
    lower, failed = torch.linalg.cholesky_ex(curvature)
    if int(failed) or not math.isfinite(value):
        raise UserError(_INDEFINITE)
    return Pilot(Normal(theta, torch.cholesky_inverse(lower)), shape, dtype, where, distance)


_INDEFINITE = (
    "The pilot ended where the log-posterior is not curved downwards in every direction, so it has "
    "no Laplace approximation: give log_prior, another theta0, or draws of your own."
)


class _Model(NamedTuple):
    call: LogLikelihood
    log_prior: LogPrior | None
    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def derivatives(
        self, theta: Tensor, points: Batch, scale: float
    ) -> tuple[float, Tensor, Tensor]:
        """U, its gradient and its Hessian at theta [P] float64, over some points."""
        own: Derivatives | None = getattr(self.call, "derivatives", None)
        at = theta.to(self.device, self.dtype)
        total = theta.new_zeros(())
        slope, curvature = torch.zeros_like(theta), theta.new_zeros(len(theta), len(theta))
        for x, y in _chunks(points, max(1, CHUNK // len(theta))):
            if own is not None:
                v, g, h = own(at, x, y)
            else:
                f = self._sum(x, y)
                v, g, h = f(at), grad(f)(at), _hessian(f)(at)
            total -= scale * v.double().cpu()
            slope -= scale * g.double().cpu()
            curvature -= scale * h.double().cpu()
        if self.log_prior is not None:
            v, g, h = self.prior_derivatives(theta)
            total, slope, curvature = total - v, slope - g, curvature - h
        return float(total), slope, (curvature + curvature.T) / 2

    def gradient(self, theta: Tensor, points: Batch) -> Tensor:
        """Of the sum of log-likelihoods alone."""
        own = getattr(self.call, "gradient", None)
        at = theta.to(self.device, self.dtype)
        g: Tensor = own(at, *points) if own is not None else grad(self._sum(*points))(at)
        return g.double().cpu()

    def prior_derivatives(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log-prior, its gradient and its Hessian, in float64."""
        own = getattr(self.log_prior, "derivatives", None)
        if own is not None:
            v, g, h = own(theta)
        else:
            prior = self._prior()
            v, g, h = prior(theta), grad(prior)(theta), _hessian(prior)(theta)
        return v.double(), g.double(), h.double()

    def value(self, theta: Tensor, points: Batch, scale: float) -> float:
        """U; infinite where a log-likelihood is not finite."""
        at = self.shape.tree(theta.to(self.device, self.dtype))
        with torch.no_grad():
            total = -scale * float(self.call(at, *points).double().sum())
        if self.log_prior is not None:
            total -= float(self._prior()(theta))
        return total if math.isfinite(total) else math.inf

    def refuse(self, theta: Tensor, points: Batch) -> None:
        """Refuse a start at which a log-likelihood is not finite, with the point's place."""
        with torch.no_grad():
            values = self.call(self.shape.tree(theta.to(self.device, self.dtype)), *points)
        wrong = (~torch.isfinite(values)).nonzero()
        if len(wrong):
            raise UserError(
                f"The log-likelihood of {len(wrong)} of {len(values)} points is "
                f"{float(values[wrong[0]])} at theta0, where the pilot starts; give another theta0."
            )
        if not math.isfinite(self.value(theta, points, 1.0)):
            raise UserError("The log-prior is not finite at theta0; give another theta0.")

    def _sum(self, x: Any, y: Any) -> Callable[[Tensor], Tensor]:
        return lambda flat: self.call(self.shape.tree(flat), x, y).sum()

    def _prior(self) -> Callable[[Tensor], Tensor]:
        assert self.log_prior is not None
        prior = self.log_prior
        return lambda flat: torch.as_tensor(prior(self.shape.tree(flat))).sum()


def _newton(model: _Model, part: Batch, scale: float, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The mode of the part's posterior and the Cholesky factor of the curvature there.

    Where the curvature is not positive definite, a multiple of the identity is added; a step is
    halved until U falls by a part of what it promises.
    """
    model.refuse(theta, part)
    for _ in range(STEPS):
        value, slope, curvature = model.derivatives(theta, part, scale)
        if not (math.isfinite(value) and bool(torch.isfinite(curvature).all())):
            raise UserError(
                "The log-likelihood has no finite derivatives on the pilot's way to the mode; give "
                "a theta0 nearer to it, or a log_prior."
            )
        factor, damped = _factor(curvature)
        step = torch.cholesky_solve(slope.unsqueeze(-1), factor).squeeze(-1)
        promise = float(slope @ step)
        if promise <= NEAR**2 and not damped:
            return theta - step, factor
        # float32 log-likelihoods: U is known to a few parts in 1e7
        slack = 1e-7 * abs(value) if model.dtype != torch.float64 else 1e-13 * abs(value)
        size = 1.0
        while model.value(theta - size * step, part, scale) > value - size * promise / 4 + slack:
            size /= 2
            if size < 1e-6:
                break
        if size < 1e-6:
            if promise <= CLOSE**2 and not damped:  # rounding ends it here
                return theta, factor
            break
        theta = theta - size * step
    raise UserError(
        f"The pilot did not converge in {STEPS} Newton steps (the mode is still "
        f"{math.sqrt(max(promise, 0.0)):.3g} standard deviations away): give another theta0, a "
        "log_prior, or draws of your own."
    )


def _factor(curvature: Tensor) -> tuple[Tensor, bool]:
    factor, failed = torch.linalg.cholesky_ex(curvature)
    damping, damped = 1e-6 * float(curvature.diagonal().abs().mean()) + 1e-12, False
    while int(failed) or not bool((factor.diagonal() > 0).all()):
        damped = True
        eye = torch.eye(len(curvature), dtype=curvature.dtype)
        factor, failed = torch.linalg.cholesky_ex(curvature + damping * eye)
        damping *= 10
        if not math.isfinite(damping):
            raise UserError(_INDEFINITE)
    return factor, damped


def _on_all_data(
    model: _Model, source: PointSource, theta: Tensor, factor: Tensor
) -> tuple[Tensor, float]:
    """Steps with the gradient of all data and the curvature of the part."""
    distance = before = math.inf
    for _ in range(ALL_STEPS):
        total = torch.zeros_like(theta)
        if model.log_prior is not None:
            total -= model.prior_derivatives(theta)[1]
        for points in source.batches(PART):
            total -= model.gradient(theta, _moved(points, model.device))
        step = torch.cholesky_solve(total.unsqueeze(-1), factor).squeeze(-1)
        distance = math.sqrt(max(float(total @ step), 0.0))
        if not math.isfinite(distance) or distance > 2 * before:
            break
        theta = theta - step
        if distance <= CLOSE:
            return theta, distance
        before = distance
    raise UserError(
        f"The pilot's mode does not carry over from {PART} points to all {source.n}: a step with "
        f"the gradient of all data is still {distance:.3g} standard deviations long. Give draws of "
        "your own, or a theta0 nearer to the mode."
    )


def _chunks(points: Batch, size: int) -> list[Batch]:
    x, y = points
    return [
        (sources.rows(x, slice(j, j + size)), sources.rows(y, slice(j, j + size)))
        for j in range(0, sources.count(x), size)
    ]


def _moved(points: Batch, device: torch.device) -> Batch:
    x, y = (sources.tree(lambda t: t.to(device), part) for part in points)
    return x, y


def _hessian(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """In reverse mode twice: all threads of a process share the levels of forward mode."""
    curvature: Callable[[Tensor], Tensor] = jacrev(grad(f))
    return curvature
