"""What was written for very many clients gives what the plain way gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from corefed.data import clients, scaling, table, validation
from corefed.data.dataset import Dataset
from corefed.data.partition import split


def pool(points: int = 400, groups: int = 30) -> Dataset:
    g = torch.Generator().manual_seed(0)
    owner = torch.cat(
        [torch.arange(groups), torch.randint(groups, (points - groups,), generator=g)]
    )
    owner = torch.cat([owner, owner, owner])  # at least three points each
    x = torch.randn(len(owner), 4, generator=g)
    y = torch.randint(3, (len(owner),), generator=g)
    names = tuple(f"site {i}" for i in range(groups))
    return Dataset("pool", x, y, 3, owner, labels=("a", "b", "c"), group_names=names)


def test_natural_clients_have_the_points_of_their_group() -> None:
    dataset = pool()
    assert dataset.groups is not None
    for client, one in enumerate(split("natural", dataset, 30, 0)):
        rows = torch.cat([one.train, one.test]).sort().values
        assert torch.equal(rows, (dataset.groups == client).nonzero().flatten())
    first = split("natural", dataset._replace(group_names=()), 7, 0)  # not all of them
    assert [len(one.train) for one in first] == [
        len(one.train) for one in split("natural", dataset, 30, 0)[:7]
    ]


@pytest.mark.parametrize("scale", ["unit", "standard", "features", "client"])
@pytest.mark.parametrize("block", [1, 50, 10_000])
def test_clients_that_are_converted_together_are_as_if_alone(
    scale: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "BLOCK", block)
    dataset = pool()
    splits = split("natural", dataset, 30, 0)
    found = clients.federate(dataset, splits, scale=scale, names=dataset.group_names)
    preparation = scaling.fit(dataset, splits, scale, dataset.group_names)
    for part, rows in (
        (found.train, [s.train for s in splits]),
        (found.test, [s.test for s in splits]),
    ):
        for client, own in enumerate(rows):
            n = len(own)
            x = preparation.scale(dataset.values(own), dataset.group_names[client])
            assert torch.equal(part.x[client, :n], x)
            assert torch.equal(part.y[client, :n], dataset.y[own])
            assert part.weight[client].tolist() == [1.0] * n + [0.0] * (part.weight.shape[1] - n)
            assert not part.x[client, n:].any()


def test_a_column_may_name_very_many_clients(tmp_path: Path) -> None:
    """More than are counted of other columns, if they have enough rows to be clients."""
    lines = [f"{i % 7},u{i % 10_500},{'ab'[i % 2]}" for i in range(31_500)]
    path = tmp_path / "table.csv"
    path.write_text("x,site,y\n" + "\n".join(lines) + "\n", encoding="utf-8")
    dataset = table.read(path, table.Settings("y", "site"), 1000)
    assert len(dataset.group_names) == 10_500


def test_warnings_about_classes() -> None:
    dataset = pool(30)
    y = torch.zeros_like(dataset.y)
    y[0], y[1], y[2] = 1, 2, 2
    found = validation.find_warnings(dataset._replace(y=y))
    assert "Classes that one client alone has: b (site 0)." in found
    (single,) = (each for each in found if each.startswith("Clients whose points"))
    assert "site 3" in single
    assert "site 0" not in single
