"""Each selector against a slow reference, a closed form or the theorem that it rests on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from selector_cases import CASES, look_of
from torch import Tensor
from torch.func import grad, vmap

from corefed import selectors
from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.selectors import classes, craig, gradients, herding, sampling
from corefed.selectors.potentials import relative_error
from corefed.selectors.settings import Selection


@pytest.mark.parametrize("case", ["classes", "regression"])
def test_last_layer_gradients_are_those_of_autograd(case: str) -> None:
    """At the posterior mean, where the factors give what back-propagation does."""
    look = look_of(case, (9, 6), (3, 2))
    model, head = look.model, look.model.head
    assert head is not None

    def log_p(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return model.log_likelihood(theta[None, None], x[None, None], y[None, None])[0, 0, 0]

    layer = gradients.last_layer(look)
    explicit = layer.explicit().unflatten(-1, (model.outputs, head.width + 1))
    for row, size in enumerate((9, 6)):
        per_point = vmap(grad(log_p), (None, 0, 0))
        full = per_point(look.q[row, 0], look.data.x[row, :size], look.data.y[row, :size])
        weight = full[:, head.weight].unflatten(-1, (model.outputs, head.width))
        torch.testing.assert_close(explicit[row, :size, :, :-1], weight)
        torch.testing.assert_close(explicit[row, :size, :, -1], full[:, head.bias])
    assert (explicit[1, 6:] == 0).all()


@pytest.mark.parametrize("draws", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_norms_and_products_are_those_of_the_explicit_gradients(case: str, draws: int) -> None:
    look = look_of(case, (9, 6), (3, 2))
    layer = gradients.last_layer(look, draws)
    g = layer.explicit()
    assert g.shape[-1] == layer.width
    torch.testing.assert_close(layer.gram(), g @ g.mT)
    torch.testing.assert_close(layer.squared_norms(), g.square().sum(-1))
    at = torch.tensor([[0, 9, 10], [8, 3, 2]])  # places of both clients laid end to end
    picked = layer.take(at)
    torch.testing.assert_close(picked.explicit(), g.flatten(0, 1)[at])
    torch.testing.assert_close(picked.inner(layer), picked.explicit() @ g.mT)


def test_a_sketch_keeps_norms_to_what_it_promises() -> None:
    """Relative variance 8/m of a squared norm: rank-one normals have E<a,r>^4 E<b,h>^4 = 9."""
    look = look_of("classes", (1,) * 500, (1,) * 500)
    one = gradients.last_layer(look)
    layer = gradients.LastLayer(*(f[:1].expand(500, -1, -1, -1) for f in one))  # 500 sketches
    m = 256
    ratio = layer.sketch(m, look.streams).square().sum(-1) / layer.squared_norms()
    assert float(ratio.mean()) == pytest.approx(1, abs=5 * math.sqrt(8 / m / 500))
    # The spread's own standard error: a squared norm is near normal, so sd / sqrt(2 * 500).
    assert float(ratio.std()) == pytest.approx(math.sqrt(8 / m), rel=5 / math.sqrt(2 * 500) + 0.1)
    assert layer.rows(layer.width, look.streams, "x").shape[-1] == layer.width
    assert layer.rows(5, look.streams, "x").shape[-1] == 5


def greedy_medoids(g: Tensor, k: int) -> dict[int, int]:
    """Facility location by trying every candidate, and how many points are nearest to each pick."""
    d = torch.cdist(g, g)
    picks: list[int] = []
    for _ in range(k):
        rest = [j for j in range(len(g)) if j not in picks]
        cost = {j: float(d[:, [*picks, j]].min(-1).values.sum()) for j in rest}
        picks.append(min(rest, key=cost.__getitem__))
    nearest = [picks[int(i)] for i in d[:, picks].argmin(-1)]
    return {j: nearest.count(j) for j in picks}


@pytest.mark.parametrize("case", CASES)
def test_craig_is_greedy_facility_location_in_each_class(case: str) -> None:
    look = look_of(case, (40, 25), (9, 5))
    weight = selectors.get("craig")(look).weight
    g = gradients.last_layer(look).explicit().double()
    for part in classes.parts(look):
        expected = torch.zeros(len(part.at))
        for j, count in greedy_medoids(g[part.client, part.at], part.k).items():
            expected[j] = count
        assert torch.equal(weight[part.client, part.at], expected)
    assert torch.equal(weight.sum(-1), look.n.float())


def test_craig_deals_large_classes_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    look = look_of("regression", (300,), (40,))
    exact = selectors.get("craig")(look).weight
    monkeypatch.setattr(craig, "BLOCK", 100)
    found = craig.blocks(look)
    assert [len(part.at) for part in found] == [100] * 3 and [p.k for p in found] == [14, 13, 13]
    assert torch.cat([part.at for part in found]).sort().values.tolist() == list(range(300))
    split = selectors.get("craig")(look).weight
    assert float(split.sum()) == 300 and int((split > 0).sum()) == 40
    g = gradients.last_layer(look).explicit()[0]
    cost = [float(torch.cdist(g, g[w[0] > 0]).min(-1).values.sum()) for w in (exact, split)]
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:40]
    assert cost[0] < cost[1] < float(torch.cdist(g, g[shuffled]).min(-1).values.sum())
    monkeypatch.setattr(craig, "MEMORY", craig.PAIR * 50**2)  # 50 points a block: 6 blocks
    assert len(craig.blocks(look)) == 6
    with pytest.raises(UserError, match="300 points in pairs to keep 2"):
        craig.blocks(look._replace(k=torch.tensor([2])))


def test_places_are_shared_by_largest_remainders_and_no_class_goes_without() -> None:
    assert classes.apportion([50, 30, 20], 10) == [5, 3, 2]
    assert classes.apportion([51, 30, 19], 11) == [6, 3, 2]  # quotas 5.61, 3.30, 2.09
    assert classes.apportion([97, 2, 1], 4) == [2, 1, 1]  # quotas 3.88, 0.08, 0.04
    assert classes.apportion([5, 5, 5], 2) == [1, 1, 0]
    assert classes.apportion([7], 3) == [3]
    for sizes in itertools.product(range(1, 7), repeat=3):
        for k in range(1, sum(sizes) + 1):
            shares = classes.apportion(sizes, k)
            assert sum(shares) == k
            assert all(min(1, k // 3) <= s <= n for s, n in zip(shares, sizes, strict=True))


def test_gradmatch_comes_nearer_to_the_gradient_than_random_and_than_craig() -> None:
    look = look_of("classes", (40, 25, 33), (8, 5, 6))
    g = gradients.last_layer(look).explicit()
    error = {
        name: relative_error(g, selectors.get(name)(look).weight)
        for name in ("gradmatch", "random", "craig")
    }
    assert (error["gradmatch"] < error["random"]).all()
    assert (error["gradmatch"] < error["craig"]).all()


def test_herding_follows_the_mean_of_each_class() -> None:
    look = look_of("classes", (40, 25), (9, 5))
    h = gradients.features(look).double()
    weight = selectors.get("herding")(look).weight
    for part in classes.parts(look):
        own = h[part.client, part.at]
        picks: list[int] = []
        for t in range(part.k):
            after = (own[picks].sum(0) + own) / (t + 1)
            gap = (own.mean(0) - after).norm(dim=-1)
            gap[picks] = torch.inf
            picks.append(int(gap.argmin()))
        if part.k:
            assert picks[0] == int((own - own.mean(0)).norm(dim=-1).argmin())
        expected = torch.zeros(len(own))
        expected[picks] = len(own) / part.k
        torch.testing.assert_close(weight[part.client, part.at], expected)
    first = herding.select(look._replace(k=torch.tensor([1, 1]))).weight  # one group a client
    nearest = [
        int((h[c, :n] - h[c, :n].mean(0)).norm(dim=-1).argmin()) for c, n in ((0, 40), (1, 25))
    ]
    assert first.argmax(-1).tolist() == nearest
    assert first.sum(-1).tolist() == [40, 25]


def test_herding_takes_the_first_of_two_points_that_are_equally_far() -> None:
    """Of a class of two both are: on each kind of processor, rounding would decide otherwise."""
    h = torch.randn(300, 2, 7, generator=torch.Generator().manual_seed(0))
    at, one = torch.arange(600).view(300, 2), torch.ones(300, dtype=torch.int64)
    weight = herding.follow(h, classes.Groups(at, torch.ones(300, 2, dtype=torch.bool), one, 1))
    assert weight.tolist() == [[2.0, 0.0]] * 300


def test_k_centre_covers_within_twice_the_smallest_radius() -> None:
    look = look_of("classes", (12, 10), (3, 4))
    weight = selectors.get("k-centre")(look).weight
    h = gradients.features(look).double()
    for row, (n, k) in enumerate(((12, 3), (10, 4))):
        d = torch.cdist(h[row, :n], h[row, :n])
        radius = {
            chosen: float(d[:, list(chosen)].min(-1).values.max())
            for chosen in itertools.combinations(range(n), k)
        }
        centres = tuple(weight[row].nonzero().flatten().tolist())
        assert radius[centres] <= 2 * min(radius.values()) * (1 + 1e-6)
        count = torch.bincount(d[:, list(centres)].argmin(-1), minlength=k)
        assert weight[row, list(centres)].tolist() == count.tolist()
    one = selectors.get("k-centre")(look._replace(k=torch.tensor([1, 1]))).weight
    nearest = [
        int((h[c, :n] - h[c, :n].mean(0)).norm(dim=-1).argmin()) for c, n in ((0, 12), (1, 10))
    ]
    assert one.argmax(-1).tolist() == nearest


def test_inclusion_probabilities_solve_their_equation() -> None:
    draws = torch.Generator().manual_seed(0)
    scores = torch.rand(4, 30, generator=draws).pow(8) * 5
    mask = torch.arange(30) < torch.tensor([30, 20, 30, 7]).unsqueeze(-1)
    scores[2] = 0  # nothing to go by: all alike
    scores[0, 3] = torch.nan
    k = torch.tensor([12, 5, 9, 7])
    pi = sampling.inclusion(scores, mask, k, 0.1)
    torch.testing.assert_close(pi.sum(-1), k.double())
    assert (pi[~mask] == 0).all() and (pi <= 1).all()
    for row, n in enumerate((30, 20, 30, 7)):
        assert (pi[row, :n] >= 0.1 * k[row] / n * (1 - 1e-9)).all()
        s = scores[row, :n].double().nan_to_num(0) if row != 2 else torch.ones(n).double()
        p = 0.9 * s / s.sum() + 0.1 / n
        low, high = 0.0, 1e6  # c by bisection
        for _ in range(200):
            c = (low + high) / 2
            low, high = (c, high) if (c * p).clamp_max(1).sum() < k[row] else (low, c)
        torch.testing.assert_close(pi[row, :n], (high * p).clamp_max(1), rtol=1e-9, atol=1e-9)
    assert (pi[0] == 1).any() and (pi[3, :7] == 1).all()
    for floor in (0.0, 1.1):
        with pytest.raises(UserError, match="floor"):
            sampling.inclusion(scores, mask, k, floor)


def test_points_are_drawn_as_often_as_they_should_and_sums_are_unbiased() -> None:
    """20000 draws of 6 of 15 points and 3 of padding; within five standard errors."""
    many, n = 20_000, 15
    draws = torch.Generator().manual_seed(0)
    scores = torch.zeros(many, 18) + torch.rand(18, generator=draws).pow(4)
    mask = (torch.arange(18) < n).expand(many, -1)
    k = torch.full((many,), 6)
    pi = sampling.inclusion(scores, mask, k, 0.2)
    chosen = sampling.draw(pi, k, mask, Streams([Who(0, c) for c in range(many)], 0), "test")
    assert (chosen.sum(-1) == 6).all() and not chosen[~mask].any()
    spread = (pi[0] * (1 - pi[0]) / many).sqrt()
    assert ((chosen.double().mean(0) - pi[0]).abs() <= 5 * spread).all()
    assert (pi[0] == 1).any()
    f = torch.randn(18, generator=draws, dtype=torch.float64)
    total = torch.where(chosen, f / pi.clamp_min(1e-9), 0.0).sum(-1)
    gap = float(total.mean() - f[:n].sum())
    assert abs(gap) < 5 * float(total.std()) / math.sqrt(many)


def test_weights_are_one_over_the_chance_and_bounded() -> None:
    look = look_of("classes", (40, 25), (8, 5))
    for name in ("loss", "gradient-norm", "leverage"):
        weight = selectors.get(name)(look).weight
        bound = (look.n / (look.k * sampling.FLOOR)).unsqueeze(-1)
        assert (weight[weight > 0] >= 1 - 1e-6).all() and (weight <= bound * (1 + 1e-6)).all()
    pi = sampling.inclusion(gradients.losses(look), look.mask, look.k)
    weight = selectors.get("loss")(look).weight
    torch.testing.assert_close(
        (weight * pi)[weight > 0], torch.ones(13).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("case", ["classes", "regression"])
def test_losses_are_those_of_the_model_above_a_perfect_fit(case: str) -> None:
    look = look_of(case, (9, 6), (3, 2))
    theta = look.q[:, :1]
    loss = -look.model.log_likelihood(theta, look.data.x, look.data.y).squeeze(1)
    if case == "regression":  # noise 0.5 and two targets: log p <= -2 log(0.5 sqrt(2 pi))
        loss = loss - 2 * math.log(0.5 * math.sqrt(2 * math.pi))
    torch.testing.assert_close(gradients.losses(look), loss * look.mask, rtol=1e-5, atol=1e-5)


def test_leverages_are_their_formula_and_sum_to_k_at_most() -> None:
    look = look_of("classes", (9, 6), (3, 2))
    g = gradients.last_layer(look).explicit()
    tau = sampling.leverages(g, look.k)
    for row in range(2):
        G = g[row].double()
        ridge = G.square().sum() / look.k[row] * torch.eye(G.shape[1]).double()
        expected = (G @ torch.linalg.inv(G.T @ G + ridge) @ G.T).diagonal()
        torch.testing.assert_close(tau[row], expected, rtol=1e-9, atol=1e-12)
    assert (tau.sum(-1) <= look.k).all()


# --- a part of the points looked at ---------------------------------------------------------------


def test_two_phases_look_at_a_part_and_stand_for_all() -> None:
    """pool = 0.5: k points within the half that is looked at, and a sum that is nearly right.

    The mean over 400 seeds of sum_j w_j is within 5 standard errors and 5 % of n. A part is first
    chosen and then chosen from, each time with the small bias of a first choice: 41.5 +- 0.1 for
    40 points was measured over 6000 seeds.
    """
    totals = []
    for seed in range(400):
        look = look_of("classes", (40, 24), (6, 5), seed=seed)
        look = look._replace(settings=Selection(pool=0.5, draws=16, shrink=1e9))
        weight = selectors.get("calibrated")(look).weight
        assert ((weight > 0).sum(-1) == look.k).all() and (weight[~look.mask] == 0).all()
        totals.append(weight.sum(-1))
    each = torch.stack(totals).double()
    error = each.std(0) / len(each) ** 0.5
    n = torch.tensor([40.0, 24.0])
    assert ((each.mean(0) - n).abs() < 5 * error + 0.05 * n).all()


def test_the_half_that_was_looked_at_is_not_looked_at_next() -> None:
    """With equal turns, two choices from half of the points each see all of them between them."""
    look = look_of("regression", (40,), (10,))
    look = look._replace(settings=Selection(pool=0.5, draws=16))
    first = selectors.get("calibrated")(look)
    second = selectors.get("calibrated")(look._replace(memory=first.memory))
    assert not ((first.weight > 0) & (second.weight > 0)).any()
