"""Chains of NUTS by NumPyro for `corefed bench pays`, and what two of them differ by.

A chain is measured with its compilation, in wall time and CPU time of this process. Two chains of
the same posterior differ for want of draws, so every difference has its error beside it: that of
both chains at their effective sample sizes. A second way has almost no such error: the draws of
all data's chain, weighted by exp(L_coreset - L_all), are draws of the coreset's posterior, and the
same draws with and without these weights are compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from corefed.base import files
from corefed.coreset.adapters import numpyro as adapter
from corefed.coreset.coreset import Coreset

Array = NDArray[Any]

PAIRED = 1000
"""Draws that are weighted, at most; each reads all data once."""


class Chain(NamedTuple):
    names: list[str]
    shapes: list[list[int]]  # of each parameter
    draws: Array  # [N, P], parameters one after the other
    steps: int  # gradients after warm-up
    seconds: float
    cpu: float

    @property
    def samples(self) -> dict[str, Array]:
        """By name, as NumPyro gives them."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        parts = np.split(self.draws, np.cumsum(sizes)[:-1], axis=1)
        named = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.reshape(-1, *shape) for name, shape, part in named}


class Difference(NamedTuple):
    off: float  # greatest difference of a mean, in standard deviations
    off_error: float  # of the chains, there
    least: float  # ratio of standard deviations
    most: float
    ratio_error: float  # of the chains, at the ratio farthest from 1


def run(model: Any, points: tuple[Any, Any], warmup: int, samples: int) -> Chain:
    """One chain."""
    begun, cpu = time.perf_counter(), time.process_time()
    mcmc = MCMC(NUTS(model), num_warmup=warmup, num_samples=samples, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), *points, extra_fields=("num_steps",))
    found = {name: np.asarray(value, np.float64) for name, value in mcmc.get_samples().items()}
    seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    flat = np.concatenate([v.reshape(len(v), -1) for v in found.values()], 1)
    steps = int(np.asarray(mcmc.get_extra_fields()["num_steps"]).sum())
    return Chain(
        list(found), [list(v.shape[1:]) for v in found.values()], flat, steps, seconds, used
    )


def remembered(path: Path | None, make: Callable[[], Chain]) -> Chain:
    """A chain that an earlier run has written there, or a new one, which is written."""
    if path is None:
        return make()
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Chain(**{**kept, "draws": np.array(kept["draws"])})
    chain = make()
    content = json.dumps({**chain._asdict(), "draws": chain.draws.tolist()})
    files.write_folder(path.parent, [(path.name, content.encode())])
    return chain


def difference(found: Chain, full: Chain) -> Difference:
    """Of means and standard deviations, with the error of the chains."""
    spread = full.draws.std(0, ddof=1)
    off = np.abs(found.draws.mean(0) - full.draws.mean(0)) / spread
    error = np.hypot(*(_error(chain.draws, spread) for chain in (found, full)))
    ratio = found.draws.std(0, ddof=1) / spread
    # d sd / sd = d var / (2 var), and var is a mean too: that of the squares
    squares = [(c.draws - c.draws.mean(0)) ** 2 for c in (found, full)]
    ratio_error = np.hypot(*(_error(s, 2 * s.mean(0)) for s in squares))
    worst, far = int(off.argmax()), int(np.abs(ratio - 1).argmax())
    return Difference(
        float(off[worst]),
        float(error[worst]),
        float(ratio.min()),
        float(ratio.max()),
        float(ratio_error[far]),
    )


def paired(model: Any, points: tuple[Any, Any], coreset: Coreset, full: Chain) -> Difference:
    """What the coreset changes, on the draws of all data's chain weighted by it."""
    step = -(-len(full.draws) // PAIRED)
    draws = full.draws[::step]
    theta = adapter.draws(model, coreset, {k: v[::step] for k, v in full.samples.items()})
    log_p = adapter.log_likelihood(model, *points).function
    thetas = {name: jnp.asarray(value.numpy(), jnp.float32) for name, value in theta.items()}
    few = jax.tree.map(jnp.asarray, adapter.points(coreset))
    ours = _totals(log_p, thetas, few, jnp.asarray(coreset.weights.numpy()))
    x, y = jax.tree.map(jnp.asarray, points)
    d = ours - _totals(log_p, thetas, (x, y), jnp.ones(len(y)))
    weight = np.exp(d - d.max())
    weight /= weight.sum()
    mean, spread = draws.mean(0), draws.std(0)
    shifted = weight @ draws
    ratio = np.sqrt(weight @ (draws - shifted) ** 2) / spread
    off = np.abs(shifted - mean) / spread
    return Difference(float(off.max()), 0.0, float(ratio.min()), float(ratio.max()), 0.0)


def _totals(log_p: Any, thetas: Any, points: Any, weight: Any) -> Array:
    """Weighted sums per draw, less the first draw's point by point: sums of a million numbers in
    float32 would round away what draws differ by."""
    first = log_p(jax.tree.map(lambda t: t[0], thetas), *points)
    one = jax.jit(lambda theta: weight @ (log_p(theta, *points) - first))
    return np.array(
        [float(one(jax.tree.map(lambda t, s=s: t[s], thetas))) for s in range(_number(thetas))]
    )


def _number(thetas: Any) -> int:
    return len(jax.tree.leaves(thetas)[0])


def _error(values: Array, unit: Array) -> Array:
    """Monte Carlo standard error of the mean of each column."""
    size = np.array([effective_sample_size(column[None]) for column in values.T])
    size = np.where(size > 0, size, 1.0)  # its estimate may be negative where a chain stands still
    return np.asarray(values.std(0, ddof=1) / np.sqrt(size) / unit)
