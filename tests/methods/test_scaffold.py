"""SCAFFOLD on quadratics: the paper's own update, and the pooled optimum that FedAvg misses."""

from __future__ import annotations

import pytest
import torch
from quadratics import EXACT, Quadratics, quadratics, run, settled
from torch import Tensor

from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Work
from corefed.methods import fedavg, scaffold
from corefed.methods.scaffold import Config
from corefed.training.local import LocalClients

RATE, STEPS = 0.1, 5


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def pooled(task: Quadratics) -> Tensor:
    return settled(task.shares.view(-1, 1, 1) * task.hessian, task.optimum)


def test_the_rounds_are_those_of_the_paper(task: Quadratics) -> None:
    """Option II by hand, in gradients: c_i, c and the server's step, clients counting by points."""
    method = scaffold.build(Config(learning_rate=RATE), task.model)
    x = run(method, task.data, 0).server["theta"]
    c, own = torch.zeros(4).double(), torch.zeros(3, 4).double()
    p = task.shares.unsqueeze(-1)
    for _ in range(4):
        y = x.expand(3, -1)
        for _ in range(STEPS):
            y = y - RATE * (task.slope(y) - own + c)
        new = own - c + (x - y) / (STEPS * RATE)
        x, c = x + (p * (y - x)).sum(0), c + (p * (new - own)).sum(0)
        own = new
    ended = run(method, task.data, 4, STEPS)
    torch.testing.assert_close(ended.server["theta"], x, **EXACT)
    torch.testing.assert_close(ended.server["c"] / (STEPS * RATE), c, **EXACT)
    torch.testing.assert_close(ended.clients.private["c"] / (STEPS * RATE), own, **EXACT)
    # As large as FedAvg's, but for one number.
    assert {k: v.shape for k, v in ended.message.items()} == {"theta": (3, 4), "first": (3,)}


def test_it_reaches_the_pooled_optimum_and_fedavg_does_not(task: Quadratics) -> None:
    best = pooled(task)
    found = run(scaffold.build(Config(learning_rate=RATE), task.model), task.data, 60, STEPS)
    torch.testing.assert_close(found.server["theta"], best, rtol=1e-6, atol=1e-6)
    other = run(fedavg.build(fedavg.Config(learning_rate=RATE), task.model), task.data, 30, STEPS)
    assert (other.server["theta"] - best).abs().max() > 0.01
    # The variates are the clients' gradients at the optimum, and those of all cancel.
    slopes = STEPS * RATE * task.slope(best.expand(3, -1))
    torch.testing.assert_close(found.clients.private["c"], slopes, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.server["c"], torch.zeros(4).double(), atol=1e-6, rtol=0)


def test_it_gets_there_with_part_of_the_clients(task: Quadratics) -> None:
    """Two clients of three, of unequal sizes, in turn; c is the mean of the c_i at any time."""
    method = scaffold.build(Config(learning_rate=RATE), task.model)
    server = {k: v.double() for k, v in method.init_server(Streams([Who(0, SERVER)], 0)).items()}
    clients = LocalClients(method, task.data, [0], [server], Work(3, 1000), chunk=3)
    n = task.data.size.double()
    for t in range(150):
        cohort = [c for c in range(3) if c != t % 3]
        (update,), _, _ = clients.train(t, [server], [cohort])
        server = method.aggregate(server, update)
        seen = n * clients.private["joined"]
        mean = (seen / seen.sum()) @ clients.private["c"]
        torch.testing.assert_close(server["c"], mean, **EXACT)
    assert server["points"] == n.sum()
    torch.testing.assert_close(server["theta"], pooled(task), rtol=1e-6, atol=1e-6)


def test_a_client_without_a_variate_makes_plain_steps(task: Quadratics) -> None:
    """Whenever its first round is: the others' c is not added to its gradient."""
    method = scaffold.build(Config(learning_rate=RATE), task.model)
    server = run(method, task.data, 3, STEPS, cohort=[0, 1]).server
    assert server["c"].abs().max() > 0.01
    clients = LocalClients(method, task.data, [0], [server], Work(STEPS, 1000), chunk=3)
    (update,), _, _ = clients.train(9, [server], [[2]])
    y = server["theta"].expand(3, -1)
    for _ in range(STEPS):
        y = y - RATE * task.slope(y)
    torch.testing.assert_close(update.message["theta"][0], y[2], **EXACT)
    torch.testing.assert_close(clients.private["c"][2], server["theta"] - y[2], **EXACT)
