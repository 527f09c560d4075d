"""Adapters: the weighted model is the weighted log-likelihood, in each library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from corefed.base.errors import UserError
from corefed.coreset import build

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax", reason="the extra numpyro is not installed")
import jax.numpy as jnp  # noqa: E402

D = 3
BETA = np.array([0.5, -1.0, 0.2], np.float32)


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2000, D)).astype(np.float32)
    return x, (draw.random(2000) < 1 / (1 + np.exp(-x @ BETA))).astype(np.float32)


def log_likelihood(theta: Any, x: Any, y: Any) -> Any:
    eta = x @ theta
    return y * eta - jnp.logaddexp(eta, 0.0)


def log_prior(theta: Any) -> Any:
    return -0.5 * (theta**2).sum()


def test_numpyro(data: tuple[Any, Any]) -> None:
    """A coreset of a model with a positive parameter; the weighted model's log-density is the
    coreset's log-likelihood and the model's prior; samples go back and are checked."""
    numpyro = pytest.importorskip("numpyro", reason="the extra numpyro is not installed")
    from numpyro import distributions as dist
    from numpyro.infer.util import log_density

    from corefed.coreset.adapters import numpyro as adapter

    def model(x: Any, y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta * (0.5 + scale)), obs=y)

    x, y = data
    coreset = adapter.build(model, x, y, 60, samples=120)
    assert coreset.diagnostics.held_out_error < 0.05
    theta = {"scale": jnp.array(0.3), "beta": jnp.asarray(BETA)}
    points = adapter.points(coreset)
    found, _ = log_density(adapter.weighted(model, coreset), points, {}, theta)
    eta = points[0] @ BETA * 0.8
    expected = coreset.weights.numpy() @ (points[1] * eta - np.logaddexp(eta, 0))
    expected += dist.Normal(0, 1).log_prob(BETA).sum() + dist.HalfNormal(1.0).log_prob(0.3)
    assert float(found) == pytest.approx(float(expected), rel=1e-4)
    many = {"scale": jnp.full(30, 0.3), "beta": jnp.tile(BETA, (30, 1))}
    drawn = adapter.draws(model, coreset, many)
    assert float(drawn["scale"][0]) == pytest.approx(np.log(0.3), abs=1e-5)
    unconstrained = {name: value[0] for name, value in drawn.items()}
    value = float(coreset.log_likelihood(unconstrained))
    assert value == pytest.approx(
        float(coreset.weights.numpy() @ (points[1] * eta - np.logaddexp(eta, 0))), rel=1e-4
    )
    with pytest.raises(UserError, match="run the model on points"):
        log_density(adapter.weighted(model, coreset), (x, y), {}, theta)


def test_what_numpyro_models_are_refused(data: tuple[Any, Any]) -> None:
    numpyro = pytest.importorskip("numpyro", reason="the extra numpyro is not installed")
    from numpyro import distributions as dist

    from corefed.coreset.adapters import numpyro as adapter

    def local(x: Any, y: Any) -> None:
        own = numpyro.sample("own", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
        numpyro.sample("y", dist.Normal(own, 1.0), obs=y)

    def blind(x: Any, y: Any) -> None:
        numpyro.sample("beta", dist.Normal(0.0, 1.0))

    with pytest.raises(UserError, match="entry per point"):
        adapter.build(local, *data, 20)
    with pytest.raises(UserError, match="observes nothing"):
        adapter.build(blind, *data, 20)


def test_a_rare_class(data: tuple[Any, Any]) -> None:
    """The pilot's first gradient is right where all logits would be 0, a kink of NumPyro's."""
    numpyro = pytest.importorskip("numpyro", reason="the extra numpyro is not installed")
    from numpyro import distributions as dist

    from corefed.coreset.adapters import numpyro as adapter

    def model(x: Any, y: Any) -> None:
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([D + 1]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)

    x = np.hstack([data[0], np.ones((2000, 1), np.float32)])
    y = (np.arange(2000) % 10 == 0).astype(np.float32)
    assert adapter.build(model, x, y, 60, samples=120).diagnostics.held_out_error < 0.05


def test_blackjax(data: tuple[Any, Any]) -> None:
    """Built from JAX functions as from the same in PyTorch; a NUTS step on its log-density."""
    blackjax = pytest.importorskip("blackjax", reason="the extra blackjax is not installed")
    from corefed.coreset.adapters.blackjax import FromJax, PriorFromJax, logdensity

    theta0 = np.zeros(D, np.float32)
    likelihood = FromJax(log_likelihood, theta0)
    options: dict[str, Any] = {"data": data, "size": 30, "posterior": "laplace", "samples": 80}
    coreset = build(
        likelihood, theta0=theta0, log_prior=PriorFromJax(log_prior, likelihood), **options
    )

    def in_torch(theta: Any, x: Any, y: Any) -> Any:
        eta = x @ theta
        return y * eta - torch.nn.functional.softplus(eta)

    twin = build(in_torch, theta0=D, log_prior=lambda theta: -0.5 * theta.square().sum(), **options)
    ratio = coreset.diagnostics.uniform_error / twin.diagnostics.uniform_error
    assert ratio == pytest.approx(1, rel=1e-2)
    density = logdensity(coreset, log_likelihood, log_prior)
    expected = float(coreset.log_likelihood(torch.tensor(BETA))) - 0.5 * float((BETA**2).sum())
    assert float(density(jnp.asarray(BETA))) == pytest.approx(expected, rel=1e-5)
    nuts = blackjax.nuts(density, step_size=0.05, inverse_mass_matrix=jnp.full(D, 0.01))
    state, info = jax.jit(nuts.step)(jax.random.PRNGKey(0), nuts.init(jnp.asarray(BETA)))
    assert bool(jnp.isfinite(state.logdensity)) and not bool(info.is_divergent)


def test_pymc(data: tuple[Any, Any]) -> None:
    pm = pytest.importorskip("pymc", reason="the extra pymc is not installed")
    from corefed.coreset.adapters.pymc import points, weighted

    def in_torch(theta: Any, x: Any, y: Any) -> Any:
        eta = x @ theta
        return y * eta - torch.nn.functional.softplus(eta)

    coreset = build(in_torch, data=data, size=30, posterior="laplace", theta0=D, samples=80)
    x, y = points(coreset)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=D)
        weighted("y", pm.Bernoulli.dist(logit_p=x @ beta), y, coreset)
        with pytest.raises(UserError, match="observe points"):
            weighted("z", pm.Bernoulli.dist(logit_p=x @ beta), data[1], coreset)
    # without compilation, which takes longer than everything else here
    logp = model.compile_logp(mode="FAST_COMPILE")
    expected = float(coreset.log_likelihood(torch.tensor(BETA)))
    expected += float(torch.distributions.Normal(0, 1).log_prob(torch.tensor(BETA)).sum())
    assert float(logp({"beta": BETA})) == pytest.approx(expected, rel=1e-4)
    with model:
        trace = pm.sample(
            draws=60, tune=60, chains=1, cores=1, progressbar=False, random_seed=0,
            compute_convergence_checks=False, compile_kwargs={"mode": "FAST_COMPILE"},
        )  # fmt: skip
    draws = trace.posterior["beta"].values[0]
    assert draws.dtype == np.float64 and coreset.check(draws).draws == 60
