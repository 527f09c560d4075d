"""After sampling: does the coreset hold where the draws went, and if not, one made there.

A sampler's draws theta_s need not lie where the coreset's own draws lay. On them the coreset's
log-likelihood is compared with that of all data, d_s = L(theta_s) - L_w(theta_s), in one pass over
the data. e^d are the importance weights from the coreset's posterior to that of all data, and to
first order a posterior mean moves by Cov(theta_i, d): both are in the posterior's own units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.coreset import making, options, passes
from corefed.coreset.coreset import CHECKED, Coreset
from corefed.coreset.draws import Draws, Theta, hold, interpret, leaves, tree, wrap_stacked
from corefed.coreset.making import Origin
from corefed.coreset.region import flat
from corefed.coreset.scan import scan

LEAST = 20
"""Draws that a check needs."""
HEAVY = 0.7
"""The shape of the tail of e^d above which importance weights say nothing (Vehtari et al. 2024)."""
WIDER = 1.1
"""Draws of a rebuilt coreset spread by this much more than the sampler's."""


@dataclass(frozen=True)
class Check:
    """How well a coreset's log-likelihood follows that of all data on a sampler's draws."""

    draws: int
    error: float  # ||L - L_w||^2 / ||L||^2, centred, as the coreset's held_out_error
    spread: float  # standard deviation of L - L_w, in nats
    shift: float  # greatest estimated error of a posterior mean, in standard deviations
    ess: float  # effective part of the draws under the weights e^d
    khat: float  # shape of the tail of e^d
    outside: float  # part of the draws farther out than every draw of the coreset
    tolerance: float
    settled: bool

    def __str__(self) -> str:
        lines = [
            f"Checked on {self.draws} draws: error {self.error:.3g}; log-likelihoods differ by "
            f"{self.spread:.3g} nats; means are off by at most {self.shift:.2g} standard "
            f"deviations; {100 * self.ess:.0f} % effective draws (k-hat {self.khat:.2f})."
        ]
        if self.outside > 0:
            lines.append(
                f"{100 * self.outside:.0f} % of the draws lie outside the region that the coreset "
                "was made for."
            )
        if not self.settled:
            lines.append(
                f"The coreset does not hold here (means may be off by more than {self.tolerance:g} "
                "standard deviations): make it anew by rebuilt_at(draws), and sample again."
            )
        return " ".join(lines)


@dataclass(frozen=True)
class Settled:
    """A coreset, its draws, and the checks on the way."""

    coreset: Coreset
    draws: Any
    checks: tuple[Check, ...]

    @property
    def settled(self) -> bool:
        return self.checks[-1].settled

    def __str__(self) -> str:
        rounds = f"{len(self.checks)} round{'' if len(self.checks) == 1 else 's'}"
        if self.settled:
            return f"Settled after {rounds}. {self.checks[-1]}"
        return f"Not settled after {rounds}: give more points or more rounds. {self.checks[-1]}"


def check(coreset: Coreset, draws: object, most: int, tolerance: float) -> Check:
    """Compare both log-likelihoods on some of the draws."""
    origin = _origin(coreset)
    assert coreset.points is not None
    drawn = _thinned(_stacked(coreset, draws), most)
    if drawn.number < LEAST:
        raise UserError(f"There are {drawn.number} draws; a check needs at least {LEAST}.")
    recipe = origin.recipe
    where, _ = options.place(drawn, recipe.device)
    drawn = hold(drawn, where, recipe.memory // 8)
    with torch.no_grad(), passes.exact_products():
        work = making.prepared(recipe, drawn, drawn.number, where)
        found = scan(work, drawn, drawn._replace(number=0), recipe.threads, recipe.show)
        mine = passes.centred(work.log_p(drawn, work.moved(coreset.points))).double()
        mine = coreset.weights.double().to(where) @ mine
    scale = drawn.number**0.5
    full, approximate = (v.cpu() * scale for v in (found.y, mine))
    d, theta = full - approximate, flat(drawn)
    d = d - d.mean()
    shift = _shift(theta, d)
    weights = (d - d.max()).exp()
    ess = float(weights.sum().square() / weights.square().sum()) / len(d)
    khat, spread = tail_shape(d), float(d.std())
    region, outside = origin.region, 0.0
    if region is not None and len(region.mean) == theta.shape[1]:
        outside = float((region.distance2(theta) > region.reach).double().mean())
    # Where the weights are nearly even, their tail is too, whatever its fitted shape.
    light = khat <= HEAVY or ess > 0.9
    return Check(
        draws=drawn.number,
        error=float(d.square().sum() / full.square().sum().clamp_min(1e-300)),
        spread=spread,
        shift=shift,
        ess=ess,
        khat=khat,
        outside=outside,
        tolerance=tolerance,
        settled=shift <= tolerance and light and math.isfinite(spread),
    )


def rebuilt_at(coreset: Coreset, draws: object, size: int | None = None) -> Coreset:
    """A coreset of the same data made where these draws lie.

    Enough draws are used as they are. Of fewer a Gaussian is fitted, a little wider than they are,
    which gives as many as are needed; where they are too few even for that, again as they are.
    """
    origin, drawn = _origin(coreset), _stacked(coreset, draws)
    k = options.number(
        size if size is not None else coreset.diagnostics.size, coreset.diagnostics.n
    )
    wanted = origin.recipe.samples or max(options.MANY * k, options.MINIMUM)
    posterior: Any = drawn
    if drawn.number < wanted * 5 / 4 and drawn.number >= 2 * drawn.width:
        posterior = interpret(_Fitted(drawn))
    return making.make(origin.recipe, posterior, [k])


def sample_until_settled(
    coreset: Coreset, sampler: Callable[[Coreset], Any], rounds: int, tolerance: float
) -> Settled:
    """Sample, check, and rebuild, at most `rounds` times."""
    if rounds < 1:
        raise UserError(f"rounds is {rounds}; it must be 1 or more.")
    checks: list[Check] = []
    while True:
        draws = sampler(coreset)
        checks.append(check(coreset, draws, CHECKED, tolerance))
        if checks[-1].settled or len(checks) == rounds:
            return Settled(coreset, draws, tuple(checks))
        coreset = rebuilt_at(coreset, draws)


def tail_shape(log_weights: Tensor) -> float:
    """The shape k of a generalised Pareto fitted to the largest weights (Zhang and Stephens 2009,
    with the weak prior of Vehtari et al.)."""
    order = log_weights.double().sort().values
    count = int(min(0.2 * len(order), 3 * len(order) ** 0.5))
    if count < 5:
        return math.inf
    weights = (order - order[-1]).exp()
    excess = (weights[-count:] - weights[-count - 1]).numpy()
    if excess[-1] <= 1e-12:
        return -math.inf  # no tail: all weights are the same
    excess = np.maximum(excess, 1e-300)
    grid = 30 + int(count**0.5)
    quarter = excess[int(count / 4 + 0.5) - 1]
    b = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    b = b / (3 * max(quarter, 1e-300)) + 1 / excess[-1]
    k = np.log1p(-b[:, None] * excess).mean(1)
    likelihood = count * (np.log(-b / k) - k - 1)
    weight = 1 / np.exp(likelihood - likelihood[:, None]).sum(1)
    best = float((b * weight).sum() / weight.sum())
    shape = float(np.log1p(-best * excess).mean())
    return (count * shape + 10 * 0.5) / (count + 10)


class _Fitted:
    """A Gaussian with the draws' mean and covariance, WIDER, in the draws' own structure."""

    def __init__(self, drawn: Draws) -> None:
        theta = flat(drawn)
        self.like = drawn.block(0, 1)
        self.mean = theta.mean(0)
        covariance = torch.cov(theta.T).reshape(theta.shape[1], -1) * WIDER**2
        covariance.diagonal().mul_(1 + 1e-9).add_(1e-300)
        self.factor, failed = torch.linalg.cholesky_ex(covariance)
        if int(failed):
            self.factor = torch.diag(theta.std(0) * WIDER)

    def sample(self, shape: torch.Size) -> Theta:
        noise = torch.randn(*shape, len(self.mean), dtype=torch.float64)
        drawn: Tensor = self.mean + noise @ self.factor.T
        sizes = [t[0].numel() for t in leaves(self.like)]
        parts = [
            part.reshape((len(part), *t.shape[1:])).to(t)
            for part, t in zip(drawn.split(sizes, 1), leaves(self.like), strict=True)
        ]
        if isinstance(self.like, Tensor):
            only: Tensor = parts[0]
            return only
        return dict(zip(self.like, parts, strict=True))


def _shift(theta: Tensor, d: Tensor) -> float:
    """max_i |Cov(theta_i, d)| / sd(theta_i)."""
    off = theta - theta.mean(0)
    spread = off.square().sum(0).sqrt().clamp_min(1e-300)
    return float(((off / spread).T @ d).abs().max()) / math.sqrt(len(d) - 1)


def _origin(coreset: Coreset) -> Origin:
    if coreset.origin is None or coreset.points is None:
        raise UserError(
            "This coreset was loaded from a file and does not know its data; build it again to "
            "check it or to make it anew."
        )
    return coreset.origin


def _stacked(coreset: Coreset, draws: object) -> Draws:
    """In the coreset's precision: samplers give float64 whatever a model was written in."""
    posterior = interpret(draws)
    if not isinstance(posterior, Draws):
        raise UserError("Give a sampler's draws, stacked or as a list, not a distribution.")
    dtype = coreset.weights.dtype
    return posterior._replace(
        block=lambda start, stop: tree(lambda t: t.to(dtype), posterior.block(start, stop))
    )


def _thinned(drawn: Draws, most: int) -> Draws:
    """At most this many of the draws, at even distances."""
    if drawn.number <= most:
        return drawn
    at = torch.arange(most) * drawn.number // most
    whole = drawn.block(0, drawn.number)
    if isinstance(whole, Tensor):
        return wrap_stacked(whole[at.to(whole.device)])
    return wrap_stacked({name: t[at.to(t.device)] for name, t in whole.items()})
