"""The two readers of CSV files, pyarrow's and Python's, give the same table or sentence."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corefed.base.errors import UserError
from corefed.data import arrow_csv, sources, table, values
from corefed.data.table import Settings

pytest.importorskip("pyarrow")

LINES = [f"{i}.{i},{'fm'[i % 2]},{'ab'[i % 3 == 0]}" for i in range(30)]
GOOD = "x,sex,y\n" + "\n".join(LINES) + "\n"

FILES = {
    "plain": GOOD,
    "no last newline": GOOD[:-1],
    "CRLF": GOOD.replace("\n", "\r\n"),
    "CR alone": GOOD.replace("\n", "\r"),
    "a byte order mark": "\ufeff" + GOOD,
    "empty lines": GOOD.replace("\n", "\n\n"),
    "a line of blanks": GOOD + "  \n",
    "quotes": GOOD.replace(",f,", ',"f",').replace(",m,", ',"m, or ""m""",'),
    "quoted header": GOOD.replace("x,sex,y", '"x","sex","y"'),
    "header over two lines": GOOD.replace("x,sex,y", 'x,"se\nx",y'),
    "lines in cells": GOOD.replace(",f,", ',"f\nf",').replace(",m,", ',"m\r\nm",'),
    "a quote inside a cell": GOOD.replace(",f,", ',f"f,'),
    "text after a quote": GOOD + '1,"f"f,a\n',
    "a blank before a quote": GOOD.replace(",f,", ', "f",'),
    "an open quote at the end": GOOD + '1,f,"',
    "an open quote at the end, and a literal one": GOOD + '1,f",a\n1,f,"',
    "an empty cell and text": GOOD + '1,""f,a\n',
    "a quote in quotes and text": GOOD + '1,""""f,a\n',
    "quotes in quotes": GOOD + '1,"""f""",a\n1,"""",a\n1,"",a\n',
    "an open quote": GOOD + '1,"f,a\n',
    "NUL": GOOD + "1,f\0,a\n",
    "too few cells": GOOD + "1,f\n",
    "too many cells": GOOD + "1,f,a,b\n",
    "Latin-1": GOOD.replace(",f,", ",é,").encode("latin-1"),
    "gaps": GOOD.replace("1.1,", ",").replace("2.2,", "NA,").replace("3.3,", " ? ,"),
    "gaps in words": GOOD.replace("1.1,", "nan,").replace("2.2,", "NaN,").replace("3.3,", "nUll,"),
    "mixed types": GOOD.replace("4.4,", "four,"),
    "numbers in other ways": "x,z,y\n" + "".join(
        f"{x},{i},{'ab'[i % 2]}\n"
        for i, x in enumerate(["+1", " 1 ", ".5", "5.", "1e3", "1E-3", "-0", "007", "1e-400"] * 4)
    ),
    "an underscore": GOOD.replace("1.1,", "1_1,"),
    "infinite": GOOD.replace("1.1,", "inf,"),
    "infinite in words": GOOD.replace("1.1,", "-Infinity,"),
    "too large": GOOD.replace("1.1,", "1e300,"),
    "far too large": GOOD.replace("1.1,", "1e400,"),
    "nan with a load": GOOD.replace("1.1,", "nan(7),"),
    "other digits": GOOD.replace("1.1,", "\u0661,"),
    "long whole numbers": "x,z,y\n" + "".join(
        f"{10**17 + i},{2**63 + 3 * i},{'ab'[i % 2]}\n" for i in range(30)
    ),
    "many digits": "x,z,y\n" + "".join(
        f"0.{i}00000000000000000000000001{i},{i / 7!r},{'ab'[i % 2]}\n" for i in range(30)
    ),
    "2 and 2.0": "x,z,y\n" + "".join(
        f"{i / 3:.3f},{i},{('2', '2.0', '3')[i % 3]}\n" for i in range(30)
    ),
    "decimal commas": GOOD.replace(".", "#").replace(",", ";").replace("#", ","),
    "semicolons": GOOD.replace(",", ";"),
    "tabs": GOOD.replace(",", "\t"),
    "thousands": GOOD + '"1,472",f,a\n',
    "a long cell": GOOD + f"1,{'f' * 200_000},a\n",
}  # fmt: skip


def outcome(path: Path) -> Any:
    """What a reader makes of a file: a table, or a sentence."""
    try:
        return table.read(path, Settings("y"), 4096)
    except UserError as error:
        return str(error)


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    fast = outcome(path)
    with monkeypatch.context() as patch:
        patch.setattr(arrow_csv, "look", lambda path, sign: "doubtful")
        return fast, outcome(path)


def assert_same(one: Any, two: Any) -> None:
    if isinstance(one, str) or isinstance(two, str):
        assert one == two
        return
    assert (
        repr(one.layout) == repr(two.layout) and one.labels == two.labels and one.notes == two.notes
    )
    assert torch.equal(one.y, two.y)
    assert one.x.numpy().tobytes() == two.x.numpy().tobytes()


@pytest.mark.parametrize("name", FILES)
def test_both_readers_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FILES[name]
    path = tmp_path / "a.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_same(*both(path, monkeypatch))


PIECES = st.sampled_from(
    ["1", "2.5", "x", "é", ",", ",", "\n", "\r\n", '"', '""', " ", "", "NA", ";", "\t"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(pieces=st.lists(PIECES, max_size=30), crlf=st.booleans())
def test_both_readers_agree_on_any_text(
    pieces: list[str], crlf: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    end = "\r\n" if crlf else "\n"
    path = tmp_path_factory.mktemp("any") / "a.csv"
    path.write_bytes((f"x,z,y{end}1,2,a{end}1,3,b{end}1,4,a{end}" + "".join(pieces)).encode())
    monkeypatch = pytest.MonkeyPatch()
    assert_same(*both(path, monkeypatch))


def test_pyarrow_is_what_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the two readers above could be one."""
    path = tmp_path / "a.csv"
    path.write_text(FILES["quotes"], encoding="utf-8")
    (block,) = sources.find(path, 100).blocks(["x"])
    assert isinstance(block.cells["x"], values.Texts)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (block,) = sources.find(path, 100).blocks(["x"])
    assert not isinstance(block.cells["x"], values.Texts)


def test_csv_goes_on_where_pyarrow_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a file: no row is lost and none is read twice."""
    monkeypatch.setattr(arrow_csv, "BYTES", 64)
    path = tmp_path / "a.csv"
    rows = [f"{i},{'f' * (300 if i == 20 else 1)},{'ab'[i % 2]}" for i in range(40)]
    path.write_text("x,z,y\n" + "\n".join(rows), encoding="utf-8")
    seen: list[float] = []
    for block in sources.find(path, 100).blocks(["x"]):
        assert list(block.places) == list(range(len(seen) + 1, len(seen) + 1 + len(block.places)))
        seen += values.numbers(block.cells["x"])[0].tolist()
    assert seen == list(range(40))


def test_cells_stay_in_memory_for_the_second_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(GOOD, encoding="utf-8")
    source = sources.find(path, 100)
    first = list(source.blocks(["x", "sex", "y"]))
    assert next(iter(source.blocks(["x", "y"]))) is first[0]
    monkeypatch.setattr(sources, "KEPT", 0)
    source = sources.find(path, 100)
    first = list(source.blocks(["x"]))
    assert next(iter(source.blocks(["x"]))) is not first[0]


def test_lines_of_rows(tmp_path: Path) -> None:
    """A message names the line in the file, where empty lines and lines in cells count."""
    path = tmp_path / "a.csv"
    path.write_text('x,z,y\n\n1,"a\nb",u\n\n2,c,v\n', encoding="utf-8")
    source = sources.find(path, 100)
    assert source.at(1) == f"Line 4 of {path}" and source.at(2) == f"Line 6 of {path}"


def test_parquet_numbers_and_text(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    whole = [2**53 + 1, None, -5]
    columns = {
        "whole": arrow.array(whole, arrow.int64()),
        "small": arrow.array([1, 2, None], arrow.uint8()),
        "half": arrow.array(np.array([0.5, 1, 2], np.float16)),
        "decimal": arrow.array([1, None, 3], arrow.decimal128(9, 2)),
        "codes": arrow.array([3, None, 3]).dictionary_encode(),
        "yes": arrow.array([True, None, False]),
        "long": arrow.array(["a", None, "1.50"], arrow.large_string()),
        "words": arrow.array(["a", None, "b"]).dictionary_encode(),
    }
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    (block,) = sources.find(tmp_path / "a.parquet", 100).blocks(list(columns))
    read = {name: values.names(cells) for name, cells in block.cells.items()}
    assert read["codes"] == ["3", "", "3"] and read["words"] == ["a", "", "b"]
    assert read["yes"] == ["true", "", "false"] and read["long"] == ["a", "", "1.50"]
    for name, expected in (
        ("whole", [float(2**53 + 1), math.nan, -5.0]), ("small", [1, 2, math.nan]),
        ("half", [0.5, 1, 2]), ("decimal", [1, math.nan, 3]),
    ):  # fmt: skip
        assert np.array_equal(values.numbers(block.cells[name])[0], expected, equal_nan=True)


def test_parquet_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """40 row groups of 200 kB: a block needs its own, not all of them."""
    import pyarrow as arrow
    from pyarrow import parquet

    x = np.random.default_rng(0).normal(size=1_000_000)
    parquet.write_table(
        arrow.table({"x": x, "y": x}), tmp_path / "a.parquet", row_group_size=25_000
    )
    source = sources.find(tmp_path / "a.parquet", 100)
    before = arrow.total_allocated_bytes()
    for block in source.blocks(["x"]):
        assert arrow.total_allocated_bytes() - before < 4e6
        assert len(block.places)
