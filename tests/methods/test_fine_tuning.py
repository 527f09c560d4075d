"""Fine-tuning at evaluation: its minibatches, its steps, and FedAvg with it."""

from __future__ import annotations

import pytest
import torch
from quadratics import EXACT, Quadratics, after, quadratics, run, times

from corefed.base.types import ClientData
from corefed.methods import fedavg, fedavg_ft
from corefed.methods.fedavg_ft import Config
from corefed.methods.fine_tuning import every_mth, fine_tune


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def test_an_epoch_takes_each_point_once() -> None:
    """Clients of 7, 3 and 0 points; some that have no weight lie between the others."""
    weight = torch.tensor([[1.0, 0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1, 0, 0], [0.0] * 9])
    number = torch.arange(9.0).expand(3, -1)
    data = ClientData(number.unsqueeze(-1), number.long(), weight)
    taken = [every_mth(data, step, 3) for step in range(3)]
    drawn = [
        [int(v) for batch in taken for v in batch.y[client][batch.scale[client] > 0]]
        for client in range(3)
    ]
    assert drawn[0] == [0, 4, 8, 2, 5, 3, 7]  # every third of 0 2 3 4 5 7 8
    assert drawn[1] == [2, 3, 6] * 3  # one minibatch is all it has
    assert drawn[2] == []
    assert all(torch.equal(b.scale[0].sum(), torch.tensor(1.0)) for b in taken)
    assert all(b.x.shape == (3, 3, 1) for b in taken)
    # A client alone, without padding, has the same minibatches.
    alone = ClientData(data.x[:1, [0, 2, 3, 4, 5, 7, 8]], number[:1, [0, 2, 3, 4, 5, 7, 8]].long(),
                       torch.ones(1, 7))  # fmt: skip
    assert every_mth(alone, 1, 3).y[0].tolist()[:2] == taken[1].y[0].tolist()[:2]


def test_on_all_points_it_is_gradient_descent(task: Quadratics) -> None:
    start = torch.ones(3, 4, dtype=torch.float64)
    found = fine_tune(task.model, start, task.data, 0.1, 6, 1000)
    expected = start + times(after(task.hessian, 0.1, 6), task.optimum - start)
    torch.testing.assert_close(found, expected, **EXACT)
    assert torch.equal(start, torch.ones_like(start))
    rates = torch.tensor([0.1, 0.05, 0.2], dtype=torch.float64)
    each = fine_tune(task.model, start, task.data, rates, 1, 1000)
    torch.testing.assert_close(each, start - rates.unsqueeze(-1) * task.slope(start), **EXACT)


def test_weights_count(task: Quadratics) -> None:
    doubled = task.data._replace(weight=2 * task.data.weight)
    start = torch.ones(3, 4, dtype=torch.float64)
    one = fine_tune(task.model, start, doubled, 0.1, 3, 8)
    two = fine_tune(task.model, start, task.data, 0.2, 3, 8)
    torch.testing.assert_close(one, two, **EXACT)


def test_fedavg_ft_is_fedavg_and_then_some_steps(task: Quadratics) -> None:
    settings = Config(learning_rate=0.1, adapt_rate=0.05, adapt_steps=7, adapt_points=1000)
    method = fedavg_ft.build(settings, task.model)
    one = run(method, task.data, 4, steps=3, batch=8)
    base = fedavg.build(fedavg.Config(learning_rate=0.1), task.model)
    two = run(base, task.data, 4, steps=3, batch=8)
    assert torch.equal(one.server["theta"], two.server["theta"])
    w = one.server["theta"].expand(3, -1)
    models = method.models({"theta": w}, one.clients.private, task.data)
    expected = w + times(after(task.hessian, 0.05, 7), task.optimum - w)
    torch.testing.assert_close(models["personal"]["theta"], expected, **EXACT)
    assert torch.equal(models["global"]["theta"], w)
    assert fedavg_ft.with_steps(settings, 3)[0].adapt_steps == 3
    assert fedavg_ft.with_steps(settings, None) == (settings, 7)
