"""The selector `seen`: what training tells of its points, what is looked at beside it, the draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from selector_cases import CASES, look_of
from torch import Tensor, nn

from corefed import selectors
from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import Batch, ClientData
from corefed.bayes import elbo, gaussian
from corefed.bayes.batches import tally
from corefed.models.cnn import cnn
from corefed.models.likelihood import Categorical
from corefed.models.modules import from_module
from corefed.models.network import Model
from corefed.models.resnet import resnet
from corefed.selectors import gradients, sampling, seen
from corefed.selectors.frame import Look
from corefed.selectors.settings import Selection
from corefed.settings.config import resolve
from corefed.training import rounds

# What a step tells


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_step_tells_the_norms_of_last_layer_gradients(case: str, draws: int) -> None:
    """Those of `gradients.py` at the same weights; the step's own gradient is the plain one."""
    look = look_of(case, (9, 6), (3, 2))
    noise = torch.randn(2, draws, look.model.size, generator=torch.Generator().manual_seed(1))
    scale = look.data.weight * torch.linspace(0.1, 2.0, 9)
    batch = Batch(look.data.x, look.data.y, scale)
    mu, sigma = look.q[:, 0], gaussian.sigma(look.q[:, 1])
    *found, squares = elbo.scored_gradient(look.model, mu, sigma, batch, noise)
    for one, other in zip(found, elbo.gradient(look.model, mu, sigma, batch, noise), strict=True):
        torch.testing.assert_close(one, other)
    theta = mu.unsqueeze(1) + sigma.unsqueeze(1) * noise
    if look.model.head is None:
        output = look.model.forward(theta, look.data.x)
        seen_there = gradients.Pass(theta, gradients.zero_where_unusable(output, look.mask), None)
    else:
        below = look.model.head.features(theta, look.data.x)
        seen_there = gradients.forward_on(look, theta, below)
    expected = gradients.layer_at(look, seen_there).squared_norms()
    torch.testing.assert_close(squares, expected * look.mask, rtol=1e-4, atol=1e-6)
    assert (squares[1, 6:] == 0).all()  # padding


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


@pytest.mark.parametrize("name", ["cnn", "resnet", "module"])
def test_features_and_outputs_come_from_one_pass(name: str) -> None:
    torch.manual_seed(0)
    model: Model = {
        "cnn": lambda: cnn((1, 16, 16), (2, 3), (4,), Categorical(3)),
        "resnet": lambda: resnet((1, 16, 16), (2, 4), Categorical(3)),
        "module": lambda: from_module(Small(), Categorical(3), last="last"),
    }[name]()
    assert model.head is not None and model.head.both is not None
    draws = torch.Generator().manual_seed(0)
    theta = torch.randn(2, 2, model.size, generator=draws) * 0.1
    x = torch.rand(2, 4, 256, generator=draws)
    features, output = model.head.both(theta, x).split([model.head.width, 3], -1)
    torch.testing.assert_close(features, model.head.features(theta, x))
    torch.testing.assert_close(output, model.forward(theta, x))


def test_what_steps_have_seen_is_added_up() -> None:
    """A point twice in a minibatch counts twice; padding counts nowhere."""
    total = torch.zeros(2, 2, 6)
    at = torch.tensor([[1, 4, 1], [0, 2, 0]])
    scale = torch.tensor([[1.0, 0.5, 2.0], [1.0, 1.0, 0.0]])
    squares = torch.tensor([[4.0, 9.0, 2.0], [1.0, 16.0, 7.0]])
    tally(total, at, scale, squares)
    tally(total, at[:, :1], scale[:, :1], torch.tensor([[3.0], [8.0]]))
    score, unseen = seen.learnt(torch.full((2, 5), 0.5), torch.full((2, 5), 40.0), total)
    expected = torch.tensor([[0.5, 3.0, 0.5, 0.5, 3.0], [4.5, 0.5, 4.0, 0.5, 0.5]])
    expected[0, 1], expected[1, 0] = 3.0**0.5, 4.5**0.5  # (4 + 2 + 3) / 3 and (1 + 8) / 2
    torch.testing.assert_close(score, expected)
    assert unseen.tolist() == [[40, 0, 40, 40, 0], [0, 40, 0, 40, 40]]
    broken = torch.tensor([[[torch.nan, 0.0, 1.0], [1.0, 1.0, 1.0]]])
    score, _ = seen.learnt(torch.zeros(1, 2), torch.zeros(1, 2), broken)
    assert (score > 0).all() and (score < 1e-30).all()  # seen, and not worth drawing


# What is looked at beside training


def known(look: Look, unseen: list[list[float]], room: list[int]) -> Look:
    ages = torch.tensor(unseen)
    memory = torch.where(ages < 0, 0.0, 7.0)
    return look._replace(memory=memory, unseen=ages, room=torch.tensor(room))


def test_points_never_seen_come_first_and_then_the_oldest() -> None:
    look = known(
        look_of("classes", (6, 4), (2, 2)),
        [
            [20, -1, 60, 0, -1, 40],
            [0, 80, 40, 20, -1, -1],
        ],  # the last two of the second are padding
        [3, 2],
    )
    score = seen.catch_up(look)
    looked = score != look.memory
    assert looked.tolist() == [
        [False, True, True, False, True, False], [False, True, True, False, False, False],
    ]  # fmt: skip
    alone = look._replace(streams=Streams([Who(0, 0), Who(0, 1)], 0))
    exact = gradients.last_layer(alone, 1, "seen/draw").squared_norms().sqrt()
    torch.testing.assert_close(score[looked], exact[looked])


def test_without_room_no_point_is_passed_through_the_network() -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("a pass")

    look = look_of("classes", (40, 25), (8, 5))
    look = look._replace(model=look.model._replace(head=None, forward=never))
    ages = torch.full_like(look.memory, -1.0)
    for each in (look, look._replace(unseen=ages, room=torch.tensor([0, 0]))):
        weight, memory = selectors.get("seen")(each)
        assert ((weight > 0).sum(-1) == look.k).all() and torch.equal(memory, look.memory)


def test_the_room_is_two_percent_of_training() -> None:
    """Training costs 3 forward passes for each point and draw; at most all points are looked at."""
    steps, n = torch.tensor([20.0, 20.0, 0.0, 500.0]), torch.tensor([1000, 1000, 1000, 60])
    points, mask = torch.tensor([100, 10, 100, 6]), torch.arange(1000) < n.unsqueeze(-1)
    unseen = torch.full((4, 1000), -1.0)
    assert seen.room(steps, points, 1, unseen, mask).tolist() == [120, 12, 0, 60]
    assert seen.room(steps, points, 2, unseen, mask).tolist() == [240, 24, 0, 60]
    unseen[mask] = 5.0  # all were seen: it saves up for a quarter of them
    assert seen.room(steps, points, 1, unseen, mask).tolist() == [0, 0, 0, 60]
    assert seen.room(3 * steps, points, 1, unseen, mask).tolist() == [360, 0, 0, 60]


# The draw


def many(scores: Tensor, y: Tensor, k: int, clients: int = 5_000) -> Look:
    """One client with these scores, so many times, each with its own random numbers."""
    n = len(scores)
    base = look_of("classes", (n,), (k,))
    data = ClientData(
        *(t.expand(clients, *t.shape[1:]) for t in (base.data.x, y[None], base.data.weight))
    )
    return base._replace(
        data=data, k=torch.full((clients,), k), memory=scores.expand(clients, -1),
        streams=Streams([Who(0, c) for c in range(clients)], 0), settings=Selection(floor=0.25),
    )  # fmt: skip


def test_chances_are_exact_and_weighted_sums_unbiased() -> None:
    """5,000 draws: every frequency, and a sum of any function, within 5 standard errors."""
    draws = torch.Generator().manual_seed(3)
    scores = torch.rand(12, generator=draws) ** 3 + 0.01
    scores[3] = 0.0  # never seen: counts as the mean of the others
    y = torch.randint(0, 3, (12,), generator=draws)
    look = many(scores, y, 4)
    weight = seen.select(look).weight
    counted = scores.clone()
    counted[3] = scores[scores > 0].mean()
    p = 0.75 * counted.double() / counted.double().sum() + 0.25 / 12
    pi = sampling.inclusion(counted[None], torch.ones(1, 12).bool(), torch.tensor([4]), 0.25)[0]
    below = pi < 1
    ratio = (pi / p)[below]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # in proportion to p
    taken = weight > 0
    assert (taken.sum(-1) == 4).all()
    error = (pi * (1 - pi) / len(weight)).sqrt()
    assert ((taken.double().mean(0) - pi).abs() <= 5 * error + 1e-9).all()
    expected = (1 / pi).float().expand_as(weight)
    torch.testing.assert_close(weight[taken], expected[taken])
    assert float(weight.max()) <= 12 / (4 * 0.25) + 1e-4
    f = torch.randn(12, generator=draws)
    sums = (weight @ f).double()
    assert abs(float(sums.mean() - f.sum())) <= 5 * float(sums.std()) / len(sums) ** 0.5


def test_each_class_has_its_expected_number_of_points() -> None:
    """Rounded up or down, in every draw; without balance only on average."""
    scores = torch.linspace(0.1, 1.0, 18)
    y = torch.arange(18) % 3
    look = many(scores, y, 6, 400)
    pi = sampling.inclusion(scores[None], torch.ones(1, 18).bool(), torch.tensor([6]), 0.25)[0]
    expected = torch.stack([pi[y == c].sum() for c in range(3)])
    taken = seen.select(look).weight > 0
    count = torch.stack([taken[:, y == c].sum(-1) for c in range(3)], -1)
    assert ((count >= expected.floor()) & (count <= expected.ceil())).all()
    free = seen.select(look._replace(settings=Selection(floor=0.25, balance=False))).weight > 0
    assert int(free[:, y == 0].sum(-1).max()) > int(expected[0].ceil())


# As a user meets it

FLAGS = {"method": "coreset-pfedbayes", "selector": "seen", "clients": 3, "local_steps": 20,
         "hidden": "4", "evaluate_draws": 2, "refresh_every": 20}  # fmt: skip


def test_a_stopped_run_goes_on_as_if_it_had_not_been_and_selection_is_counted(
    tmp_path: Path,
) -> None:
    whole = rounds.train(resolve(flags={**FLAGS, "rounds": 4}), tmp_path / "whole")
    half = {**FLAGS, "rounds": 2, "planned_rounds": 4}
    rounds.train(resolve(flags=half), tmp_path / "parts")
    longer = {**half, "rounds": 4}
    parts = rounds.train(resolve(flags=longer), tmp_path / "parts", resume=True)
    mine, theirs = (each.setup.clients.private for each in (whole, parts))
    for name in ("q", "subset.owed", "subset.unseen", "subset.since", "subset.weight"):
        assert torch.equal(mine[name], theirs[name]), name
    assert "held_out_error" not in whole.summary["coreset"]  # a measurement looks at all points
    looked, passes = (whole.summary["cost"][name] for name in ("selection_examples", "passes"))
    assert 0 < looked / 3 <= 0.02 * (passes - looked / 3)
    assert (mine["subset.owed"] > 0).sum() > (mine["subset.weight"] > 0).sum()


def test_two_posteriors_in_a_step_are_refused() -> None:
    flags = {"method": "coreset-shared-start", "selector": "seen", "personal": "own"}
    with pytest.raises(UserError, match="learns from the steps of one posterior"):
        resolve(flags=flags)
