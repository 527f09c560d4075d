"""What is recorded of a coreset is its error at independent draws of all layers."""

from __future__ import annotations

import torch

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.models.likelihood import Gaussian
from corefed.models.network import mlp
from corefed.selectors import calibrated, quality
from corefed.selectors.frame import Look
from corefed.selectors.settings import Renewal, Selection

N, K, LOOKS = 800, 80, 120


def test_the_recorded_error_is_that_at_draws_of_all_layers() -> None:
    """A network whose lower layers matter most: with one shared draw of them, half of the ratio.

    A measurement's ratio has the bias 2 / (S - 3) of a variance in a denominator, S = 32.
    """
    torch.manual_seed(0)
    x = torch.randn(1, N, 10)
    y = torch.sin(2 * x[..., :1]) + 0.3 * torch.randn(1, N, 1)
    model = mlp((10, 30, 30, 1), Gaussian(1, noise=0.3), 1.0)
    mu = model.init(torch.Generator().manual_seed(1), 0.3).requires_grad_()
    optimizer = torch.optim.Adam([mu], lr=0.01)
    for _ in range(300):
        loss = -model.log_likelihood(mu.view(1, 1, -1), x, y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    q = torch.stack([mu.detach(), gaussian.rho_of(torch.full_like(mu.detach(), 0.02))])[None]
    data, k = ClientData(x, y, torch.ones(1, N)), torch.tensor([K])
    look = Look(model, q, q, data, k, torch.zeros(1, N), Streams([Who(0, 0)], 0))
    weight = calibrated.select(look).weight

    theta = gaussian.sample(q, torch.randn(1, 2000, model.size))
    log_p = model.log_likelihood(theta, x, y).mT.double()
    g = log_p - log_p.mean(-1, keepdim=True)
    true = float(quality.judge(g, weight.double(), k, data.weight > 0).over_uniform)
    settings, due = (Selection(), Renewal()), torch.tensor([True])
    found = torch.stack([
        quality.measure(model, q, weight, data, k, Streams([Who(s, 1)], 1), settings, due)
        .over_uniform for s in range(LOOKS)
    ]) / true  # fmt: skip
    error = float(found.std()) / LOOKS**0.5
    assert abs(float(found.mean()) - 1) < 4 * error + 2 / 29
