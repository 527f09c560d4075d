"""Builds of many points: the scan, the pool and the solver on it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coreset_cases import Items, Stream, logistic, same
from torch import Tensor, nn
from torch.func import functional_call

from corefed.base.errors import UserError
from corefed.base.threads import map_parts
from corefed.coreset import build, likelihoods, passes, sources
from corefed.coreset import scan as scanning
from corefed.coreset.draws import interpret, split
from corefed.coreset.passes import DataPass
from corefed.coreset.pool import draw, size_for
from corefed.coreset.scan import scan

N, D = 4000, 4
POSTERIOR = (torch.ones(D), torch.full((D,), 0.05))


@pytest.fixture(scope="module")
def points() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=g)
    return x, (torch.rand(N, generator=g) < torch.sigmoid(x.sum(-1))).float()


def prepared(points: tuple[Tensor, Tensor]) -> tuple[DataPass, Any, Any]:
    fitted, fresh = split(interpret(POSTERIOR), 80, 30, 0)
    function = likelihoods.prepare(logistic, fitted, *points)
    source = sources.adapt(points, torch.float32)
    return DataPass(function, source, torch.device("cpu"), 512, 1 << 22), fitted, fresh


@pytest.mark.parametrize("threads", [1, 3])
def test_the_scan_is_the_survey(points: tuple[Tensor, Tensor], threads: int) -> None:
    """y, the fresh sums and the squares of all points, as a pass that stores all has them."""
    work, fitted, fresh = prepared(points)
    with torch.no_grad():
        sink = passes.sink_for("memory", work, fitted, None)
        y, check = passes.survey(work, fitted, sink, fresh)
        found = scan(work, fitted, fresh, threads, lambda *_: None)
    torch.testing.assert_close(found.y, y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.check.total, check.total, rtol=1e-4, atol=1e-5)
    assert found.check.squares == pytest.approx(check.squares, rel=1e-4)
    norm = sink.points().gather(torch.arange(N).unsqueeze(0))[0].norm(dim=-1)
    # 64 of the 80 draws: a norm from m draws has a relative error of 1 / sqrt(2 m)
    assert float(((found.score - norm) / norm).abs().mean()) < 3 / 128**0.5


def test_a_pool_stands_for_all_points_in_expectation(points: tuple[Tensor, Tensor]) -> None:
    """The mean over pools of sum g_j / pi_j is y, within 4 standard errors."""
    work, fitted, fresh = prepared(points)
    with torch.no_grad():
        found = scan(work, fitted, fresh, 1, lambda *_: None)
        every = passes.centred(work.log_p(fitted, work.take(torch.arange(N)))).double()
        sums = []
        for seed in range(40):
            pool = draw(work, found.score, 200, seed)
            assert 120 < len(pool.at) < 280
            assert float(pool.chance.max()) <= 1
            sums.append((every[pool.at] / pool.chance.double().unsqueeze(-1)).sum(0))
    stacked = torch.stack(sums)
    error = (stacked.mean(0) - found.y).norm()
    assert float(error) < 4 * float(stacked.var(0).sum().sqrt()) / 40**0.5


@pytest.mark.parametrize("store", ["memory", "disk", "recompute"])
def test_a_coreset_from_a_pool(points: tuple[Tensor, Tensor], store: str) -> None:
    """Its errors are those of the definition on all points, whatever keeps the pool's columns."""
    x, y = points
    draws = POSTERIOR[0] + 0.05 * torch.randn(200, D, generator=torch.Generator().manual_seed(2))
    coreset = build(logistic, draws, points, 30, pool=600, store=store)
    d = coreset.diagnostics
    assert 500 < d.pool < 700 and d.store == store and d.n == N
    log_p = torch.stack([logistic(theta, x, y) for theta in draws[160:]]).double()
    phi = (log_p - log_p.mean(0)) / 40**0.5
    full = phi.sum(1)
    left = full - phi[:, coreset.indices] @ coreset.weights.double()
    expected = float(left.square().sum() / full.square().sum())
    assert d.held_out_error == pytest.approx(expected, rel=0.05, abs=1e-6)
    assert d.held_out_error < 1e-3
    assert d.held_out_error < 10 * build(logistic, draws, points, 30).diagnostics.held_out_error


def test_the_same_pool_from_every_kind_of_data(points: tuple[Tensor, Tensor]) -> None:
    first = build(logistic, POSTERIOR, points, 20, pool=500, samples=100)
    for data in (Items(*points), Stream(*points)):
        same(first, build(logistic, POSTERIOR, data, 20, pool=500, samples=100))


def test_when_a_pool_is_made() -> None:
    assert size_for("auto", 1000, 1_000_000, True) == 20_000
    assert size_for("auto", 100, 1_000_000, True) == 10_000
    assert size_for("auto", 1000, 99_999, True) == 0
    assert size_for("auto", 1000, 1_000_000, False) == 0
    assert size_for(500, 20, 400, True) == 0


def test_a_function_that_must_not_run_twice_at_once(
    points: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """functional_call swaps a module's parameters while it runs. Two threads see each other's;
    the pool's second reading finds it out, and the scan is done again by one."""
    monkeypatch.setattr(scanning, "BLOCK", 1 << 14)  # 25 chunks
    module = nn.Linear(D, 1, bias=False)
    seen = set()

    def unsafe(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        seen.add(threading.get_ident())
        eta = functional_call(module, {"weight": theta.unsqueeze(0)}, (x,)).squeeze(-1)
        return y * eta - F.softplus(eta)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = build(unsafe, POSTERIOR, points, 20, pool=500, samples=100)
    finally:
        torch.set_num_threads(before)
    assert len(seen) > 1
    same(build(logistic, POSTERIOR, points, 20, pool=500, samples=100), found, 0.02)


def test_threads_give_what_one_gives_in_order() -> None:
    before = torch.get_num_threads()
    assert list(map_parts(lambda i: i * i, iter(range(50)), 3)) == [i * i for i in range(50)]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pool": "some"}, "pool is 'some'"),
        ({"pool": -1}, "pool is -1"),
        ({"pool": 10}, "needs at least that many"),
        ({"pool": 500, "solver": "uniform"}, "reads all points"),
    ],
)
def test_bad_pools(points: tuple[Tensor, Tensor], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build(logistic, POSTERIOR, points, 20, **options)


def test_what_the_scan_refuses(points: tuple[Tensor, Tensor]) -> None:
    x, _ = points

    def broken(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 3.2, torch.nan, logistic(theta, x, y))

    bad = int((x[:, 0] > 3.2).nonzero()[0])
    with pytest.raises(UserError, match=f"point {bad} under draw 0 is nan"):
        build(broken, POSTERIOR, points, 20, pool=500)
    with pytest.raises(UserError, match="does not depend on theta"):
        build(lambda theta, x, y: x[:, 0] + 0 * theta.sum(), POSTERIOR, points, 20, pool=500)
