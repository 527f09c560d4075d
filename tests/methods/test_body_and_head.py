"""FedRep and FedBABU: which part moves when, what is sent, what is fixed.

Inputs and first weights are positive, so that every ReLU is on: the network is bilinear, and its
gradients are written out here by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quadratics import EXACT, run
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.types import ClientData, Method
from corefed.methods import fedavg, fedbabu, fedrep
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.network import mlp

IN, HIDDEN, SIZES = 3, 2, (8, 16, 16)
RATE = 0.01
MODEL = mlp((IN, HIDDEN, 1), Gaussian(1, 1.0))
BODY = (IN + 1) * HIDDEN


def clients() -> ClientData:
    g = torch.Generator().manual_seed(0)
    weight = (torch.arange(16) < torch.tensor(SIZES).unsqueeze(-1)).double()
    x = torch.rand(3, 16, IN, generator=g, dtype=torch.float64) + 0.1
    y = x @ torch.randn(3, IN, 1, generator=g, dtype=torch.float64) + 1.0
    return ClientData(x * weight.unsqueeze(-1), y * weight.unsqueeze(-1), weight)


def positive(method: Method) -> Method:
    """The method from a start whose body is positive."""

    def init_server(streams: Any) -> dict[str, Tensor]:
        drawn = method.init_server(streams)
        return {**drawn, "body": drawn["body"].abs() + 0.5}

    return method._replace(init_server=init_server)


def slopes(data: ClientData, body: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of (1/2n) sum (v' (W x + b) + c - y)^2 in (W, b) and (v, c): [C, BODY], [C, 3]."""
    w, b = body[:, : IN * HIDDEN].unflatten(-1, (HIDDEN, IN)), body[:, IN * HIDDEN :]
    v, c = head[:, :HIDDEN], head[:, HIDDEN:]
    features = data.x @ w.mT + b.unsqueeze(1)
    assert (features[data.weight > 0] > 0).all()  # every unit is on
    left = (features @ v.unsqueeze(-1)).squeeze(-1) + c - data.y.squeeze(-1)
    left = left * data.weight / data.size.unsqueeze(-1)
    by_w = torch.einsum("cn,ch,cni->chi", left, v, data.x).flatten(1)
    by_b = left.sum(-1, keepdim=True) * v
    by_v = (left.unsqueeze(-1) * features).sum(1)
    return torch.cat([by_w, by_b], -1), torch.cat([by_v, left.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize(
    ("steps", "part", "moves"),
    [(4, 0.5, "hhbb"), (5, 0.3, "hbbbb"), (3, 0.9, "hhb"), (3, 0.1, "hbb"), (1, 0.5, "2")],
)
def test_fedrep_trains_the_head_and_then_the_body(steps: int, part: float, moves: str) -> None:
    """Two rounds by hand; a round of one step moves both."""
    data = clients()
    config = fedrep.Config(learning_rate=RATE, head_part=part)
    method = positive(fedrep.build(config, MODEL))
    first = run(method, data, 0).server
    body, head = first["body"], first["head"].expand(3, -1)
    shares = torch.tensor(SIZES).double() / sum(SIZES)
    for _ in range(2):
        own = body.expand(3, -1)
        for move in moves:
            by_body, by_head = slopes(data, own, head)
            own, head = (
                own - RATE * by_body * (move in "b2"),
                head - RATE * by_head * (move in "h2"),
            )
        body = shares @ own
    ended = run(method, data, 2, steps)
    torch.testing.assert_close(ended.server["body"], body, **EXACT)
    torch.testing.assert_close(ended.clients.private["head"], head, **EXACT)
    assert torch.equal(ended.server["head"], first["head"])
    # The head stays at home, and in training the initial one is not sent either.
    assert {k: v.shape for k, v in ended.message.items()} == {"body": (3, BODY)}
    assert method.traits.sent == ("body",)
    broadcast = {"body": ended.server["body"].expand(3, -1)}
    models = method.models(broadcast, ended.clients.private, data)
    own = torch.cat([broadcast["body"], ended.clients.private["head"]], -1)
    assert torch.equal(models["personal"]["theta"], own)
    assert torch.equal(models["global"]["theta"][0, BODY:], first["head"])


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_fedreps_rules_rest_while_the_other_part_moves(name: str) -> None:
    """The head's goes on from round to round, as torch's on the head's gradients alone."""
    data = clients()
    config = fedrep.Config(learning_rate=RATE, optimizer=name)
    method = positive(fedrep.build(config, MODEL))
    first, second = (run(method, data, t, 4).server["body"] for t in (0, 1))
    head = run(method, data, 0).server["head"].expand(3, -1).clone().requires_grad_()
    rule = (
        torch.optim.Adam([head], lr=RATE)
        if name == "adam"
        else torch.optim.SGD([head], lr=RATE, momentum=0.9)
    )
    for body in (first, second):
        for _ in range(2):
            head.grad = slopes(data, body.expand(3, -1), head.detach())[1]
            rule.step()
    ended = run(method, data, 2, 4)
    torch.testing.assert_close(ended.clients.private["head"], head.detach(), **EXACT)


def test_fedbabu_moves_the_body_under_a_head_that_never_does() -> None:
    data = clients()
    config = fedbabu.Config(learning_rate=RATE, adapt_rate=0.02, adapt_steps=3)
    method = positive(fedbabu.build(config, MODEL))
    first = run(method, data, 0).server
    body, head = first["body"], first["head"]
    shares = torch.tensor(SIZES).double() / sum(SIZES)
    for _ in range(3):
        own = body.expand(3, -1)
        for _ in range(4):
            own = own - RATE * slopes(data, own, head.expand(3, -1))[0]
        body = shares @ own
    ended = run(method, data, 3, 4)
    torch.testing.assert_close(ended.server["body"], body, **EXACT)
    assert torch.equal(ended.server["head"], head)
    assert torch.equal(ended.clients.private["head"], head.expand(3, -1))
    assert {k: v.shape for k, v in ended.message.items()} == {"body": (3, BODY)}
    # Personal: three steps of body and head, from the broadcast. 16 points are one minibatch.
    own, tuned = body.expand(3, -1), head.expand(3, -1)
    for _ in range(3):
        by_body, by_head = slopes(data, own, tuned)
        own, tuned = own - 0.02 * by_body, tuned - 0.02 * by_head
    broadcast = {"body": ended.server["body"].expand(3, -1)}
    models = method.models(broadcast, ended.clients.private, data)
    torch.testing.assert_close(models["personal"]["theta"], torch.cat([own, tuned], -1), **EXACT)
    assert torch.equal(models["global"]["theta"][0, BODY:], head)


def test_fedbabus_body_is_fedavgs_with_the_heads_gradient_left_out() -> None:
    """A classifier, minibatches and all: one local step of both, from the same start."""
    model = mlp((4, 5, 3), Categorical(3))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 12, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (2, 12), generator=g)
    data = ClientData(x, y, torch.ones(2, 12, dtype=torch.float64))
    one = run(fedbabu.build(fedbabu.Config(), model), data, 1, batch=4)
    two = run(fedavg.build(fedavg.Config(), model), data, 1, batch=4)
    assert torch.equal(one.server["body"], two.server["theta"][: 5 * 5])
    assert not torch.equal(one.server["head"], two.server["theta"][5 * 5 :])


@pytest.mark.parametrize("build", [fedrep.build, fedbabu.build])
def test_models_without_a_body_or_a_head_are_refused(build: Any) -> None:
    config = fedrep.Config() if build is fedrep.build else fedbabu.Config()
    with pytest.raises(UserError, match="this model has no hidden layer; set hidden"):
        build(config, mlp((4, 3), Categorical(3)))
    with pytest.raises(UserError, match="whose last layer is linear, and this model has none"):
        build(config, mlp((4, 5, 3), Categorical(3))._replace(head=None))
