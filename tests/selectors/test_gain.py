"""Batches that follow the gain of importance sampling: how large, unbiased, and where they pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.bayes.batches import plan
from corefed.models.cnn import cnn
from corefed.models.likelihood import Categorical
from corefed.models.network import PIXELS, mlp
from corefed.selectors import gain, sampling
from corefed.settings.config import resolve
from corefed.training import rounds
from corefed.training.rounds import Result

MNIST_CNN = cnn((1, 28, 28), (4, 8), (32,), Categorical(10))
SMALL: dict[str, Any] = {
    "method": "coreset-pfedbayes", "selector": "seen", "clients": 3, "partition": "labels:2",
    "fraction": 0.2, "batch_size": 32, "rounds": 4, "local_steps": 20, "refresh_every": 10,
    "evaluate_every": 4, "evaluate_draws": 2, "checkpoint_every": 0, "floor": 0.05, "device": "cpu",
}  # fmt: skip
"""Two classes per client are soon learnt, so that few of the points still have large gradients."""
CNN: dict[str, Any] = {**SMALL, "model": "cnn", "channels": "8,8", "hidden": "8"}


def trained(**flags: Any) -> Result:
    return rounds.train(resolve(flags=flags))


# How many points


def test_the_gain_is_the_ratio_of_the_variances() -> None:
    """Of sums of vectors with these norms and random directions, by 40,000 draws each."""
    draws = torch.Generator().manual_seed(0)
    n, k, many = 200, 40, 40_000
    norms = torch.rand(n, generator=draws).double() ** 4 + 0.01
    turn = torch.randn(n, 50, generator=draws).double()
    vectors = norms[:, None] * turn / turn.norm(dim=-1, keepdim=True)
    mask = torch.ones(1, n, dtype=torch.bool)
    pi = sampling.inclusion(norms[None].float(), mask, torch.tensor([k]), 0.1)[0]
    p = pi / k
    squares = [0.0, 0.0]
    for place, chance in enumerate((p, torch.full_like(p, 1 / n))):
        at = torch.multinomial(chance, many, replacement=True, generator=draws)
        squares[place] = float((vectors[at] / chance[at, None]).square().sum(-1).mean())
    exact = float((norms.square() / p).sum() / (n * norms.square().sum()))
    # The mean of squares that are at most `most` has an error of most / sqrt(many) at the most.
    assert squares[0] / squares[1] == pytest.approx(exact, rel=0.05)
    wanted = gain.share(norms[None].float(), pi[None], mask)
    assert wanted.tolist() == [-(-4 * exact // 1) / 4] and exact < 0.75


def test_equal_scores_need_the_whole_batch_and_few_points_that_matter_a_quarter() -> None:
    mask = torch.ones(4, 1000, dtype=torch.bool)
    mask[3, 100:] = False
    score = torch.ones(4, 1000)
    score[1, 20:] = 1e-3
    score[2] = 0.0
    k = torch.tensor([100, 100, 100, 10])
    pi = sampling.inclusion(score, mask, k, 0.1)
    assert gain.share(score, pi, mask).tolist() == [1.0, 0.25, 1.0, 1.0]
    parts = torch.tensor([0.25, 0.5, 0.75, 1.0])
    assert gain.points(parts, 100) == [32, 56, 80, 100]  # multiples of 8, at most all
    assert gain.points(parts, 16) == [8, 8, 16, 16] and gain.points(parts, 5) == [5] * 4


@pytest.mark.parametrize("large", [1e-30, 1e30])
def test_scores_of_any_size_have_the_same_share(large: float) -> None:
    score = torch.linspace(0.01, 1.0, 50)[None] ** 3
    mask, k = torch.ones(1, 50, dtype=torch.bool), torch.tensor([10])
    shares = [
        gain.share(s, sampling.inclusion(s, mask, k, 0.1), mask) for s in (score, score * large)
    ]
    assert torch.equal(*shares) and float(shares[0]) < 1


# Minibatches of different sizes


def some_clients(points: tuple[int, ...]) -> tuple[ClientData, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    n = max(points)
    real = (torch.arange(n) < torch.tensor(points).unsqueeze(-1)).float()
    data = ClientData(torch.zeros(len(points), n, 1), torch.zeros(len(points), n).long(), real)
    return data, real * (torch.rand(len(points), n, generator=draws) * 3 + 0.5) * (
        torch.rand(len(points), n, generator=draws) < 0.7
    )


def test_the_sum_over_a_batch_is_unbiased_whatever_its_size() -> None:
    """By 4,000 minibatches per client, within 5 standard errors; epochs make them smaller."""
    points = (40, 40, 25, 9)
    data, weight = some_clients(points)
    f = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    expected = (weight * f).sum(-1) / torch.tensor(points)
    streams = Streams([Who(0, c) for c in range(4)], 0)
    sizes = [8, 16, 8, 16]
    at, scale, *_ = plan(data, weight, streams, 4000, sizes)
    sums = (scale * f.gather(1, at.flatten(1)).view_as(at)).sum(-1).double()
    error = sums.std(-1) / 4000**0.5
    assert ((sums.mean(-1) - expected).abs() <= 5 * error + 1e-6).all()
    used = (scale > 0).sum(-1)
    support = (weight > 0).sum(-1).tolist()
    for client, (size, m) in enumerate(zip(sizes, support, strict=True)):
        assert (used[client] == min(size, m)).all()


def test_a_client_has_the_same_minibatches_alone_and_beside_others() -> None:
    data, weight = some_clients((40, 33, 25))
    who, sizes = [Who(0, c) for c in range(3)], [8, 24, 16]
    together = plan(data, weight, Streams(who, 0), 7, sizes)
    for row, size in enumerate(sizes):
        one = ClientData(*(field[row : row + 1] for field in data))
        own = Streams(who[row : row + 1], 0)
        for alone in (
            plan(one, weight[row : row + 1], own.restart(), 7, [size]),
            plan(one, weight[row : row + 1], own.restart(), 7, size),
        ):
            width = alone.at.shape[-1]
            assert torch.equal(together.at[row, :, :width], alone.at[0])
            assert torch.equal(together.scale[row, :, :width], alone.scale[0])
            assert not together.scale[row, :, width:].any()


# Where it pays


def test_a_point_of_a_cnn_costs_more_than_a_weight_and_of_an_mlp_less() -> None:
    flat = mlp((784, 100, 10), Categorical(10), PIXELS)
    assert gain.flops(flat.forward, flat.size, (784,)) == 2 * 79_400
    by_hand = 2 * 9 * (28 * 28 * 4 + 14 * 14 * 4 * 8) + 2 * (8 * 7 * 7 * 32 + 32 * 10)
    assert gain.flops(MNIST_CNN.forward, MNIST_CNN.size, (784,)) == by_hand
    assert gain.pays(MNIST_CNN, (784,))
    assert not gain.pays(flat, (784,))


def test_an_mlp_keeps_its_batch() -> None:
    """Bit for bit, since a step on fewer points takes as long."""
    flags = {**SMALL, "hidden": "4"}
    plain, by_gain = trained(**flags), trained(**flags, batch_by_gain=True)
    assert plain.summary["metrics"] == by_gain.summary["metrics"]
    assert plain.summary["cost"]["passes"] == by_gain.summary["cost"]["passes"]
    for one, other in zip(plain.servers, by_gain.servers, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("one_thread")
def test_a_cnn_takes_fewer_points_and_the_same_alone_and_stacked() -> None:
    plain = trained(**CNN)
    stacked, alone = (trained(**CNN, batch_by_gain=True, runtime=r) for r in ("vmap", "loop"))
    shares = stacked.setup.clients.private["subset.share"]
    assert 0.25 <= float(shares.min()) < 1 and len(shares.unique()) > 1
    torch.testing.assert_close(shares, alone.setup.clients.private["subset.share"])
    passes = [each.summary["cost"]["passes"] for each in (plain, stacked, alone)]
    assert passes[0] > passes[1] == passes[2]
    for one, other in zip(stacked.servers, alone.servers, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4)
    looked = stacked.summary["cost"]["selection_examples"] / 3
    assert 0 < looked <= 0.02 * (passes[1] - looked)


@pytest.mark.usefixtures("one_thread")
def test_under_a_deadline_passes_are_counted_as_they_are_taken() -> None:
    timed = {**CNN, "speeds": "600", "deadline": 1.0, "local_epochs": 40, "late": "fit"}
    done = trained(**timed, batch_by_gain=True)
    assert done.setup.clients.devices is not None and any(done.setup.clients.devices.late)
    assert float(done.setup.clients.private["subset.share"].min()) < 1
    assert 3 < done.summary["simulated"]["seconds"]["mean"] <= 4 * (1 + 1e-9)


def test_other_selectors_do_not_use_it() -> None:
    with pytest.raises(UserError, match="batch_by_gain is True, but selector calibrated does not"):
        resolve(flags={"batch_by_gain": True})
