"""NumPyro: a coreset of a model's own data, and the model with weights on what it observes.

A model is a function of (x, y) whose parameters are global: none has an entry per point. Its theta,
for `build` and for draws that are checked, is the dict of its unconstrained parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError, install
from corefed.coreset import engine
from corefed.coreset.adapters import bridge
from corefed.coreset.coreset import Coreset

try:
    import jax
    import jax.numpy as jnp
    from numpyro import handlers
    from numpyro.distributions import Unit, biject_to
    from numpyro.primitives import Messenger
except ImportError as error:
    raise UserError(f"This needs NumPyro: {install('numpyro')}.") from error

Model = Callable[[Any, Any], Any]

points = bridge.points


def build(
    model: Model, x: Any, y: Any, size: int | float | str = "auto", **options: Any
) -> Coreset:
    """A coreset of (x, y) for this model: its posterior by a Laplace pilot unless `draws` are given
    (a dict of unconstrained parameters). Further options are those of `corefed.coreset.build`."""
    parts = _parts(model, x, y)
    if "draws" in options:
        draws = options.pop("draws")
        return engine.build(parts.log_likelihood, draws, (x, y), size, **options)
    return engine.build(
        parts.log_likelihood,
        data=(x, y),
        size=size,
        posterior="laplace",
        theta0=options.pop("theta0", parts.theta0),
        log_prior=parts.log_prior,
        **options,
    )


def log_likelihood(model: Model, x: Any, y: Any) -> bridge.FromJax:
    """The model's log-likelihood per point, over unconstrained parameters."""
    return _parts(model, x, y).log_likelihood


def weighted(model: Model, coreset: Coreset | Tensor) -> Model:
    """The model with the coreset's weights (or these) on its observed sites; run it on
    `points(coreset)`."""
    own = coreset if isinstance(coreset, Tensor) else coreset.weights
    return _Weighted(model, jnp.asarray(own.numpy()))


def draws(model: Model, coreset: Coreset, samples: Mapping[str, Any]) -> dict[str, Tensor]:
    """Draws as `coreset.check` takes them, from `mcmc.get_samples()`."""
    sites = _latent(model, *points(coreset))
    missing = sites.keys() - samples.keys()
    if missing:
        raise UserError(f"The samples lack the model's {', '.join(sorted(missing))}.")
    found = {}
    for name, site in sites.items():
        inverse = jax.vmap(biject_to(site["fn"].support)._inverse)
        found[name] = torch.from_numpy(np.array(inverse(jnp.asarray(samples[name]))))
    return found


class _Weighted(Messenger):  # type: ignore[misc]  # no types
    """Multiplies the log-likelihood of each point by its weight."""

    def __init__(self, fn: Model, weight: Any) -> None:
        super().__init__(fn)
        self.weight = weight

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        if _is_prior(msg, len(self.weight)):
            return
        shape = np.shape(msg["value"]) or msg["fn"].batch_shape
        if not isinstance(msg["fn"], Unit) and shape[:1] != (len(self.weight),):
            raise UserError(
                f"The observed site {msg['name']!r} has shape {shape}, and the coreset has "
                f"{len(self.weight)} points: run the model on points(coreset)."
            )
        batch = len(msg["fn"].batch_shape) or len(shape) - len(msg["fn"].event_shape)
        weight = self.weight.reshape(-1, *(1,) * (batch - 1))
        msg["scale"] = weight if msg["scale"] is None else msg["scale"] * weight


class _Parts(NamedTuple):
    log_likelihood: bridge.FromJax
    log_prior: bridge.PriorFromJax
    theta0: dict[str, np.ndarray[Any, Any]]


def _parts(model: Model, x: Any, y: Any) -> _Parts:
    """The model's log-likelihood per point and log-prior, over unconstrained parameters."""
    few = tuple(_first(part, 2) for part in (x, y))
    sites = _latent(model, *few)
    other = _latent(model, *(_first(part, 1) for part in (x, y)))
    for name, site in sites.items():
        if np.shape(site["value"]) != np.shape(other[name]["value"]):
            raise UserError(
                f"The model's {name!r} has an entry per point; a coreset needs parameters that do "
                "not belong to single points."
            )
    transforms = {name: biject_to(site["fn"].support) for name, site in sites.items()}
    # Near 0, and not there: NumPyro's logits have kinks at 0, where JAX's slope is another one.
    draw = np.random.default_rng(0)
    theta0 = {
        name: _near_zero(draw, transforms[name].inverse_shape(np.shape(site["value"])))
        for name, site in sites.items()
    }

    def traced(theta: Any, x: Any, y: Any) -> Any:
        values = {name: transform(theta[name]) for name, transform in transforms.items()}
        fixed = handlers.substitute(handlers.seed(model, jax.random.PRNGKey(0)), values)
        return values, handlers.trace(fixed).get_trace(x, y)

    def log_likelihood(theta: Any, x: Any, y: Any) -> Any:
        _, trace = traced(theta, x, y)
        b = jax.tree.leaves(x)[0].shape[0]
        total = 0.0
        for site in _observed(trace):
            if _is_prior(site, b):
                continue
            log_p = site["fn"].log_prob(site["value"])
            total = total + log_p.reshape(log_p.shape[0], -1).sum(-1)
        return total

    def log_prior(theta: Any) -> Any:
        values, trace = traced(theta, *few)
        total = 0.0
        for name, transform in transforms.items():
            jacobian = transform.log_abs_det_jacobian(theta[name], values[name])
            total = total + trace[name]["fn"].log_prob(values[name]).sum() + jacobian.sum()
        for site in _observed(trace):
            if _is_prior(site, 2):
                total = total + site["fn"].log_prob(site["value"]).sum()
        return total

    own = bridge.FromJax(log_likelihood, theta0)
    return _Parts(own, bridge.PriorFromJax(log_prior, own), theta0)


def _near_zero(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.asarray(0.01 * draw.normal(size=shape), np.float32)


def _observed(trace: Mapping[str, Any]) -> list[Any]:
    return [s for s in trace.values() if s["type"] == "sample" and s["is_observed"]]


def _is_prior(site: Mapping[str, Any], b: int) -> bool:
    """A `numpyro.factor` without an entry per point: such as what NumPyro adds where it changes
    variables."""
    return isinstance(site["fn"], Unit) and site["fn"].batch_shape[:1] != (b,)


def _latent(model: Model, x: Any, y: Any) -> dict[str, Any]:
    """The sites that the model draws."""
    seeded = handlers.seed(model, jax.random.PRNGKey(0))
    trace = handlers.trace(seeded).get_trace(x, y)
    samples = [s for s in trace.values() if s["type"] == "sample"]
    if not any(site["is_observed"] for site in samples):
        raise UserError("The model observes nothing: give it obs=y where it samples the data.")
    return {site["name"]: site for site in samples if not site["is_observed"]}


def _first(part: Any, count: int) -> Any:
    if isinstance(part, Mapping):
        return {name: _first(value, count) for name, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(_first(value, count) for value in part)
    return np.asarray(part[:count])
