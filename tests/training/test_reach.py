"""Points unlike the training points are noticed, and points like them are not."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.data.columns import Column
from corefed.data.preparation import Preparation, Scale
from corefed.settings.config import resolve
from corefed.training import reach, reach_fitting
from corefed.training.setup import concrete, load

NAMES = ("age", "pressure", "grade")
COLUMNS = (Column("age"), Column("pressure"), Column("grade", ("a", "b")))


def patients(n: int, seed: int = 0) -> torch.Tensor:
    """Age and pressure, standardised and strongly correlated, and one of two grades."""
    g = torch.Generator().manual_seed(seed)
    age = torch.randn(n, generator=g)
    pressure = 0.95 * age + 0.31 * torch.randn(n, generator=g)
    grade = torch.rand(n, generator=g) < 0.3
    return torch.stack([age, pressure, grade.float(), 1 - grade.float()], 1)


def federation(each: list[torch.Tensor], preparation: Preparation) -> FederatedData:
    n = max(map(len, each))
    x = torch.zeros(len(each), n, *each[0].shape[1:])
    weight = torch.zeros(len(each), n)
    for i, points in enumerate(each):
        x[i, : len(points)], weight[i, : len(points)] = points, 1
    data = ClientData(x, torch.zeros(len(each), n, dtype=torch.int64), weight)
    names = [f"client {i}" for i in range(len(each))]
    return FederatedData(data, data, 2, 0, names, ("no", "yes"), (), (preparation,))


TABLE = Preparation(
    (4,), ("no", "yes"), kind="table", columns=COLUMNS,
    mean=(50.0, 120.0, 0.0, 0.0), std=(10.0, 15.0, 1.0, 1.0),
)  # fmt: skip


def judged(known: reach.Reach, point: list[float], i: int | None = 0) -> str:
    found = reach.judge(known, TABLE, "client 0", i, torch.tensor([point]))
    assert bool(found.far[0]) == bool(found.why[0])
    return found.why[0]


def test_columns_categories_and_all_together() -> None:
    """An age of 900, a grade that nobody had, and a pressure that does not go with the age."""
    (known,) = reach_fitting.measure(federation([patients(400), patients(300, 1)], TABLE))
    assert judged(known, [0, 0, 1, 0]) == ""
    assert judged(known, [2.0, 2.0, 1, 0]) == ""
    assert judged(known, [85.0, 0, 1, 0]).startswith("age 900 (training: ")
    assert "pressure -999" in judged(known, [0, (-999 - 120) / 15, 1, 0])
    assert judged(known, [0, 0, 0, 0]) == "grade is no category of training"
    assert judged(known, [2.0, -2.0, 0, 1]).startswith("features together unlike training")
    assert judged(known, [math.nan, 0, 1, 0])  # a comparison with NaN must not let it pass


def test_a_range_in_the_clients_own_unit() -> None:
    own = TABLE.__class__(**{**vars(TABLE), "clients": {"client 0": Scale((5, 1, 0, 0), (2,) * 4)}})
    (known,) = reach_fitting.measure(federation([patients(200)], own))
    found = reach.judge(known, own, "client 0", 0, torch.tensor([[50.0, 0, 1, 0]]))
    assert found.why[0].startswith("age 105 (training: ")


def test_each_client_has_its_own_centre_if_it_has_the_points() -> None:
    """Client 1 is far from client 0; client 2 has too few points, and gets what all have."""
    shift = torch.tensor([8.0, 8.0, 0, 0])
    (known,) = reach_fitting.measure(
        federation([patients(300), patients(300, 1) + shift, patients(5, 2)], TABLE)
    )
    there = [8.0, 8.0, 1, 0]
    assert judged(known, there, 1) == judged(known, there, None) == judged(known, there, 2) == ""
    assert judged(known, there, 0).startswith("features together unlike")
    torch.testing.assert_close(known.centre[2], known.centre[3])


def test_few_points_and_constant_columns() -> None:
    """Five points have no joint limit, and a column that was constant may change a little."""
    points = torch.zeros(5, 4)
    points[:, 0] = torch.arange(5.0)
    points[:, 2] = 1
    (known,) = reach_fitting.measure(federation([points], TABLE))
    assert math.isinf(float(known.limit[0]))
    assert judged(known, [4.5, 0.1, 1, 0]) == ""
    assert judged(known, [4.5, 50.0, 1, 0]).startswith("pressure")
    (same,) = reach_fitting.measure(federation([torch.ones(3, 4)], TABLE))
    assert judged(same, [1, 1, 1, 1]) == ""


def test_a_newcomer_extends_the_reach() -> None:
    (known,) = reach_fitting.measure(federation([patients(400), patients(400, 1)], TABLE))
    wide = reach.extend(known, torch.tensor([[9.0, 9.0, 1, 0]]))
    assert judged(known, [9.0, 9.0, 1, 0])
    assert judged(wide, [9.0, 9.0, 1, 0]) == ""
    assert judged(wide, [85.0, 0, 1, 0])


def test_files(tmp_path: Path) -> None:
    """Seeds may have other numbers of directions; an older folder has no file."""
    assert reach.read(tmp_path, 2) == []
    small, large = (reach_fitting.measure(federation([patients(n)], TABLE))[0] for n in (30, 400))
    reach.keep(tmp_path, [small, large])
    for before, after in zip((small, large), reach.read(tmp_path, 2), strict=True):
        x = 3 * patients(50, 3)
        one, two = (reach.judge(each, TABLE, "", 0, x) for each in (before, after))
        assert torch.equal(one.far, two.far)
        assert one.why == two.why
    (tmp_path / reach.FILE).write_bytes(b"no")
    with pytest.raises(Exception, match="damaged"):
        reach.read(tmp_path, 2)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    data = federation([patients(60 + i, i) for i in range(5)], TABLE)
    (whole,) = reach_fitting.measure(data)
    monkeypatch.setattr(reach_fitting, "PIECE", 300)
    (parts,) = reach_fitting.measure(data)
    for name in reach.Reach._fields:
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))


def test_very_many_clients_keep_one_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_fitting, "MOST_CENTRES", 10)
    (known,) = reach_fitting.measure(federation([patients(60, i) for i in range(5)], TABLE))
    assert known.centre.shape == (1, 4)
    assert judged(known, [0, 0, 1, 0], 3) == ""
    assert judged(known, [2.0, -2.0, 0, 1], 3)


def flagged(settings: dict[str, object], seeds: int) -> float:
    """Share of the held-out points that are outside."""
    run = concrete(resolve(None, {**settings, "device": "cpu"}, [])).run
    far = count = 0
    for seed in range(seeds):
        data = load(run.__class__(**{**vars(run), "seeds": (seed,)}))
        (known,) = reach_fitting.measure(data)
        for i, name in enumerate(data.names):
            x = data.test.x[i][data.test.weight[i] > 0]
            if len(x):
                far += int(reach.judge(known, data.preparations[0], name, i, x).far.sum())
                count += len(x)
    return far / count


@pytest.mark.parametrize("partition", ["iid", "shards-medium"])
def test_few_held_out_digits_are_outside(partition: str) -> None:
    settings = {"data": "digits", "partition": partition, "clients": 10}
    assert flagged(settings, 3) <= 0.01


def test_few_held_out_rows_of_a_table_are_outside(tmp_path: Path) -> None:
    """Breast cancer: 30 columns with long tails, 569 rows; chance alone is worth 0.3 %."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    site = np.random.default_rng(0).integers(0, 4, len(y))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*(f"c{j}" for j in range(30)), "site", "y"])
        rows.writerows([*point, f"s{s}", label] for point, s, label in zip(x, site, y, strict=True))
    table = {"data": f"table:{tmp_path / 'a.csv'}", "target": "y", "client_column": "site"}
    assert flagged(table, 5) <= 0.013


def test_few_held_out_houses_are_outside() -> None:
    file = Path(os.environ.get("COREFED_DATA", "nowhere")) / "housing/california_housing.csv"
    if not file.exists():
        pytest.skip("COREFED_DATA has no housing")
    table = {"data": f"table:{file}", "target": "median_house_value", "partition": "iid"}
    assert flagged({**table, "clients": 10}, 1) <= 0.01
