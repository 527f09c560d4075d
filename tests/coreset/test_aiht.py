"""Algorithm 2 against a brute-force reference, planted answers and edge cases.

The reference is the paper's pseudocode for one client in numpy's float64, with both line searches
done by evaluating f: it contains neither closed form.

Phi is written [C, S, n] here, as in the formulas; `solve` below hands the solver its transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from corefed.coreset import aiht
from corefed.coreset.problem import Solution, problem

Array = np.ndarray
DTYPES = [torch.float32, torch.float64]


def objective(phi: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (y - torch.einsum("csn,cn->cs", phi, w)).square().sum(-1)


def solve(
    phi: Tensor,
    y: Tensor,
    k: Tensor,
    mask: Tensor,
    *,
    debias: bool = True,
    start: Tensor | None = None,
    iterations: int = 0,
    tolerance: float = aiht.TOLERANCE,
) -> Solution:
    posed = problem(phi.mT.contiguous(), k, mask, y)
    return aiht.solve(posed, start=start, debias=debias, iterations=iterations, tolerance=tolerance)


def gaussian(clients: int, rows: int, n: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(clients, rows, n, generator=g, dtype=torch.float64)


def potentials(clients: int, rows: int, n: int, seed: int = 0) -> Tensor:
    """Correlated columns of very different sizes, as potentials have."""
    g = torch.Generator().manual_seed(seed + 1)
    common = torch.randn(clients, rows, 1, generator=g, dtype=torch.float64)
    size = torch.rand(clients, 1, n, generator=g, dtype=torch.float64) ** 3
    return (gaussian(clients, rows, n, seed) + common) * size


def all_real(phi: Tensor) -> Tensor:
    return torch.ones(phi.shape[0], phi.shape[2], dtype=torch.bool)


def sizes(k: int, clients: int = 1) -> Tensor:
    return torch.full((clients,), k)


# The reference


def vertex(f: Callable[[float], float], size: float) -> float:
    """argmin of a parabola from three values of it, a step `size` apart; 0 where it is flat."""
    low, mid, high = f(-size), f(0.0), f(size)
    bend = low - 2 * mid + high
    return 0.0 if bend <= 1e-14 * abs(mid) else size * (low - high) / (2 * bend)


def pseudocode(phi: Array, y: Array, k: int) -> Iterator[tuple[Array, float, float]]:
    """Lines 1 to 10, for ever: w_t, mu_t, tau_t for t = 1, 2, ..."""
    n = phi.shape[1]

    def f(w: Array) -> float:
        return float(((y - phi @ w) ** 2).sum())

    w, z = np.zeros(n), np.zeros(n)  # line 1
    while True:  # line 2
        gradient = -2 * phi.T @ (y - phi @ z)
        support = np.flatnonzero(z > 0)  # line 3
        outside = np.setdiff1d(np.arange(n), support)
        chosen = outside[np.argsort(-np.abs(gradient[outside]))[:k]]
        active = np.union1d(support, chosen)  # line 4
        restricted = np.zeros(n)  # line 5
        restricted[active] = gradient[active]
        mu = vertex(lambda m, z=z, g=restricted: f(z - m * g), 0.01)  # line 6
        moved = z - mu * gradient
        keep = np.argsort(-moved)[:k]  # line 7
        following = np.zeros(n)
        following[keep] = np.maximum(moved[keep], 0)
        change = following - w
        tau = vertex(lambda t, v=following, d=change: f(v + t * d), 1.0)  # line 8
        z = following + tau * change  # line 9
        w = following  # line 10
        yield w, mu, tau


@pytest.mark.parametrize("make", [gaussian, potentials])
@pytest.mark.parametrize(("rows", "n", "k"), [(30, 12, 3), (20, 40, 5), (8, 6, 6), (5, 30, 10)])
def test_iterates_are_those_of_the_pseudocode(
    make: Callable[..., Tensor], rows: int, n: int, k: int
) -> None:
    """12 iterations; a vertex from three values is good to about 1e-8 of the line's length."""
    phi = make(1, rows, n, seed=rows)
    y = phi.sum(-1)
    reference = pseudocode(phi[0].numpy(), y[0].numpy(), k)
    best, best_f = np.zeros(n), float(y.square().sum())
    for t in range(1, 13):
        w, _, _ = next(reference)
        f = float(objective(phi, y, torch.from_numpy(w)[None]))
        if f < best_f:
            best, best_f = w, f
        found = solve(phi, y, sizes(k), all_real(phi), debias=False, iterations=t, tolerance=0)
        assert found.iterations == t
        assert float(found.objective) == pytest.approx(best_f, rel=1e-6, abs=1e-12)
        np.testing.assert_allclose(found.w[0].numpy(), best, atol=1e-6 * (1 + best.max()))


def test_the_steps_of_lines_6_and_8_are_exact_line_searches() -> None:
    """No other step gives a lower f; the paper's factor of 2 in line 8 would stop half way."""
    phi, k = potentials(1, 25, 15, seed=4), 4
    y = phi.sum(-1)
    reference = pseudocode(phi[0].numpy(), y[0].numpy(), k)
    w_1, mu_1, _ = next(reference)
    w_2, _, tau_2 = next(reference)
    gradient = -2 * torch.einsum("csn,cs->cn", phi, y)
    top = gradient.abs().topk(k).indices
    restricted = torch.zeros_like(gradient).scatter(-1, top, gradient.gather(-1, top))
    first = solve(phi, y, sizes(k), all_real(phi), debias=False, iterations=1).w
    at = first.argmax(-1, keepdim=True)  # w_1 is -mu times the gradient where it was kept
    step = -(first / gradient).gather(-1, at)
    assert float(step) == pytest.approx(mu_1, rel=1e-9)
    least = float(objective(phi, y, -step * restricted))
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert float(objective(phi, y, -factor * step * restricted)) > least
    change = phi[0] @ torch.from_numpy(w_2 - w_1)
    residual = y[0] - phi[0] @ torch.from_numpy(w_2)
    exact = float(residual @ change / (change @ change))
    assert exact == pytest.approx(tau_2, rel=1e-6)


def test_debias_ends_at_least_squares_on_the_support() -> None:
    """Where A-IHT II settles, its gradient vanishes on w > 0. (Some clients end in a cycle.)"""
    phi = gaussian(20, 60, 30)
    y = phi.sum(-1)
    found = solve(phi, y, sizes(6, 20), all_real(phi), tolerance=1e-12, iterations=1000)
    assert int(found.converged.sum()) >= 10
    gradient = 2 * torch.einsum("csn,cs->cn", phi, y - torch.einsum("csn,cn->cs", phi, found.w))
    scale = 2 * torch.einsum("csn,cs->cn", phi, y).abs().amax(-1)
    left = (gradient * (found.w > 0)).abs().amax(-1) / scale
    assert (left[found.converged] < 1e-5).all()


# Laws of every solution


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(phi, y, k, mask, start) of several clients, with padding, zeros and repeated columns."""
    clients, rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    dtype = draw(st.sampled_from(DTYPES))
    cell = st.one_of(st.just(0.0), st.floats(-10, 10, width=32).filter(lambda v: abs(v) > 1e-3))
    phi = torch.from_numpy(draw(arrays.arrays("float64", (clients, rows, n), elements=cell)))
    real = torch.tensor(draw(st.lists(st.integers(1, n), min_size=clients, max_size=clients)))
    k = torch.tensor(draw(st.lists(st.integers(1, n + 2), min_size=clients, max_size=clients)))
    mask = torch.arange(n) < real.unsqueeze(-1)
    phi = (phi * mask.unsqueeze(1)).to(dtype)
    y = phi.sum(-1)
    if draw(st.booleans()):
        y = torch.from_numpy(draw(arrays.arrays("float64", (clients, rows), elements=cell)))
    start = None
    if draw(st.booleans()):  # feasible, as every start must be
        k_real = k.clamp_max(real)
        start, _ = aiht.project(phi[:, 0].abs(), k_real, int(k_real.max()), mask)
    return phi, y.to(dtype), k, mask, start


@settings(max_examples=150, deadline=None)
@given(posed=problems(), debias=st.booleans())
def test_solutions_are_feasible_recomputable_and_never_worse_than_the_start(
    posed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], debias: bool
) -> None:
    phi, y, k, mask, start = posed
    was = None if start is None else start.clone()
    found = solve(phi, y, k, mask, start=start, debias=debias, iterations=30)
    assert found.w.dtype == phi.dtype
    assert found.w.isfinite().all()
    assert (found.w >= 0).all()
    assert ((found.w > 0).sum(-1) <= k).all()
    assert (found.w[~mask] == 0).all()
    before = objective(phi, y, torch.zeros_like(found.w) if start is None else start)
    eps = torch.finfo(phi.dtype).eps
    size = (phi.abs() @ found.w.unsqueeze(-1)).squeeze(-1).square().sum(-1) + y.square().sum(-1)
    # A sum of a few dozen products in another order differs by that many roundings of its terms.
    rounding = 100 * eps * size
    assert ((found.objective - objective(phi, y, found.w)).abs() <= rounding).all()
    assert (found.objective <= before * (1 + 100 * eps)).all()
    assert start is None or torch.equal(start, was)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("debias", [False, True])
def test_planted_weights_are_recovered(dtype: torch.dtype, debias: bool) -> None:
    """20 clients, 5 of 60 columns, 200 rows: Gaussian columns are almost orthogonal, so there is
    one sparse answer with f = 0. Converged, ||w - w*|| is a few roundings of it."""
    clients, rows, n, k = 20, 200, 60, 5
    phi = gaussian(clients, rows, n).to(dtype)
    g = torch.Generator().manual_seed(1)
    where = torch.rand(clients, n, generator=g).argsort(-1)[:, :k]
    planted = torch.zeros(clients, n, dtype=dtype).scatter(
        -1, where, 1 + 9 * torch.rand(clients, k, generator=g).to(dtype)
    )
    y = torch.einsum("csn,cn->cs", phi, planted)
    found = solve(
        phi, y, sizes(k, clients), all_real(phi), debias=debias, tolerance=1e-12, iterations=500
    )
    assert ((found.w > 0) == (planted > 0)).all()
    atol = 1e-3 if dtype is torch.float32 else 1e-5
    torch.testing.assert_close(found.w, planted, rtol=0, atol=atol)
    assert (found.objective <= 1e-6 * y.square().sum(-1)).all()


def logistic(clients: int, rows: int, n: int, features: int = 5) -> Tensor:
    """Potentials of logistic regressions around their true coefficients."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(clients, n, features, generator=g, dtype=torch.float64)
    truth = torch.randn(clients, 1, features, generator=g, dtype=torch.float64)
    uniform = torch.rand(clients, 1, n, generator=g, dtype=torch.float64)
    sign = torch.where(uniform < torch.sigmoid(truth @ x.mT), 1.0, -1.0)
    noise = torch.randn(clients, rows, features, generator=g, dtype=torch.float64)
    log_p = torch.nn.functional.logsigmoid(sign * ((truth + 0.3 * noise) @ x.mT))
    return (log_p - log_p.mean(1, keepdim=True)) / rows**0.5


@pytest.mark.parametrize("make", [gaussian, logistic])
def test_debias_is_not_worse_on_average(make: Callable[..., Tensor]) -> None:
    """The mean of ||y - Phi w||^2 / ||y||^2 over 20 problems, 20 of 300 columns, S = 100."""
    phi = make(20, 100, 300)
    y = phi.sum(-1)
    plain, debiased = (
        solve(phi, y, sizes(20, 20), all_real(phi), debias=debias).objective / y.square().sum(-1)
        for debias in (False, True)
    )
    assert debiased.mean() <= plain.mean()


# Batches of clients


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """Clients of 40, 7, 1, 25 and 40 points with k of 8, 7, 1, 30 and 3: (phi, k, mask)."""
    real, k = torch.tensor([40, 7, 1, 25, 40]), torch.tensor([8, 7, 1, 30, 3])
    mask = torch.arange(40) < real.unsqueeze(-1)
    phi = torch.cat([gaussian(3, 50, 40), potentials(2, 50, 40)])
    return phi * mask.unsqueeze(1), k, mask


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_clients_is_each_client_alone(dtype: torch.dtype, debias: bool) -> None:
    """Also without the padding, and though the others need more iterations until they settle.

    Products of another shape round differently, and momentum triples the difference at each
    iteration: from 1e-16 to 1e-12 after 5 and to some 1e-8 when it settles. In float64 that stays
    far from any decision; in float32 it may move the iteration at which a client is seen to settle,
    hence a tolerance of the solver's own: PATIENCE changes of 1e-5 of ||y||^2.
    """
    phi, k, mask = ragged()
    phi = phi.to(dtype)
    y = phi.sum(-1)
    together, early = (solve(phi, y, k, mask, debias=debias, iterations=i) for i in (0, 5))
    alone = []
    for c in range(len(k)):
        n, one = int(mask[c].sum()), slice(c, c + 1)
        found, soon = (
            solve(
                phi[one, :, :n], y[one], k[one], mask[one, :n], debias=debias, iterations=iterations
            )
            for iterations in (0, 5)
        )
        alone.append(found)
        gap = (together.objective[c] - found.objective[0]).abs()
        assert gap <= 10 * 1e-5 * y[c].square().sum()
        if dtype is torch.float64:
            torch.testing.assert_close(early.w[c, :n], soon.w[0], rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(together.w[c, :n], found.w[0], rtol=1e-7, atol=1e-7)
            assert bool(together.converged[c]) == bool(found.converged[0])
    if dtype is torch.float64:
        assert len({one.iterations for one in alone}) > 1  # else this test shows nothing
        assert together.iterations == max(one.iterations for one in alone)


def test_columns_of_padding_are_never_looked_at() -> None:
    """`potentials` makes them zero; the solver does not rely on it."""
    phi, k, mask = ragged()
    y = phi.sum(-1)
    garbage = phi + 100 * gaussian(5, 50, 40, seed=9) * ~mask.unsqueeze(1)
    found, clean = solve(garbage, y, k, mask), solve(phi, y, k, mask)
    torch.testing.assert_close(found.w, clean.w, rtol=1e-8, atol=1e-8)


# Edges


@pytest.mark.parametrize("debias", [False, True])
def test_y_of_zero_needs_no_points(debias: bool) -> None:
    phi = gaussian(3, 10, 5)
    found = solve(phi, torch.zeros(3, 10).double(), sizes(2, 3), all_real(phi), debias=debias)
    assert not found.w.any()
    assert (found.objective == 0).all()
    assert found.converged.all()
    nothing = solve(0 * phi, torch.ones(3, 10).double(), sizes(2, 3), all_real(phi))
    assert not nothing.w.any()
    assert (nothing.objective == 10).all()


@pytest.mark.parametrize("debias", [False, True])
def test_a_zero_column_is_never_chosen(debias: bool) -> None:
    phi = gaussian(4, 20, 6)
    phi[:, :, 2] = 0
    found = solve(phi, phi.sum(-1), sizes(6, 4), all_real(phi), debias=debias)
    assert (found.w[:, 2] == 0).all()
    assert (found.objective < 1e-3 * phi.sum(-1).square().sum(-1)).all()


@pytest.mark.parametrize("debias", [False, True])
def test_duplicate_points(debias: bool) -> None:
    """n copies of one point: any weights of sum n are exact, so is one point with weight n."""
    phi = gaussian(1, 20, 1).expand(1, 20, 6).contiguous()
    for k in (1, 3, 6):
        found = solve(phi, phi.sum(-1), sizes(k), all_real(phi), debias=debias)
        assert float(found.w.sum()) == pytest.approx(6, rel=1e-6)
        assert 1 <= int((found.w > 0).sum()) <= k
        assert float(found.objective) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("debias", [False, True])
def test_one_point_has_its_least_squares_weight(dtype: torch.dtype, debias: bool) -> None:
    phi = gaussian(3, 9, 1).to(dtype)
    found = solve(phi, 2.5 * phi[..., 0], sizes(1, 3), all_real(phi), debias=debias)
    torch.testing.assert_close(found.w, torch.full((3, 1), 2.5, dtype=dtype))
    opposite = solve(phi, -phi[..., 0], sizes(1, 3), all_real(phi), debias=debias)
    assert not opposite.w.any()


@pytest.mark.parametrize("k", [8, 20])
def test_without_a_bound_it_is_non_negative_least_squares(k: int) -> None:
    """k >= n leaves a convex problem; scipy solves it. Targets that ask for negative weights."""
    phi = gaussian(6, 30, 8)
    y = torch.einsum("csn,n->cs", phi, torch.linspace(-2, 3, 8).double())
    y = y + gaussian(6, 30, 1, seed=5)[..., 0]
    found = solve(phi, y, sizes(k, 6), all_real(phi), tolerance=1e-12, iterations=2000)
    for c in range(6):
        w, norm = scipy.optimize.nnls(phi[c].numpy(), y[c].numpy())
        assert float(found.objective[c]) == pytest.approx(norm**2, rel=1e-6)
        np.testing.assert_allclose(found.w[c].numpy(), w, atol=1e-3)


def test_a_good_start_is_kept() -> None:
    phi = gaussian(2, 50, 20)
    planted = torch.zeros(2, 20).double()
    planted[:, [3, 8]] = 2.0
    y = torch.einsum("csn,cn->cs", phi, planted)
    found = solve(phi, y, sizes(2, 2), all_real(phi), start=planted)
    torch.testing.assert_close(found.w, planted)
    assert found.iterations <= 20
    assert found.converged.all()


def test_it_says_whether_it_converged() -> None:
    phi = potentials(3, 40, 60)
    stopped = solve(phi, phi.sum(-1), sizes(6, 3), all_real(phi), iterations=5)
    assert stopped.iterations == 5
    assert not stopped.converged.any()
    done = solve(phi, phi.sum(-1), sizes(6, 3), all_real(phi))
    assert done.iterations < 300
    assert done.converged.all()


def test_the_projection_is_the_nearest_feasible_point() -> None:
    """By brute force over all supports of size k = 2 in 5 dimensions."""
    z = gaussian(20, 1, 5, seed=3)[:, 0]
    found, index = aiht.project(z, sizes(2, 20), 2, torch.ones(20, 5, dtype=torch.bool))
    pairs = torch.combinations(torch.arange(5), 2)
    candidates = torch.zeros(20, len(pairs), 5).double()
    for i, pair in enumerate(pairs):
        candidates[:, i, pair] = z[:, pair].clamp_min(0)
    nearest = (candidates - z.unsqueeze(1)).square().sum(-1).amin(-1)
    torch.testing.assert_close((found - z).square().sum(-1), nearest)
    assert ((found > 0).sum(-1) <= 2).all()
    kept = torch.zeros_like(found).scatter(-1, index, found.gather(-1, index))
    assert torch.equal(kept, found)  # nothing lies outside the places it names
