"""The KL rows on the linear-Gaussian model, where q_w, its derivative and the KL are exact."""

import math

import pytest
import torch

from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.coreset import aiht
from corefed.coreset.problem import problem as posed
from corefed.models import network
from corefed.models.likelihood import Gaussian
from corefed.selectors.kl_rows import kl_rows

NOISE, ZETA, POINTS, FEATURES = 0.7, 2.0, 12, 3
P = FEATURES + 1


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def problem():
    g = torch.Generator().manual_seed(3)
    mixing = torch.eye(FEATURES) + 0.8 * torch.randn(FEATURES, FEATURES, generator=g)
    x = torch.randn(POINTS, FEATURES, generator=g) @ mixing  # correlated: H is far from diagonal
    y = x @ torch.randn(FEATURES, 1, generator=g) + NOISE * torch.randn(POINTS, 1, generator=g)
    z = torch.stack([torch.randn(P, generator=g) * 0.1, torch.rand(P, generator=g)])
    return x, y, z


def exact(x, y, z, w):
    """The minimiser (mu, sigma) of sum_j w_j l_j + zeta KL(q || z), in closed form."""
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    prior = gaussian.sigma(z[1]).pow(-2)
    precision = design.T @ (w[:, None] * design) / NOISE**2
    mu = torch.linalg.solve(
        precision + ZETA * torch.diag(prior),
        design.T @ (w[:, None] * y)[:, 0] / NOISE**2 + ZETA * prior * z[0],
    )
    sigma = (precision.diagonal() / ZETA + prior).rsqrt()
    return torch.stack([mu, sigma])


def posterior(v):
    return torch.stack([v[0], gaussian.rho_of(v[1])])[None]


def rows_at(problem, w, reference, sketch=None, **options):
    """(A, b) at w with cubature points for g, which have the moments of N(0, I) up to the third."""
    x, y, z = problem
    model = network.mlp((FEATURES, 1), Gaussian(1, NOISE))
    points = math.sqrt(P) * torch.eye(P)
    noise = torch.cat([points, -points])[None]
    sketch = torch.eye(2 * P).view(1, 2 * P, 2, P) if sketch is None else sketch
    data = ClientData(x[None], y[None], torch.ones(1, len(x)))
    q_w, q = posterior(exact(x, y, z, w)), posterior(reference)
    return kl_rows(model, q_w, q, z[None], data, w[None], ZETA, noise, sketch, **options)


def test_rows_are_the_derivative_of_the_exact_posterior(problem):
    x, y, z = problem
    w = torch.linspace(0.5, 1.5, POINTS)
    reference = exact(x, y, z, torch.ones(POINTS))
    a, _ = rows_at(problem, w, reference, iterations=2 * P + 4)
    root_fisher = torch.stack([1 / reference[1], math.sqrt(2) / reference[1]])
    jacobian = torch.func.jacrev(lambda u: exact(x, y, z, u))(w)  # [2, P, n]
    wanted = (root_fisher[..., None] * jacobian).flatten(0, 1) / math.sqrt(2)
    torch.testing.assert_close(a[0], wanted, rtol=1e-9, atol=1e-11)


def test_gradient_is_that_of_the_exact_kl_nearby(problem):
    """The quadratic's gradient tends to the KL's as w tends to the reference's weights."""
    x, y, z = problem
    reference = exact(x, y, z, torch.ones(POINTS))
    direction = torch.linspace(-1, 1, POINTS)

    def divergence(w):
        return gaussian.kl(posterior(exact(x, y, z, w)), posterior(reference))[0]

    errors = []
    for distance in (1e-1, 1e-2, 1e-3):
        w = 1 + distance * direction
        a, b = rows_at(problem, w, reference, iterations=2 * P + 4)
        quadratic = 2 * a[0].T @ (a[0] @ w - b[0])
        true = torch.func.grad(divergence)(w)
        if distance == 1e-1:  # where central differences of the KL do not cancel
            h = 1e-4 * torch.eye(POINTS)
            finite = torch.stack([(divergence(w + e) - divergence(w - e)) / 2e-4 for e in h])
            torch.testing.assert_close(finite, true, rtol=1e-5, atol=1e-6 * float(true.abs().max()))
        errors.append(float((quadratic - true).norm() / true.norm()))
    assert errors[0] < 0.2
    assert errors[1] < errors[0] / 5  # first order in the distance: a factor of 10
    assert errors[2] < errors[1] / 5


def test_diagonal_curvature_is_worse_and_says_so(problem):
    """On correlated features the diagonal turns the gradient; the exact H does not."""
    x, y, z = problem
    reference = exact(x, y, z, torch.ones(POINTS))
    w = 1 + 0.01 * torch.linspace(-1, 1, POINTS)

    def slope(**options):
        a, b = rows_at(problem, w, reference, iterations=2 * P + 4, **options)
        return a[0].T @ (a[0] @ w - b[0])

    true = torch.func.grad(
        lambda u: gaussian.kl(posterior(exact(x, y, z, u)), posterior(reference))[0]
    )(w)
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(slope(), true, dim=0) > 0.999
    assert cosine(slope(diagonal=True), true, dim=0) < 0.99


def test_a_sketch_is_the_projection_of_all_rows(problem):
    """Omega A and Omega b: with E[Omega^T Omega] = I, the sketched term is unbiased."""
    x, y, z = problem
    reference = exact(x, y, z, torch.ones(POINTS))
    w = torch.linspace(0.5, 1.5, POINTS)
    a, b = rows_at(problem, w, reference, iterations=2 * P + 4)
    omega = torch.randn(1, 5, 2 * P, generator=torch.Generator().manual_seed(1)) / math.sqrt(5)
    sketch = omega.view(1, 5, 2, P)
    few, offsets = rows_at(problem, w, reference, sketch, iterations=2 * P + 4)
    torch.testing.assert_close(few, omega @ a, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(offsets, (omega @ b[..., None])[..., 0], rtol=1e-8, atol=1e-9)


def test_the_term_moves_the_coreset_towards_the_full_posterior(problem):
    """Solving with the rows gives a smaller KL(q_w || q) than w_t has, at the same size."""
    x, y, z = problem
    reference = exact(x, y, z, torch.ones(POINTS))
    start = torch.zeros(POINTS)
    start[:6] = 2.0
    a, b = rows_at(problem, start, reference, iterations=2 * P + 4)
    found = aiht.solve(posed(a.mT.contiguous(), 6, y=b), start=start[None], debias=True)

    def divergence(w):
        return float(gaussian.kl(posterior(exact(x, y, z, w)), posterior(reference)))

    assert divergence(found.w[0]) < divergence(start)
