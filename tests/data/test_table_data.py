"""Tables as data: columns to features, whatever their order, and what is fixed on training rows."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import corefed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corefed.base.errors import UserError
from corefed.data import (
    arrow_csv,
    cells,
    clients,
    columns,
    memory,
    npz,
    partition,
    scaling,
    sources,
    table,
    validation,
    values,
)
from corefed.data.columns import Column
from corefed.data.dataset import Dataset
from corefed.data.datasets import load
from corefed.data.preparation import Preparation, Scale
from corefed.data.table import Settings
from corefed.settings.config import resolve
from corefed.settings.run import Run
from corefed.training import setup

HEADER = ("sex", "age", "site", "outcome", "code")
ROWS = [
    ("f", "30", "north", "ill", "1"),
    ("m", "", "south", "well", "2"),
    ("f", "50", "north", "well", "1"),
    ("", "40", "south", "ill", "3"),
    ("f", "20", "north", "", "2"),
    ("m", "60", "", "ill", "2"),
]


def write(path: Path, header: Any = HEADER, rows: Any = ROWS, sign: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=sign).writerows([header, *rows])
    return path


def read(path: Path, target: str = "outcome", client: str = "site", **more: Any) -> Dataset:
    return table.read(path, Settings(target, client, **more), 4096)


def features(data: Dataset) -> tuple[str, ...]:
    assert data.layout is not None
    return columns.features(data.layout.columns)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


# --- features by hand -----------------------------------------------------------------------------


def test_features_by_hand(tmp_path: Path) -> None:
    """Columns in the file's order; text one-hot; what some rows lack has a feature of its own."""
    data = read(write(tmp_path / "a.csv"), categorical=("code",))
    assert features(data) == (
        "sex=f", "sex=m", "sex missing", "age", "age missing", "code=1", "code=2", "code=3",
    )  # fmt: skip
    nan = math.nan
    expected = [
        [1, 0, 0, 30, 0, 1, 0, 0],
        [0, 1, 0, nan, 1, 0, 1, 0],
        [1, 0, 0, 50, 0, 1, 0, 0],
        [0, 0, 1, 40, 0, 0, 0, 1],
    ]
    assert same(data.x, torch.tensor(expected, dtype=torch.float64))
    assert data.labels == ("ill", "well") and data.y.tolist() == [0, 1, 1, 0]
    assert data.group_names == ("north", "south")
    assert data.groups is not None and data.groups.tolist() == [0, 1, 0, 1]
    said = " ".join(data.notes)
    assert "'outcome' has 2 classes: ill, well." in said
    assert "1 of 6 rows have no target" in said and "1 of 6 rows have no client" in said
    assert "1 in 'age'" in said and "1 in 'sex'" in said


def test_features_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """A convolution over t0, t1, ..., t59 needs them in this order: not t0, t1, t10, t11."""
    names = [f"t{i}" for i in range(60)]
    rows = [[*map(str, range(i, i + 60)), "ab"[i % 2]] for i in range(20)]
    data = read(write(tmp_path / "a.csv", [*names, "y"], rows), "y", "")
    assert features(data) == tuple(names)
    assert data.x[3].tolist() == list(range(3, 63))


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_row_numbers_of_pandas_are_left_out_and_said(tmp_path: Path, name: str) -> None:
    """A column without a name, or with the name that pandas gives it when it reads it again."""
    rows = [(str(i), *row) for i, row in enumerate(ROWS)]
    data = read(write(tmp_path / "a.csv", (name, *HEADER), rows))
    assert same(data.x, read(write(tmp_path / "b.csv")).x)
    assert data.layout is not None and data.layout.ignored == ("Unnamed: 0",)
    assert (
        "has a column without a name ('Unnamed: 0'), as pandas writes row numbers" in data.notes[0]
    )
    other = write(
        tmp_path / "c.csv",
        ("sex", name or " ", "y"),
        [("f", str(i), "ab"[i % 2]) for i in range(9)],
    )
    if name:
        assert features(read(other, "y", "", categorical=(name,)))[1] == "Unnamed: 0=0"
    else:
        with pytest.raises(UserError, match=r"Column 2 of .* has no name"):
            read(other, "y", "")


def test_ignored_columns_and_no_clients(tmp_path: Path) -> None:
    data = read(write(tmp_path / "a.csv"), client="", ignore=("site", "code"))
    assert features(data) == ("sex=f", "sex=m", "sex missing", "age", "age missing")
    assert data.groups is None and len(data.y) == 5


@pytest.mark.parametrize("sign", [";", "\t"])
def test_other_separators_are_read_and_said(tmp_path: Path, sign: str) -> None:
    comma, other = write(tmp_path / "a.csv"), write(tmp_path / "b.csv", sign=sign)
    one, two = read(comma), read(other)
    assert same(one.x, two.x)
    assert "separated by" in two.notes[0]


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    typed = {
        "sex": arrow.array([row[0] or None for row in ROWS]).dictionary_encode(),
        "age": arrow.array([float(row[1]) if row[1] else None for row in ROWS]),
        "site": arrow.array([row[2] or None for row in ROWS]),
        "outcome": arrow.array([row[3] or None for row in ROWS]),
        "code": arrow.array([int(row[4]) for row in ROWS], arrow.int32()),
        "notes.taken": arrow.array([[1]] * 6),
        "seen": arrow.array([0] * 6, arrow.timestamp("s")),
    }
    parquet.write_table(arrow.table(typed), tmp_path / "a.parquet", row_group_size=2)
    ignored = ("notes.taken", "seen")
    one = read(tmp_path / "a.parquet", categorical=("code",), ignore=ignored)
    two = read(write(tmp_path / "a.csv"), categorical=("code",))
    assert features(one) == features(two) and one.labels == two.labels
    assert same(one.x, two.x) and torch.equal(one.y, two.y)
    with pytest.raises(UserError, match=r"'notes.taken' of .* has nested or binary values"):
        read(tmp_path / "a.parquet", ignore=("seen",))
    with pytest.raises(UserError, match=r"'seen' of .* has dates; turn them into numbers"):
        read(tmp_path / "a.parquet", ignore=("notes.taken",))


def test_names_of_numbers() -> None:
    """2.0 is 2 everywhere; other text is a name as it is written."""
    named = ["2", " 2.0 ", "2.00", "02", "2.5", "-1.0", "x.0", "1e3"]
    assert [cells.as_name(each) for each in named] == [
        "2", "2", "2", "02", "2.5", "-1", "x.0", "1e3",
    ]  # fmt: skip
    assert values.names(np.array([2.0, 2.5, math.nan, -1.0])) == ["2", "2.5", "", "-1"]
    found, texts = values.numbers(["1", "1_0", "", "NA", " 3 ", "x"])
    assert texts == [1, 5]
    assert [None if math.isnan(v) else v for v in found] == [1, None, None, None, 3, None]


# --- what is learnt -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "task", "classes"),
    [
        (["a", "b"] * 30, "auto", 2),
        (["0", "1", "2"] * 20, "auto", 3),
        (["0.0", "1.0"] * 30, "auto", 2),
        ([str(i) for i in range(60)], "auto", 0),  # whole, but many
        (["0.5", "1"] * 30, "auto", 0),
        (["0", "1"] * 30, "regression", 0),
        ([str(i % 30) for i in range(60)], "classification", 30),
        (["1", "2", "x"] * 20, "auto", 3),
        ([f"class {i % 25}" for i in range(60)], "auto", 25),
    ],
)
def test_task(tmp_path: Path, targets: list[str], task: str, classes: int) -> None:
    rows = [(str(i * i), each) for i, each in enumerate(targets)]
    data = read(write(tmp_path / "a.csv", ("x", "y"), rows), "y", "", task=task)
    assert data.classes == classes
    if not classes:
        assert data.y.flatten().tolist() == pytest.approx([float(each) for each in targets])
    else:
        assert [data.labels[i] for i in data.y.tolist()] == [cells.as_name(t) for t in targets]
    assert any(("regression" in note) == (not classes) for note in data.notes)


def test_small_clients_are_left_out_and_named(tmp_path: Path) -> None:
    sites = ["a"] * 12 + ["b"] * 3 + ["c"] * 12
    rows = [(str(i), site, "xy"[i % 2]) for i, site in enumerate(sites)]
    path = write(tmp_path / "a.csv", ("v", "site", "y"), rows)
    reading = Settings("y", "site", smallest_client=10)
    data = load(f"table:{path}", reading=reading)
    assert data.group_names == ("a", "c") and len(data.y) == 24
    assert data.groups is not None and data.groups.tolist() == [0] * 12 + [1] * 12
    assert "1 of 3 clients have fewer than 10 points and are left out: b." in data.notes
    with pytest.raises(UserError, match=r"No client of .* has 20 points; the largest has 12"):
        load(f"table:{path}", reading=reading._replace(smallest_client=20))


# --- properties -----------------------------------------------------------------------------------

VALUES = {
    "a": st.sampled_from(["", "1", "2.5", "-3", "1e2"]),
    "b": st.sampled_from(["", "x", "y", " x", "z"]),
    "c": st.integers(-5, 5).map(str),
    "site": st.sampled_from(["p", "q", ""]),
    "y": st.sampled_from(["u", "v", ""]),
}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.fixed_dictionaries(VALUES), min_size=3, max_size=25),
    order=st.permutations(list(VALUES)),
    block=st.integers(1, 9),
)
def test_features_follow_their_columns_whatever_the_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, str]],
    order: list[str],
    block: int,
) -> None:
    folder = tmp_path_factory.mktemp("order")
    paths = []
    for number, names in enumerate((list(VALUES), order)):
        body = [[row[name] for name in names] for row in rows]
        paths.append(write(folder / f"{number}.csv", names, body))

    def outcome(path: Path) -> Any:
        try:
            found = read(path, "y", "site")
        except UserError as error:
            return str(error).replace(str(path), "PATH")
        return found

    one = outcome(paths[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        patch.setattr(arrow_csv, "BYTES", 20 * block)  # where a row is longer, csv goes on
        two = outcome(paths[1])
    if isinstance(one, str) or isinstance(two, str):
        assert isinstance(one, str) and isinstance(two, str)
        return
    mine, theirs = one.layout.columns, two.layout.columns
    assert [each.name for each in theirs] == [name for name in order if name in "abc"]
    assert same(one.x, columns.change_layout(two.x, theirs, mine)) and one.labels == two.labels
    assert torch.equal(one.y, two.y) and torch.equal(one.groups, two.groups)
    assert one.group_names == two.group_names


def dataset(n: int = 40, seed: int = 0) -> Dataset:
    """Two numbers, one of them often missing, a constant and a one-hot pair; two clients."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=draws, dtype=torch.float64) * 30 + 1000
    x[:, 1][torch.rand(n, generator=draws) < 0.3] = math.nan
    x[:, 2] = x[:, 1].isnan()
    x[:, 3] = 7.1
    x[:, 4] = (torch.rand(n, generator=draws) < 0.5).double()
    x[:, 5] = 1 - x[:, 4]
    layout = (Column("a"), Column("b", (), True), Column("c"), Column("d", ("u", "v")))
    groups = torch.arange(n) % 2
    y = torch.randn(n, 1, generator=draws) * 5 + 100
    return Dataset(
        "made", x, y, 0, groups, group_names=("p", "q"), standardise=True,
        layout=columns.Layout(layout, "y", "site", (), ()),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from(["features", "client"]))
def test_scaled_features_have_mean_0_and_std_1(seed: int, scale: str) -> None:
    """Over all training points, or each client's own; categories and test points are left alone."""
    data = dataset(seed=seed)
    splits = partition.split("natural", data, 2, 0)
    (found,) = clients.federate(data, splits, scale=scale, names=("p", "q")).preparations
    parts = [found.scale(data.x[one.train], name) for one, name in zip(splits, "pq", strict=True)]
    for each in [torch.cat(parts)] if scale == "features" else parts:
        every = each.double()
        assert every[:, 0].mean().item() == pytest.approx(0, abs=1e-6)
        assert every[:, 0].std(correction=0).item() == pytest.approx(1, abs=1e-6)
        there = every[:, 1][every[:, 2] == 0]
        # The missing ones are the mean of the others, which is 0.
        assert there.mean().item() == pytest.approx(0, abs=1e-6)
        assert there.std(correction=0).item() == pytest.approx(1, abs=1e-6)
        assert (every[:, 1][every[:, 2] == 1] == 0).all()
        assert (every[:, 3] == 0).all()  # constant: centred only
        assert set(every[:, 4].tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("scale", scaling.SCALES)
def test_preparation_round_trips(scale: str) -> None:
    data = dataset()
    splits = partition.split("natural", data, 2, 0)
    federated = clients.federate(data, splits, scale=scale, names=("p", "q"))
    (found,) = federated.preparations
    again = Preparation.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    raw = data.x[splits[1].test]
    assert torch.equal(again.scale(raw, "q"), federated.test.x[1, : len(raw)])
    assert again.scale(raw, "q").isfinite().all()


def test_older_preparations_are_read() -> None:
    """data.json of a run before there were tables."""
    old = {"shape": [3], "labels": ["a", "b"], "targets": [], "mean": [1.0], "std": [2.0]}
    found = Preparation.from_dict(old)
    assert found.scale(torch.tensor([[1.0, 3.0, 5.0]])).tolist() == [[0, 1, 2]]


def test_missing_numbers_become_the_training_mean() -> None:
    """Where features are not scaled one by one; the mean is that of training points alone."""
    x = torch.tensor([[1.0], [3.0], [math.nan], [1000.0]], dtype=torch.float64)
    layout = columns.Layout((Column("a"),), "y", "", (), ())
    data = Dataset("made", x, torch.zeros(4, 1), 0, layout=layout)
    split = partition.Split(torch.tensor([0, 1, 2]), torch.tensor([3]))
    found = clients.federate(data, [split], scale="unit")
    assert found.train.x[0].flatten().tolist() == [1, 3, 2]
    assert found.test.x[0].flatten().tolist() == [1000]


def test_a_category_without_training_points_stays_0() -> None:
    x = torch.tensor([[1.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    layout = columns.Layout((Column("a", ("u", "v")),), "y", "", (), ())
    data = Dataset("made", x, torch.zeros(3, 1), 0, layout=layout)
    split = partition.Split(torch.tensor([0, 1]), torch.tensor([2]))
    found = clients.federate(data, [split], scale="features")
    assert found.preparations[0].unseen == (1,)
    assert found.test.x[0].tolist() == [[0, 0]]


def test_a_new_client_has_a_scale_of_its_own() -> None:
    known = Preparation((1,), clients={"p": Scale((0.0,), (1.0,))})
    x = torch.tensor([[1.0], [3.0]])
    assert scaling.add_client(known, "p", x, torch.tensor([True])) is known
    found = scaling.add_client(known, "new", x, torch.tensor([True]))
    assert found.clients["new"] == Scale((2.0,), (1.0,))
    plain = Preparation((1,))
    assert scaling.add_client(plain, "new", x, torch.tensor([True])) == plain


def test_targets_are_standardised_to_train_on_and_kept_to_test() -> None:
    data = dataset()
    splits = partition.split("natural", data, 2, 0)
    federated = clients.federate(data, splits, scale="features", names=("p", "q"))
    rows = torch.cat([one.train for one in splits])
    mean, std = data.y[rows].double().mean().item(), data.y[rows].double().std(correction=0).item()
    (found,) = federated.preparations
    assert found.target_mean == pytest.approx((mean,)) and found.target_std == pytest.approx((std,))
    real = federated.train.weight[0] > 0
    expected = (data.y[splits[0].train] - mean) / std
    assert torch.allclose(federated.train.y[0][real], expected, atol=1e-5)
    assert (federated.train.y[0][~real] == 0).all()
    assert torch.equal(federated.test.y[0, : len(splits[0].test)], data.y[splits[0].test])


# --- .npz -----------------------------------------------------------------------------------------


def test_npz_makes_clients_of_an_array(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    whose = np.array(["north", "south", "east"])[np.arange(60) % 3]
    np.savez(tmp_path / "a.npz", X=x, y=y, groups=whose)
    concrete = setup.concrete(resolve(None, {"data": f"npz:{tmp_path / 'a.npz'}"})).run
    assert (concrete.partition, concrete.client_column, concrete.scale) == (
        "natural", "groups", "features",
    )  # fmt: skip
    data = setup.load(concrete)
    assert data.names == ["east", "north", "south"]
    assert data.train.x.shape[0] == 3
    iid = setup.concrete(
        resolve(None, {"data": f"npz:{tmp_path / 'a.npz'}", "partition": "iid", "clients": 4})
    ).run
    assert iid.client_column == "" and len(setup.load(iid).names) == 4


def test_npz_with_train_and_test_clients(tmp_path: Path) -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.linspace(0, 1, 20)
    whose = np.arange(20) % 2
    np.savez(
        tmp_path / "a.npz", X_train=x, y_train=y, client_train=whose, X_test=x, y_test=y,
        client_test=whose,
    )  # fmt: skip
    data = load(f"npz:{tmp_path / 'a.npz'}", reading=Settings(client_column="client"))
    assert data.group_names == ("0", "1") and data.standardise
    assert data.held_out is not None and data.held_out.tolist() == [False] * 20 + [True] * 20
    with pytest.raises(UserError, match="no array 'site_train' to make clients of"):
        load(f"npz:{tmp_path / 'a.npz'}", reading=Settings(client_column="site"))


def test_npz_task(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=np.ones((9, 2)), y=np.arange(9))
    path = tmp_path / "a.npz"
    assert npz.read(path, 100).classes == 9
    assert npz.read(path, 100, task="regression").y.shape == (9, 1)


@pytest.mark.parametrize(
    ("targets", "task", "labels"),
    [
        ([0.0, 1.0], "auto", ("0", "1")),
        ([-1.0, 1.0], "auto", ("-1", "1")),
        ([0.0, 1.0], "regression", ()),
        ([0.0, 0.5], "auto", ()),
        (list(range(21)), "auto", ()),
        (list(range(21)), "classification", tuple(map(str, range(21)))),
    ],
)
def test_one_rule_says_what_floating_point_numbers_are(
    tmp_path: Path, targets: list[float], task: str, labels: tuple[str, ...]
) -> None:
    """In a table, in an .npz and in memory: few different whole numbers are classes, and said."""
    y = np.array(targets * 3, dtype=np.float64)
    x = np.arange(2.0 * len(y)).reshape(-1, 2) ** 1.5
    np.savez(tmp_path / "a.npz", X=x, y=y)
    rows = [(*map(str, point), str(each)) for point, each in zip(x, y, strict=True)]
    read_table = read(write(tmp_path / "a.csv", ("a", "b", "y"), rows), "y", "", task=task)
    for found in (
        npz.read(tmp_path / "a.npz", 100, task=task),
        memory.gather({"p": (x, y)}, None, task).dataset,
    ):
        assert found.labels == labels == read_table.labels
        assert torch.equal(found.y, read_table.y)
        noted = "different whole numbers as floating-point numbers; they are taken for classes: "
        assert any(noted + ", ".join(labels) in note for note in found.notes) == (
            bool(labels) and task == "auto"
        )


def test_floating_point_numbers_that_cannot_be_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=np.ones((6, 2)), y=np.array([0.5, 1] * 3))
    with pytest.raises(UserError, match="floating-point numbers that are not whole"):
        npz.read(tmp_path / "a.npz", 100, task="classification")


def test_a_word_that_is_taken_for_missing_is_named(tmp_path: Path) -> None:
    """Namibia's NA as a site or a class; a gap names no word."""
    header = ("x", "site", "outcome")
    rows = [(i / 7, ("NA", "EU")[i % 2], ("na", "b", "c")[i % 3]) for i in range(60)]
    said = " ".join(read(write(tmp_path / "a.csv", header, rows)).notes)
    assert "20 of 60 rows have no client; they are left out ('NA' means missing; write" in said
    assert "20 of 60 rows have no target; they are left out ('na' means missing; write" in said
    gaps = [(x, site, "" if y == "na" else y) for x, site, y in rows]
    said = " ".join(read(write(tmp_path / "b.csv", header, gaps), client="").notes)
    assert "20 of 60 rows have no target; they are left out." in said
    alone, bare = [row for row in rows if row[2] != "c"], [(x, "NA", y) for x, _, y in rows]
    for sentence, cells_of in (
        ("there are no clients ('NA' means missing", bare),
        ("there is nothing to learn ('na' means missing", alone),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            read(write(tmp_path / "c.csv", header, cells_of))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_hot_classes_are_not_learnt_as_numbers(tmp_path: Path, dtype: type) -> None:
    """Each row has a single 1: classes. Two of them, or task=regression, make several targets."""
    x, y = np.random.default_rng(0).normal(size=(30, 2)), np.eye(3, dtype=dtype)[np.arange(30) % 3]
    file = tmp_path / "a.npz"
    np.savez(file, X=x, y=y)
    result = corefed("run", f"--data=npz:{file}", "--clients=2", "--out", tmp_path / "run")
    assert result.code == 2 and not (tmp_path / "run").exists()
    assert "a.npz has one 1 and zeros in every row" in result.err
    assert "y.argmax(1)" in result.err and result.err.count("\n") == 1
    with pytest.raises(UserError, match="y has one 1 and zeros in every row"):
        memory.gather({"p": (x, y)}, None, "auto")
    assert npz.read(file, 100, task="regression").y.shape == (30, 3)
    np.savez(file, X=x, y=np.array([[1.0, 1.0], [1.0, 0.0]])[np.arange(30) % 2])
    assert npz.read(file, 100).y.shape == (30, 2)


# --- validation -----------------------------------------------------------------------------------


def test_warnings_by_hand(tmp_path: Path) -> None:
    rows = [
        (str(i), "7", "" if i % 3 else "1", "ab"[i >= 30], "xyz"[2 if i == 39 else i < 30])
        for i in range(40)
    ]
    path = write(tmp_path / "a.csv", ("id", "same", "rare", "site", "y"), rows)
    found = " ".join(validation.find_warnings(read(path, "y")))
    assert "Columns that never change teach nothing: same." in found
    assert "'id' has another whole number in every row" in found
    assert "Columns that most rows lack: rare (65 %)." in found
    assert "Classes with fewer than 10 points: x (9), z (1)." in found
    assert "Clients with fewer than 50 points: a (30), b (10)." in found
    assert "Classes that one client alone has: x (b), y (a), z (b)." in found
    assert "Clients whose points all have one class: a." in found


def test_identifiers_of_more_rows_than_values_are_counted(tmp_path: Path) -> None:
    """Numbers of rows are told from measurements that are whole numbers too."""
    rows = [(i, i // 2 * 7, "ab"[i % 2]) for i in range(21_000)]
    dataset = read(write(tmp_path / "a.csv", ("id", "pay", "y"), rows), "y", "")
    found = validation.find_warnings(dataset)
    assert [note for note in found if "identifier" in note] == [
        "'id' has another whole number in every row, as an identifier has; "
        "--set ignore=id leaves it out."
    ]


def test_own_data_learn_their_noise() -> None:
    """Unless the user says anything about it."""
    assert resolve(None, {"data": "table:a.csv"}).run.learn_noise
    assert resolve(None, {"data": "table:a.csv"}).run.noise == 0.5
    assert not resolve(None, {"data": "table:a.csv", "noise": 1.0}).run.learn_noise
    assert resolve(None, {"data": "digits"}).run == Run(planned_rounds=Run.rounds)
