"""Hints at mistakes in data that can be read all the same; none about data without them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import corefed

from corefed.data import hints, memory, partition, table
from corefed.data.dataset import Dataset
from corefed.data.table import Settings
from corefed.settings.run import Run

DRAW = np.random.default_rng(0)
ROWS = [
    {
        "age": str(20 + i % 71), "dose": f"{DRAW.normal():.6f}", "ward": "uv"[i % 2],
        "site": ("north", "south")[i // 50], "y": "ab"[int(DRAW.random() < 0.5)],
    }
    for i in range(100)
]  # fmt: skip


def read(path: Path, rows: list[dict[str, str]], target: str = "y", **more: Any) -> Dataset:
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    path.write_text("".join(",".join(line) + "\n" for line in lines), encoding="utf-8")
    return table.read(path, Settings(target, "site", **more), 4096)


def changed(column: str, **values: str) -> list[dict[str, str]]:
    """ROWS with other values in some rows: r3="x" sets that of row 3."""
    new = {int(row[1:]): value for row, value in values.items()}
    return [{**row, column: new.get(i, row[column])} for i, row in enumerate(ROWS)]


def test_no_hints_about_good_data(tmp_path: Path) -> None:
    data = read(tmp_path / "a.csv", ROWS)
    assert hints.find(data, partition.split("natural", data, 2, 0)) == []
    assert hints.find(read(tmp_path / "a.csv", ROWS, "age")) == []


@pytest.mark.parametrize(
    ("column", "cells", "words"),
    [
        (
            "age",
            {"r3": "-999", "r9": "-999"},
            "Column 'age' has -999 in 2 rows, far from its other",
        ),
        ("age", {"r3": "9999"}, "has 9999 in 1 row, far from its other values (20 to 90); if it"),
        ("dose", {"r3": "1e30"}, "Column 'dose' has 1e+30 in 1 row, where most values are from -"),
        ("dose", {"r3": "-4000"}, "Column 'dose' has -4000 in 1 row"),
    ],
)
def test_values_far_from_all_others(
    tmp_path: Path, column: str, cells: dict[str, str], words: str
) -> None:
    rows = changed(column, **cells)
    (found,) = hints.find(read(tmp_path / "a.csv", rows))
    assert words in found
    if column == "dose":
        (found,) = hints.find(read(tmp_path / "a.csv", rows, "dose"))
        assert found.startswith("Target 'dose' has ")


def test_numbers_that_only_look_like_sentinels(tmp_path: Path) -> None:
    """99 among ages, and 999 among doses of hundreds."""
    assert hints.find(read(tmp_path / "a.csv", changed("age", r3="99"))) == []
    rows = [{**row, "dose": str(37 * i % 1000)} for i, row in enumerate(ROWS)]
    assert hints.find(read(tmp_path / "a.csv", rows)) == []


def test_many_columns_are_counted(tmp_path: Path) -> None:
    rows = [{**row, **{f"c{k}": "-999" if i == 3 else str(i) for k in range(9)}}
            for i, row in enumerate(ROWS)]  # fmt: skip
    found = hints.find(read(tmp_path / "a.csv", rows))
    assert len(found) == 6 and found[-1] == "The same holds for 4 more columns."


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("y", "A", "Classes that differ in case or blanks only: 'A' and 'a'; if they are the same"),
        ("site", "North", "Clients that differ in case or blanks only: 'North' and 'north'"),
        ("ward", "U", "Categories of 'ward' that differ in case or blanks only: 'U' and 'u'"),
    ],
)
def test_names_that_are_written_in_two_ways(
    tmp_path: Path, column: str, value: str, words: str
) -> None:
    (found,) = hints.find(read(tmp_path / "a.csv", changed(column, r3=value)))
    assert words in found


def test_blanks_inside_a_name(tmp_path: Path) -> None:
    rows = [{**row, "ward": ("ward  one", "ward one", "two")[i % 3]} for i, row in enumerate(ROWS)]
    (found,) = hints.find(read(tmp_path / "a.csv", rows))
    assert "'ward  one' and 'ward one'" in found


def test_copied_rows(tmp_path: Path) -> None:
    data = read(tmp_path / "a.csv", [*ROWS, *ROWS[:7]])
    (found,) = hints.find(data)
    assert "14 of 107 rows have the features and the target of another row; if" in found
    rows = torch.arange(107)
    split = partition.Split(rows[:100], rows[100:])
    (found,) = hints.find(data, [split])
    assert "another row, and 7 of 7 test rows those of a training row; if they are copies" in found


def test_row_hashes_tell_whole_numbers_apart() -> None:
    """Small whole numbers differ in few bits of a float64."""
    x = torch.cartesian_prod(*[torch.arange(8.0)] * 6)
    data = Dataset("made", x, torch.zeros(len(x), dtype=torch.int64), 2)
    assert len(np.unique(hints.hash_rows(data))) == len(x)
    again = data._replace(
        x=torch.cat([x, -x[:9] * 0]), y=torch.zeros(len(x) + 9, dtype=torch.int64)
    )
    assert len(np.unique(hints.hash_rows(again))) == len(x)


def test_a_column_that_determines_the_target(tmp_path: Path) -> None:
    for cells in ({"a": "yes", "b": "no"}, {"a": "1", "b": "0"}):
        rows = [{**row, "told": cells[row["y"]]} for row in ROWS]
        (found,) = hints.find(read(tmp_path / "a.csv", rows))
        assert found.startswith("Column 'told' determines the target (one to one); if it is only")
        assert "--set ignore=told" in found
        rows[5]["told"] = cells["b" if rows[5]["y"] == "a" else "a"]
        assert hints.find(read(tmp_path / "a.csv", rows)) == []
    rows = [{**row, "copy": str(3 * float(row["dose"]) + 1)} for row in ROWS]
    (found,) = hints.find(read(tmp_path / "a.csv", rows, "dose"))
    assert found.startswith("Column 'copy' determines the target (but for its unit)")


def test_arrays_have_hints_too() -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 2
    x[3, 1] = 1e20
    (found,) = hints.find(Dataset("made", x, y, 2, labels=("0", "1")))
    assert found.startswith("Feature 1 of X has 1e+20 in 1 row")
    (found,) = hints.find(Dataset("made", torch.stack([x[:, 0], y.float()], 1), y, 2))
    assert found == (
        "Feature 1 of X determines the target (one to one); if it is only known afterwards, leave "
        "it out."
    )


def test_arrays_in_memory_have_hints_too() -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    x[3, 1] = -9999
    pool = memory.gather({"p": (x, np.arange(60) % 2)}, None, "auto")
    data = memory.federate(pool, Run(), 0.2)
    assert any(note.startswith("Feature 1 of X has -9999 in 1 row") for note in data.notes)


def test_hints_take_no_time() -> None:
    x = torch.randn(50_000, 30, generator=torch.Generator().manual_seed(0))
    data = Dataset("made", x, (x[:, 0] > 0).long(), 2, labels=("0", "1"))
    began = time.process_time()
    assert hints.find(data) == []
    assert time.process_time() - began < 2  # 0.15 measured


# --- said by the commands -------------------------------------------------------------------------

QUICK = (
    "--method=fedavg", "--device=cpu", "--rounds=1", "--local-steps=2", "--set=hidden=4",
    "--set=evaluate_draws=1",
)  # fmt: skip


def test_commands_say_them_before_training(tmp_path: Path) -> None:
    read(tmp_path / "a.csv", changed("age", r3="-999"))
    table_ = (f"table:{tmp_path / 'a.csv'}", "--target=y", "--client=site")
    shown = corefed("datasets", "--show", *table_)
    ran = corefed("run", "--data", *table_, *QUICK, f"--out={tmp_path / 'out'}")
    for result in (shown, ran):
        assert result.code == 0 and "note: Column 'age' has -999 in 1 row" in result.err


def test_a_client_column_that_is_not_used(tmp_path: Path) -> None:
    data = read(tmp_path / "a.csv", ROWS)
    words = (
        f"table:{tmp_path / 'a.csv'}", "--target=y", "--client=site", "--partition=dirichlet:1",
        "--clients=3",
    )  # fmt: skip
    shown = corefed("datasets", "--show", *words)
    ran = corefed("run", "--data", *words, *QUICK, f"--out={tmp_path / 'out'}")
    for result in (shown, ran):
        assert result.code == 0, result.err
        assert "'site' is neither the client nor a feature; leave out --partition" in result.err
    assert "ignored" in shown.out and data.layout is not None
