"""Every solver by one table of contracts, and the steps of each against brute force.

Potentials are a row a point here as in the code: g [C, n, S], Phi = g^T.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from corefed.base.errors import UserError
from corefed.bayes import regression
from corefed.coreset import aiht, exchange, solvers, sparse_vi, support
from corefed.coreset.problem import Dense, Problem, Solution, Solver, divide, largest, problem

Array = np.ndarray
DTYPES = [torch.float32, torch.float64]


class Row(NamedTuple):
    start: str = "zero"  # what it can never be worse than: w = 0, its first vertex, or nothing
    draws: bool = False
    few: int = 0  # iterations at which a batch is compared: hard thresholding amplifies rounding
    recovers: str = ""  # a planted answer: "" or why not


MOVES = "k steps of one point each change all weights together and end near the answer, not at it"
RANDOM = "its points are random"
TABLE = {
    "exchange": Row(),
    "omp": Row(),
    "omp-block": Row(),
    "aiht-2": Row(few=5),
    "aiht": Row(few=5),
    "iht": Row(few=5),
    "giga": Row(recovers=MOVES),
    "frank-wolfe": Row(start="vertex", recovers=MOVES + "; nor is it in its polytope"),
    "sparse-vi": Row(),
    # n/k on k points is no fit: nothing makes it better than w = 0, and it seldom is.
    "uniform": Row(start="", draws=True, recovers=RANDOM),
    "uniform-refit": Row(draws=True, recovers=RANDOM + " unless k = n"),
}
NAMES = list(TABLE)
PURSUITS = ["exchange", "omp", "omp-block", "sparse-vi"]


def run(
    name: str, posed: Problem, iterations: int = 0, seed: int = 0, **options: float
) -> Solution:
    """Sparse VI with draws that do not depend on w is a plain solver like the others."""
    solver: Solver = partial(solvers.get(name), **options)
    if name == "sparse-vi":
        solver = partial(sparse_vi.solve, resample=lambda w, step: posed)
    generators = [torch.Generator().manual_seed(seed) for _ in posed.k]
    return solver(posed, iterations=iterations, generators=generators)


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def correlated(clients: int, n: int, rows: int, seed: int = 0) -> Tensor:
    """Rows with a common part and very different sizes, as potentials have."""
    g = torch.Generator().manual_seed(seed + 1)
    size = torch.rand(clients, n, 1, generator=g, dtype=torch.float64) ** 3
    return (normal(clients, n, rows, seed=seed) + normal(clients, 1, rows, seed=seed + 2)) * size


def logistic(n: int, features: int, rows: int, width: float, seed: int) -> Tensor:
    """Potentials of a logistic regression around its true coefficients."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=g, dtype=torch.float64)
    truth = torch.randn(features, generator=g, dtype=torch.float64)
    y = (torch.rand(n, generator=g, dtype=torch.float64) < torch.sigmoid(x @ truth)).double()
    theta = truth + width * torch.randn(rows, features, generator=g, dtype=torch.float64)
    return regression.potentials(regression.logistic, theta, x, y).unsqueeze(0)


def objective(posed: Problem, w: Tensor) -> Tensor:
    """f(w) in float64, of all columns."""
    assert isinstance(posed.points, Dense)
    return (
        (posed.y.double() - torch.einsum("cn,cns->cs", w.double(), posed.points.g.double()))
        .square()
        .sum(-1)
    )


def rounding(posed: Problem, w: Tensor) -> Tensor:
    """Of f(w) in the potentials' precision: a few dozen roundings of its terms, in all orders."""
    assert isinstance(posed.points, Dense)
    terms = torch.einsum("cn,cns->cs", w.double(), posed.points.g.double().abs())
    size = terms.square().sum(-1) + posed.y.double().square().sum(-1)
    return 100 * torch.finfo(posed.y.dtype).eps * size


def check(posed: Problem, found: Solution, name: str) -> None:
    """What holds of every solution of every problem."""
    w = found.w
    assert w.dtype == posed.y.dtype and w.shape == posed.mask.shape
    assert w.isfinite().all() and found.objective.isfinite().all()
    assert (w >= 0).all()
    assert ((w > 0).sum(-1) <= posed.k).all()
    assert (w[~posed.mask] == 0).all()
    assert found.converged.shape == posed.k.shape and found.converged.dtype == torch.bool
    error = (found.objective.double() - objective(posed, w)).abs()
    assert (error <= rounding(posed, w)).all()
    if TABLE[name].start == "zero":
        nothing = posed.y.double().square().sum(-1)
        assert (found.objective.double() <= nothing + rounding(posed, w)).all()
    if TABLE[name].start == "vertex":
        first = run(name, posed, iterations=1)
        allowed = rounding(posed, w) + rounding(posed, first.w)
        assert (found.objective.double() <= first.objective.double() + allowed).all()


def test_the_table_has_every_solver() -> None:
    assert list(solvers.SOLVERS) == NAMES
    assert solvers.DEFAULT in solvers.SOLVERS
    for entry in solvers.SOLVERS.values():
        assert entry.description


# Laws of every solution


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Several clients with padding, zeros and repeated points."""
    clients, rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    cell = st.one_of(st.just(0.0), st.floats(-10, 10, width=32).filter(lambda v: abs(v) > 1e-3))
    g = torch.from_numpy(draw(arrays.arrays("float64", (clients, n, rows), elements=cell)))
    real = torch.tensor(draw(st.lists(st.integers(1, n), min_size=clients, max_size=clients)))
    k = torch.tensor(draw(st.lists(st.integers(1, n + 2), min_size=clients, max_size=clients)))
    mask = torch.arange(n) < real.unsqueeze(-1)
    g = (g * mask.unsqueeze(-1)).to(draw(st.sampled_from(DTYPES)))
    y = None
    if draw(st.booleans()):
        y = torch.from_numpy(draw(arrays.arrays("float64", (clients, rows), elements=cell)))
        y = y.to(g.dtype)
    return problem(g, k, mask, y)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(posed=problems())
def test_solutions_are_feasible_recomputable_and_never_worse_than_the_start(
    name: str, posed: Problem
) -> None:
    check(posed, run(name, posed, iterations=20), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides(name: str, dtype: torch.dtype) -> None:
    posed = problem(correlated(2, 40, 30).to(dtype), 6)
    first, again, other = (run(name, posed, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.w, again.w) and torch.equal(first.objective, again.objective)
    assert torch.equal(first.w, other.w) != TABLE[name].draws
    check(posed, first, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_solver_leaves_its_input_alone(name: str) -> None:
    g, k, mask, y = ragged()
    posed = problem(g.clone(), k.clone(), mask.clone(), y.clone())
    run(name, posed)
    assert torch.equal(posed.points.g, g) and torch.equal(posed.mask, mask)
    assert torch.equal(posed.y, y)


# Batches of clients


def ragged() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clients of 40, 7, 1, 25 and 40 points with k of 8, 7, 1, 30 and 3: (g, k, mask, y)."""
    real, k = torch.tensor([40, 7, 1, 25, 40]), torch.tensor([8, 7, 1, 30, 3])
    mask = torch.arange(40) < real.unsqueeze(-1)
    g = torch.cat([normal(3, 40, 50), correlated(2, 40, 50)]) * mask.unsqueeze(-1)
    return g, k, mask, g.sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_clients_is_each_client_alone(name: str, dtype: torch.dtype) -> None:
    """Also without the padding. Products of another shape round differently, by eps times what
    condition (k = n = 25 correlated points) and the solver make of it."""
    g, k, mask, _ = ragged()
    together = run(name, problem(g.to(dtype), k, mask), TABLE[name].few)
    tolerance = 1e-8 if dtype is torch.float64 else 2e-3
    for c in range(len(k)):
        n, one = int(mask[c].sum()), slice(c, c + 1)
        alone = run(name, problem(g[one, :n].to(dtype), k[one], mask[one, :n]), TABLE[name].few)
        torch.testing.assert_close(
            together.w[c, :n], alone.w[0], rtol=tolerance, atol=tolerance * float(alone.w.max())
        )
        assert bool(together.converged[c]) == bool(alone.converged[0])


@pytest.mark.parametrize("name", NAMES)
def test_points_of_padding_are_never_looked_at(name: str) -> None:
    """`potentials` makes them zero; no solver relies on it."""
    g, k, mask, y = ragged()
    garbage = g + 100 * normal(5, 40, 50, seed=9) * ~mask.unsqueeze(-1)
    few = TABLE[name].few
    found, clean = (run(name, problem(rows, k, mask, y), few) for rows in (garbage, g))
    torch.testing.assert_close(found.w, clean.w, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_units_of_the_potentials_do_not_matter(name: str, dtype: torch.dtype) -> None:
    """A power of two changes no rounding, so the weights are the same to the last bit. Potentials
    of a regression with small noise are of size 1e6, those of a sharp posterior of 1e-6."""
    g = correlated(1, 30, 20).to(dtype)
    whole = run(name, problem(g, 5))
    for scale in (2.0**-20, 2.0**20):
        found = run(name, problem(scale * g, 5))
        torch.testing.assert_close(found.w, whole.w, rtol=1e-6, atol=1e-6)


# Edges


def random_rows() -> Tensor:
    return normal(2, 12, 20)


def zero_point() -> Problem:
    g = random_rows()
    g[:, 5] = 0
    return problem(g, 4)


def without_points() -> Problem:
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1] = False
    return problem(random_rows() * mask.unsqueeze(-1), 4, mask)


EDGES: dict[str, Callable[[], Problem]] = {
    "y = 0": lambda: problem(random_rows(), 4, y=torch.zeros(2, 20).double()),
    "all points zero": lambda: problem(torch.zeros(2, 12, 20).double(), 4),
    "all points zero, y not": lambda: problem(
        torch.zeros(2, 12, 20).double(), 4, y=torch.ones(2, 20).double()
    ),
    "duplicate points": lambda: problem(random_rows().repeat_interleave(3, 1), 5),
    "a zero point": zero_point,
    "k >= n": lambda: problem(random_rows(), 50),
    "k >= rank": lambda: problem(normal(2, 12, 3) @ normal(2, 3, 20, seed=1), 8),
    "one point": lambda: problem(random_rows()[:, :1], 5),
    "all points equal": lambda: problem(random_rows()[:, :1].repeat(1, 12, 1), 4),
    "k = 1": lambda: problem(random_rows(), 1),
    "no point towards y": lambda: problem(random_rows().abs(), 4, y=-torch.ones(2, 20).double()),
    "one row": lambda: problem(normal(2, 12, 1), 4),
    "a client without points": without_points,
}


def posed_edge(edge: str, dtype: torch.dtype) -> Problem:
    made = EDGES[edge]()
    assert isinstance(made.points, Dense)
    return problem(made.points.g.to(dtype), made.k, made.mask, made.y.to(dtype))


def relative(posed: Problem, found: Solution) -> Tensor:
    return found.objective.double() / posed.y.double().square().sum(-1).clamp_min(1e-300)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, name: str, dtype: torch.dtype) -> None:
    posed = posed_edge(edge, dtype)
    found = run(name, posed)
    check(posed, found, name)
    if edge in ("y = 0", "no point towards y") and name not in ("uniform", "frank-wolfe"):
        assert not found.w.any()  # those two have no weights below theirs
    if edge.startswith("all points zero") and name != "uniform":
        assert not found.w.any()
    if edge == "a zero point" and name != "uniform":
        assert (found.w[:, 5] == 0).all()
    if edge == "all points equal":
        assert (relative(posed, found) < 1e-10).all()
        torch.testing.assert_close(found.w.sum(-1), torch.full((2,), 12.0, dtype=dtype))
    if edge == "one point":
        torch.testing.assert_close(found.w, torch.ones(2, 1, dtype=dtype))
    if edge == "a client without points":
        assert found.w[0].any() and not found.w[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("giga", "frank-wolfe")])
def test_enough_points_fit_exactly(name: str, dtype: torch.dtype) -> None:
    """k >= n and k >= rank have f = 0. Hard thresholding ends within its tolerance of it, 1e-5;
    geodesics and Frank-Wolfe make k steps and no more, and need not be near."""
    everything, few = posed_edge("k >= n", dtype), posed_edge("k >= rank", dtype)
    allowed = 1e-5 if TABLE[name].few else 1e-12
    assert (relative(everything, run(name, everything)) < allowed).all()
    if not TABLE[name].draws:
        assert (relative(few, run(name, few)) < allowed).all()
    if name in ("exchange", "omp", "omp-block"):  # the rank is 3: more points say nothing new
        assert ((run(name, few).w > 0).sum(-1) <= 3).all()


@pytest.mark.parametrize("name", [*PURSUITS, "giga"])
def test_the_best_single_point(name: str) -> None:
    """k = 1: by brute force over points, each with its best weight."""
    posed = posed_edge("k = 1", torch.float64)
    assert isinstance(posed.points, Dense)
    slope = torch.einsum("cns,cs->cn", posed.points.g, posed.y).clamp_min(0)
    drop = slope.square() / posed.points.squares()
    found = run(name, posed)
    assert torch.equal(found.w.argmax(-1), drop.argmax(-1))
    expected = posed.y.square().sum(-1) - drop.amax(-1)
    torch.testing.assert_close(found.objective, expected, rtol=1e-9, atol=0)


# Planted answers


def planted(dtype: torch.dtype) -> tuple[Problem, Tensor]:
    """20 clients, 5 of 60 points, 200 rows: nearly orthogonal, so there is one answer, f = 0."""
    clients, n, rows, k = 20, 60, 200, 5
    g = normal(clients, n, rows).to(dtype)
    draws = torch.Generator().manual_seed(1)
    where = torch.rand(clients, n, generator=draws).argsort(-1)[:, :k]
    size = 1 + 9 * torch.rand(clients, k, generator=draws).to(dtype)
    w = torch.zeros(clients, n, dtype=dtype).scatter(-1, where, size)
    return problem(g, k, y=torch.einsum("cn,cns->cs", w, g)), w


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if not row.recovers])
def test_planted_weights_are_recovered(name: str, dtype: torch.dtype) -> None:
    """Hard thresholding down to rounding, not to its usual tolerance."""
    posed, w = planted(dtype)
    options = {"tolerance": 1e-12} if TABLE[name].few else {}
    found = run(name, posed, 500 if TABLE[name].few else 0, **options)
    assert torch.equal(found.w > 0, w > 0)
    torch.testing.assert_close(found.w, w, rtol=0, atol=1e-3 if dtype is torch.float32 else 1e-5)
    assert (found.objective <= 1e-6 * posed.y.square().sum(-1)).all()


def test_a_random_support_of_all_points_recovers_them() -> None:
    posed, w = planted(torch.float64)
    found = run("uniform-refit", posed._replace(k=torch.full_like(posed.k, 60)))
    torch.testing.assert_close(found.w, w, rtol=0, atol=1e-8)


# Every closed-form step against a line search by values of the function


def minimiser(f: Callable[[float], float], low: float, high: float) -> float:
    found = scipy.optimize.minimize_scalar(
        f, bounds=(low, high), method="bounded", options={"xatol": 1e-12}
    )
    return float(found.x)


def geodesics(g: Array, y: Array) -> Iterator[Array]:
    """Algorithm 2 of Campbell and Broderick (2018) for one client: w_1, w_2, ..."""
    sigma = np.linalg.norm(g, axis=1)
    ell, ells = y / np.linalg.norm(y), g / sigma[:, None]
    weight, at = np.zeros(len(g)), np.zeros_like(y)  # ell(w) in terms of the ell_n
    while True:
        d = ell - (ell @ at) * at
        tangents = ells - np.outer(ells @ at, at)
        length = np.linalg.norm(tangents, axis=1)  # 0 for the point that ell(w) stands on
        n = int(np.argmax(np.where(length > 1e-7, tangents @ d / np.maximum(length, 1e-7), -1)))

        def angle(gamma: float, at: Array = at, n: int = n) -> float:
            moved = (1 - gamma) * at + gamma * ells[n]
            return -float(ell @ moved) / float(np.linalg.norm(moved))

        gamma = minimiser(angle, 0, 1) if at.any() else 1.0
        moved = (1 - gamma) * at + gamma * ells[n]
        unit = np.zeros(len(g))
        unit[n] = 1
        weight = ((1 - gamma) * weight + gamma * unit) / np.linalg.norm(moved)
        at = moved / np.linalg.norm(moved)
        yield np.linalg.norm(y) * (ell @ at) * weight / sigma


def vertices(g: Array, y: Array) -> Iterator[Array]:
    """Algorithm 2 of Campbell and Broderick (2019) for one client: w_1, w_2, ..."""
    sigma = np.linalg.norm(g, axis=1)
    w = np.zeros(len(g))
    while True:
        n = int(np.argmax(g @ (y - w @ g) / sigma))
        vertex = np.zeros(len(g))
        vertex[n] = sigma.sum() / sigma[n]

        def f(gamma: float, w: Array = w, vertex: Array = vertex) -> float:
            return float(((y - ((1 - gamma) * w + gamma * vertex) @ g) ** 2).sum())

        gamma = minimiser(f, 0, 1) if w.any() else 1.0
        w = (1 - gamma) * w + gamma * vertex
        yield w


def thresholding(g: Array, y: Array, k: int) -> Iterator[Array]:
    """w <- P_k(w - mu grad f(w)), mu by line search along the gradient on the active set."""
    w = np.zeros(len(g))
    while True:
        gradient = -2 * g @ (y - w @ g)
        others = np.flatnonzero(w <= 0)
        active = np.union1d(
            np.flatnonzero(w > 0), others[np.argsort(-np.abs(gradient[others]))[:k]]
        )
        restricted = np.zeros(len(g))
        restricted[active] = gradient[active]

        def f(mu: float, w: Array = w, restricted: Array = restricted) -> float:
            return float(((y - (w - mu * restricted) @ g) ** 2).sum())

        # The minimiser lies below 1 / (twice the smallest curvature); 1 is far above it here.
        moved = w - minimiser(f, 0, 1) * gradient
        keep = np.argsort(-moved)[:k]
        w = np.zeros(len(g))
        w[keep] = np.maximum(moved[keep], 0)
        yield w


@pytest.mark.parametrize(
    ("name", "reference", "steps"),
    [
        ("giga", lambda g, y, k: geodesics(g, y), 8),
        ("frank-wolfe", lambda g, y, k: vertices(g, y), 8),
        ("iht", thresholding, 6),
    ],
)
@pytest.mark.parametrize("make", [normal, correlated])
def test_iterates_are_those_of_a_slow_reference(
    name: str,
    reference: Callable[[Array, Array, int], Iterator[Array]],
    steps: int,
    make: Callable[..., Tensor],
) -> None:
    """The references contain no closed-form step. A line search by values finds its minimum to
    about sqrt(eps) = 1.5e-8 of the interval, and errors add up over the steps."""
    g = make(1, 30, 15, seed=3)
    posed = problem(g, 8)
    best, best_f = torch.zeros(1, 30).double(), float(posed.y.square().sum())
    iterates = islice(reference(g[0].numpy(), posed.y[0].numpy(), 8), steps)
    for t, w in enumerate(iterates, start=1):
        expected = torch.from_numpy(w).unsqueeze(0)
        f = float(objective(posed, expected))
        if f < best_f or name != "iht":  # thresholding keeps the best iterate it has seen
            best, best_f = expected, f
        found = run(name, posed, iterations=t)
        assert found.iterations == t
        torch.testing.assert_close(found.w, best, rtol=0, atol=1e-5 * float(best.max()))


def test_giga_is_not_held_up_by_the_point_it_stands_on() -> None:
    """After the first step the tangent towards the first point is 0/0. In float32 it must not win
    by its rounding: points that share most of their direction are the usual case."""
    for seed in range(6):
        g = 0.01 * normal(1, 200, 50, seed=seed) + normal(1, 1, 50, seed=seed + 100)
        double, single = (run("giga", problem(g.to(dtype), 10)) for dtype in reversed(DTYPES))
        assert int((single.w > 0).sum()) == int((double.w > 0).sum()) == 10
        f = objective(problem(g, 10), single.w)
        assert float(f) <= 2 * float(double.objective)


# The support


def supported(seed: int = 0, k: int = 6) -> tuple[Problem, support.Support]:
    """Two clients on 6 and 4 fitted points."""
    g = correlated(2, 30, 20, seed=seed)
    posed = problem(g, k)
    w = torch.zeros(2, 30).double()
    w[0, [1, 4, 9, 16, 20, 25]] = 1
    w[1, [0, 3, 7, 28]] = 1
    return posed, support.refitted(support.from_weights(posed, w))


def fitted(g: Array, y: Array, where: Sequence[int]) -> tuple[Array, float]:
    x, norm = scipy.optimize.nnls(g[list(where)].T, y)
    return x, norm**2


def test_a_support_is_what_it_says() -> None:
    posed, chosen = supported()
    w = chosen.weights(posed)
    assert torch.equal(chosen.size, (w > 0).sum(-1))
    torch.testing.assert_close(chosen.residual(posed).square().sum(-1), objective(posed, w))
    torch.testing.assert_close(chosen.gram, chosen.columns @ chosen.columns.mT)
    again = support.from_weights(posed, w)
    torch.testing.assert_close(again.weights(posed), w)
    fewer = support.kept(chosen, chosen.x >= chosen.x.amax(-1, keepdim=True))
    assert fewer.at.shape[1] == 1 and torch.equal(fewer.size, torch.ones(2).long())
    torch.testing.assert_close(fewer.weights(posed), w * (w == w.amax(-1, keepdim=True)))


def test_removal_costs_are_what_f_grows_by() -> None:
    """Exact where no other weight meets 0, and a lower bound everywhere."""
    exact = 0
    for seed in range(5):
        posed, chosen = supported(seed)
        assert isinstance(posed.points, Dense)
        costs = support.removal_costs(chosen)
        assert (costs[chosen.x <= 0] == torch.inf).all()
        for c in range(2):
            g, y = posed.points.g[c].numpy(), posed.y[c].numpy()
            slots = (chosen.x[c] > 0).nonzero().squeeze(-1).tolist()
            points = chosen.at[c].tolist()
            _, whole = fitted(g, y, [points[j] for j in slots])
            for j in slots:
                x, f = fitted(g, y, [points[i] for i in slots if i != j])
                assert float(costs[c, j]) <= (f - whole) * (1 + 1e-8)
                if (x > 0).all():
                    exact += 1
                    assert float(costs[c, j]) == pytest.approx(f - whole, rel=1e-8)
    assert exact >= 20


def test_candidates_are_those_that_lower_f_most() -> None:
    """By a line search in the weight of each point alone, from 0 up to the cap."""
    posed, chosen = supported()
    assert isinstance(posed.points, Dense)
    w = chosen.weights(posed)
    room = torch.tensor([5, 3])
    index, real = support.candidates(posed, chosen, room)
    assert torch.equal(real.sum(-1), room)
    cap = support.CAP * 30 / 6
    capped = 0
    for c in range(2):
        g, y = posed.points.g[c].numpy(), posed.y[c].numpy()
        residual = y - w[c].numpy() @ g
        drops = np.zeros(30)
        for j in range(30):

            def f(x: float, r: Array = residual, column: Array = g[j]) -> float:
                return float(((r - x * column) ** 2).sum())

            best = min(minimiser(f, 0, cap), cap, key=f)
            drops[j] = f(0) - f(best)
            capped += best > cap - 1e-6
        drops[chosen.at[c][chosen.real[c]].numpy()] = -1
        order = np.argsort(-drops)[: int(room[c])]
        assert drops[order[-1]] > 0
        assert index[c][real[c]].tolist() == order.tolist()
    assert capped > 0  # some points want more than any may stand for


def test_who_joins_lowers_f_most_when_all_others_follow() -> None:
    """One after the other, against fitting again with each candidate: the first that is not passed
    over, then the best beside it."""
    posed, chosen = supported(seed=1)
    chosen = support.kept(chosen, chosen.x > 0)
    every = torch.arange(posed.mask.shape[-1]).expand(len(posed.k), -1)
    g, y = posed.points.gather(every)[0].numpy(), posed.y[0].numpy()
    inside = chosen.at[0, chosen.real[0]].tolist()

    cap = support.CAP * len(g) / 6

    def in_order(taken: list[int]) -> list[int]:
        before = fitted_anew(taken)[1]
        drop = {}
        for j in set(range(len(g))) - set(taken):
            x, f = fitted_anew([*taken, j])
            if x[-1] > 0:  # a parabola in the weight of j, with its vertex at x[-1]
                c = min(x[-1], cap)
                drop[j] = (before - f) * c * (2 * x[-1] - c) / x[-1] ** 2
        return sorted(drop, key=lambda j: -drop[j])

    def fitted_anew(taken: list[int]) -> tuple[Array, float]:
        x = np.linalg.lstsq(g[taken].T, y, rcond=None)[0]
        return x, float(((y - g[taken].T @ x) ** 2).sum())

    first = in_order(inside)
    two = torch.full_like(posed.k, 2)
    for skip in range(4):
        grown = support.joined_best(posed, chosen, two, torch.full_like(posed.k, skip))
        found = [j for j in grown.at[0, grown.real[0]].tolist() if j not in inside]
        assert found[0] == first[skip]
        # The shortlist has those that would have lowered f on their own.
        allowed = [j for j in in_order([*inside, first[skip]]) if j in first[skip:]]
        assert found[1] == allowed[0]


def test_points_that_only_help_together_are_found() -> None:
    """All data near their mode: points have slopes a thousand times their curvature, which cancel
    in y. A few points cannot cancel theirs and get hardly any weight, so that blocks of k/20 = 4
    lower f by nothing until some 30 points are there."""
    draw = torch.Generator().manual_seed(0)
    n, groups, rows, k = 2000, 20, 400, 75
    group = torch.randint(groups, (n,), generator=draw)
    x = torch.cat([torch.randn(n, 10, generator=draw), torch.eye(groups)[group]], 1).double()
    slope = torch.rand(n, 1, generator=draw).double().sub(0.5).sign()
    curvature = x.T @ x
    slope = slope - x @ torch.linalg.solve(curvature, x.T @ slope)
    noise = torch.randn(x.shape[1], rows, generator=draw).double()
    factor = torch.linalg.cholesky(curvature)
    eta = x @ torch.linalg.solve_triangular(factor.T, noise, upper=True)
    g = 1000 * slope * eta - eta.square() / 8
    made = problem(((g - g.mean(-1, keepdim=True)) * rows**-0.5).unsqueeze(0), k)
    found = exchange.solve(made)
    assert int((found.w > 0).sum()) == k
    assert float(found.objective / made.y.square().sum()) < 0.05


def test_nothing_joins_a_perfect_fit() -> None:
    g = normal(1, 10, 20)
    posed = problem(g, 4, y=3 * g[:, 2])
    w = torch.zeros(1, 10).double()
    w[0, 2] = 3.0
    _, real = support.candidates(posed, support.from_weights(posed, w), torch.tensor([3]))
    assert not real.any()


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_on_the_support_are_those_with_all_of_phi(
    clients: int, dtype: torch.dtype
) -> None:
    g = normal(clients, 40, 25).to(dtype)
    posed = problem(g, 8)
    for size in (0, 1, 8, 19, 20, 40):
        v = normal(clients, 40, seed=size).to(dtype)
        v = v * largest(v.abs(), torch.full((clients,), size), size)  # some entries below 0
        expected = torch.einsum("cn,cns->cs", v, g)
        for width in {size, min(40, size + 3), 40}:
            torch.testing.assert_close(posed.combine(v, width), expected)
    index = torch.randint(0, 40, (clients, 6), generator=torch.Generator().manual_seed(0))
    for c in range(clients):
        assert torch.equal(posed.points.gather(index)[c], g[c, index[c]])
    torch.testing.assert_close(posed.points.squares(), g.square().sum(-1))
    r = posed.y
    torch.testing.assert_close(posed.points.correlate(r), torch.einsum("cns,cs->cn", g, r))


def test_dividing_by_zero_is_zero() -> None:
    a, b = torch.tensor([1.0, 0.0, 6.0]), torch.tensor([0.0, 0.0, 3.0])
    assert divide(a, b).tolist() == [0, 0, 2]


# Pursuit and exchange


@pytest.mark.parametrize("make", [normal, correlated])
def test_pursuit_of_a_point_at_a_time_is_the_method_of_lawson_and_hanson(
    make: Callable[..., Tensor],
) -> None:
    """Add the point of the largest capped gain, fit all weights, drop those at 0; every step."""
    n, rows, k = 40, 25, 10
    posed = problem(make(1, n, rows, seed=5), k)
    g, y = posed.points.g[0].numpy(), posed.y[0].numpy()
    squares, cap = (g**2).sum(1), support.CAP * n / k
    points: list[int] = []
    w = np.zeros(n)
    for t in range(1, 13):
        if len(points) < k:
            slope = g @ (y - w @ g)
            x = np.clip(slope / squares, 0, cap)
            gain = x * (2 * slope - x * squares)
            gain[points] = -1
            points.append(int(np.argmax(gain)))
            weights, _ = fitted(g, y, points)
            w = np.zeros(n)
            w[points] = weights
            points = [j for j in points if w[j] > 0]
        found = run("omp", posed, iterations=t)
        np.testing.assert_allclose(found.w[0].numpy(), w, atol=1e-7 * w.max())


@settings(max_examples=60, deadline=None)
@given(posed=problems())
def test_exchange_is_never_above_the_selection_it_starts_from(posed: Problem) -> None:
    start, swapped = exchange.forward(posed)[0].weights(posed), run("exchange", posed)
    allowed = rounding(posed, start) + rounding(posed, swapped.w)
    assert (swapped.objective.double() <= objective(posed, start) + allowed).all()


def test_exchanges_help_and_each_one_lowers_f() -> None:
    """12 clients; a tenth off the first selection's f, though some clients find no exchange."""
    posed = problem(torch.cat([correlated(3, 200, 60, seed=seed) for seed in range(4)]), 20)
    fs = [objective(posed, exchange.forward(posed)[0].weights(posed))]
    fs += [run("exchange", posed, iterations=t).objective for t in range(1, 15)]
    for before, after in pairwise(fs):
        assert (after <= before * (1 + 1e-12)).all()
    done, early = run("exchange", posed), run("exchange", posed, iterations=1)
    assert (done.objective <= fs[-1] * (1 + 1e-12)).all()
    assert (done.objective / fs[0]).mean() < 0.95
    assert done.converged.all() and not early.converged.any()


@pytest.mark.parametrize("name", ["omp", "omp-block"])
def test_every_step_of_a_pursuit_lowers_f(name: str) -> None:
    posed = problem(correlated(3, 100, 60), 20)
    fs = torch.stack([run(name, posed, iterations=t).objective for t in range(1, 30)])
    assert (fs[1:] <= fs[:-1] * (1 + 1e-12)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exchange", "omp", "omp-block"])
def test_a_pursuit_does_not_end_where_random_points_do_better(
    name: str, dtype: torch.dtype
) -> None:
    """Three features: potentials lie near a space of few dimensions, and when f is 1e-8 of ||y||^2
    no point alone lowers it by much, though many together do. There is room for 100."""
    for seed in range(3):
        g = logistic(1000, 3, 300, 0.1, seed)
        whole = problem(g, 100)
        random, found = (run(n, problem(g.to(dtype), 100)) for n in ("uniform-refit", name))
        assert float(objective(whole, found.w)) < float(objective(whole, random.w))


def test_de_biased_thresholding_is_its_own_entry() -> None:
    posed = problem(correlated(2, 40, 30), 6)
    assert torch.equal(run("aiht-2", posed).w, aiht.solve(posed, debias=True).w)
    assert not torch.equal(run("aiht-2", posed).w, run("aiht", posed).w)


@pytest.mark.parametrize("seed", [0, 1])
def test_solvers_in_order_of_strength(seed: int) -> None:
    """Logistic regression with 20 features, 3000 points and draws from about its posterior."""
    posed = problem(logistic(3000, 20, 300, 0.05, seed), 60)
    order = ["exchange", "omp-block", "aiht-2", "aiht", "iht", "giga", "frank-wolfe", "uniform"]
    errors = {name: float(relative(posed, run(name, posed))) for name in order}
    assert sorted(errors, key=errors.__getitem__) == order, errors
    assert errors["exchange"] < 0.75 * errors["omp-block"]


# Uniform subsets


def test_every_point_is_as_likely_in_a_uniform_subset() -> None:
    """Frequencies over 2000 clients, within 4.5 standard errors; weights n/k on exactly k."""
    clients, n = 2000, 8
    mask = torch.arange(n).expand(clients, n) < 6
    posed = problem(torch.ones(clients, n, 1) * mask.unsqueeze(-1), 2, mask)
    draws = [torch.Generator().manual_seed(c) for c in range(clients)]
    w = solvers.get("uniform")(posed, generators=draws).w
    assert ((w > 0).sum(-1) == 2).all() and set(w.unique().tolist()) == {0.0, 3.0}
    share = (w > 0).double().mean(0)[:6]
    assert ((share - 1 / 3).abs() < 4.5 * (2 / 9 / clients) ** 0.5).all()


# Sparse variational inference


def test_sparse_vi_without_draws_says_what_it_needs() -> None:
    with pytest.raises(UserError, match="resample"):
        sparse_vi.solve(problem(normal(1, 5, 4), 2))


@pytest.mark.parametrize(
    ("n", "features", "k", "iterations", "share"),
    [(300, 5, 15, 0, 0.01), (1000, 8, 25, 0, 0.01), (300, 5, 15, 4, 0.2)],
)
def test_sparse_vi_on_a_linear_gaussian_model(
    n: int, features: int, k: int, iterations: int, share: float
) -> None:
    """The posterior of every coreset is exact, and so is its KL from the full one: a small share
    of what uniform subsets have. k is below the d (d + 3) / 2 = 20 and 44 numbers that would fix a
    Gaussian. While the chosen points are fewer than features, pi_w is narrow where they look and
    as wide as the prior elsewhere: the weights must not run away."""
    noise, rows = 0.5, 400
    x = normal(n, features, seed=1) @ (
        torch.eye(features) + 0.5 * normal(features, features, seed=2)
    )
    y = x @ normal(features, seed=3) + noise * normal(n, seed=4)
    prior = regression.Normal(torch.zeros(features).double(), torch.eye(features).double())
    family = regression.gaussian(noise)

    def posterior(w: Tensor) -> regression.Normal:
        return regression.linear_posterior(x, y, w, prior, noise)

    asked = []

    def resample(w: Tensor, step: int) -> Problem:
        asked.append(step)
        theta = posterior(w[0]).sample(rows, torch.Generator().manual_seed(step))
        return problem(regression.potentials(family, theta, x, y).unsqueeze(0), k)

    posed = resample(torch.ones(1, n).double(), 10**6)
    found = sparse_vi.solve(posed, iterations=iterations, resample=resample)
    assert asked[1:] == sorted(asked[1:]) and len(set(asked[1:])) == found.iterations
    assert (found.w >= 0).all() and int((found.w > 0).sum()) <= k
    assert float(found.w.max()) <= 100 * n / k
    full = posterior(torch.ones(n).double())
    uniform = torch.stack(
        [regression.kl(posterior(run("uniform", posed, seed=s).w[0]), full) for s in range(20)]
    )
    assert regression.kl(posterior(found.w[0]), full) < share * uniform.median()


# By name


def test_an_unknown_name_is_a_sentence_with_the_nearest() -> None:
    with pytest.raises(UserError, match="'exchange'"):
        solvers.get("exchnge")
    with pytest.raises(UserError, match=r"There is no solver 'xyz'\. There are exchange, omp"):
        solvers.get("xyz")
    assert solvers.find("omp-block").options == {"in_blocks": True}


def test_names_need_no_torch() -> None:
    code = "import sys, corefed.coreset.solvers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA")
@pytest.mark.parametrize("name", NAMES)
def test_cuda_agrees_with_the_cpu(name: str) -> None:
    """In float64, after few iterations where rounding grows; random points are drawn on the CPU."""
    g, k, mask, _ = ragged()
    here = run(name, problem(g, k, mask), TABLE[name].few)
    there = run(name, problem(g.cuda(), k.cuda(), mask.cuda()), TABLE[name].few)
    torch.testing.assert_close(there.w.cpu(), here.w, rtol=1e-7, atol=1e-7 * float(here.w.max()))
    torch.testing.assert_close(there.objective.cpu(), here.objective, rtol=1e-6, atol=1e-10)
