"""Many heads on shared features, against whole networks."""

from __future__ import annotations

import pytest
import torch

from corefed.bayes import heads
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.models.network import mlp


@pytest.mark.parametrize(
    "likelihood", [Categorical(3), Gaussian(2, 0.3), Gaussian(2, learn_noise=True)]
)
def test_log_likelihoods_are_those_of_whole_networks(likelihood: Likelihood) -> None:
    clients, draws, points = 2, 4, 5
    model = mlp((3, 6, likelihood.outputs), likelihood)
    assert model.head is not None
    theta, x = torch.randn(clients, model.size), torch.randn(clients, points, 3)
    y = torch.randint(3, (clients, points))
    if not isinstance(likelihood, Categorical):
        y = torch.randn(clients, points, 2)
    where = heads.span(model.head)
    drawn = torch.randn(clients, draws, where.stop - where.start)
    whole = theta.unsqueeze(1).repeat(1, draws, 1)
    whole[..., where] = drawn
    features = model.head.features(theta.unsqueeze(1), x).squeeze(1)
    found = heads.log_likelihoods(model, theta, features, drawn, y)
    torch.testing.assert_close(found, model.log_likelihood(whole, x, y).mT)
    alone = heads.log_likelihoods(model, theta[1], features[1], drawn[1], y[1])
    torch.testing.assert_close(alone, found[1])
