"""A log-likelihood written in JAX as `build` takes one: numbers cross over as numpy arrays.

Draws are mapped and compiled by JAX. Points are padded to a few lengths, since every new length is
compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError, install
from corefed.coreset import sources
from corefed.coreset.coreset import Coreset

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise UserError(f"This needs JAX: {install('blackjax')}.") from error

LENGTH = 512
"""Points are padded to multiples of this, and fewer to a power of 2."""


class FromJax:
    """log_likelihood(theta, x, y) -> [b] of JAX arrays, for `corefed.coreset.build`.

    `theta0` is a theta: an array, or a dict of arrays by name. Give both to `build`, with
    posterior="laplace" or draws of the same structure.
    """

    width = 2

    def __init__(self, log_likelihood: Callable[[Any, Any, Any], Any], theta0: Any) -> None:
        self.function = log_likelihood
        named = theta0 if isinstance(theta0, Mapping) else {"": theta0}
        self.named = isinstance(theta0, Mapping)
        self.shapes = {str(name): np.shape(value) for name, value in named.items()}
        self._one = jax.jit(log_likelihood)
        self._many = jax.jit(jax.vmap(log_likelihood, in_axes=(0, None, None)))

        def total(flat: Any, x: Any, y: Any, real: Any) -> Any:
            return jnp.where(real, log_likelihood(unravelled(self, flat), x, y), 0.0).sum()

        self._slope = jax.jit(jax.grad(total))
        self._all = jax.jit(lambda *a: (total(*a), jax.grad(total)(*a), jax.hessian(total)(*a)))
        self._sums = jax.jit(partial(_sums, log_likelihood), static_argnums=0)
        self._ready: dict[Any, Callable[..., Any]] = {}
        self._compiling = Lock()

    def __call__(self, theta: Any, x: Any, y: Any) -> Tensor:
        """[b] of one theta."""
        b = sources.count(x)
        return back(self._one(over(theta), _padded(x), _padded(y)))[:b]

    def stacked(self, thetas: Any, x: Any, y: Any) -> Tensor:
        """[S, b]."""
        b = sources.count(x)
        return back(self._many(over(thetas), _padded(x), _padded(y)))[:, :b]

    def sums(self, fitted: Any, fresh: Any, first: int, x: Any, y: Any) -> tuple[Tensor, ...]:
        """What a scan keeps of some points (`scan.py`), in one call: [S, b] never leaves JAX."""
        b = sources.count(x)
        given = over(fitted), over(fresh), _padded(x), _padded(y), _real(x)
        with self._compiling:  # threads that meet a new shape together would each compile it
            compiled = self._compiled(first, *given)
        found = compiled(*given)
        totals, judged, score, squares, rounding = (back(value) for value in found)
        return totals, judged, score[:b], squares, rounding

    def _compiled(self, first: int, *given: Any) -> Callable[..., Any]:
        shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(given))
        if (first, shapes) not in self._ready:
            self._ready[first, shapes] = self._sums.lower(first, *given).compile()
        return self._ready[first, shapes]

    def gradient(self, flat: Tensor, x: Any, y: Any) -> Tensor:
        return back(self._slope(over(flat), _padded(x), _padded(y), _real(x)))

    def derivatives(self, flat: Tensor, x: Any, y: Any) -> tuple[Tensor, Tensor, Tensor]:
        value, slope, curvature = self._all(over(flat), _padded(x), _padded(y), _real(x))
        return back(value), back(slope), back(curvature)


class PriorFromJax:
    """log_prior(theta) of JAX arrays, for `build(posterior="laplace")`."""

    def __init__(self, log_prior: Callable[[Any], Any], like: FromJax) -> None:
        self._one = jax.jit(log_prior)

        def value(flat: Any) -> Any:
            return log_prior(unravelled(like, flat))

        self._all = jax.jit(lambda f: (value(f), jax.grad(value)(f), jax.hessian(value)(f)))

    def __call__(self, theta: Any) -> Tensor:
        return back(self._one(over(theta)))

    def derivatives(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope, curvature = self._all(over(flat))
        return back(value), back(slope), back(curvature)


def _sums(
    log_p: Callable[[Any, Any, Any], Any],
    first: int,
    fitted: Any,
    fresh: Any,
    x: Any,
    y: Any,
    real: Any,
) -> tuple[Any, ...]:
    """Sums over points of log p - c under the fitted and the fresh draws, scores of points,
    sum_j ||h_j||^2, and the squares that rounding is judged by. Draws are mapped a block at a time,
    and their values summed before the next block."""
    lead = _mapped(log_p, jax.tree.map(lambda t: t[:first], fitted), x, y)
    lead = jnp.where(real, lead, 0.0)
    reference = lead.mean(0)
    off = lead - reference
    score = jnp.sqrt((off**2).mean(0))

    def total(theta: Any) -> Any:
        return jnp.where(real, log_p(theta, x, y) - reference, 0.0).sum()

    totals = off.sum(1)
    if len(jax.tree.leaves(fitted)[0]) > first:
        others = jax.tree.map(lambda t: t[first:], fitted)
        totals = jnp.concatenate([totals, jax.lax.map(total, others, batch_size=first)])
    h = jnp.where(real, _mapped(log_p, fresh, x, y) - reference, 0.0)
    each = (h**2).mean(0) - h.mean(0) ** 2
    return totals, h.sum(1), score, each.sum(), (lead[0] ** 2).sum()


def _mapped(log_p: Callable[[Any, Any, Any], Any], thetas: Any, x: Any, y: Any) -> Any:
    return jax.vmap(log_p, in_axes=(0, None, None))(thetas, x, y)


def unravelled(like: FromJax, flat: Any) -> Any:
    """What the log-likelihood takes, from a flat theta [P]."""
    parts, start = {}, 0
    for name, shape in like.shapes.items():
        size = int(np.prod(shape))
        parts[name] = flat[start : start + size].reshape(shape)
        start += size
    return parts if like.named else parts[""]


def points(coreset: Coreset) -> tuple[Any, Any]:
    """(x, y) of the coreset's points as numpy arrays: what a model of (x, y) is run on."""
    if coreset.points is None:
        raise UserError(
            "This coreset was loaded without its points; attach(log_likelihood, data) first."
        )
    x, y = (_arrays(part) for part in coreset.points)
    return x, y


def back(value: Any) -> Tensor:
    """A JAX array as a tensor of its own memory, in float32 or float64."""
    return torch.from_numpy(np.array(value))


def _arrays(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part
    if isinstance(part, Tensor):
        return part.detach().cpu().numpy()
    if isinstance(part, Mapping):
        return {name: _arrays(value) for name, value in part.items()}
    return tuple(_arrays(value) for value in part)


def over(part: Any) -> Any:
    """The same tree of JAX arrays, floating-point ones in JAX's own precision."""
    return jax.tree.map(jnp.asarray, _arrays(part))


def _padded(part: Any) -> Any:
    length = _length(sources.count(part))

    def pad(array: Any) -> Any:
        more = np.repeat(array[-1:], length - len(array), axis=0)
        return jnp.asarray(np.concatenate([array, more]) if len(more) else array)

    return jax.tree.map(pad, _arrays(part))


def _real(x: Any) -> Any:
    b = sources.count(x)
    return jnp.arange(_length(b)) < b


def _length(b: int) -> int:
    if b >= LENGTH:
        return -(-b // LENGTH) * LENGTH
    return 1 << max(0, b - 1).bit_length()
