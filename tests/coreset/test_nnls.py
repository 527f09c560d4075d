"""Non-negative least squares from a Gram matrix, against scipy's active-set method on the columns.

How far above the minimum f may end is derived. Fitted with the ridge lambda = RIDGE in units of the
columns' norms, f(x) + lambda |x|^2 <= f(x*) + lambda |x*|^2; slopes below `slack` are taken for
zero, each worth 2 slack x*_j at most; and f itself is a difference of numbers of size |b|^2.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from corefed.bayes import regression
from corefed.coreset import nnls as module
from corefed.coreset.nnls import RIDGE, SLACK, nnls

Array = np.ndarray
EPS = torch.finfo(torch.float64).eps


class Fit(NamedTuple):
    """Minimise |b - A x|^2 over x >= 0, and what scipy makes of it."""

    A: Array
    b: Array
    best: Array
    allowed: float  # of f above its minimum
    gram: Tensor  # [1, m, m]
    target: Tensor  # [1, m]
    real: Tensor  # [1, m]

    def f(self, x: Array | Tensor) -> float:
        return float(((self.b - self.A @ np.asarray(x)) ** 2).sum())


def posed(A: Array, b: Array) -> Fit:
    m = A.shape[1]
    best, _ = scipy.optimize.nnls(A, b, maxiter=100 * m)
    norms = np.linalg.norm(A, axis=0)
    x = best * norms  # in units of the columns
    slopes = np.abs(A.T @ b) / np.where(norms > 0, norms, 1)
    allowed = RIDGE * (x @ x) + 2 * SLACK * slopes.max() * x.sum() + 1e-14 * (b @ b)
    columns = torch.from_numpy(A)
    target = torch.from_numpy(A.T @ b).unsqueeze(0)
    real = torch.ones(1, m, dtype=torch.bool)
    return Fit(A, b, best, allowed, (columns.T @ columns).unsqueeze(0), target, real)


def spectrum(rng: np.random.Generator, s: int, m: int, decades: float) -> Array:
    """Singular values from 1 to 10^-decades, which the Gram matrix squares."""
    u = np.linalg.qr(rng.standard_normal((s, m)))[0]
    v = np.linalg.qr(rng.standard_normal((m, m)))[0]
    return (u * np.logspace(0, -decades, m)) @ v


def gaussian(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    return rng.standard_normal((s, m)), 3 * rng.standard_normal(s)


def correlated(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = 0.3 * rng.standard_normal((s, m)) + rng.standard_normal((s, 1))
    return A, A.sum(1) + 3 * rng.standard_normal(s)


def ill_conditioned(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = spectrum(rng, s, m, 4)
    return A, A @ rng.standard_normal(m) + 0.1 * rng.standard_normal(s)


def very_ill_conditioned(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = spectrum(rng, s, m, 6)
    return A, A @ np.abs(rng.standard_normal(m)) + 1e-3 * rng.standard_normal(s)


def rank_deficient(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = rng.standard_normal((s, m // 3 + 1)) @ rng.standard_normal((m // 3 + 1, m))
    return A, A.sum(1) + rng.standard_normal(s)


def fewer_rows_than_columns(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = rng.standard_normal((m // 2 + 1, m)) + 0.5
    return A, A.sum(1) + rng.standard_normal(len(A))


def planted(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = rng.standard_normal((s, m))
    return A, A @ (np.abs(rng.standard_normal(m)) * (rng.random(m) < 0.4))


def duplicates(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = rng.standard_normal((s, m))[:, rng.integers(0, m // 2 + 1, m)]
    return A, A.sum(1) + rng.standard_normal(s)


def zero_columns(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    A = rng.standard_normal((s, m)) * (np.arange(m) % 3 > 0)
    return A, A.sum(1) + rng.standard_normal(s)


def tiny_columns(rng: np.random.Generator, s: int, m: int) -> tuple[Array, Array]:
    """Norms over 8 orders of magnitude."""
    A = rng.standard_normal((s, m)) * np.logspace(0, -8, m)
    return A, A.sum(1) + rng.standard_normal(s)


KINDS = [
    gaussian,
    correlated,
    ill_conditioned,
    very_ill_conditioned,
    rank_deficient,
    fewer_rows_than_columns,
    planted,
    duplicates,
    zero_columns,
    tiny_columns,
]
UNIQUE = {gaussian, correlated, planted}  # where the weights themselves are well determined
Kind = Callable[[np.random.Generator, int, int], tuple[Array, Array]]


def example(kind: Kind, seed: int) -> Fit:
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 40))
    return posed(*kind(rng, m + int(rng.integers(0, 40)), m))


def in_units(fit: Fit) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `nnls` hands on: Gram matrix, target, real and slack in units of the columns, and the
    norms themselves."""
    norms = fit.gram.diagonal(dim1=-2, dim2=-1).sqrt()
    real = norms > 0
    inverse = torch.where(real, norms.reciprocal(), 0.0)
    gram = fit.gram * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    target = fit.target * inverse
    return gram, target, real, SLACK * target.abs().amax(-1, keepdim=True), inverse


@pytest.mark.parametrize("kind", KINDS)
def test_the_minimum_is_that_of_scipy(kind: Kind) -> None:
    for seed in range(20):
        fit = example(kind, seed)
        x = nnls(fit.gram, fit.target, fit.real)[0]
        assert x.isfinite().all() and (x >= 0).all()
        assert fit.f(x) <= fit.f(fit.best) + fit.allowed
        if kind in UNIQUE:
            np.testing.assert_allclose(x.numpy(), fit.best, atol=1e-7 * (1 + fit.best.max()))


@pytest.mark.parametrize("kind", KINDS)
def test_kkt_conditions(kind: Kind) -> None:
    """Slopes: none below zero where bound, zero where free but for the ridge's part, lambda x.

    A slope is a sum of m products of size |G||x|, each rounded.
    """
    for seed in range(20):
        fit = example(kind, seed)
        gram, target, real, slack, inverse = in_units(fit)
        x = nnls(fit.gram, fit.target, fit.real)
        x = torch.where(real, x / inverse, 0.0)
        slope = torch.bmm(gram, x.unsqueeze(-1)).squeeze(-1) - target
        rounding = 1e-15 * x.shape[1] * (x.sum(-1, keepdim=True) + target.abs().amax())
        assert (slope >= -slack - rounding)[real & (x == 0)].all()
        assert (slope.abs() <= slack + 2 * RIDGE * x + rounding)[real & (x > 0)].all()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_never_worse_than_its_start(kind: Kind) -> None:
    """From anywhere, and from the optimum itself: by the ridge at most."""
    for seed in range(10):
        fit = example(kind, seed)
        g = torch.Generator().manual_seed(seed)
        anywhere = torch.rand(fit.target.shape, generator=g, dtype=torch.float64)
        for start in (anywhere, torch.from_numpy(fit.best).unsqueeze(0)):
            was = start.clone()
            x = nnls(fit.gram, fit.target, fit.real, start)[0]
            assert fit.f(x) <= fit.f(start[0]) + fit.allowed
            assert torch.equal(start, was)


# The two methods


def test_pivoting_alone_ends_on_an_easy_problem_and_cycles_on_a_hard_one() -> None:
    easy, hard = example(gaussian, 0), [example(ill_conditioned, seed) for seed in range(20)]
    x, ended = module._pivot(*in_units(easy)[:4])
    assert ended.all()
    assert easy.f((x * in_units(easy)[4])[0]) <= easy.f(easy.best) + easy.allowed
    cycles = [fit for fit in hard if not module._pivot(*in_units(fit)[:4])[1].all()]
    assert len(cycles) >= 5  # about half of them
    for fit in cycles:
        x, _ = module._pivot(*in_units(fit)[:4])
        given_up = (x * in_units(fit)[4])[0].clamp_min(0)  # what it had when it gave up
        assert fit.f(given_up) > fit.f(fit.best) + fit.allowed
        x = nnls(fit.gram, fit.target, fit.real)[0]  # descent takes over
        assert fit.f(x) <= fit.f(fit.best) + fit.allowed


def descend(fit: Fit, start: Tensor) -> Tensor:
    gram, target, real, slack, inverse = in_units(fit)
    units = torch.where(real, start / torch.where(real, inverse, 1.0), 0.0)
    return module._descend(gram, target, real, slack, units) * inverse


@pytest.mark.parametrize("kind", KINDS)
def test_descent_alone_finds_the_minimum(kind: Kind) -> None:
    for seed in range(20):
        fit = example(kind, seed)
        g = torch.Generator().manual_seed(seed)
        anywhere = torch.rand(fit.target.shape, generator=g, dtype=torch.float64)
        for start in (torch.zeros_like(fit.target), anywhere):
            x = descend(fit, start)[0]
            assert x.isfinite().all() and (x >= 0).all()
            assert fit.f(x) <= fit.f(fit.best) + fit.allowed


def test_descent_never_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the slope at every iterate, once; they are caught on the way there."""
    times, iterates = module._times, []

    def caught(gram: Tensor, x: Tensor) -> Tensor:
        iterates.append(x[0])
        return times(gram, x)

    monkeypatch.setattr(module, "_times", caught)
    for seed in range(10):
        fit = example(very_ill_conditioned, seed)
        iterates.clear()
        descend(fit, torch.zeros_like(fit.target))
        fs = [fit.f(x * in_units(fit)[4][0]) for x in iterates]
        rounding = 1e-14 * float(fit.b @ fit.b)
        assert all(after <= before + rounding for before, after in pairwise(fs))


@pytest.mark.parametrize("m", [150, 300])
def test_descent_has_enough_steps_for_a_large_and_ill_conditioned_problem(m: int) -> None:
    """Pivoting cycles on both, and descent starts from 0."""
    rng = np.random.default_rng(m)
    fit = posed(*very_ill_conditioned(rng, 2 * m, m))
    assert not module._pivot(*in_units(fit)[:4])[1].all()
    x = nnls(fit.gram, fit.target, fit.real)[0]
    assert fit.f(x) <= fit.f(fit.best) + fit.allowed


def test_potentials_of_a_random_support() -> None:
    """100 of 3000 points of a logistic regression in 5 dimensions, to stand for all of them: nearly
    dependent columns, and f at its minimum is 1e-6 of |b|^2."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 5, generator=g, dtype=torch.float64)
    truth = torch.randn(5, generator=g, dtype=torch.float64)
    y = (torch.rand(3000, generator=g, dtype=torch.float64) < torch.sigmoid(x @ truth)).double()
    theta = truth + 0.05 * torch.randn(1000, 5, generator=g, dtype=torch.float64)
    potentials = regression.potentials(regression.logistic, theta, x, y)
    for seed in range(3):
        chosen = torch.randperm(3000, generator=torch.Generator().manual_seed(seed))[:100]
        fit = posed(potentials[chosen].T.numpy(), potentials.sum(0).numpy())
        found = nnls(fit.gram, fit.target, fit.real)[0]
        assert fit.f(found) <= fit.f(fit.best) + fit.allowed


# Batches


def test_a_batch_is_each_alone_whatever_its_padding_holds() -> None:
    """Easy and hard ones beside each other, with garbage where they are not real."""
    kinds = [gaussian, ill_conditioned, planted, zero_columns, duplicates, ill_conditioned]
    fits = [example(kind, seed) for seed, kind in enumerate(kinds, start=3)]
    pivots = [bool(module._pivot(*in_units(fit)[:4])[1].all()) for fit in fits]
    assert not all(pivots) and any(pivots)
    most = max(fit.target.shape[1] for fit in fits)
    g = torch.Generator().manual_seed(1)
    gram = torch.randn(len(fits), most, most, generator=g, dtype=torch.float64)
    gram = gram @ gram.mT
    target = 10 * torch.rand(len(fits), most, generator=g, dtype=torch.float64)
    real = torch.zeros(len(fits), most, dtype=torch.bool)
    for c, fit in enumerate(fits):
        m = fit.target.shape[1]
        gram[c, :m, :m], target[c, :m], real[c, :m] = fit.gram[0], fit.target[0], True
    together = nnls(gram, target, real)
    assert (together[~real] == 0).all()
    for c, fit in enumerate(fits):
        alone = nnls(fit.gram, fit.target, fit.real)[0]
        mine = together[c, : len(alone)]
        assert abs(fit.f(mine) - fit.f(alone)) <= fit.allowed
        if kinds[c] in UNIQUE:
            torch.testing.assert_close(mine, alone, rtol=1e-9, atol=1e-9)
    places = torch.randperm(most, generator=g)  # real ones anywhere, not only in front
    shuffled = nnls(
        gram[:, places][:, :, places], target[:, places], real[:, places], together[:, places]
    )
    for c, fit in enumerate(fits):
        mine = shuffled[c, places.argsort()][: fit.target.shape[1]]
        assert abs(fit.f(mine) - fit.f(together[c, : len(mine)])) <= fit.allowed


# Edges


def test_one_column() -> None:
    """x = <a, b> / |a|^2, or 0."""
    a, b = np.array([[3.0], [4.0]]), np.array([1.0, 1.0])
    fit = posed(a, b)
    assert float(nnls(fit.gram, fit.target, fit.real)) == pytest.approx(7 / 25, rel=1e-10)
    assert float(nnls(fit.gram, -fit.target, fit.real)) == 0
    assert float(nnls(fit.gram, fit.target, ~fit.real)) == 0
    assert float(nnls(0 * fit.gram, 0 * fit.target, fit.real)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_no_column_points_at_needs_none(kind: Kind) -> None:
    fit = example(kind, 2)
    target = -fit.target.abs() - 1e-3
    assert not nnls(fit.gram, target, fit.real).any()
    start = torch.ones_like(target)
    assert not nnls(fit.gram, target, fit.real, start).any()
    assert not nnls(fit.gram, 0 * target, fit.real, start).any()


def test_equal_columns_share_their_weight() -> None:
    """The ridge holds the shares together against rounding, which it outweighs by RIDGE / eps."""
    A = np.repeat(np.array([[1.0], [2.0], [2.0]]), 5, axis=1)
    fit = posed(A, A.sum(1))
    x = nnls(fit.gram, fit.target, fit.real)
    torch.testing.assert_close(x, torch.ones(1, 5).double(), rtol=10 * EPS / RIDGE, atol=0)
    assert fit.f(x[0]) <= fit.allowed


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_answer_does_not_depend_on_units(scale: float) -> None:
    fit = example(correlated, 4)
    x = nnls(fit.gram, fit.target, fit.real)
    whole = nnls(scale**2 * fit.gram, scale * fit.target, fit.real)
    torch.testing.assert_close(whole * scale, x, rtol=1e-9, atol=1e-12)
    each = torch.logspace(-6, 6, x.shape[1], dtype=torch.float64)  # every column its own unit
    gram = fit.gram * each.unsqueeze(-1) * each
    torch.testing.assert_close(nnls(gram, fit.target * each, fit.real) * each, x)


cells = st.one_of(st.just(0.0), st.floats(-10, 10).filter(lambda v: abs(v) > 1e-3))


@settings(max_examples=100, deadline=None)
@given(
    A=st.tuples(st.integers(1, 6), st.integers(1, 7)).flatmap(
        lambda shape: arrays.arrays("float64", shape, elements=cells)
    ),
    data=st.data(),
)
def test_anything_small_is_solved(A: Array, data: st.DataObject) -> None:
    b = data.draw(arrays.arrays("float64", len(A), elements=cells))
    fit = posed(A, b)
    x = nnls(fit.gram, fit.target, fit.real)[0]
    assert x.isfinite().all() and (x >= 0).all()
    assert fit.f(x) <= fit.f(fit.best) + fit.allowed
