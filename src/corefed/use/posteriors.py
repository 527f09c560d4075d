"""Fit a posterior for `corefed build`, where the user has data but no model.

    logistic, poisson   Laplace approximation, a full Gaussian
    linear              exact, with the noise estimated from the residuals
    mlp                 mean-field Gaussian by variational inference on Eq. 1 with a fixed prior

Regressions have standardised features, an intercept and a prior N(0, 1). The network gets the
features unscaled, as in `corefed run`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base import arrays
from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.bayes import batches, elbo, gaussian, optim, regression
from corefed.coreset.shared import SharedBodies
from corefed.data import datasets
from corefed.data.dataset import Dataset, check
from corefed.models import network
from corefed.models.likelihood import Categorical, Gaussian

MODELS = ("auto", "mlp", "logistic", "poisson", "linear")
Show = Callable[[str, int, int], None]  # (stage, done, of how many)

MOST_CLASSES = 100
"""Whole numbers with more distinct values are a regression target, not classes."""
INITIAL_STD, INITIAL_RHO, RATE, BATCH = 0.1, -3.0, 0.003, 100
"""Start, learning rate and batch of the network's posterior; the first two as in PFedBayes. The
prior is N(0, 0.1^2), where the means start. One of width 1 dominates: 60000 images and a short
training do not move 80000 weights away from it."""
MOST_FEATURES = 2000
"""Coefficients of a full covariance; its factor takes 32 MB and a few seconds."""


class PointSet(NamedTuple):
    """The points that a coreset is selected from."""

    name: str
    x: Tensor  # [n, ...] float32
    y: Tensor  # [n] int64 labels, or [n, d] float32 targets
    classes: int  # 0 for targets


class PosteriorFit(NamedTuple):
    """All that `build` needs, and a description."""

    text: str
    log_likelihood: Any
    draws: Any
    data: tuple[Tensor, Tensor]
    resample: Callable[[Tensor, Tensor, int, torch.Generator], Tensor] | None


def load(name: str, data_dir: Path | None, seed: int) -> PointSet:
    """The training points of a named set, or the arrays of npz:PATH."""
    if name.startswith("npz:"):
        return _from_npz(Path(name.removeprefix("npz:")))
    dataset = datasets.load(name, data_dir, seed=seed)
    rows = torch.arange(len(dataset.y))
    if dataset.held_out is not None:
        rows = rows[~dataset.held_out]
    return PointSet(name, dataset.values(rows).flatten(1), dataset.y[rows], dataset.classes)


def choose(model: str, given: PointSet) -> str:
    """auto: for an npz, logistic with two labels, linear with targets; otherwise a network."""
    if model not in MODELS:
        raise UserError(f"There is no model {model!r}; use one of {', '.join(MODELS)}.")
    own = given.name.startswith("npz:")
    if model == "auto":
        if not own or given.classes > 2:
            return "mlp"
        return "logistic" if given.classes == 2 else "linear"
    if model == "logistic" and given.classes != 2:
        raise UserError(f"logistic needs labels of two values; {given.name} has {_kind(given)}.")
    single = given.classes or given.y.shape[1] == 1
    if model == "linear" and (given.classes > 2 or not single):
        raise UserError(f"linear needs one measured target; {given.name} has {_kind(given)}.")
    if model == "poisson":
        y = given.y.double()
        if not single or bool((y < 0).any()) or not torch.equal(y, y.round()):
            raise UserError(f"poisson needs counts 0, 1, 2, ...; {given.name} has {_kind(given)}.")
    return model


def fit(
    model: str,
    given: PointSet,
    hidden: int,
    steps: int,
    seed: int,
    device: torch.device,
    show: Show,
) -> PosteriorFit:
    if model == "mlp":
        return _network(given, hidden, steps, seed, device, show)
    return _regression(model, given)


def _regression(model: str, given: PointSet) -> PosteriorFit:
    x = given.x.flatten(1).double()
    std, mean = torch.std_mean(x, 0, correction=0)
    x = torch.cat([(x - mean) / std.masked_fill(std == 0, 1.0), torch.ones(len(x), 1)], 1).double()
    y = given.y.double().flatten()
    width = x.shape[1]
    if width > MOST_FEATURES:
        raise UserError(
            f"{given.name} has {width - 1} features; a full posterior takes at most "
            f"{MOST_FEATURES - 1}. Use --model mlp."
        )
    eye = torch.eye(width, dtype=torch.float64)
    prior = regression.Normal(torch.zeros(width, dtype=torch.float64), eye)
    family = {"logistic": regression.logistic, "poisson": regression.poisson}.get(model)
    if family is None:
        y = (y - y.mean()) / (y.std(correction=0) or 1.0)
        rest = y - x @ torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
        noise = max(float(rest.square().sum() / max(1, len(y) - width)) ** 0.5, 1e-3)
        family = regression.gaussian(noise)

        def posterior(rows: Tensor, w: Tensor) -> regression.Normal:
            return regression.linear_posterior(x[rows], y[rows], w, prior, noise)

        text = f"linear regression, exact posterior of {width} coefficients"
    else:
        chosen = family

        def posterior(rows: Tensor, w: Tensor) -> regression.Normal:
            return regression.laplace(chosen, x[rows], y[rows], w, prior)

        text = f"{model} regression, Laplace posterior of {width} coefficients"

    def resample(rows: Tensor, w: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        return posterior(rows, w.double()).sample(draws, generator)

    full = posterior(torch.arange(len(x)), torch.ones(len(x), dtype=torch.float64))
    return PosteriorFit(text, family, full, (x, y), resample)


def _network(
    given: PointSet, hidden: int, steps: int, seed: int, device: torch.device, show: Show
) -> PosteriorFit:
    """q = N(mu, sigma^2) by `steps` Adam steps on (1/n) [ sum_j nll_j + KL(q || N(0, 0.1^2)) ]."""
    x, y = given.x.flatten(1).to(device), given.y.to(device)
    n, outputs = len(x), given.classes or given.y.shape[1]
    likelihood = Categorical(outputs) if given.classes else Gaussian(outputs)
    widths = (x.shape[1], *([hidden] if hidden else []), outputs)
    model = network.mlp(widths, likelihood)
    streams = Streams([Who(seed, 0)], 0, device)
    mu = model.init(streams.generators("init", host=True)[0], INITIAL_STD).to(device)
    q = torch.stack([mu, torch.full_like(mu, INITIAL_RHO)]).unsqueeze(0)
    wide = gaussian.rho_of(torch.full_like(mu, INITIAL_STD))
    z = torch.stack([torch.zeros_like(mu), wide]).unsqueeze(0)
    data = ClientData(x.unsqueeze(0), y.unsqueeze(0), torch.ones(1, n, device=device))
    adam = optim.adam(RATE)
    state = adam.init(q)
    sigma_z = gaussian.sigma(z[:, 1])
    noises = batches.noises(streams, (1, model.size), steps)
    minibatches = batches.batches(data, data.weight, streams, steps, BATCH)
    for step, (batch, noise) in enumerate(zip(minibatches, noises, strict=True), 1):
        sigma = gaussian.sigma(q[:, 1])
        _, by_mu, by_sigma = elbo.gradient(model, q[:, 0], sigma, batch, noise)
        kl_mu, kl_sigma = gaussian.kl_grads(q, z, sigma, sigma_z)
        by_rho = gaussian.to_rho(by_sigma + kl_sigma / n, q[:, 1])
        adam.update(q, torch.stack([by_mu + kl_mu / n, by_rho], 1), state)
        if step % 10 == 0 or step == steps:
            show("posterior", step, steps)
    if not bool(torch.isfinite(q).all()):
        raise UserError(
            f"Training the network on {given.name} diverged; scale its features to about 1."
        )

    shape = "-".join(map(str, widths))
    text = f"{shape} network, mean-field posterior after {steps} steps"
    if given.classes:
        with torch.no_grad():
            right = model.forward(q[:, :1], x.unsqueeze(0))[0, 0].argmax(-1) == y
        text += f", accuracy {100 * float(right.float().mean()):.1f} % on these points"
    shared = SharedBodies(model, q[0])
    return PosteriorFit(text, shared, shared, (x, y), None)


def _from_npz(path: Path) -> PointSet:
    """Arrays X (or x) and y of an .npz file."""
    there = arrays.headers(path)
    name = next((name for name in ("X", "x") if name in there), None)
    if name is None or "y" not in there:
        found = ", ".join(there) or "nothing"
        raise UserError(f"{path} must hold arrays X (or x) and y; it holds {found}.")
    stored = arrays.load(path, [name, "y"], arrays.MEMORY_MB, remedy="use fewer points")
    x, y = stored[name], stored["y"]
    for what, array in (("X", x), ("y", y)):
        if array.dtype.kind not in "fiub" or array.ndim == 0:
            raise UserError(f"{what} in {path} is {array.dtype}, not an array of numbers.")
        if array.size == 0:
            raise UserError(f"{what} in {path} is empty; a coreset needs at least one point.")
    return _checked(f"npz:{path}", x, y)


def _checked(name: str, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> PointSet:
    """Checked tensors; few distinct whole numbers become labels from 0, in order."""
    points = torch.from_numpy(np.ascontiguousarray(x, np.float32)).reshape(len(x), -1)
    column = y.reshape(len(y), -1)
    targets = torch.from_numpy(np.ascontiguousarray(column, np.float32))
    check(Dataset(name, points, targets, 0))
    values, labels = np.unique(column, return_inverse=True)
    whole = y.dtype.kind in "iub" or len(values) == 2
    if column.shape[1] == 1 and whole and 2 <= len(values) <= MOST_CLASSES:
        return PointSet(name, points, torch.from_numpy(labels.reshape(-1)).long(), len(values))
    return PointSet(name, points, targets, 0)


def _kind(given: PointSet) -> str:
    if given.classes:
        return f"{given.classes} classes"
    return f"{given.y.shape[1]} real-valued target{'s' if given.y.shape[1] > 1 else ''}"
