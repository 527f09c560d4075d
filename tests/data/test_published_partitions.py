"""Splits of published benchmarks: their counts, their minimum, and what is tested on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corefed.base.errors import UserError
from corefed.data import Dataset, Split, split
from corefed.data.partition import count_classes, notes
from corefed.data.published import BENCHMARKS

NIID = ("niid-2", "niid-3", "niid-dir")


def pool(per_label: int = 700, classes: int = 10, tested: int = 100) -> Dataset:
    """As MNIST is: official test points are marked, and no part of the usual splits."""
    y = torch.arange(per_label * classes) % classes
    held_out = torch.arange(len(y)) >= len(y) - tested * classes
    return Dataset("digits of ten kinds", torch.zeros(len(y), 1), y, classes, held_out=held_out)


def same(first: list[Split], second: list[Split]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.train, b.train) and torch.equal(a.test, b.test) for a, b in pairs)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_all_points_are_dealt_once_and_the_seed_decides(name: str) -> None:
    data, clients = pool(), BENCHMARKS[name].clients
    first = split(name, data, clients, seed=3)
    dealt = torch.cat([torch.cat([one.train, one.test]) for one in first])
    assert torch.equal(dealt.sort().values, torch.arange(len(data.y)))
    assert same(first, split(name, data, clients, seed=3))
    assert not same(first, split(name, data, clients, seed=4))


def test_pfllib_pools_both_files_and_tests_a_quarter() -> None:
    data = pool()
    assert data.held_out is not None
    for seed in range(5):
        splits = split("pfllib", data, 20, seed)
        sizes = [(len(one.train), len(one.test)) for one in splits]
        assert all(train == int(0.75 * (train + test)) for train, test in sizes)
        assert min(map(sum, sizes)) >= 40
        trained = torch.cat([one.train for one in splits])
        official = data.held_out[trained].sum().item()  # 750 of 1000, within 5 deviations
        assert abs(official - 750) < 5 * (1000 * 0.75 * 0.25) ** 0.5


def test_pfllib_is_skewed_and_nobody_gets_much_more_than_an_equal_share() -> None:
    """A client that has its share gets nothing of later labels: less than one label above it."""
    data = pool()
    splits = split("pfllib", data, 20, seed=0)
    assert max(len(one.train) + len(one.test) for one in splits) < 7000 / 20 + 700
    counts = np.array(count_classes(splits, data))
    largest = counts.max(1) / counts.sum(1)
    # Dirichlet(0.1): most of a client's points are of one or two labels.
    assert largest.mean() > 0.4
    assert (counts > 0).sum(1).mean() < 7


@pytest.mark.parametrize("name", NIID)
def test_niid_bench_tests_on_the_official_points(name: str) -> None:
    data = pool()
    assert data.held_out is not None
    splits = split(name, data, 10, seed=1)
    tested = torch.cat([one.test for one in splits])
    assert data.held_out[tested].all()
    assert len(tested) == 1000
    for one in splits:  # every label in its share, within a point at either end of a part
        for label in range(10):
            train, test = ((data.y[rows] == label).sum().item() for rows in (one.train, one.test))
            assert abs(test - train / 6) <= 2


@pytest.mark.parametrize("labels", [2, 3])
def test_niid_bench_labels(labels: int) -> None:
    data = pool()
    for seed in range(3):
        counts = np.array(count_classes(split(f"niid-{labels}", data, 10, seed), data))
        assert (counts > 0).sum(1).tolist() == [labels] * 10
        assert (counts.diagonal() > 0).all()  # client i has label i
        for column in counts.T:  # who shares a label has an equal part of its 700 points, of which
            parts = column[column > 0]  # a point more or less is a training point
            assert parts.max() - parts.min() <= 2
            assert parts.sum() == 600


def test_niid_bench_dirichlet_has_ten_points_each() -> None:
    data = pool(per_label=40, tested=5)
    for seed in range(10):
        assert min(len(o.train) + len(o.test) for o in split("niid-dir", data, 10, seed)) >= 10


def test_data_without_official_test_points_hold_out_the_usual_share() -> None:
    data = pool()._replace(held_out=None)
    splits = split("niid-3", data, 10, seed=0)
    tested = sum(len(one.test) for one in splits)
    assert abs(tested - 1400) <= 10  # one point in five, rounded per client


def test_data_that_are_divided_stay_so() -> None:
    data = pool()._replace(keep_split=True)
    assert data.held_out is not None
    for one in split("pfllib", data, 10, seed=0):
        assert data.held_out[one.test].all()
        assert not data.held_out[one.train].any()


def test_a_note_where_clients_are_others_than_the_published() -> None:
    data = pool()
    (note,) = (n for n in notes("pfllib", split("pfllib", data, 10, 0), data) if "PFLlib" in n)
    assert "are of 20 clients, and here are 10" in note
    assert not any("figures" in n for n in notes("pfllib", split("pfllib", data, 20, 0), data))


@pytest.mark.parametrize(
    ("name", "data", "clients", "message"),
    [
        ("pfllib", pool(per_label=50, tested=5), 20, "fewer than 40 points of digits of ten kinds"),
        ("niid-3", pool(classes=2), 4, "has 3 labels per client; digits of ten kinds has only 2"),
        ("pfllib:0.1", pool(), 20, "write pfllib"),
        (
            "niid-2",
            Dataset("targets", torch.zeros(60, 1), torch.zeros(60, 1), 0),
            2,
            "splits by label",
        ),
    ],
)
def test_what_is_refused(name: str, data: Dataset, clients: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(name, data, clients, 0)


@pytest.mark.parametrize("name", ["pfllib", "niid-2"])
def test_the_share_of_test_points_is_the_benchmark_s(name: str) -> None:
    with pytest.raises(UserError, match="has test points of its own"):
        split(name, pool(), 10, 0, test=0.3)
