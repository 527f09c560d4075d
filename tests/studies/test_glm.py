"""`reproduce glm` at its quick scale, and the Hamiltonian Monte Carlo that checks Laplace."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from corefed.bayes.regression import Normal, gaussian, kl, laplace, linear_posterior, poisson
from corefed.coreset import solvers
from corefed_studies.reproduce import curves, glm, hamiltonian

QUIET = Console(file=io.StringIO())


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sets in the shape of the published ones."""
    draws = np.random.default_rng(0)
    x = np.column_stack([draws.normal(size=(300, 2)), np.ones(300)])
    eta = x @ (1.0, -1.0, 0.5)
    (tmp_path / "data/coresets").mkdir(parents=True)
    label = np.where(draws.random(300) < 1 / (1 + np.exp(-eta)), 1, -1)
    np.savez(tmp_path / "data/coresets/synth_lr.npz", X=x, y=label)
    count = draws.poisson(np.logaddexp(0, eta))
    np.savez(tmp_path / "data/coresets/synth_poiss.npz", X=x, y=count)
    monkeypatch.setenv("COREFED_DATA", str(tmp_path / "data"))
    return tmp_path


# --- Hamiltonian Monte Carlo ----------------------------------------------------------------------


def linear(noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Normal]:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=draws, dtype=torch.float64)
    y = x.sum(-1) + noise * torch.randn(50, generator=draws, dtype=torch.float64)
    weight = 2 * torch.rand(50, generator=draws, dtype=torch.float64)
    weight[::2] = 0
    return x, y, weight, Normal(torch.zeros(3).double(), torch.eye(3).double())


def test_chains_have_the_moments_of_an_exact_posterior() -> None:
    """Started from a wrong Gaussian: a shifted mean and twice the std, which they must forget.

    Means within four of their own standard errors. The variance of N independent draws has a
    relative error sqrt(2 / N); successive ones are correlated here, so allow for N / 4 of them.
    """
    x, y, weight, prior = linear(0.5)
    exact = linear_posterior(x, y, weight, prior, 0.5)
    start = Normal(exact.mean + exact.covariance.diagonal().sqrt(), 4 * exact.covariance)
    run = hamiltonian.sample(
        *(gaussian(0.5), x, y, weight, prior, start),
        chains=40,
        draws=250,
        generator=torch.Generator().manual_seed(0),
    )
    assert run.theta.shape == (250, 40, 3)
    assert ((run.mean - exact.mean).abs() < 4 * run.standard_error()).all()
    ratio = run.std.square() / exact.covariance.diagonal()
    assert ((ratio - 1).abs() < 4 * (2 / (10000 / 4)) ** 0.5).all()
    assert float(run.r_hat().max()) < 1.02
    assert 0.6 < run.acceptance < 1


def test_chains_weigh_points_as_often_as_they_say() -> None:
    """A run on doubled weights is a run on doubled data, draw for draw."""
    x, y, weight, prior = linear(0.5)
    count = (weight.abs() > 0).double()
    start = linear_posterior(x, y, 2 * count, prior, 0.5)
    runs = [
        hamiltonian.sample(
            *(gaussian(0.5), *data, prior, start),
            chains=2,
            draws=5,
            generator=torch.Generator().manual_seed(0),
        )
        for data in (
            (x, y, 2 * count),
            (torch.cat([x, x]), torch.cat([y, y]), torch.cat([count, count])),
        )
    ]
    torch.testing.assert_close(runs[0].theta, runs[1].theta)


def test_r_hat_sees_chains_that_disagree() -> None:
    noise = torch.randn(100, 4, 1, generator=torch.Generator().manual_seed(0))
    assert float(hamiltonian.Chains(noise, 1.0).r_hat()) < 1.05
    apart = noise + torch.tensor([0.0, 0.0, 3.0, 3.0]).reshape(4, 1)
    assert float(hamiltonian.Chains(apart, 1.0).r_hat()) > 1.5
    drifting = noise + torch.linspace(0, 10, 100).reshape(100, 1, 1)
    assert float(hamiltonian.Chains(drifting, 1.0).r_hat()) > 1.5


def test_monte_carlo_agrees_with_quadrature_where_laplace_does_not() -> None:
    """One coefficient, four counts: skewed enough to tell the mean from the mode."""
    x = torch.ones(4, 1, dtype=torch.float64)
    y = torch.tensor([0.0, 0.0, 1.0, 0.0]).double()
    prior = Normal(torch.zeros(1).double(), 9 * torch.eye(1).double())
    ones = torch.ones(4, dtype=torch.float64)
    mode = laplace(poisson, x, y, ones, prior)
    grid = torch.linspace(-20, 20, 20001, dtype=torch.float64)
    log_p = poisson.log_p(grid, y.unsqueeze(-1)).sum(0) - grid.square() / 18
    density = (log_p - log_p.max()).exp()
    mean = float((density * grid).sum() / density.sum())
    run = hamiltonian.sample(
        *(poisson, x, y, ones, prior, mode),
        chains=40,
        draws=250,
        generator=torch.Generator().manual_seed(0),
    )
    error = float(run.standard_error())
    assert abs(float(run.mean) - mean) < 4 * error
    assert abs(float(mode.mean) - mean) > 10 * error


# --- the experiment -------------------------------------------------------------------------------


def test_quick_writes_everything_and_goes_on_where_it_was(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = sets / "out"
    out.mkdir()
    glm.reproduce("glm", "quick", out, QUIET)
    text = (out / "glm.md").read_text()
    assert "| synth_lr | logistic, d = 3 | 1000 |" in text
    assert "| synth_poiss | poisson, d = 3 | 1000 |" in text
    assert (out / "glm.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((out / "glm.json").read_text())
    by_key = {(each["set"], each["solver"], each["k"]): each for each in figures["summary"]}
    for name in ("synth_lr", "synth_poiss"):
        best, plain = (by_key[name, solver, 100] for solver in (solvers.DEFAULT, "uniform"))
        for metric in ("held_out", "reverse_kl", "forward_kl"):
            assert best[metric]["mean"] < 0.01 * plain[metric]["mean"]

    def refuse(*arguments: object) -> None:
        raise AssertionError("a kept measurement was made again")

    monkeypatch.setattr(glm, "measure", refuse)
    monkeypatch.setattr(glm, "check", refuse)
    glm.reproduce("glm", "quick", out, QUIET)
    assert (out / "glm.md").read_text() == text


def test_a_coreset_of_everything_is_the_truth(sets: Path) -> None:
    for name in ("synth_lr", "synth_poiss"):
        this = glm.load(name)
        assert float(kl(this.posterior(torch.ones_like(this.y)), this.truth)) < 1e-20
        thetas = this.truth.sample(50, torch.Generator().manual_seed(0))
        everything = this.problem(thetas, len(this.y))
        w = torch.ones(1, len(this.y), dtype=torch.float64)
        assert curves.relative_objective(everything, w) < 1e-20


def test_sparse_vi_draws_from_its_own_posterior(sets: Path) -> None:
    """It gets what it needs, and its coreset beats as many points at random."""
    this, setting = glm.load("synth_lr"), glm.SETTINGS["quick"]
    mcmc = {"mean": [0.0] * 3, "std": [1.0] * 3}
    lines = [
        glm.measure(this, setting, 0, curves.Contender(name, name), 40, mcmc)
        for name in ("sparse-vi", "uniform")
    ]
    assert lines[0]["reverse_kl"] < lines[1]["reverse_kl"]


def test_paper_scale_measures_everything() -> None:
    setting = glm.SETTINGS["paper"]
    keys = [key for key, _ in glm.jobs(setting)]
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    assert {key["solver"] for key in keys} == {*solvers.SOLVERS, curves.LONG.label}
    assert len({key["set"] for key in keys}) == 6
    assert {key["seed"] for key in keys} == set(range(5))
    assert setting.chains * setting.chain_draws == 20000
    assert setting.draws >= 2 * max(setting.sizes)
