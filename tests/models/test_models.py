"""Networks over flat vectors against nn.Module, client by client and draw by draw."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.bayes.predict import predictive
from corefed.methods import pfedbayes
from corefed.models.cnn import cnn
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.models.modules import from_module
from corefed.models.network import STANDARDISED, Model, mlp

WIDTHS = [(4, 3), (4, 6, 3), (5, 7, 6, 2), (1, 1), (3, 1, 2)]
CLIENTS, DRAWS, POINTS = 3, 4, 6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def sequential(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.GroupNorm(1, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3 * 2 * 2, 3),
    ).double()


def one_by_one(module: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    """The module run for each client and draw on its own, its weights overwritten each time."""
    size = parameters_to_vector(module.parameters()).numel()
    outputs = []
    for c in range(theta.shape[0]):
        for k in range(theta.shape[1]):
            vector_to_parameters(theta[c, k, :size], module.parameters())
            outputs.append(module(x[c]).detach())
    return torch.stack(outputs).unflatten(0, theta.shape[:2])


@pytest.mark.parametrize("widths", WIDTHS)
def test_mlp_is_a_sequential_of_linear_and_relu(widths: tuple[int, ...]) -> None:
    module = sequential(widths)
    model = mlp(widths, Categorical(widths[-1]))
    assert model.size == sum(p.numel() for p in module.parameters())
    assert model.outputs == widths[-1]
    for clients, draws in ((1, 1), (1, DRAWS), (CLIENTS, 1), (CLIENTS, DRAWS)):
        theta = normal(clients, draws, model.size)
        x = normal(clients, POINTS, widths[0], seed=1)
        expected = one_by_one(module, theta, x)
        assert expected.shape == (clients, draws, POINTS, widths[-1])
        torch.testing.assert_close(model.forward(theta, x), expected)


def test_mlp_flattens_images() -> None:
    model = mlp((12, 5, 3), Categorical(3))
    theta, x = normal(2, 3, model.size), normal(2, POINTS, 3, 2, 2, seed=1)
    assert torch.equal(model.forward(theta, x), model.forward(theta, x.flatten(2)))


@pytest.mark.parametrize("widths", WIDTHS)
def test_from_module_agrees_with_mlp(widths: tuple[int, ...]) -> None:
    by_hand = mlp(widths, Categorical(widths[-1]))
    wrapped = from_module(sequential(widths), Categorical(widths[-1]))
    assert (wrapped.size, wrapped.outputs) == (by_hand.size, by_hand.outputs)
    theta, x = normal(CLIENTS, DRAWS, by_hand.size), normal(CLIENTS, POINTS, widths[0], seed=1)
    torch.testing.assert_close(wrapped.forward(theta, x), by_hand.forward(theta, x))


def test_from_module_is_functional_call_for_each_client_and_draw() -> None:
    module = conv_net()
    model = from_module(module, Categorical(3))
    theta, x = normal(CLIENTS, DRAWS, model.size), normal(CLIENTS, POINTS, 2, 4, 4, seed=1)
    found = model.forward(theta, x)
    assert found.shape == (CLIENTS, DRAWS, POINTS, 3)
    names = [(name, p.shape, p.numel()) for name, p in module.named_parameters()]
    for c in range(CLIENTS):
        for k in range(DRAWS):
            parts = theta[c, k].split([numel for *_, numel in names])
            weights = {n: p.view(s) for (n, s, _), p in zip(names, parts, strict=True)}
            torch.testing.assert_close(found[c, k], functional_call(module, weights, (x[c],)))


def test_from_module_keeps_buffers_and_leaves_the_module_alone() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("factor", torch.tensor([2.0, -1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    module = Scaled()
    before = parameters_to_vector(module.parameters()).clone()
    model = from_module(module, Categorical(2))
    theta, x = normal(2, 3, model.size).float(), normal(2, POINTS, 3, seed=1).float()
    w, b = theta[..., :6].unflatten(-1, (2, 3)), theta[..., 6:]
    expected = (torch.einsum("ckoi,cni->ckno", w, x) + b.unsqueeze(2)) * torch.tensor([2.0, -1.0])
    torch.testing.assert_close(model.forward(theta, x), expected)
    assert torch.equal(parameters_to_vector(module.parameters()), before)
    assert all(p.grad is None for p in module.parameters())


def test_gradients_pass_through_both() -> None:
    widths = (4, 6, 3)
    x, y = normal(CLIENTS, POINTS, 4, seed=1), torch.arange(POINTS).remainder(3).expand(CLIENTS, -1)
    gradients = []
    for model in (mlp(widths, Categorical(3)), from_module(sequential(widths), Categorical(3))):
        theta = normal(CLIENTS, DRAWS, model.size).requires_grad_()
        (by_theta,) = torch.autograd.grad(model.log_likelihood(theta, x, y).sum(), theta)
        gradients.append(by_theta)
    torch.testing.assert_close(*gradients)


# Refusals


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.BatchNorm1d(3), "'body.norm' (BatchNorm1d)"),
        (nn.BatchNorm2d(3, track_running_stats=False), "'body.norm' (BatchNorm2d)"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "'body.norm' (InstanceNorm1d)"),
    ],
)
def test_batch_statistics_are_refused_by_name(layer: nn.Module, named: str) -> None:
    body = nn.Sequential(OrderedDict(linear=nn.Linear(4, 3), norm=layer))
    module = nn.Sequential(OrderedDict(body=body, head=nn.Linear(3, 2)))
    with pytest.raises(UserError) as refused:
        from_module(module, Categorical(2))
    assert str(refused.value).startswith(f"Layer {named} keeps statistics of its batches")
    assert "use nn.GroupNorm or nn.LayerNorm" in str(refused.value)


def test_dropout_is_refused_by_name_unless_it_is_off() -> None:
    module = nn.Sequential(OrderedDict(linear=nn.Linear(4, 2), drop=nn.Dropout(0.5)))
    with pytest.raises(UserError, match=r"Layer 'drop' \(Dropout\) is in training mode"):
        from_module(module, Categorical(2))
    from_module(module.eval(), Categorical(2))


def test_norms_within_a_point_are_accepted() -> None:
    for layer in (nn.LayerNorm(4), nn.GroupNorm(2, 4)):
        model = from_module(nn.Sequential(layer, nn.Linear(4, 2)).double(), Categorical(2))
        x = normal(2, POINTS, 4, seed=1)
        assert model.forward(normal(2, 3, model.size), x).shape == (2, 3, POINTS, 2)


@pytest.mark.parametrize("widths", [(), (4,), (4, 0, 2), (0, 2)])
def test_networks_without_a_width_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="an input and an output width of at least 1"):
        mlp(widths, Categorical(2))


# Initial means


def test_initial_means() -> None:
    """mlp: N(0, std^2), the std of n values known to std / sqrt(2n). A module: its own weights."""
    model = mlp((50, 40, 10), Categorical(10))
    mu = model.init(torch.Generator().manual_seed(0), 0.1)
    assert mu.shape == (model.size,)
    assert abs(float(mu.std()) / 0.1 - 1) < 4 / math.sqrt(2 * model.size)
    assert abs(float(mu.mean())) < 4 * 0.1 / math.sqrt(model.size)
    assert torch.equal(mu, model.init(torch.Generator().manual_seed(0), 0.1))
    module = conv_net()
    wrapped = from_module(module, Categorical(3))
    own = wrapped.init(torch.Generator().manual_seed(0), 0.1)
    assert torch.equal(own, parameters_to_vector(module.parameters()))


# Heads


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("learn_noise", [False, True])
def test_features_and_head_make_up_the_network(widths: tuple[int, ...], learn_noise: bool) -> None:
    model = mlp(widths, Gaussian(widths[-1], learn_noise=learn_noise))
    head = model.head
    assert head is not None
    assert head.width == widths[-2]
    assert head.bias.start == head.weight.stop  # potentials.py draws both at once
    theta, x = normal(CLIENTS, DRAWS, model.size), normal(CLIENTS, POINTS, widths[0], seed=1)
    features = head.features(theta, x)
    assert features.shape == (CLIENTS, DRAWS, POINTS, head.width)
    weight = theta[..., head.weight].unflatten(-1, (model.outputs, head.width))
    output = features @ weight.mT + theta[..., head.bias].unsqueeze(2)
    torch.testing.assert_close(output, model.forward(theta, x))


def test_features_of_a_linear_model_are_its_inputs() -> None:
    model = mlp((4, 3), Categorical(3))
    assert model.head is not None
    x = normal(CLIENTS, POINTS, 4, seed=1)
    features = model.head.features(normal(CLIENTS, DRAWS, model.size), x)
    assert torch.equal(features, x.unsqueeze(1).expand(-1, DRAWS, -1, -1))


# Likelihoods


def test_log_likelihood_of_classes() -> None:
    model = mlp((4, 5, 3), Categorical(3))
    theta, x = normal(CLIENTS, DRAWS, model.size), normal(CLIENTS, POINTS, 4, seed=1)
    y = torch.randint(3, (CLIENTS, POINTS), generator=torch.Generator().manual_seed(2))
    found = model.log_likelihood(theta, x, y)
    assert found.shape == (CLIENTS, DRAWS, POINTS)
    for k in range(DRAWS):
        logits = model.forward(theta, x)[:, k]
        expected = torch.distributions.Categorical(logits=logits).log_prob(y)
        torch.testing.assert_close(found[:, k], expected)


def build(widths: tuple[int, ...], likelihood: Likelihood, module: bool) -> Model:
    return from_module(sequential(widths), likelihood) if module else mlp(widths, likelihood)


@pytest.mark.parametrize("module", [False, True], ids=["mlp", "module"])
@pytest.mark.parametrize("widths", [(4, 2), (4, 5, 2)])
def test_known_and_learnt_noise(widths: tuple[int, ...], module: bool) -> None:
    """Learnt, the log of the noise is the last entry of theta, and no weight of the network."""
    known = build(widths, Gaussian(2, noise=0.5), module)
    learnt = build(widths, Gaussian(2, noise=0.5, learn_noise=True), module)
    assert learnt.size == known.size + 1
    mu = learnt.init(torch.Generator().manual_seed(0), 0.1)
    assert mu.shape == (learnt.size,)
    assert float(mu[-1]) == pytest.approx(math.log(0.5))
    theta, x = normal(CLIENTS, DRAWS, learnt.size), normal(CLIENTS, POINTS, 4, seed=1)
    y = normal(CLIENTS, POINTS, 2, seed=2)
    mean = known.forward(theta[..., :-1], x)
    torch.testing.assert_close(learnt.forward(theta, x), mean)
    for model, noise, weights in (
        (known, torch.full((CLIENTS, DRAWS), 0.5).double(), theta[..., :-1]),
        (learnt, theta[..., -1].exp(), theta),
    ):
        scale = noise[..., None, None].expand_as(mean)
        expected = torch.distributions.Normal(mean, scale).log_prob(y.unsqueeze(1)).sum(-1)
        torch.testing.assert_close(model.log_likelihood(weights, x, y), expected)


def test_the_gradient_reaches_the_learnt_noise() -> None:
    """d log p / d log noise = z^2 - 1 for each target, z the standardised residual."""
    model = mlp((4, 2), Gaussian(2, learn_noise=True))
    theta, x = normal(1, 1, model.size).requires_grad_(), normal(1, 1, 4, seed=1)
    y = normal(1, 1, 2, seed=2)
    (by_theta,) = torch.autograd.grad(model.log_likelihood(theta, x, y).sum(), theta)
    z = (y - model.forward(theta, x)[:, 0]) / theta[0, 0, -1].exp()
    torch.testing.assert_close(by_theta[0, 0, -1], (z.square() - 1).sum())


# The predictive


def test_predictive_probabilities_are_averages_over_draws() -> None:
    model = mlp((4, 5, 3), Categorical(3))
    v = torch.stack([normal(CLIENTS, model.size), normal(CLIENTS, model.size, seed=1) - 2], 1)
    noise, x = normal(CLIENTS, DRAWS, model.size, seed=2), normal(CLIENTS, POINTS, 4, seed=3)
    found = predictive(model, v, x, noise)
    one_draw = [predictive(model, v, x, noise[:, k : k + 1]) for k in range(DRAWS)]
    torch.testing.assert_close(found, torch.stack(one_draw).mean(0))
    torch.testing.assert_close(found.sum(-1), torch.ones(CLIENTS, POINTS).double())
    torch.testing.assert_close(predictive(model, v, x, noise, points=4), found)


@pytest.mark.parametrize("learn_noise", [False, True])
def test_predictive_of_a_regression_is_the_mixture(learn_noise: bool) -> None:
    """Mean and variance of an equal mixture of Normals, by torch.distributions."""
    model = mlp((4, 2), Gaussian(2, noise=0.7, learn_noise=learn_noise))
    theta, x = normal(CLIENTS, DRAWS, model.size), normal(CLIENTS, POINTS, 4, seed=3)
    output = model.forward(theta, x)  # [C, K, n, 2]
    found = model.likelihood.predictive(theta, output)
    std = theta[..., -1].exp() if learn_noise else torch.full((CLIENTS, DRAWS), 0.7).double()
    parts = output.movedim(1, -1), std[:, None, None].expand(-1, POINTS, 2, -1)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(DRAWS)), torch.distributions.Normal(*parts)
    )
    torch.testing.assert_close(found, torch.cat([mixture.mean, mixture.variance], -1))


# --- the size of weights by the inputs of their layer ---------------------------------------------


def test_layers_of_many_inputs_have_a_scale() -> None:
    """sqrt(100 / inputs) for those of more than 100; pixels count a tenth, standardised all."""
    assert mlp((784, 100, 10), Categorical(10)).scale() is None
    wide = mlp((1600, 100, 10), Categorical(10), STANDARDISED).scale()
    assert wide is not None
    first = 1600 * 100 + 100
    assert wide[:first].unique().tolist() == [0.25]
    assert wide[first:].unique().tolist() == [1.0]


def test_scales_of_convolutions_and_modules() -> None:
    image = cnn((3, 32, 32), (32, 64), (50,), Categorical(5))
    scale = image.scale()
    assert scale is not None and len(scale) == image.size
    first, second = 9 * 3 * 32 + 32, 9 * 32 * 64 + 64
    assert scale[:first].unique().tolist() == [1.0]
    torch.testing.assert_close(
        scale[first : first + second], torch.full((second,), (100 / 288) ** 0.5)
    )
    module = nn.Sequential(nn.Linear(400, 3), nn.ReLU(), nn.Linear(3, 2))
    found = from_module(module, Categorical(2)).scale()
    assert found is not None and found.tolist() == [*[0.5] * 1203, *[1.0] * 8]


def test_the_output_of_a_wide_layer_moves_as_that_of_others() -> None:
    """The spread of pre-activations at the start does not grow with standardised inputs."""
    spreads = []
    for inputs in (100, 900, 6400):
        model = mlp((inputs, 50, 2), Categorical(2), STANDARDISED)
        config = pfedbayes.Config()
        start = pfedbayes.build(config, model).init_server(Streams([Who(0, SERVER)], 0))["v"]
        weights = start[0, : inputs * 50].view(50, inputs)
        x = torch.randn(inputs, 200, generator=torch.Generator().manual_seed(3))
        spreads.append(float((weights @ x).std()))
    assert max(spreads) / min(spreads) < 1.25  # 10,000 dependent products: a tenth or so
