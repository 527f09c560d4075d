"""A log-likelihood written in JAX as `build` takes one: numbers cross over as numpy arrays.

Draws are mapped and compiled by JAX. Points are padded to a few lengths, since every new length is
compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    alone = True  # XLA has threads of its own
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

    def __call__(self, theta: Any, x: Any, y: Any) -> Tensor:
        """[b] of one theta."""
        b = sources.count(x)
        return back(self._one(over(theta), _padded(x), _padded(y)))[:b]

    def stacked(self, thetas: Any, x: Any, y: Any) -> Tensor:
        """[S, b]."""
        b = sources.count(x)
        return back(self._many(over(thetas), _padded(x), _padded(y)))[:, :b]

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
