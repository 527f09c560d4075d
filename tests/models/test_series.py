"""The networks for series, compared with torch's own layers, and in a federation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from method_rows import SMALL, TIGHT, assert_same, run
from saved_state import bits_of
from torch import Tensor, nn
from torch.func import functional_call

from corefed import resolve, train
from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.methods import registry
from corefed.models import own
from corefed.models.attention import PlainAttention
from corefed.models.likelihood import Categorical
from corefed.models.network import Model
from corefed.models.series import SERIES, Block, Cell, Gated, LongShortTerm, Series, series_shape
from corefed.settings.config import check_model
from corefed.settings.fields import from_flat, list_settings
from corefed.settings.run import CONVOLUTIONAL, MODELS, default_scale
from corefed.training import fitted
from corefed.training.setup import concrete, prepare
from corefed.use.export import package, program

EXACT = {"rtol": 1e-10, "atol": 1e-10}
"""Sums of some dozen products of numbers around 1 in float64, where one rounding is 1e-16."""

CLASSES, POINTS = 3, 5
SHAPES = {"one channel": (7,), "two channels": (2, 9)}

every_series = pytest.mark.parametrize("model", SERIES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def factory(model: str) -> Series:
    return Series(model, (3, 2), (4, 4))


def build(model: str, shape: tuple[int, ...]) -> Model:
    return own.build(
        model, shape, Categorical(CLASSES), memory_mb=100, batch=8, factory=factory(model)
    )


# The networks


@pytest.mark.parametrize(
    ("cell", "torchs"), [(LongShortTerm, nn.LSTM), (Gated, nn.GRU)], ids=["lstm", "gru"]
)
def test_a_cell_is_torchs_with_one_bias(cell: type[Cell], torchs: type[nn.Module]) -> None:
    mine, theirs = cell(2, 5).double(), torchs(2, 5, batch_first=True).double()
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            kind = {"weight_ih_l0": mine.input.weight, "weight_hh_l0": mine.state.weight}
            value.copy_(kind.get(name, mine.input.bias if name == "bias_ih_l0" else 0 * value))
    x = normal(POINTS, 8, 2)
    torch.testing.assert_close(mine(x), theirs(x)[0], **EXACT)


def test_an_lstm_remembers_at_first() -> None:
    bias = LongShortTerm(1, 100).input.bias.detach().view(4, 100)
    assert bias[:, 0].tolist() == [0, 1, 0, 0]
    assert (bias == bias[:, :1]).all()


@pytest.mark.parametrize("width", [8, 6, 3])
def test_a_block_is_torchs_encoder_layer(width: int) -> None:
    mine = Block(width).double()
    theirs = nn.TransformerEncoderLayer(
        width, mine.heads, 2 * width, dropout=0.0, norm_first=True, batch_first=True
    ).double()
    pairs = [
        (theirs.self_attn.in_proj_weight, mine.mix.weight),
        (theirs.self_attn.in_proj_bias, torch.zeros(3 * width)),
    ]
    for one, other in (
        (theirs.self_attn.out_proj, mine.join), (theirs.linear1, mine.up),
        (theirs.linear2, mine.down), (theirs.norm1, mine.first), (theirs.norm2, mine.second),
    ):  # fmt: skip
        pairs += [(one.weight, other.weight), (one.bias, other.bias)]
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)
    x = normal(POINTS, 7, width)
    with PlainAttention():
        torch.testing.assert_close(mine(x), theirs(x), **EXACT)


def test_convolutions_see_five_steps_and_halve_them() -> None:
    layers = Series("cnn1d", (3, 2, 2), (6,))((2, 5), CLASSES)
    kinds = [type(each).__name__ for each in layers.children()]
    convolved = ["Conv1d", "MaxPool1d", "ReLU", "Conv1d", "MaxPool1d", "ReLU", "Conv1d", "ReLU"]
    assert kinds == ["Steps", *convolved, "Flatten", "Linear", "ReLU", "Linear"]
    assert [tuple(p.shape) for p in layers.parameters() if p.dim() == 3] == [
        (3, 2, 5), (2, 3, 5), (2, 2, 5)
    ]  # fmt: skip
    assert layers(normal(4, 2, 5).float()).shape == (4, CLASSES)


@every_series
def test_one_number_per_step_is_one_channel(model: str) -> None:
    torch.manual_seed(0)
    flat = factory(model)((7,), CLASSES).double()
    deep = factory(model)((1, 7), CLASSES).double()
    deep.load_state_dict(flat.state_dict())
    x = normal(POINTS, 7)
    torch.testing.assert_close(flat(x), deep(x.unsqueeze(1)), **EXACT)


@every_series
def test_the_order_of_steps_matters(model: str) -> None:
    torch.manual_seed(0)
    made, x = factory(model)((7,), CLASSES).double(), normal(POINTS, 7)
    assert not torch.allclose(made(x), made(x.flip(-1)), atol=1e-4)


@every_series
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_stacked_clients_and_draws_are_modules_one_by_one(
    model: str, shape: tuple[int, ...]
) -> None:
    made, reference = build(model, shape), factory(model)(shape, CLASSES).double()
    named = [(name, p.shape, p.numel()) for name, p in reference.named_parameters()]
    assert made.size == sum(numel for *_, numel in named)
    x, direction = normal(2, POINTS, *shape, seed=1), normal(2, 3, POINTS, CLASSES, seed=2)

    def alone(theta: Tensor, x: Tensor) -> Tensor:
        outputs = []
        for c in range(2):
            for one in theta[c]:
                parts = one.split([numel for *_, numel in named])
                weights = {n: p.view(s) for (n, s, _), p in zip(named, parts, strict=True)}
                outputs.append(functional_call(reference, weights, (x[c],)))
        return torch.stack(outputs).unflatten(0, (2, 3))

    found, expected = [], []
    for results, f in ((found, made.forward), (expected, alone)):
        theta = (0.5 * normal(2, 3, made.size)).requires_grad_()
        output = f(theta, x)
        results += [output.detach(), *torch.autograd.grad((output * direction).sum(), theta)]
    torch.testing.assert_close(found, expected, **EXACT)
    assert made.head is not None
    theta = theta.detach()
    weight = theta[..., made.head.weight].unflatten(-1, (CLASSES, made.head.width))
    bias = theta[..., made.head.bias].unsqueeze(2)
    torch.testing.assert_close(
        made.head.features(theta, x) @ weight.mT + bias, made.forward(theta, x), **EXACT
    )


# What they are built for


def test_shape_of_a_series() -> None:
    assert series_shape((60,), "gru") == (1, 60)
    assert series_shape((12, 1000), "gru") == (12, 1000)
    for point in ((), (1,), (3, 1), (1, 8, 8)):
        with pytest.raises(UserError, match=r"gru needs series: points of shape \[steps\]"):
            series_shape(point, "gru")


@pytest.mark.parametrize(
    ("model", "hidden", "words"),
    [("lstm", (), "lstm needs at least one width"), ("transformer", (), "at least one width"),
     ("transformer", (8, 6), "repeated for every block, as in hidden=64,64; it is 8,6"),
     ("transformer", (7,), "one even width in hidden")],
)  # fmt: skip
def test_widths_that_cannot_be(model: str, hidden: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Series(model, (4,), hidden)((9,), 2)


def test_every_name_is_known_everywhere() -> None:
    assert own.BUILT_IN == MODELS
    for model in MODELS:
        check_model(model)
        assert not own.is_own(model)
        assert default_scale(model) == (
            "features" if model in SERIES else "standard" if model in CONVOLUTIONAL else "unit"
        )
    with pytest.raises(UserError, match="Did you mean 'lstm'"):
        check_model("lstmm")


def test_images_are_no_series() -> None:
    flags = {"data": "cifar10", "model": "gru"}
    assert concrete(resolve(flags=flags)).run.scale == "features"
    with pytest.raises(UserError, match=r"gru needs series: .* not \[3, 32, 32\]"):
        own.build("gru", (3, 32, 32), Categorical(2), memory_mb=9, batch=8, factory=factory("gru"))


# In a federation


def series(dtype: torch.dtype = torch.float64) -> ClientData:
    """Unequal clients, one with a single point."""
    sizes = torch.tensor([9, 20, 1])
    weight = (torch.arange(20) < sizes.unsqueeze(-1)).to(dtype)
    y = torch.arange(20).remainder(CLASSES).expand(3, -1) * weight.long()
    x = (normal(3, 20, 2, 6) + y.view(3, 20, 1, 1)).to(dtype) * weight.view(3, 20, 1, 1)
    return ClientData(x, y, weight)


@every_series
@pytest.mark.parametrize("name", ["fedavg", "pfedbayes", "coreset-pfedbayes"])
def test_loop_and_vmap_agree(model: str, name: str) -> None:
    config = registry.config_class(name)
    fields = {each.name for each in list_settings(config)}
    small = {key: value for key, value in SMALL.items() if key in fields}
    method = registry.build(name, from_flat(config, small), build(model, (2, 6)))
    one, all_ = (run(method, series(), chunk=chunk, rounds=1) for chunk in (1, 3))
    assert all(value.isfinite().all() for value in one.messages[-1].values())
    assert_same(all_, one, **TIGHT)


@every_series
def test_it_learns_which_of_two_bumps_comes_first(model: str) -> None:
    """Up then down, or down then up, at any two places.

    At this rate losses end near 0.001. At twice the rate attention swings, on each kind of
    processor otherwise.
    """
    g = torch.Generator().manual_seed(0)
    y = torch.randint(2, (2, 40), generator=g)
    places = torch.rand(2, 40, 8, generator=g).argsort(-1)[..., :2].sort(-1).values
    bumps = torch.tensor([2.0, -2.0]) * (2 * y - 1).unsqueeze(-1)
    x = (0.2 * torch.randn(2, 40, 8, generator=g)).scatter_add(-1, places, bumps)
    data = ClientData(x, y, torch.ones(2, 40))
    made = own.build(
        model, (8,), Categorical(2), memory_mb=100, batch=8, factory=Series(model, (6, 6), (16,))
    )
    config = registry.config_class("independent")(learning_rate=0.01, optimizer="adam")
    losses = run(registry.build("independent", config, made), data, rounds=120).losses
    assert losses[-1].item() < 0.3 * math.log(2) < math.log(2) < 2 * losses[0].item()


RUN = {
    "method": "pfedbayes", "client_column": "site", "rounds": 2, "local_steps": 2, "hidden": "4",
    "channels": "3,2", "device": "cpu", "evaluate_draws": 2, "evaluate_every": 1,
    "checkpoint_every": 1,
}  # fmt: skip


@every_series
def test_a_run_is_resumed_and_exported(model: str, tmp_path: Path) -> None:
    """Arrays [n, channels, steps]: stopped after a round, resumed, and taken out of the run."""
    g = np.random.default_rng(0)
    x = g.normal(50, 9, (60, 2, 6)).astype(np.float32)
    site = np.repeat(["north", "south"], 30)
    np.savez(tmp_path / "series.npz", X=x, y=(x[:, 0, 0] > x[:, 0, 5]).astype(int), site=site)
    flags = {**RUN, "data": f"npz:{tmp_path}/series.npz", "model": model}
    setup = prepare(resolve(flags=flags))
    assert (setup.experiment.run.scale, setup.data.train.x.shape[2:]) == ("features", (2, 6))
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(resolve(flags=flags), straight)
    train(resolve(flags={**flags, "rounds": 1, "planned_rounds": 2}), stopped)
    train(resolve(flags={**flags, "planned_rounds": 2}), stopped, resume=True)
    assert bits_of(stopped) == bits_of(straight)

    fit = fitted.load(straight)
    taken = package.take(fit, "north", shared=False, seed=None)
    made = program.predictive(
        taken.network, taken.draws, taken.likelihood, taken.preparation, "north", taken.temperature
    )
    points = torch.from_numpy(x[:7])
    ready = fit.preparations[0].scale(points.clone(), "north")
    expected = fit.predict("north", ready).mean.float()
    torch.testing.assert_close(made(points)["probabilities"], expected, rtol=0, atol=2e-5)
    assert program.compiled(made)
