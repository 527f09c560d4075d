"""Independent: each client's own SGD and nothing else, and a run in which nothing is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import SMALL, corefed
from quadratics import EXACT, Quadratics, after, quadratics, run, times
from saved_state import bits_of
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData
from corefed.methods import fedavg, independent
from corefed.methods.independent import Config
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.training import record
from corefed.training.evaluate import evaluate


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def test_a_client_goes_its_own_way(task: Quadratics) -> None:
    """T rounds of R steps are T R steps of gradient descent from the common start."""
    method = independent.build(Config(learning_rate=0.1), task.model)
    start = run(method, task.data, 0).server["theta"]
    ended = run(method, task.data, 5, steps=4)
    expected = start + times(after(task.hessian, 0.1, 20), task.optimum - start)
    torch.testing.assert_close(ended.clients.private["theta"], expected, **EXACT)
    assert torch.equal(ended.server["theta"], start)
    assert ended.message == {}


@pytest.mark.parametrize("client", [0, 2])
def test_it_is_fedavg_with_one_client(task: Quadratics, client: int) -> None:
    """Minibatches and all: the average over one upload is that upload."""
    config = fedavg.Config(learning_rate=0.05, initial_std=0.1)
    alone = run(fedavg.build(config, task.model), task.data, 4, steps=3, batch=8, cohort=[client])
    method = independent.build(Config(learning_rate=0.05, initial_std=0.1), task.model)
    beside = run(method, task.data, 4, steps=3, batch=8).clients.private["theta"]
    torch.testing.assert_close(beside[client], alone.server["theta"], **EXACT)


def test_others_accuracy_by_hand() -> None:
    """Three clients that always say 0, 1 and 2, on 2, 3 and 1 test points of their own."""
    model = mlp((1, 3), Categorical(3))
    method = independent.build(Config(), model)
    x = torch.zeros(3, 3, 1)
    weight = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0]])
    y = torch.tensor([[0, 1, 0], [1, 1, 2], [0, 0, 0]])
    clients = run(method, ClientData(x, y, weight), 0).clients
    clients.private["theta"] = torch.cat([torch.zeros(3, 3), 5 * torch.eye(3)], 1)
    test = ClientData(x, y, weight)
    server = {"theta": torch.zeros(model.size)}
    (metrics,) = evaluate(clients, method, [server], test, 0, draws=9, classes=3).metrics
    # At home: 1 of 2, 2 of 3, 0 of 1. Elsewhere, of what the other two have: client 0 says 0,
    # right on 1 of [1 1 2 | 0]; client 1 says 1, right on 1 of [0 | 0 1]; client 2 says 2, right on
    # 1 of [0 1 | 1 1 2].
    assert metrics["personal_accuracy"] == pytest.approx(3 / 6)
    assert metrics["others_accuracy"] == pytest.approx(3 / 12)
    assert {name.split("_")[0] for name in metrics} == {"personal", "others"}


def test_one_client_has_no_others() -> None:
    data = ClientData(torch.zeros(1, 2, 1), torch.tensor([[0, 1]]), torch.ones(1, 2))
    method = independent.build(Config(), mlp((1, 2), Categorical(2)))
    ended = run(method, data, 1)
    (metrics,) = evaluate(ended.clients, method, [ended.server], data, 0, 1, classes=2).metrics
    assert not any(name.startswith("others") for name in metrics)


def test_a_run_in_which_nothing_is_sent(tmp_path: Path) -> None:
    """Record, checkpoint, resume and compare a method without messages."""
    arguments = [*SMALL[1:], "--method=independent", "--seed=0,1", "--quiet"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert corefed("run", *arguments, "--rounds=3", "--out", whole).code == 0
    short = ("--rounds=1", "--set=planned_rounds=3")
    assert corefed("run", *arguments, *short, "--out", part).code == 0
    resumed = corefed("run", "--resume", part, "--rounds=3", "--quiet")
    assert resumed.code == 0, resumed.err
    first, second = (json.loads((f / record.SUMMARY).read_text()) for f in (whole, part))
    assert first["metrics"] == second["metrics"]
    assert bits_of(whole) == bits_of(part)
    assert first["cost"]["bytes_up"] == first["cost"]["bytes_down"] == 0
    assert {"personal_accuracy", "others_accuracy"} <= set(first["metrics"])
    assert not any(name.startswith(("global", "localized")) for name in first["metrics"])
    compared = corefed("compare", whole, part)
    assert compared.code == 0, compared.err


def test_training_does_not_touch_the_start(task: Quadratics) -> None:
    method = independent.build(Config(), task.model)
    start = run(method, task.data, 0).server["theta"]
    broadcast = {"theta": start.expand(3, -1)}
    private = method.init_client(broadcast, task.data)
    kept: Tensor = private["theta"].clone()
    working = method.begin(broadcast, private, task.data, Streams([], 0))
    method.step(working, task.whole, torch.empty(3, 0))
    assert torch.equal(private["theta"], kept)
