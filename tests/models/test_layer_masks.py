"""Layers by name, as masks of the flat vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from corefed.base.errors import UserError
from corefed.models.cnn import cnn
from corefed.models.layer_masks import bayesian_entries, layer_mask
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.modules import from_module
from corefed.models.network import mlp


def test_an_mlp() -> None:
    model = mlp((4, 3, 2), Categorical(2))
    assert layer_mask(model, "all").all()
    assert bayesian_entries(model, "all") is None
    first = torch.arange(model.size) < 15
    assert torch.equal(layer_mask(model, "layer-1"), first)
    assert torch.equal(layer_mask(model, "last"), ~first)
    assert layer_mask(model, "layer-1, layer-2").all()


def test_the_noise_of_a_regression_always_has_a_posterior() -> None:
    model = mlp((4, 3, 1), Gaussian(1, 0.5, learn_noise=True))
    mask = layer_mask(model, "layer-1")
    assert mask[-1]
    assert int(mask.sum()) == 16


def test_a_convolutional_network() -> None:
    model = cnn((1, 8, 8), (2, 3), (5,), Categorical(2))
    names = [name for name, _ in model.layers]
    assert names == ["conv-1", "conv-2", "layer-1", "layer-2"]
    ends = [at.stop for _, at in model.layers]
    assert [at.start for _, at in model.layers] == [0, *ends[:-1]]
    assert ends[-1] == model.size
    assert int(layer_mask(model, "conv-1").sum()) == 2 * 9 + 2
    assert int(layer_mask(model, "last").sum()) == 5 * 2 + 2


def test_a_module_of_ones_own() -> None:
    """A name stands for all layers below it; the last one is that of the output."""
    body = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    module = nn.ModuleDict({"body": body, "norm": nn.LayerNorm(3), "head": nn.Linear(3, 2)})
    model = from_module(module, Categorical(2), last="head")
    assert [name for name, _ in model.layers] == ["body.0", "body.2", "norm", "head"]
    assert int(layer_mask(model, "body").sum()) == 4 * 3 + 3 + 3 * 3 + 3
    assert int(layer_mask(model, "last").sum()) == 3 * 2 + 2
    with pytest.raises(
        UserError, match=r"no layer 'boddy'. Did you mean 'body.\d'\? It has body.0,"
    ):
        layer_mask(model, "boddy")
    with pytest.raises(UserError, match="no layer ''"):
        layer_mask(model, "")
