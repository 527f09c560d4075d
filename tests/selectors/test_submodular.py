"""Greedy diverse subsets: against f recomputed, LAPACK, hand-worked sets and submodlib."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from itertools import pairwise
from math import exp, log
from runpy import run_path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.linalg.lapack
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from submodular_cases import (
    METRICS,
    STORED,
    Case,
    K,
    cases,
    is_tied,
    points,
    rounded_like_submodlib,
)
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Method, Work
from corefed.methods import fedavg, registry
from corefed.methods.submodular import Config, diverse
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.selectors import submodular as engine
from corefed.selectors.similarity import ComparedPoints, Metric, prepare
from corefed.selectors.submodular import Objective, greedy
from corefed.settings import config
from corefed.training.local import LocalClients
from corefed_studies.bench import submodular
from corefed_studies.bench.submodular import OBJECTIVES, by_submodlib, naive, similarities, value

every_metric = pytest.mark.parametrize("metric", METRICS)
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def normal(n: int, p: int, seed: int = 0) -> Tensor:
    return torch.randn(n, p, generator=torch.Generator().manual_seed(seed))


# The slow twin


@st.composite
def small(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Up to 12 points and a budget: whole numbers, with equal points, ties and zeros, or reals."""
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 5)))
    whole = arrays.arrays(np.float32, shape, elements=st.integers(-2, 2).map(float))
    real = st.integers(0, 2**32 - 1).map(lambda seed: normal(*shape, seed).numpy())
    x = draw(st.one_of(whole, real))
    return torch.from_numpy(x), draw(st.integers(1, len(x)))


@every_objective
@every_metric
@pytest.mark.parametrize("block", [1, 3, 64])
@settings(max_examples=40, deadline=None)
@given(problem=small())
def test_picks_are_those_of_working_out_f_anew(
    objective: Objective, metric: Metric, block: int, problem: tuple[Tensor, int]
) -> None:
    """For small blocks too: points that wait, rows made ahead."""
    x, k = problem
    with mock.patch.object(engine, "BLOCK", block):
        found = greedy(x, k, objective, metric=metric)
    assert found.chosen.tolist() == naive(x, k, objective, metric=metric)
    f = value(similarities(x, metric), found.chosen.tolist(), objective, 1.0)
    torch.testing.assert_close(found.gain.sum(), f, rtol=1e-10, atol=1e-10)


@every_metric
@pytest.mark.parametrize("regulariser", [1e-4, 0.1, 30.0])
def test_the_regulariser_is_lambda(metric: Metric, regulariser: float) -> None:
    x = normal(25, 4)
    picks = greedy(x, 25, "logdet", metric=metric, regulariser=regulariser)
    assert picks.chosen.tolist() == naive(x, 25, "logdet", metric=metric, regulariser=regulariser)
    L = similarities(x, metric) + regulariser * torch.eye(25, dtype=torch.float64)
    torch.testing.assert_close(picks.gain.sum(), torch.logdet(L), rtol=1e-9, atol=0)


@every_metric
@pytest.mark.parametrize("block", [2, 64])
def test_the_smallest_regulariser_is_enough(metric: Metric, block: int) -> None:
    """Equal points, and more of them than features: all but a few eigenvalues of L are lambda.

    Both ways to log det are backward stable: each eigenvalue is off by about eps |L| = 7e-14,
    which is 7e-8 of lambda.
    """
    x = normal(100, 2).repeat(3, 1)
    with mock.patch.object(engine, "BLOCK", block):
        picks = greedy(x, 300, "logdet", metric=metric, regulariser=1e-6)
    assert sorted(picks.chosen.tolist()) == list(range(300))
    L = similarities(x, metric) + 1e-6 * torch.eye(300, dtype=torch.float64)
    torch.testing.assert_close(picks.gain.sum(), torch.logdet(L), rtol=0, atol=300 * 7e-8)


@pytest.mark.parametrize(("p", "metric"), [(20, "cosine"), (700, "cosine"), (20, "euclidean")])
def test_logdet_is_lapacks_pivoted_cholesky(p: int, metric: Metric) -> None:
    """dpstrf takes the first of equal pivots, so it gets the points from the last to the first."""
    n, k = 600, 400
    x = normal(n, p)
    L = (similarities(x, metric) + torch.eye(n)).flip(0, 1).numpy()
    factor, order, rank, _ = scipy.linalg.lapack.dpstrf(L, lower=1)
    picks = greedy(x, k, "logdet", metric=metric)
    assert rank == n and picks.chosen.tolist() == (n - order[:k]).tolist()
    expected = 2 * np.log(np.diag(factor)[:k])
    np.testing.assert_allclose(picks.gain.numpy(), expected, rtol=1e-9, atol=1e-12)


@every_objective
@every_metric
def test_gains_fall_where_they_must(objective: Objective, metric: Metric) -> None:
    """logdet is submodular, the smallest distance falls, and a sum of distances grows."""
    gain = greedy(normal(90, 6), 90, objective, metric=metric).gain
    if objective == "dispsum":
        assert gain[0] == 0 and all(gain[1:] > 0)
    elif objective == "dispmin":
        assert gain[0] == 0 and gain[1] > 0 and all(gain[2:] <= 0)
        assert gain.sum() > 0  # no two points are equal
    else:
        assert all(b <= a + 1e-12 for a, b in pairwise(gain.tolist()))


@every_objective
def test_a_longer_choice_begins_with_the_shorter(objective: Objective) -> None:
    x = normal(80, 5)
    longest = greedy(x, 80, objective)
    assert sorted(longest.chosen.tolist()) == list(range(80))
    for k in (1, 2, 31):
        assert greedy(x, k, objective).chosen.tolist() == longest.chosen[:k].tolist()


# Worked by hand

COMPASS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])


def test_four_directions() -> None:
    """East, north, west, south: neighbours are at distance 1, opposites at 2."""
    found = greedy(COMPASS, 4, "dispsum")
    assert found.chosen.tolist() == [3, 1, 2, 0] and found.gain.tolist() == [0, 2, 2, 4]
    # A first distance above 1 counts as 1, so that all three tie for the second pick.
    found = greedy(COMPASS, 4, "dispmin")
    assert found.chosen.tolist() == [3, 2, 1, 0] and found.gain.tolist() == [0, 1, 0, 0]
    # South and west are orthogonal: det = 2 * 2. North then has 2 - (-1)^2 / 2.
    found = greedy(COMPASS, 4, "logdet")
    assert found.chosen.tolist() == [3, 2, 1, 0]
    torch.testing.assert_close(found.gain.exp().tolist(), [2.0, 2.0, 1.5, 1.5])


def test_points_on_a_line() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]])
    near, middle, far = (1 - exp(-d) for d in (1, 2, 3))
    found = greedy(x, 3, "dispsum", metric="euclidean")
    assert found.chosen.tolist() == [2, 0, 1]
    torch.testing.assert_close(found.gain.tolist(), [0.0, far, near + middle])
    found = greedy(x, 3, "dispmin", metric="euclidean")
    assert found.chosen.tolist() == [2, 0, 1]
    torch.testing.assert_close(found.gain.tolist(), [0.0, far, near - far])
    found = greedy(x, 2, "logdet", metric="euclidean", regulariser=0.5)
    assert found.chosen.tolist() == [2, 0]
    torch.testing.assert_close(found.gain.tolist(), [log(1.5), log(1.5 - exp(-6) / 1.5)])


@every_objective
@every_metric
@pytest.mark.parametrize("x", [torch.zeros(70, 3), torch.full((70, 3), -0.3)])
def test_of_equal_points_the_last_come_first(
    objective: Objective, metric: Metric, x: Tensor
) -> None:
    assert greedy(x, 66, objective, metric=metric).chosen.tolist() == list(range(69, 3, -1))


@every_objective
@every_metric
def test_one_point(objective: Objective, metric: Metric) -> None:
    found = greedy(torch.tensor([[2.0, 1.0]]), 1, objective, metric=metric)
    expected = log(2) if objective == "logdet" else 0.0
    assert found.chosen.tolist() == [0]
    assert found.gain.item() == pytest.approx(expected, abs=1e-6)


@every_objective
def test_what_a_metric_cannot_see(objective: Objective) -> None:
    """Cosine: the length of a point. Euclidean: where all of them are. Both: features' shape."""
    x = torch.randint(-9, 9, (50, 6), generator=torch.Generator().manual_seed(0)).float()
    length = 2.0 ** torch.arange(50).remainder(7).unsqueeze(-1)  # no rounding
    for metric, other in (("cosine", x * length), ("euclidean", x + 1024)):
        expected = greedy(x, 25, objective, metric=metric).chosen
        assert torch.equal(greedy(other, 25, objective, metric=metric).chosen, expected)
        assert torch.equal(greedy(x.view(50, 3, 2), 25, objective, metric=metric).chosen, expected)
        assert torch.equal(greedy(x.double(), 25, objective, metric=metric).chosen, expected)


# Rows and roundings


@every_metric
def test_similarities_row_by_row(metric: Metric) -> None:
    x = torch.cat([normal(40, 30), torch.zeros(1, 30)]) + 10_000  # far from 0, as years are
    x[40], x[7] = 0, x[3]
    ready, expected = prepare(x, metric), similarities(x, metric)
    a, b = torch.tensor([3, 40, 11]), torch.tensor([7, 3, 40, 0])
    for found, wanted in (
        (ready.similarity(a), expected[a]),
        (ready.similarity(a, b), ready.similarity(a)[:, b]),  # a product of another shape
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    assert ready.similarity(a, b)[0, 0].item() == pytest.approx(1, abs=1e-15)  # equal points


def test_rows_are_made_once_while_there_is_room() -> None:
    ready = prepare(normal(300, 4), "cosine")
    expected = 1 - ready.similarity(torch.arange(300))
    made: list[int] = []
    similarity = ComparedPoints.similarity

    def counted(self: ComparedPoints, a: Tensor, b: Tensor | None = None) -> Tensor:
        made.extend(a.tolist())
        return similarity(self, a, b)

    score = torch.arange(300.0).double()
    with mock.patch.object(ComparedPoints, "similarity", counted):
        for room, many in ((300, 300), (0, 20 * 64)):
            made.clear()
            rows = engine.Rows(ready, room)
            for i in [*range(0, 300, 31), *range(0, 300, 31)]:
                torch.testing.assert_close(rows(i, score, 200), expected[i], rtol=0, atol=1e-14)
            assert len(made) <= many
            assert room == 0 or len(made) == len(set(made))
            assert len(rows.kept) <= max(room, engine.BLOCK)


def test_a_point_is_similar_to_itself_unless_it_is_0() -> None:
    x = torch.cat([normal(200, 37), torch.tensor([[1e-30], [1e30], [0.0]]).expand(3, 37)])
    assert prepare(x, "cosine").own.tolist() == [1.0] * 202 + [0.0]
    assert prepare(x, "euclidean").own.tolist() == [1.0] * 203


# submodlib


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_picks_are_those_submodlib_made(case: Case) -> None:
    """30 of 35 as they are. For logdet of cosines all points tie for the first pick, and float32's
    rounding of a point's cosine with itself decides there; with it, later picks agree too."""
    stored = json.loads(STORED.read_text())["picks"][case.name]
    x = points()[case.points]
    tied = is_tied(case.metric, case.objective)
    if not tied or case.points == "positive":  # where rounding has the last point too
        assert greedy(x, K, case.objective, metric=case.metric).chosen.tolist() == stored
    if tied:
        with rounded_like_submodlib():
            assert greedy(x, K, case.objective, metric=case.metric).chosen.tolist() == stored


@every_objective
@every_metric
def test_picks_are_those_submodlib_makes(objective: Objective, metric: Metric) -> None:
    """With submodlib itself, where it is installed: stored cases and fresh ones."""
    pytest.importorskip("submodlib")
    fresh = [normal(n, p, n) for n, p in ((2, 3), (50, 12), (130, 40), (150, 300))]
    chosen = [points()[case.points] for case in cases() if case[1:] == (metric, objective)]
    for x in [*fresh, *chosen]:
        k = min(K, len(x) - 1)
        expected = by_submodlib(x, k, objective, metric=metric)
        rounded = rounded_like_submodlib() if is_tied(metric, objective) else nullcontext()
        with rounded:
            assert greedy(x, k, objective, metric=metric).chosen.tolist() == expected


# Mistakes


@pytest.mark.parametrize(
    ("x", "settings_", "words"),
    [
        (normal(5, 2), {"k": 0}, "k is 0; it must be from 1 to the number of points, 5"),
        (normal(5, 2), {"k": 6}, "k is 6"),
        (torch.zeros(0, 2), {"k": 1}, "number of points, 0"),
        (
            normal(5, 2),
            {"k": 2, "regulariser": 0.0},
            "regulariser is 0.0; it must be at least 1e-06",
        ),
        (normal(5, 2) / 0, {"k": 2}, "no finite number"),
        (normal(5, 2).double() * 1e300, {"k": 2}, "no finite number"),
        (torch.empty(60_000, 600), {"k": 9}, "raise selection_mb, which is 100"),
    ],
)
@every_objective
def test_mistakes_are_named(
    x: Tensor, settings_: dict[str, Any], words: str, objective: Objective
) -> None:
    with pytest.raises(UserError, match=words):
        greedy(x, objective=objective, selection_mb=100, **settings_)


def test_what_there_is_not_is_named() -> None:
    with pytest.raises(UserError, match="no 'facility' to choose points by, only logdet, dispsum"):
        greedy(normal(5, 2), 2, "facility")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no 'rbf' to choose points by, only cosine, euclidean"):
        greedy(normal(5, 2), 2, "logdet", metric="rbf")  # type: ignore[arg-type]


def test_memory_is_of_what_is_needed() -> None:
    """A Cholesky factor of n k numbers, unless cosines of fewer features do without it."""
    x = normal(3000, 2)
    with pytest.raises(UserError, match=r"Choosing 1500 of 3000 points takes 39 MB"):
        greedy(x, 1500, "logdet", metric="euclidean", selection_mb=10)
    greedy(x, 100, "logdet", selection_mb=10)
    greedy(x, 100, "dispmin", metric="euclidean", selection_mb=10)


# The methods


def federation() -> ClientData:
    """Clients of 11, 4, 1 and 30 points, in images of 3 x 2."""
    weight = (torch.arange(30) < torch.tensor([[11], [4], [1], [30]])).float()
    x = normal(4 * 30, 6).view(4, 30, 3, 2) * weight[..., None, None]
    return ClientData(x, (x.sum((-1, -2)) > 0).long(), weight)


MODEL = mlp((6, 4, 2), Categorical(2))


def build(objective: Objective, **values: Any) -> Method:
    name = f"submodular-{objective}"
    method = registry.build(name, registry.config_class(name)(**values), MODEL)
    assert method.name == name
    return method


@every_objective
@every_metric
def test_each_client_picks_from_its_own_points(objective: Objective, metric: Metric) -> None:
    """Whatever its company and padding: k = ceil(n / 2) points, each with weight n / k."""
    data, own = federation(), Config(metric=metric)
    weight = diverse(data, objective, own)
    for c, (n, k) in enumerate(((11, 6), (4, 2), (1, 1), (30, 15))):
        expected = torch.zeros(30)
        chosen = greedy(data.x[c, :n], k, objective, metric=metric).chosen
        expected[chosen] = n / k
        assert torch.equal(weight[c], expected)
        alone = ClientData(*(field[c : c + 1, :n] for field in data))
        assert torch.equal(diverse(alone, objective, own)[0], expected[:n])
    scattered = torch.randperm(30, generator=torch.Generator().manual_seed(1)).sort().values[:11]
    apart = ClientData(*(torch.zeros_like(field[:1]) for field in data))
    for field, given_ in zip(apart, data, strict=True):
        field[0, scattered] = given_[0, :11]
    assert torch.equal(diverse(apart, objective, own)[0, scattered], weight[0, :11])


def trained(method: Method, rounds: int) -> tuple[list[Tensor], Tensor | None]:
    data = federation()
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    clients = LocalClients(method, data, [0], [server], Work(steps=3, batch=5), 4)
    messages = []
    for t in range(rounds):
        (update,), _, _ = clients.train(t, [server], [range(4)])
        server = method.aggregate(server, update)
        messages.append(update.message["theta"])
    return messages, clients.private.get("subset.weight")


@every_objective
def test_training_is_fedavg_on_picks_made_once(objective: Objective) -> None:
    found, weight = trained(build(objective), 3)
    assert torch.equal(weight, diverse(federation(), objective, Config()))
    plain = fedavg.build(fedavg.Config(), MODEL)
    on_all, _ = trained(plain, 3)
    assert not torch.equal(found[0], on_all[0])
    # With fraction 1 every point is picked, with weight 1.
    everything, weight = trained(build(objective, fraction=1.0), 3)
    assert torch.equal(weight, federation().weight)
    assert all(torch.equal(a, b) for a, b in zip(everything, on_all, strict=True))


def test_settings_reach_the_choice() -> None:
    data = federation()
    by_default = diverse(data, "logdet", Config(), 1.0)
    weights = [
        by_default,
        diverse(data, "logdet", Config(), 1e-3),
        diverse(data, "logdet", Config(metric="euclidean")),
        diverse(data, "logdet", Config(fraction=0.3)),
    ]
    assert all(not torch.equal(by_default, other) for other in weights[1:])
    for values, expected in (({}, 0), ({"regulariser": 1e-3}, 1), ({"metric": "euclidean"}, 2)):
        assert torch.equal(trained(build("logdet", **values), 1)[1], weights[expected])


def test_settings_are_checked_before_a_run() -> None:
    for given_, words in (("regulariser=0", "at least 1e-06"), ("metric=rbf", "or 'euclidean'")):
        with pytest.raises(UserError, match=words):
            config.resolve(flags={"method": "submodular-logdet"}, assignments=[given_])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA")
@every_objective
@every_metric
def test_a_gpu_picks_the_same(objective: Objective, metric: Metric) -> None:
    x = normal(500, 40)
    found = greedy(x.cuda(), 250, objective, metric=metric)
    assert found.chosen.is_cuda
    assert found.chosen.tolist() == greedy(x, 250, objective, metric=metric).chosen.tolist()


# The benchmark


def test_the_benchmark_compares_in_one_process() -> None:
    for objective in OBJECTIVES:
        row = submodular.one(objective, 40, "naive", "cpu")
        assert row["k"] == row["same picks"] == row["in order"] == 20
        assert row["ratio"] == row["its s"] / row["s"]


def test_the_benchmark_says_what_it_compares_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its processes are played by this one."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "corefed_studies.bench.submodular"]
        monkeypatch.setattr(sys, "argv", command[2:])
        with redirect_stdout(StringIO()) as out:
            run_path(submodular.__file__, run_name="__main__")
        return subprocess.CompletedProcess(command, 0, out.getvalue())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setitem(submodular.SIZES, "quick", (110, 120))
    monkeypatch.setattr(submodular, "find_spec", lambda name: None)
    rows = submodular.submodular(torch.device("cpu"), "quick")
    assert [row["n"] for row in rows] == [100] * 3 + [110] * 3 + [120] * 3
    assert [row["compared with"] for row in rows] == ["naive"] * 3 + ["-"] * 6
    assert "submodlib is not installed" in capsys.readouterr().err
