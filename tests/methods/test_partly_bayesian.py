"""`bayesian`: some layers have a posterior, the others are point estimates."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from commands import SMALL, corefed
from exact import exact_mean_field
from torch import Tensor, nn

from corefed.base.rng import Streams, Who
from corefed.base.types import Batch, ClientData
from corefed.bayes import gaussian
from corefed.data.synthetic import linear_gaussian
from corefed.methods import pfedbayes, shared_start
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.modules import from_module
from corefed.models.network import Model, mlp

POINTS = 8


class Sum(nn.Module):
    """Linear in all of its weights, which are two layers: y = a x_1 + b x_2 + c."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x[:, :2]) + self.second(x[:, 2:])
        return y


def linear() -> tuple[Model, ClientData, Tensor]:
    """The model, one client, and its design matrix."""
    data = linear_gaussian(1, POINTS, 3, 1.0, seed=3, correlation=0.5)
    x, y = data.x.double(), data.y.double()
    client = ClientData(x.unsqueeze(0), y.unsqueeze(0), torch.ones(1, POINTS, dtype=torch.float64))
    design = torch.cat([x, torch.ones(POINTS, 1)], 1)
    return from_module(Sum(), Gaussian(1, 1.0)), client, design


def quadrature(size: int) -> Tensor:
    half = math.sqrt(size) * torch.eye(size, dtype=torch.float64)
    return torch.cat([half, -half]).unsqueeze(0)


def test_a_partly_bayesian_linear_model_has_its_closed_form() -> None:
    """All means are those of the posterior with the Gaussian prior; widths are where there are any.

    E_q[nll] of a linear model has no term that mixes means and widths.
    """
    model, data, design = linear()
    mean, std = torch.tensor([0.5, -0.3, 0.2, 0.4]), torch.full((4,), 0.6)
    prior = torch.stack([mean, gaussian.rho_of(std)]).double()
    broadcast = {"v": prior.unsqueeze(0)}
    config = pfedbayes.Config(
        zeta=1.0, eta_1=0.6, eta_2=0.0, monte_carlo=8, optimizer="sgd", bayesian="second"
    )
    method = pfedbayes.build(config, model)
    private = method.init_client(broadcast, data)
    working = method.begin(broadcast, private, data, Streams([], 0))
    batch = Batch(data.x, data.y, data.weight / POINTS)
    for _ in range(250):
        working, _ = method.step(working, batch, quadrature(4))
    _, private = method.end(broadcast, working)
    exact, variance = exact_mean_field(design, data.y[0], data.weight[0], mean, std, 1.0)
    torch.testing.assert_close(private["q"][0, 0], exact, rtol=0, atol=1e-4)
    sigma = gaussian.sigma(private["q"][0, 1])
    torch.testing.assert_close(sigma[2:].square(), variance[2:], rtol=1e-3, atol=0)
    torch.testing.assert_close(sigma[:2], std[:2].double())
    seen = gaussian.sigma(method.models(broadcast, private, data)["personal"]["v"][0, 1])
    assert (seen[:2] == gaussian.SIGMA_FLOOR).all()
    assert torch.equal(seen[2:], sigma[2:])


def test_widths_of_points_never_matter() -> None:
    """Other ones lead to the same steps and the same predictions, bit for bit."""
    model = mlp((4, 5, 3), Categorical(3))
    config = shared_start.Config(personal="steps", bayesian="last")
    method = shared_start.build(config, model)
    g = torch.Generator().manual_seed(0)
    data = ClientData(
        torch.randn(1, 6, 4, generator=g), torch.randint(3, (1, 6), generator=g), torch.ones(1, 6)
    )
    streams = Streams([Who(0, 0)], 0)
    v = method.init_server(streams)["v"].unsqueeze(0)
    other = v.clone()
    other[:, 1, :25] = 1.0
    noise = torch.randn(1, *method.noise, generator=g)
    found = []
    for start in (v, other):
        broadcast = {"v": start}
        working = method.begin(broadcast, method.init_client(broadcast, data), data, streams)
        for _ in range(3):
            working, _ = method.step(working, Batch(data.x, data.y, data.weight / 6), noise)
        _, private = method.end(broadcast, working)
        kinds = method.models(broadcast, private, data)
        found.append((working, {k: method.predict(m, data.x, noise) for k, m in kinds.items()}))
    (one, first), (two, second) = found
    assert torch.equal(one["mu"], two["mu"])
    assert torch.equal(one["rho"][:, 25:], two["rho"][:, 25:])
    assert torch.equal(two["rho"][:, :25], other[:, 1, :25])
    assert all(torch.equal(first[kind], second[kind]) for kind in first)


def test_a_partly_bayesian_run_predicts_exports_and_takes_newcomers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = ("--method=shared-start", *SMALL[1:], "--set=bayesian=last", f"--out={run}")
    assert corefed("run", *own).code == 0
    g = np.random.default_rng(0)
    file = tmp_path / "south.npz"
    np.savez(file, X=g.random((20, 64), np.float32), y=g.integers(0, 3, 20))
    joined = corefed("personalize", run, "--data", file, "--name", "south", "--steps", "5")
    assert joined.code == 0, joined.err
    said = corefed(
        "predict", run, "--client", "south", "--input", file, "--out", tmp_path / "p.csv"
    )
    assert said.code == 0, said.err
    out = tmp_path / "exported"
    done = corefed("export", run, "--client", "client 1", "--out", out, "--no-program")
    assert done.code == 0, done.err
    wrong = corefed("run", *own[:-2], "--set=bayesian=lsat", f"--out={tmp_path / 'no'}")
    assert wrong.code == 2
    assert "no layer 'lsat'. Did you mean 'last'?" in " ".join(wrong.err.split())
    assert not (tmp_path / "no").exists()
