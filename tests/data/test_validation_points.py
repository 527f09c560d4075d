"""Validation points: taken from training points, by class, never from test points."""

from __future__ import annotations

import pytest
import torch

from corefed.base.errors import UserError
from corefed.data import held_out, partition
from corefed.data.dataset import Dataset
from corefed.data.partition import Split
from corefed.settings.config import resolve
from corefed.training.rounds import train
from corefed.training.setup import prepare

SMALL = {"clients": 3, "rounds": 2, "local_steps": 2, "hidden": (4,), "evaluate_draws": 2,
         "device": "cpu", "method": "pfedbayes"}  # fmt: skip


def pool(labels: list[int]) -> Dataset:
    y = torch.tensor(labels)
    return Dataset("made", torch.arange(len(y), dtype=torch.float32).unsqueeze(1), y, 3)


def test_points_are_split_once_and_by_class() -> None:
    data = pool([0] * 40 + [1] * 20 + [2] * 40)
    splits = [Split(torch.arange(0, 80), torch.arange(80, 100))]
    (found,) = held_out.with_validation(data, splits, 0.25, 0)
    assert sorted([*found.train.tolist(), *found.validation.tolist()]) == list(range(80))
    assert torch.equal(found.test, splits[0].test)
    counts = torch.bincount(data.y[found.validation], minlength=3).tolist()
    assert [abs(count - part) <= 1 for count, part in zip(counts, (10, 5, 5), strict=True)]


def test_seeds_and_clients_draw_their_own() -> None:
    data = pool([0] * 60)
    twice = [Split(torch.arange(30), torch.arange(50, 60))] * 2
    one, other = held_out.with_validation(data, twice, 0.3, 0)
    assert not torch.equal(one.validation, other.validation)
    again = held_out.with_validation(data, twice, 0.3, 0)
    assert torch.equal(one.validation, again[0].validation)
    assert not torch.equal(one.validation, held_out.with_validation(data, twice, 0.3, 1)[0].train)


def test_every_class_keeps_a_training_point() -> None:
    data = pool([0] * 9 + [1])
    for seed in range(20):
        (found,) = held_out.with_validation(data, [Split(torch.arange(10), torch.tensor([]))], 0.5,
                                            seed)  # fmt: skip
        assert 1 in data.y[found.train].tolist()


def test_a_share_that_leaves_none_is_refused() -> None:
    with pytest.raises(UserError, match="leaves no client a validation point: the largest has 2"):
        held_out.with_validation(pool([0, 1, 2]), [Split(torch.tensor([0, 1]), torch.tensor([2]))],
                                 0.01, 0)  # fmt: skip


def test_little_is_said_of_few_points_and_of_one_class() -> None:
    data = pool([0] * 40 + [1] * 2)
    splits = held_out.with_validation(data, [Split(torch.arange(40), torch.arange(40, 42))], 0.2, 0)
    few, single = held_out.validation_notes(splits, data, ["north"])
    assert "1 of 1 clients have fewer than 20 validation points (north has 8)" in few
    assert "All validation points are of class '0'" in single
    assert (
        held_out.validation_notes([Split(torch.arange(3), torch.arange(3, 5))], data, ["a"]) == []
    )


def test_none_by_default() -> None:
    setup = prepare(resolve(flags=SMALL))
    assert setup.data.validation is None
    splits = partition.split("iid", pool([0, 1] * 20), 2, 0)
    assert held_out.with_validation(pool([0, 1] * 20), splits, 0.0, 0) == splits


def test_metrics_of_validation_points_are_recorded() -> None:
    found = train(resolve(flags={**SMALL, "validation": 0.4, "seeds": (0, 1)}))
    data = found.setup.data
    assert data.validation is not None
    assert found.summary["validation"].keys() == found.summary["metrics"].keys()
    values = found.summary["validation"]["personal_nll"]["per_seed"]
    assert len(values) == 2 and values != found.summary["metrics"]["personal_nll"]["per_seed"]
    points = int((data.validation.weight > 0).sum())
    assert points == pytest.approx(0.4 * (points + int(data.train.size.sum())), abs=6)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(UserError, match=r"validation is .* it must be 0 or more and below 1"):
        resolve(flags={"validation": share})
