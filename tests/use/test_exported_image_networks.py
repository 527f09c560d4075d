"""Exported modules of networks for images are the networks that were trained."""

from __future__ import annotations

import pytest
import torch

from corefed.models.likelihood import Categorical
from corefed.settings.config import resolve
from corefed.training import setup
from corefed.use.export.network import network


@pytest.mark.parametrize("model", ["cnn", "cnn-pfllib", "cnn-niid", "resnet"])
@pytest.mark.parametrize("shape", [(3, 16, 18), (256,)])
def test_the_module_is_the_network(model: str, shape: tuple[int, ...]) -> None:
    flags = {"data": "mnist", "model": model, "channels": "4,6", "hidden": "5"}
    run = resolve(flags=flags).run
    trained = setup.network(run, shape, 3, 0)
    theta = trained.init(torch.Generator().manual_seed(0), 0.1)
    exported = network(run, shape, Categorical(3).outputs)
    assert exported.size == trained.size
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(1))
    expected = trained.forward(theta.view(1, 1, -1), x.unsqueeze(0))[0, 0]
    torch.testing.assert_close(exported.with_weights(theta)(x), expected, rtol=1e-4, atol=1e-5)
    names: dict[str, object] = {}
    exec(exported.code, names)  # the card's code makes the same network
    made = names["network"]
    assert isinstance(made, torch.nn.Module)
    assert sum(p.numel() for p in made.parameters()) == trained.size
