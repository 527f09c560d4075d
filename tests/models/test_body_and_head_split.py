"""Where the last layer lies in a flat vector: built-in networks, and a user's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from corefed.models.body_and_head import body_and_head
from corefed.models.cnn import cnn
from corefed.models.layer_masks import layer_mask
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.modules import from_module
from corefed.models.network import Model, mlp

MODULE = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
MODELS = {
    "mlp": mlp((5, 4, 3), Categorical(3)),
    "learnt noise": mlp((5, 4, 3), Gaussian(3, 0.5, learn_noise=True)),
    "cnn": cnn((1, 8, 8), (2, 2), (4,), Categorical(3)),
    "module": from_module(MODULE, Categorical(3), last="2"),
}


def last_layer(model: Model) -> Tensor:
    """Without what the likelihood learns, which belongs to every mask."""
    mask = layer_mask(model, "last")
    mask[model.size - model.likelihood.extra :] = False
    return mask


@pytest.mark.parametrize("name", MODELS)
def test_the_mask_and_the_split_agree(name: str) -> None:
    model = MODELS[name]
    mask = last_layer(model)
    assert mask.shape == (model.size,) and mask.sum() == 4 * 3 + 3
    split = body_and_head(model, "a method")
    theta = torch.arange(2.0 * model.size).view(2, -1)
    assert torch.equal(split.head(theta), theta[:, mask])
    assert torch.equal(split.body(theta), theta[:, ~mask])
    assert torch.equal(split.join(split.body(theta), split.head(theta)), theta)


@pytest.mark.parametrize("name", MODELS)
def test_features_do_not_depend_on_the_head(name: str) -> None:
    model = MODELS[name]
    mask = last_layer(model)
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(1, 1, model.size, generator=g)
    x = torch.randn(1, 6, *((1, 8, 8) if name == "cnn" else (5,)), generator=g)
    changed = theta + mask
    assert model.head is not None
    assert torch.equal(model.head.features(theta, x), model.head.features(changed, x))
    assert not torch.allclose(model.forward(theta, x), model.forward(changed, x))
