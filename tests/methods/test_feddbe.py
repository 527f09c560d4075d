"""FedDBE: gradients by hand, the consensus, and the bias memory folded into plain weights."""

from __future__ import annotations

import pytest
import torch
from quadratics import EXACT, run
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import Batch, ClientData, Update
from corefed.methods import fedavg, feddbe
from corefed.methods.feddbe import Config, folded, gradients, mean_features
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.network import mlp

MODEL = mlp((3, 4, 2), Categorical(2))
WIDTH = 4


def data() -> ClientData:
    g = torch.Generator().manual_seed(0)
    weight = (torch.arange(16) < torch.tensor([8, 16]).unsqueeze(-1)).double()
    x = torch.randn(2, 16, 3, generator=g, dtype=torch.float64) * weight.unsqueeze(-1)
    return ClientData(x, torch.randint(2, (2, 16), generator=g) * weight.long(), weight)


def whole(points: ClientData) -> Batch:
    return Batch(points.x, points.y, points.weight / points.size.unsqueeze(-1))


def anywhere(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features(theta: Tensor, x: Tensor) -> Tensor:
    assert MODEL.head is not None
    return MODEL.head.features(theta.unsqueeze(1), x).squeeze(1)


def test_without_regularisation_it_is_the_gradient_of_the_folded_network() -> None:
    """g(z + b) is the network whose head has the bias c + W b; b's gradient is W' times c's."""
    points, theta, bias = data(), anywhere(2, MODEL.size), anywhere(2, WIDTH, seed=2)
    assert MODEL.head is not None
    plain = folded(MODEL.head, theta, bias)
    loss, by_theta, by_bias, centre = gradients(
        MODEL, theta, bias, torch.zeros(2, WIDTH), torch.zeros(2), whole(points)
    )
    torch.testing.assert_close(centre, mean_features(MODEL, theta, points), **EXACT)
    expected, slope = fedavg.gradient(MODEL, plain, whole(points))
    torch.testing.assert_close(loss, expected, **EXACT)
    w = theta[:, MODEL.head.weight].view(2, 2, WIDTH)
    c = slope[:, MODEL.head.bias]
    torch.testing.assert_close(by_bias, (w.mT @ c.unsqueeze(-1)).squeeze(-1), **EXACT)
    # Entries below the head, and its bias, are those of the folded network; W has c b' more.
    more = slope.clone()
    more[:, MODEL.head.weight] += (c.unsqueeze(-1) * bias.unsqueeze(1)).flatten(1)
    torch.testing.assert_close(by_theta, more, **EXACT)


def test_the_gradient_of_the_mean_regulariser() -> None:
    """(kappa / K) J' (z_bar - z_g), J of the mean feature: the units that are on, times x."""
    points, theta, bias = data(), anywhere(2, MODEL.size), anywhere(2, WIDTH, seed=2)
    target, kappa = anywhere(2, WIDTH, seed=3), torch.tensor([7.0, 0.5], dtype=torch.float64)
    batch = whole(points)
    _, without, b_without, _ = gradients(MODEL, theta, bias, target, 0 * kappa, batch)
    _, with_it, b_with, _ = gradients(MODEL, theta, bias, target, kappa, batch)
    z = features(theta, points.x)
    share = batch.scale.unsqueeze(-1)
    gap = (kappa / WIDTH).unsqueeze(-1) * ((share * z).sum(1) - target)  # [C, K]
    on = share * (z > 0)  # [C, n, K]
    by_weight = gap.unsqueeze(-1) * torch.einsum("cnk,cni->cki", on, points.x)
    by_bias = gap * on.sum(1)
    expected = torch.zeros_like(theta)
    expected[:, : 3 * WIDTH], expected[:, 3 * WIDTH : 4 * WIDTH] = by_weight.flatten(1), by_bias
    torch.testing.assert_close(with_it - without, expected, **EXACT)
    assert torch.equal(b_with, b_without)  # it has no part in the memory


def test_the_consensus_is_that_of_the_first_round() -> None:
    """By numbers of points, a running mean over the steps from the initial weights; it stays."""
    points, rate = data(), 0.1
    method = feddbe.build(Config(learning_rate=rate), MODEL)
    theta = run(method, points, 0).server["theta"].expand(2, -1)
    means = torch.stack([features(theta, points.x)[i, :n].mean(0) for i, n in enumerate((8, 16))])
    torch.testing.assert_close(mean_features(MODEL, theta, points, 5), means, **EXACT)
    own, bias, none = theta, torch.zeros(2, WIDTH).double(), torch.zeros(2).double()
    for _ in range(2):
        _, by_theta, by_bias, centre = gradients(MODEL, own, bias, means, none, whole(points))
        means = 0.9 * means + 0.1 * centre
        own, bias = own - rate * by_theta, bias - rate * by_bias
    expected = (8 * means[0] + 16 * means[1]) / 24
    for rounds in (1, 3):
        ended = run(method, points, rounds, 2)
        torch.testing.assert_close(ended.server["mean"], expected, **EXACT)
        assert ended.server["known"] == 1
    late = Update((0,), {"theta": theta[:1], "mean": means[:1] + 9}, torch.tensor([8]))
    assert torch.equal(feddbe.aggregate(ended.server, late)["mean"], ended.server["mean"])


def test_two_rounds_by_hand() -> None:
    """No MR in the first; b_i goes on, the weights start at the broadcast."""
    points = data()
    method = feddbe.build(Config(learning_rate=0.1, regularisation=3.0), MODEL)
    server = run(method, points, 0).server
    theta, bias = server["theta"].expand(2, -1), torch.zeros(2, WIDTH).double()
    goal = run(method, points, 1, 2).server["mean"].expand(2, -1)
    shares = torch.tensor([8, 16]).double() / 24
    for kappa in (0.0, 3.0):
        own = theta
        for _ in range(2):
            weight = torch.full((2,), kappa).double()
            _, by_theta, by_bias, _ = gradients(MODEL, own, bias, goal, weight, whole(points))
            own, bias = own - 0.1 * by_theta, bias - 0.1 * by_bias
        theta = (shares @ own).expand(2, -1)
    ended = run(method, points, 2, 2)
    torch.testing.assert_close(ended.server["theta"], theta[0], **EXACT)
    torch.testing.assert_close(ended.clients.private["bias"], bias, **EXACT)


def test_the_personal_model_predicts_with_the_memory() -> None:
    points, theta, bias = data(), anywhere(2, MODEL.size), anywhere(2, WIDTH, seed=2)
    method = feddbe.build(Config(), MODEL)
    private = {"theta": theta + 1, "bias": bias}
    models = method.models({"theta": theta}, private, points)
    assert MODEL.head is not None
    w = theta[:, MODEL.head.weight].view(2, 2, WIDTH)
    z = features(theta, points.x) + bias.unsqueeze(1)
    expected = (z @ w.mT + theta[:, MODEL.head.bias].unsqueeze(1)).softmax(-1)
    found = method.predict(models["personal"], points.x, torch.empty(2, 1, 0))
    torch.testing.assert_close(found, expected, **EXACT)
    assert torch.equal(models["global"]["theta"], theta)


def test_strong_regularisation_brings_the_features_together() -> None:
    """Clients of shifted inputs: their mean features end nearer to the consensus, and so to each
    other, than without."""
    points = data()
    points = points._replace(x=points.x + torch.tensor([-1.0, 1.0]).view(2, 1, 1))
    apart = []
    for kappa in (0.0, 20.0):
        method = feddbe.build(Config(learning_rate=0.05, regularisation=kappa), MODEL)
        ended = run(method, points, 40, 10)
        means = mean_features(MODEL, ended.clients.private["theta"], points)
        apart.append((means - ended.server["mean"]).norm().item())
    assert apart[1] < 0.5 * apart[0], apart


def test_learnt_noise_and_a_model_without_a_head() -> None:
    model = mlp((3, 4, 1), Gaussian(1, 0.5, learn_noise=True))
    points = data()._replace(y=anywhere(2, 16, 1))
    theta, zero = anywhere(2, model.size), torch.zeros(2, WIDTH).double()
    _, found, _, _ = gradients(model, theta, zero, zero, torch.zeros(2), whole(points))
    torch.testing.assert_close(found, fedavg.gradient(model, theta, whole(points))[1], **EXACT)
    with pytest.raises(UserError, match="whose last layer is linear, and this model has none"):
        feddbe.build(Config(), model._replace(head=None))
    method = feddbe.build(Config(), MODEL)
    broadcast = {k: v.expand(2, *v.shape) for k, v in run(method, data(), 1).server.items()}
    private = method.init_client(broadcast, data())
    working = method.begin(broadcast, private, data(), Streams([Who(0, 0), Who(0, 1)], 1))
    assert torch.equal(working["mean"], broadcast["mean"])  # once known, nothing is measured
