"""Shrunk non-negative least squares against scipy's, on the augmented system.

||y - Phi w||^2 + lambda ||w - n/k||^2 = || (y, sqrt(lambda) n/k) - (Phi, sqrt(lambda)) w ||^2
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from corefed.coreset import refit as module
from corefed.coreset.problem import Problem
from corefed.coreset.problem import problem as posed
from corefed.coreset.refit import GRID, choose_shrink


def refit(phi: Tensor, y: Tensor, support: Tensor, plain: Tensor, shrink: float) -> Tensor:
    """Phi is written [C, S, n] here, as in the formulas."""
    g = phi.mT.contiguous()
    return module.refit(posed(g, phi.shape[-1], y=y), support, plain, shrink)


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def ragged(rows: int = 30, n: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four clients with supports of 5, 1, 12 and 8 points: (phi, y, support, plain)."""
    phi = normal(4, rows, n) * torch.linspace(0.2, 2, n).double()
    phi[:, :, 1] = phi[:, :, 0]  # a duplicate: least squares alone is not unique
    support = torch.zeros(4, n, dtype=torch.bool)
    for c, rows_of in enumerate(([0, 1, 4, 7, 11], [3], range(12), [0, 2, 3, 5, 6, 8, 9, 10])):
        support[c, list(rows_of)] = True
    y = phi.sum(-1) + 3 * normal(4, rows, seed=1)  # not what n/k would give; some weights hit 0
    return phi, y, support, n / support.sum(-1).double()


def exact(phi: Tensor, y: Tensor, support: Tensor, plain: Tensor, shrink: float) -> Tensor:
    """One client, by scipy's active-set method."""
    columns = phi[:, support].numpy()
    k = columns.shape[1]
    root = np.sqrt(shrink * (columns**2).sum(0).mean())
    system = np.concatenate([columns, root * np.eye(k)])
    target = np.concatenate([y.numpy(), np.full(k, root * float(plain))])
    w = torch.zeros_like(phi[0])
    w[support] = torch.from_numpy(scipy.optimize.nnls(system, target)[0])
    return w


@pytest.mark.parametrize("shrink", [1e-2, 0.1, 1.0, 10.0])
def test_weights_are_those_of_scipy(shrink: float) -> None:
    """Both solve small systems exactly; ours from a Gram matrix, whose condition number, 12 / 0.01
    at worst, and ridge of 1e-11 of the diagonal leave 1e-8."""
    phi, y, support, plain = ragged()
    found = refit(phi, y, support, plain, shrink)
    assert (found >= 0).all()
    assert (found[~support] == 0).all()
    expected = torch.stack(
        [exact(*one, shrink) for one in zip(phi, y, support, plain, strict=True)]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    if shrink < 1:
        assert (expected[support] == 0).any()  # the bound is active somewhere


def correlated() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """50 of 100 points whose potentials share most of their variance: one large eigenvalue."""
    phi = 0.3 * normal(3, 120, 100) + normal(3, 120, 1, seed=2)
    support = (torch.arange(100) % 2 == 0).expand(3, -1)
    return phi, phi.sum(-1), support, torch.full((3,), 2.0).double()


@pytest.mark.parametrize("shrink", [0.0, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("make", [ragged, correlated])
def test_nothing_is_left_of_the_objective(
    make: Callable[[], tuple[Tensor, ...]], shrink: float
) -> None:
    """Of the objective above its minimum, as a part of its fall from the start w = n/k. Also
    without shrinkage, where duplicates leave the weights themselves open."""
    problem = make()
    phi, y, support, plain = problem
    norms = (phi.square().sum(1) * support).sum(-1) / support.sum(-1)

    def f(w: Tensor) -> Tensor:
        fit = (y - torch.einsum("csn,cn->cs", phi, w)).square().sum(-1)
        return fit + shrink * norms * ((w - plain.unsqueeze(-1)) * support).square().sum(-1)

    best = f(torch.stack([exact(*one, shrink) for one in zip(*problem, strict=True)]))
    start = f(plain.unsqueeze(-1) * support)
    left = (f(refit(phi, y, support, plain, shrink)) - best) / (start - best)
    assert (left < 1e-9).all()


def test_infinite_shrinkage_is_the_plain_weight() -> None:
    """||w - n/k|| is of order 1 / shrink."""
    phi, y, support, plain = ragged()
    expected = plain.unsqueeze(-1) * support
    for shrink in (1e4, 1e8):
        found = refit(phi, y, support, plain, shrink)
        torch.testing.assert_close(found, expected.double(), rtol=100 / shrink, atol=0)


def test_shrink_means_the_same_whatever_the_scale() -> None:
    phi, y, support, plain = ragged()
    first = refit(phi, y, support, plain, 0.1)
    for scale in (1e-4, 1e3):
        torch.testing.assert_close(refit(scale * phi, scale * y, support, plain, 0.1), first)


def test_an_exact_fit_needs_no_shrinkage() -> None:
    """y = Phi 1 and n/k = 1: both terms vanish at w = 1, whatever lambda is."""
    phi, _, _, _ = ragged()
    everything = torch.ones(4, 12, dtype=torch.bool)
    for shrink in (1e-3, 1.0):
        found = refit(phi, phi.sum(-1), everything, torch.ones(4).double(), shrink)
        torch.testing.assert_close(found, torch.ones(4, 12).double())


def test_clients_do_not_interact_and_padding_has_weight_zero() -> None:
    phi, y, support, plain = ragged()
    together = refit(phi, y, support, plain, 0.1)
    for c in range(4):
        one = slice(c, c + 1)
        alone = refit(phi[one], y[one], support[one], plain[one], 0.1)
        torch.testing.assert_close(together[one], alone)
    longer = torch.cat([phi, normal(4, 30, 5, seed=7)], 2)  # points outside every support
    padded = torch.cat([support, torch.zeros(4, 5, dtype=torch.bool)], 1)
    found = refit(longer, y, padded, plain, 0.1)
    torch.testing.assert_close(found[:, :12], together)
    assert (found[:, 12:] == 0).all()


def test_a_client_without_support_beside_one_with() -> None:
    phi, y, support, plain = ragged()
    expected = refit(phi, y, support, plain, 0.1)
    support[1] = False
    found = refit(phi, y, support, plain, 0.1)
    assert (found[1] == 0).all()
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]])


def test_opposite_columns() -> None:
    """The Gram matrix of (g, -g) is singular, and one of the two must be bound at 0 by slope."""
    g = normal(1, 20, 1)
    phi, y = torch.cat([g, -g], 2), 3 * g[..., 0]
    support = torch.ones(1, 2, dtype=torch.bool)
    found = refit(phi, y, support, torch.ones(1).double(), 0.1)
    expected = exact(phi[0], y[0], support[0], torch.ones(1), 0.1)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-8)


def test_float32() -> None:
    phi, y, support, plain = ragged()
    single = refit(phi.float(), y.float(), support, plain.float(), 0.1)
    assert single.dtype == torch.float32
    double = refit(phi, y, support, plain, 0.1)
    torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-5)


def halves_of_noise(rows: int, columns: int, noise: float, seed: int) -> tuple[Problem, Tensor]:
    """Weights of 1 seen through noise: the fewer the draws, the more they must be pulled to n/k."""
    phi = normal(1, rows, columns, seed=seed)
    y = phi.sum(-1) + noise * normal(1, rows, seed=seed + 1)
    return posed(phi.mT.contiguous(), columns, y=y), torch.ones(1, columns, dtype=torch.bool)


def test_shrinkage_is_chosen_by_draws_that_were_not_fitted() -> None:
    plain = torch.ones(1, dtype=torch.float64)
    for seed in range(5):
        exact, everything = halves_of_noise(200, 20, 0.0, seed)
        wrong = 3 * plain  # pulls away from the truth, which the draws know
        assert choose_shrink(exact, everything, wrong) == 0.0
        noisy, everything = halves_of_noise(30, 20, 30.0, seed)
        assert choose_shrink(noisy, everything, plain) == max(GRID)
    nothing = torch.zeros_like(everything)
    assert choose_shrink(noisy, nothing, plain) == 0.0
