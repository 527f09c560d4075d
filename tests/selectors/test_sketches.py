"""What is matched: potentials and gradients of a sketch, what they cost, what matching is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from selector_cases import CASES, look_of
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.selectors import calibrated, gradients, matching, potentials, sketches
from corefed.selectors.frame import Look
from corefed.selectors.quality import judge
from corefed.selectors.settings import Selection


def streams(clients: int, seed: int = 0) -> Streams:
    return Streams([Who(seed, c) for c in range(clients)], 0)


def look_with(case: str = "classes", **settings: Any) -> Look:
    """Two clients with padding; the global model and the last choice lie elsewhere than q."""
    look = look_of(case, (30, 20), (6, 5), padding=3)
    draws = torch.Generator().manual_seed(3)
    z = look.q + 0.3 * torch.randn(look.q.shape, generator=draws)
    before = look.q - 0.1 * torch.randn(look.q.shape, generator=draws)
    return look._replace(z=z, before=before, settings=Selection(**settings))


def again(look: Look) -> Look:
    """The same with its streams at their beginning."""
    return look._replace(streams=look.streams.restart())


def scaled(g: Tensor) -> Tensor:
    length: Tensor = g.sum(1).norm(dim=-1)
    return g / length.view(-1, 1, 1)


# Potentials


@pytest.mark.parametrize("features", [0, 2, 64])
@pytest.mark.parametrize("case", CASES)
def test_a_block_is_scaled_and_centred_potentials(case: str, features: int) -> None:
    """Those of Eq. 4 at draws of the block's own, whichever way they share layers."""
    look = look_with(case, widths=(1.0, 4.0), draws=20, feature_draws=features)
    g, norms = sketches.sketch(look)
    assert g.shape == (2, 33, 20) and norms.shape == (2, 33)
    assert (g[~look.mask] == 0).all() and (norms[~look.mask] == 0).all()
    for number, width in enumerate((1.0, 4.0)):
        block = g[..., 10 * number : 10 * (number + 1)]
        pi = gaussian.widen(look.q, width)
        log_p = potentials.draw(
            look.model, pi, look.data, 10, again(look).streams, f"coreset/{number}", features // 2
        )
        expected = scaled(potentials.potentials(log_p, look.mask))
        torch.testing.assert_close(block, expected, rtol=1e-4, atol=1e-6)  # float32, centred
        # Zero over draws and ||y|| = 1, to float32's rounding of sums over 10 and 30 numbers.
        assert float(block.sum(-1).abs().max()) < 1e-5 * float(block.abs().max()) * 10
        torch.testing.assert_close(block.sum(1).norm(dim=-1), torch.ones(2), rtol=1e-5, atol=0)


def test_matching_and_the_sketch_have_the_same_potentials() -> None:
    """A sketch's second block draws under the name that matching gives to width 1."""
    look = look_with(widths=(4.0, 1.0), draws=40, feature_draws=4)
    g = sketches.sketch(look).g[..., 20:]
    plain = Selection(feature_draws=2)
    engine = matching.matched_potentials(
        look.model, look.q, look.data, plain, 20, again(look).streams
    )
    torch.testing.assert_close(g, scaled(engine), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_norms_are_of_the_last_layer_at_the_same_draws(case: str) -> None:
    look = look_with(case, widths=(2.0, 1.0), draws=40, feature_draws=6)
    norms = sketches.sketch(look).norms
    wide = again(look)._replace(q=gaussian.widen(look.q, 2.0))
    if case == "no head":  # nothing is shared: a pass of their own
        layer = gradients.last_layer(wide, 1, "coreset/0/norms")
    else:
        layer = gradients.last_layer(wide, 3, "coreset/0")
    torch.testing.assert_close(norms, layer.squared_norms().sqrt())
    assert (norms[look.mask] > 0).all()


def test_without_draws_asked_for_there_are_64() -> None:
    assert sketches.sketch(look_with()).g.shape[-1] == sketches.DRAWS == 64


# Where pi-hat is drawn


def test_the_path_has_two_centres_and_needs_the_last_choice() -> None:
    look = look_with(around="path")
    assert look.before is not None
    here, ahead = sketches.centres(look)
    assert torch.equal(here, look.q)
    torch.testing.assert_close(ahead - look.q, look.q - look.before)
    both = sketches.sketch(look).g
    assert both.shape[-1] == 64
    moved = look._replace(q=ahead, before=None)  # the same draws, by name, around the point ahead
    log_p = potentials.draw(look.model, moved.q, look.data, 32, again(look).streams, "coreset/1", 1)
    expected = scaled(potentials.potentials(log_p, look.mask))
    torch.testing.assert_close(both[..., 32:], expected, rtol=1e-4, atol=1e-6)
    first = again(look)._replace(before=None)  # at the first choice there is no path
    assert len(sketches.centres(first)) == 1
    plain = again(look)._replace(settings=Selection())
    assert torch.equal(sketches.sketch(first).g, sketches.sketch(plain).g)


def test_around_global_is_around_z() -> None:
    look = look_with(around="global")
    g, norms = sketches.sketch(look)
    swapped = again(look)._replace(q=look.z, settings=Selection())
    expected = sketches.sketch(swapped)
    assert torch.equal(g, expected.g) and torch.equal(norms, expected.norms)
    here = sketches.sketch(again(look)._replace(settings=Selection())).g
    assert not torch.allclose(g, here, atol=1e-3)


# Gradients


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_last_layers(case: str) -> None:
    look = look_with(case, match="gradients", draws=64)
    g, norms = sketches.sketch(look)
    layer = gradients.last_layer(again(look), 2, "coreset")
    assert torch.equal(g, layer.explicit())  # 2 draws of 3 (6 + 1) numbers, or fewer
    torch.testing.assert_close(norms, g.square().sum(-1).sqrt())
    few = sketches.sketch(again(look)._replace(settings=replace(look.settings, draws=2)))
    assert few.g.shape[-1] == 2 and torch.equal(few.norms, norms)
    assert (few.g[~look.mask] == 0).all()


# What a sketch costs


def test_passes_by_hand() -> None:
    """784 * 100 + 100 weights below the last layer, 100 * 10 + 10 in it."""
    model = mlp((784, 100, 10), Categorical(10))
    head = 1010 / 79510
    plain = Selection()
    assert sketches.passes(model, plain) == pytest.approx(2 + 64 * head)
    many = replace(plain, draws=200, feature_draws=16)
    assert sketches.passes(model, many) == pytest.approx(16 + 200 * head)
    assert sketches.passes(model, replace(plain, match="gradients")) == 2
    wide = replace(plain, widths=(1.0, 2.0, 4.0))  # one draw below the last layer each, at least
    assert sketches.passes(model, wide) == pytest.approx(3 + 3 * 22 * head)
    path = replace(wide, around="path")
    assert sketches.passes(model, path) == pytest.approx(6 + 6 * 11 * head)
    odd = replace(plain, widths=(1.0, 4.0), feature_draws=3)  # two draws for each width
    assert sketches.passes(model, odd) == pytest.approx(4 + 64 * head)
    # Where every layer is drawn, the gradients' norms want one pass more.
    assert sketches.passes(model, replace(plain, feature_draws=0)) == 65
    assert sketches.passes(model._replace(head=None), plain) == 65
    assert sketches.passes(model, replace(plain, feature_draws=0, match="gradients")) == 1


# A client of logistic regression


POINTS, COPIES, SIGMA = 400, 60, 0.1  # sigma is what 400 points leave of a weight's uncertainty


def logistic(k: int) -> tuple[Look, Tensor]:
    """Copies of one client, each with a seed of its own, and 4 sigma from its posterior."""
    draws = torch.Generator().manual_seed(0)
    model = mlp((6, 3), Categorical(3))
    x, mu = torch.randn(1, POINTS, 6, generator=draws), model.init(draws, 1.0)
    p = model.forward(mu[None, None], x)[0, 0].softmax(-1)
    y = torch.multinomial(p, 1, generator=draws).T
    q = torch.stack([mu, gaussian.rho_of(torch.full_like(mu, SIGMA))]).expand(COPIES, -1, -1)
    weight = torch.ones(COPIES, POINTS)
    data = ClientData(x.expand(COPIES, -1, -1), y.expand(COPIES, -1), weight)
    keep = torch.full((COPIES,), k)
    memory = torch.zeros_like(weight)
    away = mu + 4 * SIGMA * torch.randn(len(mu), generator=draws).sign()
    look = Look(model, q, q, data, keep, memory, streams(COPIES))
    return look, torch.stack([away, q[0, 1]]).unsqueeze(0)


def fresh(look: Look, pi: Tensor) -> Tensor:
    """Potentials [1, n, S] at draws that no selector has seen."""
    data = ClientData(*(field[:1] for field in look.data))
    log_p = potentials.draw(look.model, pi, data, 200, streams(1, 99), "fresh")
    return potentials.potentials(log_p, look.mask[:1])


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
def test_choices_are_better_than_uniform_ones_here_and_four_sigma_away(fraction: float) -> None:
    """Mean over 60 seeds of the error over what a uniform subset of that size expects. Measured:
    0.07, 0.04 and 0.006 at the posterior's width; 0.11 to 0.17 at four times that, and as much
    around a mean that is 4 sigma away in every weight."""
    look, away = logistic(round(fraction * POINTS))
    weight = calibrated.select(look).weight
    here = look.q[:1]
    for pi, most in ((here, 0.1), (gaussian.widen(here, 4.0), 0.3), (away, 0.3)):
        g = fresh(look, pi).expand(COPIES, -1, -1)
        quality = judge(g, weight, look.k, look.mask)
        assert float(quality.over_uniform.mean()) < most


def test_calibration_takes_most_of_the_spread_away() -> None:
    """The variance over seeds of sum_j w_j g_j(theta) at fresh theta, over that of a uniform
    subset, which is in closed form; drawn weights alone, then calibrated ones."""
    look, _ = logistic(40)
    g = fresh(look, look.q[:1])
    uniform = judge(g, look.data.weight[:1], look.k[:1], look.mask[:1]).uniform
    spread = []
    for shrink in (1e9, 0.1):
        settings = replace(look.settings, shrink=shrink)
        weight = calibrated.select(look._replace(settings=settings)).weight
        total = weight @ g[0]
        variance = total.var(0).sum() / g[0].sum(0).square().sum()
        spread.append(float(variance / uniform))
    assert spread[1] < 0.1 < 0.3 < spread[0] < 1  # measured: 0.042 and 0.43
