"""Everything `corefed.coreset.build` refuses, in one sentence each."""

from __future__ import annotations

from typing import Any

import numpy as np
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
)
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from corefed.base.errors import UserError
from corefed.coreset import build


@pytest.fixture(scope="module")
def points() -> tuple[Tensor, Tensor]:
    return make_points()


# --- bad input: one sentence each -----------------------------------------------------------------


def nan_at_five(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return logistic(theta, x, y).where((x != BAD[0][5]).any(-1), torch.nan)


BAD: list[Tensor] = []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 0}, "at least one point"),
        ({"size": -3}, "at least one point"),
        ({"size": N + 1}, "only 300 points"),
        ({"size": 1.5}, "between 0 and 1"),
        ({"size": float("nan")}, "between 0 and 1"),
        ({"size": "ten"}, "number of points"),
        ({"size": True}, "number of points"),
        ({"solver": "exchang"}, "Did you mean 'exchange'"),
        ({"solver": "sparse-vi"}, "give resample"),
        ({"resample": lambda *_: None}, "is for the solver sparse-vi"),
        ({"samples": -1}, "samples is -1"),
        ({"samples": 1}, "samples is 1"),
        ({"shrink": -1.0}, "shrink is -1.0"),
        ({"shrink": "much"}, "shrink is 'much'"),
        ({"chunk": -1}, "chunk is -1"),
        ({"memory_mb": 0}, "memory_mb is 0"),
        ({"iterations": -1}, "iterations is -1"),
        ({"store": "tape"}, "store is 'tape'"),
        ({"device": "gpu"}, "There is no device"),
        ({"log_likelihood": 3}, "log_likelihood is a int"),
        ({"log_likelihood": lambda t, x, y: logistic(t, x, y).mean()}, r"shape \[\] for 4 points"),
        ({"log_likelihood": lambda t, x, y: logistic(t, x, y)[:, None]}, r"shape \[4, 1\]"),
        ({"log_likelihood": lambda *a: logistic(*a).squeeze()}, r"shape \[\] for 1 points"),
        ({"log_likelihood": lambda t, x, y: 1.0}, "returned a float"),
        ({"log_likelihood": lambda t, x, y: logistic(t, x, y).long()}, "returned torch.int64"),
        ({"log_likelihood": lambda t, x, y: logistic(t, x - x.mean(0), y)}, "not per example"),
        ({"log_likelihood": lambda t, x, y: logistic(t, x, y) / len(x)}, "not per example"),
        ({"log_likelihood": lambda t, x, y: logistic(t, F.dropout(x), y)}, "not per example"),
        ({"log_likelihood": lambda t, x, y: logistic(t, x.mul_(1), y)}, "in place"),
        ({"log_likelihood": lambda t, x, y: -x[:, 0]}, "does not depend on theta"),
        ({"log_likelihood": nan_at_five}, "point 5 under draw 0 is nan"),
        ({"draws": torch.ones(50, D)}, "All 40 draws are the same"),
        ({"draws": [{"a": torch.ones(D)}] * 50}, "All 40 draws are the same"),
        ({"draws": torch.randn(3, D)}, "There are 3 draws"),
        ({"draws": []}, "is empty"),
        ({"draws": [torch.ones(2), torch.ones(3)]}, "Draw 1 of the list has other"),
        ({"draws": [{"a": torch.ones(2)}, {"b": torch.ones(2)}]}, "Draw 1 of the list has other"),
        ({"draws": [torch.ones(2), torch.full((2,), torch.nan)]}, "Draw 1 of the list holds NaN"),
        ({"draws": {"a": torch.ones(9, 2), "b": torch.ones(8, 2)}}, "share their first axis"),
        ({"draws": torch.full((9, D), torch.inf)}, "NaN or infinite"),
        ({"draws": torch.ones(9, D).long()}, "floating-point"),
        ({"draws": "posterior"}, "draws is a str"),
        ({"draws": (torch.ones(D), torch.zeros(D))}, "must be positive"),
        ({"draws": (torch.ones(D), torch.ones(3))}, "same names and shapes"),
        ({"draws": (torch.ones(D), torch.ones(D, D))}, "lower-triangular"),
        ({"draws": (torch.full((D,), torch.nan), 0.1)}, "NaN or infinite"),
        ({"data": (torch.ones(5, D), torch.ones(4))}, "x has 5 points but y has 4"),
        ({"data": (torch.ones(0, D), torch.ones(0))}, "empty"),
        ({"data": (np.array(["a", "b"]), np.ones(2))}, "no numbers"),
        ({"data": 7}, "data is a int"),
        ({"data": TensorDataset(torch.ones(9, D)), "size": 3}, "must be a pair"),
        ({"data": Items(torch.ones(0, D), torch.ones(0))}, "empty"),
    ],
)  # fmt: skip
def test_bad_input(points: tuple[Tensor, Tensor], change: dict[str, Any], words: str) -> None:
    BAD[:] = points
    arguments: dict[str, Any] = {
        "log_likelihood": logistic, "draws": POSTERIOR, "data": points, "size": 10, **change
    }  # fmt: skip
    with pytest.raises(UserError, match=words) as refused:
        build(**arguments)
    assert "\n" not in str(refused.value)


def test_cuda_without_cuda(points: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="has no CUDA"):
        build(logistic, POSTERIOR, points, 10, device="cuda")


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([nn.Dropout(0.5)], r"Layer '1' \(Dropout\) is in training mode"),
        ([nn.BatchNorm1d(3)], r"Layer '1' \(BatchNorm1d\) is in training mode"),
        ([nn.MultiheadAttention(3, 1, dropout=0.5)], r"Layer '1' \(Multi.*\) is in training mode"),
        ([nn.BatchNorm1d(3, track_running_stats=False)], r"Layer '1' \(BatchNorm1d\) always"),
        ([nn.Flatten(0)], "logits are"),
    ],
)
def test_modules_that_are_not_per_example(
    points: tuple[Tensor, Tensor], layers: list[nn.Module], words: str
) -> None:
    module = nn.Sequential(nn.Linear(D, 3), *layers)
    size = sum(p.numel() for p in module.parameters())
    with pytest.raises(UserError, match=words):
        build(module, (torch.ones(size), 0.1), (points[0], points[1].long()), 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draws": (torch.ones(9), 0.1)}, "has 15 numbers"),
        ({"draws": {"bias": torch.randn(9, 4)}}, r"'bias' have shape \[4\]"),
        ({"draws": {"biass": torch.randn(9, 3)}}, "no parameter or buffer 'biass'"),
        ({"likelihood": "poisson"}, "likelihood is 'poisson'"),
        ({"noise": 0.0}, "noise is 0.0"),
        ({"likelihood": "gaussian"}, "they must agree"),
    ],
)
def test_modules_and_draws_that_do_not_fit(
    points: tuple[Tensor, Tensor], options: dict[str, Any], words: str
) -> None:
    x, y = points
    options = {"draws": (torch.ones(15), 0.1), **options}
    with pytest.raises(UserError, match=words):
        build(nn.Linear(D, 3), data=(x, y.long()), size=10, **options)


def test_labels_without_a_class(points: tuple[Tensor, Tensor]) -> None:
    labels = torch.full((N,), 1)
    labels[250] = 9
    with pytest.raises(UserError, match="There is a label 9"):
        build(nn.Linear(D, 3), (torch.ones(15), 0.1), (points[0], labels), 10)


def test_loaders_that_cannot_be_read_in_order(points: tuple[Tensor, Tensor]) -> None:
    items = Items(*points)
    with pytest.raises(UserError, match="SubsetRandomSampler"):
        build(logistic, POSTERIOR, DataLoader(items, sampler=SubsetRandomSampler(range(5))), 3)
    for unbatched in (items, Stream(*points)):
        with pytest.raises(UserError, match="batch_size=None"):
            build(logistic, POSTERIOR, DataLoader(unbatched, batch_size=None), 3)
    own = BatchSampler(SubsetRandomSampler(range(5)), 2, False)
    with pytest.raises(UserError, match="SubsetRandomSampler"):
        build(logistic, POSTERIOR, DataLoader(items, batch_sampler=own), 3)
    drawn = RandomSampler(items, replacement=True)
    with pytest.raises(UserError, match="RandomSampler"):
        build(logistic, POSTERIOR, DataLoader(items, sampler=drawn), 3)
    singles = DataLoader(points[0], batch_size=8)
    with pytest.raises(UserError, match="pair"):
        build(logistic, POSTERIOR, singles, 3)


def test_data_that_change_between_readings(points: tuple[Tensor, Tensor]) -> None:
    class Augmented(Items):
        def __getitem__(self, j: int) -> tuple[Tensor, Tensor]:
            return self.x[j] + torch.rand(D), self.y[j]

    with pytest.raises(UserError, match="augmentation"):
        build(logistic, POSTERIOR, Augmented(*points), 10)
