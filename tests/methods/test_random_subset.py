"""Training on a subset: which points, with which weights, for how long, under which method."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from quadratics import EXACT, FEATURES, NOISE, Quadratics, quadratics, run, settled
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.methods import fedavg, pfedbayes, random_subset
from corefed.methods.random_subset import Config
from corefed.methods.subset import on_subset
from corefed.selectors.subset import subset_size, uniform
from corefed.settings.config import resolve

BASES = {
    "pfedbayes": pfedbayes.build(pfedbayes.Config(), quadratics().model),
    "fedavg": fedavg.build(fedavg.Config(), quadratics().model),
}
over_each = pytest.mark.parametrize("base", list(BASES))


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def streams(round_: int = 0, clients: int = 3) -> Streams:
    return Streams([Who(0, i) for i in range(clients)], round_)


# Which points


@pytest.mark.parametrize(
    ("size", "fraction", "k"),
    [(10, 0.1, 1), (11, 0.1, 2), (1000, 0.1, 100), (250, 0.3, 75), (7, 1.0, 7), (5, 1e-9, 1)],
)
def test_the_size_of_a_subset(size: int, fraction: float, k: int) -> None:
    """ceil(fraction n), where a product like 250 * 0.3 = 75.00000000000001 is 75."""
    assert subset_size(torch.tensor([size]), fraction).tolist() == [k]


def test_points_and_weights(task: Quadratics) -> None:
    w = uniform(task.data, 0.25, streams())
    assert (w > 0).sum(-1).tolist() == [4, 8, 16]
    assert w[w > 0].unique().tolist() == [4.0]
    assert (w[task.data.weight == 0] == 0).all()
    torch.testing.assert_close(w.sum(-1), task.data.size.double())
    # n / k is 7/3 where k = ceil(0.3 * 7); one point is its own subset.
    few = ClientData(
        torch.zeros(2, 7, 1), torch.zeros(2, 7), torch.stack([torch.ones(7), torch.eye(7)[3]])
    )
    w = uniform(few, 0.3, streams(clients=2))
    assert sorted(w[0].tolist()) == pytest.approx([0, 0, 0, 0] + [7 / 3] * 3)
    assert w[1].tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_every_point_is_as_likely(task: Quadratics) -> None:
    """2000 draws of 4 of 16: a point is in a quarter of them, give or take 4.5 sigma."""
    one = ClientData(*(field[:1] for field in task.data))
    draws = torch.stack([uniform(one, 0.25, streams(t, 1))[0, :16] for t in range(2000)])
    share = (draws > 0).double().mean(0)
    assert (share - 0.25).abs().max() < 4.5 * (0.25 * 0.75 / 2000) ** 0.5


# For how long


@over_each
def test_a_subset_is_kept_or_redrawn(task: Quadratics, base: Any) -> None:
    """Chosen in the first round; redrawn after 4 local steps, so in every second round of 2."""
    for redraw, distinct in ((0, 1), (4, 3)):
        config = Config(base=base, fraction=0.25, redraw_every=redraw)
        method = random_subset.build(config, task.model)
        seen: list[Tensor] = []
        for rounds in range(1, 7):
            private = run(method, task.data, rounds, steps=2).clients.private
            assert (private["subset.weight"] > 0).sum(-1).tolist() == [4, 8, 16]
            seen.append(private["subset.weight"])
        assert len({tuple(w.flatten().tolist()) for w in seen}) == distinct
        if distinct > 1:
            assert torch.equal(seen[0], seen[1])
            assert not torch.equal(seen[1], seen[2])


def test_only_clients_that_are_due_choose(task: Quadratics) -> None:
    asked: list[list[int]] = []

    def choose(data: ClientData, streams: Streams, points: Tensor | None) -> Tensor:
        asked.append([who.client for who in streams.who])
        return data.weight

    method = on_subset(BASES["fedavg"], "all of them", choose, redraw_every=2)
    clients = run(method, task.data, 0).clients
    server = run(method, task.data, 0).server
    for t, cohort in enumerate([[1], [0, 1], [0, 1, 2], [0]]):
        clients.train(t, [server], [cohort])
    assert asked == [[1], [0], [1, 2], [0]]


# Under which method


@over_each
def test_all_points_are_the_base_itself(task: Quadratics, base: Any) -> None:
    config = Config(base=base, fraction=1.0)
    expected = run(BASES[base], task.data, 3, steps=2, batch=8)
    found = run(random_subset.build(config, task.model), task.data, 3, steps=2, batch=8)
    for name, value in expected.server.items():
        assert torch.equal(found.server[name], value)
    for name, value in expected.clients.private.items():
        assert torch.equal(found.clients.private[name], value)


@over_each
def test_what_was_chosen_stays_on_the_client(task: Quadratics, base: Any) -> None:
    config = Config(base=base)
    found = run(random_subset.build(config, task.model), task.data, 1)
    assert set(found.message) == set(run(BASES[base], task.data, 1).message)
    assert {"subset.weight", "subset.age"} <= set(found.clients.private)


def test_fedavg_settles_where_the_subsets_send_it(task: Quadratics) -> None:
    """One full-batch step a round: sum_i p_i H_i (w - a_i) = 0 with H and a of the subset.

    A client counts by all its points, not by the few that it trains on.
    """
    config = Config(base="fedavg", fraction=0.5, learning_rate=0.2)
    ended = run(random_subset.build(config, task.model), task.data, 400)
    weight = ended.clients.private["subset.weight"]
    design = torch.cat([task.data.x, torch.ones_like(task.data.y)], -1)
    weighted = design * weight.unsqueeze(-1)
    normal, target = weighted.mT @ design, weighted.mT @ task.data.y
    optimum = torch.linalg.solve(normal, target).squeeze(-1)
    hessian = normal / (task.data.size.view(-1, 1, 1) * NOISE**2)
    expected = settled(task.shares.view(-1, 1, 1) * hessian, optimum)
    torch.testing.assert_close(ended.server["theta"], expected, **EXACT)
    assert expected.shape == (FEATURES + 1,)
    whole = settled(task.shares.view(-1, 1, 1) * task.hessian, task.optimum)
    assert (expected - whole).abs().max() > 0.01


# Settings


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["base=fedavg", "zeta=10"], "zeta is 10.0, but base fedavg does not use it"),
        (["base=fedavg", "optimizer=sgd"], "optimizer is sgd, but base fedavg does not use it"),
        (["learning_rate=0.1"], "learning_rate is 0.1, but base pfedbayes does not use it"),
        (["base=fedprox"], "it must be 'pfedbayes' or 'fedavg'"),
        (["beta=1.5"], "beta is 1.5; it must be above 0 and at most 1"),
    ],
)
def test_settings_without_effect_are_refused(given: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(None, {"method": "random-subset"}, given)
    assert sentence in str(caught.value)


def test_settings_of_the_chosen_base_are_taken() -> None:
    mine = ["base=fedavg", "learning_rate=0.1", "initial_std=0.2", "fraction=0.5"]
    settings = resolve(None, {"method": "random-subset"}, mine).settings
    assert settings == Config(base="fedavg", learning_rate=0.1, initial_std=0.2, fraction=0.5)
    theirs = {field.name: field.default for field in fields(fedavg.Steps)}
    assert theirs.pop("optimizer") == "sgd"  # which a random subset always has
    assert theirs.items() <= {field.name: field.default for field in fields(Config)}.items()
