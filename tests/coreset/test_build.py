"""`corefed.coreset.build`: is it right, and the same whatever form the data have?"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from coreset_cases import (
    POSTERIOR,
    D,
    Items,
    N,
    Stream,
    logistic,
    make_points,
    same,
)
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from corefed.bayes import regression
from corefed.coreset import SOLVERS, build, refit


@pytest.fixture(scope="module")
def points() -> tuple[Tensor, Tensor]:
    return make_points()


# --- is it right? ---------------------------------------------------------------------------------


def test_the_posterior_of_a_coreset_is_near_the_exact_one() -> None:
    """Linear-Gaussian: posterior given coreset and given all data are both in closed form."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 3, generator=g, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = y + torch.randn(500, generator=g, dtype=torch.float64)
    prior = regression.Normal(torch.zeros(3).double(), torch.eye(3).double())
    exact = regression.linear_posterior(x, y, torch.ones(500).double(), prior, 1.0)
    coreset = build(regression.gaussian(1.0), exact, (x, y), 20)
    rows, d = coreset.indices, coreset.diagnostics
    mine = regression.linear_posterior(x[rows], y[rows], coreset.weights, prior, 1.0)
    random = rows.new_tensor(range(0, 500, 25))
    plain = regression.linear_posterior(
        x[random], y[random], torch.full((20,), 25.0).double(), prior, 1.0
    )
    # f is quadratic in 3 parameters, 9 numbers after centring: 20 points can match it exactly.
    assert float(regression.kl(mine, exact)) < 1e-6
    assert float(regression.kl(plain, exact)) > 0.1
    assert d.dtype == "float64"
    assert d.held_out_error < 1e-6
    assert not d.degenerate


def test_errors_are_those_of_the_definition(points: tuple[Tensor, Tensor]) -> None:
    """fitted, held-out and uniform errors recomputed from the draws by the formulas."""
    x, y = points
    draws = POSTERIOR[0] + 0.1 * torch.randn(100, D, generator=torch.Generator().manual_seed(2))
    coreset = build(logistic, draws, points, 12)
    d = coreset.diagnostics
    assert (d.n, d.size, d.draws, d.fresh_draws) == (N, 12, 80, 20)
    for part, error in ((draws[:80], d.fitted_error), (draws[80:], d.held_out_error)):
        log_p = torch.stack([logistic(theta, x, y) for theta in part]).double()
        phi = (log_p - log_p.mean(0)) / len(part) ** 0.5
        full = phi.sum(1)
        residual = full - phi[:, coreset.indices] @ coreset.weights.double()
        norm = full.square().sum()
        assert error == pytest.approx(float(residual.square().sum() / norm), rel=1e-2, abs=1e-5)
    spread = phi.square().sum() - norm / N
    expected = (N / 12) * (N - 12) / (N - 1) * float(spread / norm)
    assert d.uniform_error == pytest.approx(expected, rel=1e-3)
    assert d.ratio == pytest.approx(d.held_out_error / d.uniform_error)
    # The picture's numbers are the centred log-likelihoods of the fresh draws.
    log_p = torch.stack([logistic(theta, x, y) for theta in draws[80:]]).sum(1).double()
    torch.testing.assert_close(coreset.full, log_p - log_p.mean(), rtol=1e-3, atol=1e-3)


def test_expected_error_of_a_uniform_subset(points: tuple[Tensor, Tensor]) -> None:
    """The mean over seeds of solver `uniform` is the closed form, within 4 standard errors."""
    found = [
        build(logistic, POSTERIOR, points, 30, solver="uniform", seed=s).diagnostics
        for s in range(60)
    ]
    ratio = torch.tensor([d.ratio for d in found])
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / 60**0.5


def test_a_coreset_of_everything_is_the_data(points: tuple[Tensor, Tensor]) -> None:
    coreset = build(logistic, POSTERIOR, points, N)
    assert coreset.indices.tolist() == list(range(N))
    assert bool((coreset.weights == 1).all())
    assert coreset.diagnostics.held_out_error < 1e-8
    assert not coreset.diagnostics.degenerate
    assert coreset.diagnostics.draws == 400


@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "sparse-vi"])
def test_every_solver(points: tuple[Tensor, Tensor], solver: str) -> None:
    coreset = build(logistic, POSTERIOR, points, 20, solver=solver)
    assert 1 <= len(coreset) <= 20
    assert bool((coreset.indices.diff() > 0).all())
    assert bool((coreset.weights > 0).all())
    assert math.isfinite(coreset.diagnostics.held_out_error)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_sparse_vi_with_the_users_own_draws(points: tuple[Tensor, Tensor], store: str) -> None:
    x, y = (part.double() for part in points)
    prior = regression.Normal(torch.zeros(D).double(), torch.eye(D).double())
    steps = []

    def resample(indices: Tensor, weights: Tensor, draws: int, g: torch.Generator) -> Tensor:
        steps.append(len(indices))
        laplace = regression.laplace(
            regression.logistic, x[indices], y[indices], weights.double(), prior
        )
        return laplace.sample(draws, g)

    full = regression.laplace(regression.logistic, x, y, torch.ones(N).double(), prior)
    coreset = build(
        regression.logistic, full, (x, y), 20, solver="sparse-vi", resample=resample, store=store
    )
    assert steps[0] == 0 and len(steps) > 10
    assert coreset.diagnostics.ratio < 0.5


def test_few_draws_are_degenerate_and_shrunk(points: tuple[Tensor, Tensor]) -> None:
    few = build(logistic, POSTERIOR, points, 50, samples=20)
    assert few.diagnostics.degenerate
    assert few.diagnostics.shrink in refit.GRID
    assert "means nothing" in str(few)
    enough = build(logistic, POSTERIOR, points, 50)
    assert (enough.diagnostics.draws, enough.diagnostics.shrink) == (400, 0.0)
    assert "means nothing" not in str(enough)
    # A strong pull leaves every weight at n / (points kept).
    pulled = build(logistic, POSTERIOR, points, 50, shrink=1e9)
    torch.testing.assert_close(pulled.weights, torch.full_like(pulled.weights, N / len(pulled)))
    assert build(logistic, POSTERIOR, points, 50, samples=20, shrink=0).diagnostics.shrink == 0


@pytest.mark.parametrize("solver", ["exchange", "omp", "omp-block"])
def test_points_that_say_next_to_nothing_do_not_join(solver: str) -> None:
    """Far from the boundary a potential is rounding: fitted to the rounding of others, such points
    got weights of millions, and the error on fresh draws was a hundred times what it is."""
    g = torch.Generator().manual_seed(0)
    x, theta = 3 * torch.randn(20_000, 10, generator=g), torch.randn(10, generator=g)
    data = x, (torch.rand(20_000, generator=g) < torch.sigmoid(x @ theta)).float()
    coreset = build(logistic, (theta, torch.full((10,), 0.01)), data, 80, solver=solver)
    assert coreset.diagnostics.weight_sum < 2 * 20_000
    assert coreset.diagnostics.ratio < 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA")
@pytest.mark.parametrize("store", ["memory", "disk", "recompute"])
def test_cuda_in_many_chunks_is_the_cpu(store: str) -> None:
    """20000 points in chunks of 4096 and 500 draws of a narrow posterior: potentials are small
    differences of log-likelihoods, to which both devices must hold."""
    g = torch.Generator().manual_seed(0)
    x, theta = torch.randn(20_000, 20, generator=g), torch.randn(20, generator=g)
    data = x, (torch.rand(20_000, generator=g) < torch.sigmoid(x @ theta)).float()
    scale = torch.full((20,), 0.01)
    here = build(logistic, (theta, scale), data, 50, samples=500)
    there = build(logistic, (theta.cuda(), scale.cuda()), data, 50, samples=500, store=store)
    assert there.diagnostics.uniform_error == pytest.approx(
        here.diagnostics.uniform_error, rel=0.01
    )
    assert there.diagnostics.ratio < 2 * here.diagnostics.ratio


def test_seeds(points: tuple[Tensor, Tensor]) -> None:
    one, again = (build(logistic, POSTERIOR, points, 20, seed=3) for _ in range(2))
    assert torch.equal(one.weights, again.weights)
    assert torch.equal(one.full, again.full)
    other = build(logistic, POSTERIOR, points, 20, seed=4)
    assert not torch.equal(one.full, other.full)


def test_fractions_and_numpy_and_progress(points: tuple[Tensor, Tensor]) -> None:
    seen: list[tuple[str, int, int]] = []
    by_part = build(logistic, POSTERIOR, points, 0.1, chunk=100, progress=lambda *a: seen.append(a))
    assert by_part.diagnostics.size == 30
    assert seen[:3] == [("potentials", d, N) for d in (100, 200, 300)]
    assert seen[3:] == [("solving", 0, 1), ("solving", 1, 1)]
    arrays = points[0].double().numpy(), points[1].double().numpy()
    same(by_part, build(logistic, POSTERIOR, arrays, 30))


# --- the same data in every form ------------------------------------------------------------------


FORMS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "list": lambda x, y: [x, y],
    "TensorDataset": TensorDataset,
    "Dataset": Items,
    "DataLoader": lambda x, y: DataLoader(Items(x, y), batch_size=7),
    "shuffled": lambda x, y: DataLoader(Items(x, y), batch_size=64, shuffle=True, drop_last=True),
    "workers": lambda x, y: DataLoader(Items(x, y), batch_size=150, num_workers=1),
    "IterableDataset": Stream,
    "its loader": lambda x, y: DataLoader(Stream(x, y), batch_size=32),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_in_every_form_give_the_same_coreset(points: tuple[Tensor, Tensor], form: str) -> None:
    same(
        build(logistic, POSTERIOR, points, 15), build(logistic, POSTERIOR, FORMS[form](*points), 15)
    )


def test_inputs_of_several_tensors(points: tuple[Tensor, Tensor]) -> None:
    """x may be a dict or a tuple of tensors; a module takes them as keywords or arguments."""
    x, y = points

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return (torch.cat([left, right], 1) @ self.weight).unsqueeze(1)

    def bernoulli(output: Tensor, y: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(output[:, 0], y, reduction="none")

    expected = build(logistic, POSTERIOR, points, 15)
    for parts in ({"left": x[:, :1], "right": x[:, 1:]}, (x[:, :1], x[:, 1:])):
        same(expected, build(Two(), POSTERIOR, (parts, y), 15, likelihood=bernoulli))


@pytest.mark.parametrize("store", ["disk", "recompute"])
@pytest.mark.parametrize("solver", ["exchange", "aiht-2", "giga"])
def test_every_store_gives_the_same_coreset(
    points: tuple[Tensor, Tensor], store: str, solver: str
) -> None:
    """In float64, where rounding does not decide between two points; and over 20 iterations, since
    the momentum of A-IHT makes two runs part after a hundred whatever they differ by."""
    data = tuple(part.double() for part in points)
    posterior = tuple(part.double() for part in POSTERIOR)
    expected, found = (
        build(logistic, posterior, data, 15, solver=solver, iterations=20, store=kind)
        for kind in ("memory", store)
    )
    assert found.diagnostics.store == store
    same(expected, found)


@pytest.mark.parametrize("chunk", [1, 37, 1000])
def test_chunks_do_not_change_the_answer(points: tuple[Tensor, Tensor], chunk: int) -> None:
    data = tuple(part.double() for part in points)
    posterior = tuple(part.double() for part in POSTERIOR)
    expected = build(logistic, posterior, data, 15)
    same(expected, build(logistic, posterior, data, 15, chunk=chunk))


def test_automatic_store(points: tuple[Tensor, Tensor]) -> None:
    x, y = (part.repeat(10, *[1] * (part.dim() - 1)) for part in points)
    small = build(logistic, POSTERIOR, (x, y), 5)
    assert small.diagnostics.store == "memory"  # 3000 x 400 x 4 bytes
    large = build(logistic, POSTERIOR, (x, y), 5, memory_mb=2)
    assert large.diagnostics.store == "disk"
