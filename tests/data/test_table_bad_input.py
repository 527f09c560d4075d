"""What may be wrong with a table or an array: exit code 2, one sentence, nothing written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import Result, corefed


def run(path: Path, out: Path, *more: str, kind: str = "table") -> Result:
    return corefed("run", f"--data={kind}:{path}", "--rounds=1", *more, f"--out={out}")


def assert_refused(result: Result, out: Path, *words: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err
    assert not out.exists()


def rows(count: int, line: str) -> str:
    """`line` with {i} the number of the row, and {ab} a class."""
    return "".join(line.format(i=i, ab="ab"[i % 2]) + "\n" for i in range(count))


GOOD = "x,site,y\n" + rows(30, "{i},s,{ab}")

BAD = {
    "empty": ("", "is empty"),
    "a header alone": ("x,site,y\n", "has a header but no rows"),
    "no such target": (GOOD.replace("y\n", "Outcome\n", 1), "has no column 'y' to predict"),
    "numbers as header": (rows(9, "1,2,3"), "begins with numbers"),
    "one column": ("y\n1\n2\n", "has one column only"),
    "bars": ("x|site|y\n1|2|3\n", "is it separated by '|'? Use commas"),
    "columns twice": ("x,x,site,y\n1,2,3,4\n", "has 2 columns 'x'"),
    "300,000 columns": (
        ",".join([*(f"x{i}" for i in range(300_000)), "site", "y"]) + "\n",
        "has 300,002 columns, and a table has at most 100,000",
    ),
    "a column without a name": ("x,,site,y\n1,2,3,4\n", "Column 2 of", "has no name"),
    "a ragged line": (GOOD + "1,2\n", "Line 32 of", "has 2 cells, the header 3"),
    "one class": ("x,site,y\n" + rows(30, "{i},s,a"), "has one value only, 'a'"),
    "one number": ("x,site,y\n" + rows(30, "{i},s,1.5"), "has one value only, '1.5'"),
    "no target at all": ("x,site,y\n" + rows(30, "{i},s,NA"), "is empty; there is nothing"),
    "a class a row": ("x,site,y\n" + rows(30, "{i},s,c{i}"), "another class in every row"),
    "10000 clients": (
        "x,site,y\n" + rows(10_000, "{i},{i},{ab}"),
        "has 10000 different values, and each would be a client",
    ),
    "more clients than categories are counted": (
        "x,site,y\n" + rows(10_500, "{i},u{i},{ab}"),
        "has 10500 different values, and each would be a client, with 1.0 rows on average",
    ),
    "no clients": ("x,site,y\n" + rows(30, "{i},,{ab}"), "is empty; there are no clients"),
    "no row whole": (
        "x,site,y\n" + rows(30, "{i},s,") + rows(30, "{i},,{ab}"),
        "lacks its target or its client",
    ),
    "text among numbers": (
        GOOD + "unknwon,s,a\n",
        "Line 32 of",
        "has 'unknwon' in column 'x', whose other cells are numbers",
        "--set categorical=x",
    ),
    "text among targets": (
        "x,site,y\n" + rows(60, "{i},s,0.{i}") + "1,s,high\n",
        "Line 62 of",
        "has 'high' in column 'y'",
    ),
    "an identifier": ("x,site,y\n" + rows(30, "p{i},s,{ab}"), "as an identifier has", "ignore=x"),
    "categories": (
        "x,site,y\n" + rows(60, "p{i},s,{ab}") + rows(60, "p{i},s,{ab}"),
        "has 60 different categories, more than 50",
    ),
    "dates": ("x,site,y\n" + rows(28, "2020-01-{i:02d},s,{ab}"), "has dates, such as", "an age"),
    "other dates": ("x,site,y\n" + rows(28, "{i}.1.2020,s,{ab}"), "has dates, such as"),
    "decimal commas": (
        "x;site;y\n" + rows(30, "{i},5;s;{ab}"),
        "decimal commas, such as '0,5'; write decimal points",
    ),
    "a thousand, or a decimal comma": (
        GOOD + '"1,472",s,a\n',
        "Column 'x' of",
        "numbers with a comma, such as '1,472'; leave it out where it stands between thousands",
    ),
    "thousands": (
        GOOD + '"1,472",s,a\n"1,001,472",s,a\n"1,472.5",s,a\n',
        "commas between thousands, such as",
    ),
    "percentages": (GOOD + "50%,s,a\n2.5 %,s,a\n", "percentages, such as '50%'; write them"),
    "percentages to predict": (
        "x,site,y\n" + rows(30, "{i},s,{i}%"),
        "Column 'y' of",
        "percentages, such as '0%'",
    ),
    "too large": (
        GOOD + "1e300,s,a\n", "Line 32 of", "has 1e300, more than 3.4e+38, in column 'x'"
    ),
    "too large a target": (
        "x,site,y\n" + rows(60, "{i},s,{i}.5") + "1,s,-1e39\n",
        "Line 62 of",
        "has -1e39, more than 3.4e+38, in column 'y'",
    ),
    "infinite": (GOOD + "inf,s,a\n", "Line 32 of", "has an infinite number in column 'x'"),
    "infinite target": ("x,site,y\n" + rows(60, "{i},s,{i}.5") + "1,s,inf\n", "infinite number"),
    "an empty column": ("x,z,site,y\n" + rows(30, "{i},,s,{ab}"), "'z' of", "is empty; leave it"),
    "no features": ("site,y\n" + rows(30, "s,{ab}"), "has no columns left to learn from"),
    "quotes": ('x,site,y\n"1,s,a\n', "is not a CSV file that can be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tables(name: str, tmp_path: Path) -> None:
    text, *words = BAD[name]
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    result = run(tmp_path / "a.csv", tmp_path / "out", "--target=y", "--client=site")
    assert_refused(result, tmp_path / "out", *words)


def test_a_bad_table_is_not_shown_either(tmp_path: Path) -> None:
    text, *words = BAD["text among numbers"]
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    shown = corefed("datasets", f"--show=table:{tmp_path / 'a.csv'}", "--target=y", "--client=site")
    assert_refused(shown, tmp_path / "out", *words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--client=site"], "Name the column of"),
        (["--target=Y"], "has no column 'Y' to predict; did you mean 'y'?"),
        (["--target=y", "--client=sit"], "'sit' to make clients of; did you mean 'site'?"),
        (["--target=y", "--client=y"], "cannot be both target and client"),
        (["--target=y", "--set=ignore=z"], "has no column 'z' to ignore"),
        (["--target=y", "--set=ignore=y,x"], "ignore names column 'y', which is the target"),
        (["--target=y", "--set=categorical=z"], "to take for categories"),
        (["--target=y", "--set=task=regression"], "a regression needs numbers"),
        (["--target=x", "--set=task=classification"], "another class in every row"),
        (["--target=y", "--client=site", "--set=smallest_client=0"], "it must be at least 1"),
        (["--target=y", "--client=site", "--set=smallest_client=50"], "has 50 points"),
        (["--target=y", "--client=site", "--set=cohort=2"], "at most the 1 clients"),
        (["--target=y", "--partition=natural"], "has no natural clients"),
        (["--target=y", "--set=scale=both"], "it must be 'auto' or 'unit'"),
    ],
)
def test_bad_settings(settings: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(GOOD, encoding="utf-8")
    assert_refused(run(tmp_path / "a.csv", tmp_path / "out", *settings), tmp_path / "out", words)


def test_missing_values_may_be_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(GOOD + ",s,a\n", encoding="utf-8")
    more = ("--target=y", "--client=site", "--set=missing=refuse")
    result = run(tmp_path / "a.csv", tmp_path / "out", *more)
    assert_refused(result, tmp_path / "out", "has missing values: 1 in column 'x'")


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    """10 GB without a byte on the disk: it is never opened."""
    for name in ("a.csv", "a.parquet"):
        with (tmp_path / name).open("wb") as file:
            os.truncate(file.fileno(), 10 * 2**30)
        result = run(tmp_path / name, tmp_path / "out", "--target=y")
        assert_refused(result, tmp_path / "out", "has 10240 MB, more than the 4096 MB of memory")


def test_a_wide_table_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """50 categories a column become 50 numbers of 8 bytes, twice."""
    lines = "".join(",".join([f"c{i % 50}"] * 20 + ["ab"[i % 2]]) + "\n" for i in range(2000))
    header = ",".join(f"x{i}" for i in range(20)) + ",y\n"
    (tmp_path / "a.csv").write_text(header + lines, encoding="utf-8")
    result = run(tmp_path / "a.csv", tmp_path / "out", "--target=y", "--set=memory_mb=20")
    assert_refused(result, tmp_path / "out", "2000 rows of 1000 features of", "need 31 MB")


def test_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert_refused(run(tmp_path / "no.csv", out, "--target=y"), out, "There is no ")
    assert_refused(run(tmp_path, out, "--target=y"), out, "is no file; a table is a .csv")
    (tmp_path / "a.csv").write_bytes("x,site,y\nä,b,c\n".encode("latin-1"))
    assert_refused(run(tmp_path / "a.csv", out, "--target=y"), out, "is not UTF-8 text")
    for begin, words in (
        (b"PK\x03\x04", "an Excel file or another archive; save it in Excel as CSV"),
        (b"\xd0\xcf\x11\xe0", "an old Excel file; save it in Excel as CSV"),
        (b"\x1f\x8b", "compressed; unpack it"),
        (b"PAR1", "a Parquet file; give it the ending .parquet"),
    ):
        (tmp_path / "a.csv").write_bytes(begin + b"\0" * 9)
        assert_refused(run(tmp_path / "a.csv", out, "--target=y"), out, "By its content", words)
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    assert_refused(run(tmp_path / "a.xlsx", out, "--target=y"), out, "no table by its ending")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    pytest.importorskip("pyarrow")
    assert_refused(run(tmp_path / "a.parquet", out, "--target=y"), out, "not a whole Parquet file")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run(tmp_path / "a.parquet", out, "--target=y")
    assert_refused(
        result, out, "needs pyarrow: in a checkout of corefed, pip install -e '.[tables]'"
    )


def test_settings_of_tables_for_other_data(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = corefed("run", "--data=digits", "--target=y", f"--out={out}")
    assert_refused(result, out, "target is a setting of table:PATH; digits has no columns")
    result = corefed("run", "--data=digits", "--client=y", f"--out={out}")
    assert_refused(result, out, "client_column is a setting of table:PATH")
    result = corefed("datasets", "--show=digits", "--target=y")
    assert_refused(result, out, "--target, --client and --set are for table:PATH and npz:PATH")


def test_bad_arrays(tmp_path: Path) -> None:
    out, x = tmp_path / "out", np.zeros((30, 2))
    np.savez(tmp_path / "a.npz", X=x, y=np.arange(30) % 2, client=np.zeros(29, int))
    assert_refused(run(tmp_path / "a.npz", out, kind="npz"), out, "30 points in X but 29 in client")
    np.savez(tmp_path / "a.npz", X=x, y=np.arange(30) % 2, client=np.zeros(30))
    assert_refused(run(tmp_path / "a.npz", out, kind="npz"), out, "clients are whole numbers or")
    np.savez(tmp_path / "a.npz", X=x)
    assert_refused(run(tmp_path / "a.npz", out, kind="npz"), out, "must hold arrays X and y")
    np.savez(tmp_path / "a.npz", X=x, y=np.zeros(30, int))
    assert_refused(run(tmp_path / "a.npz", out, kind="npz"), out, "has one value only")
    np.savez(tmp_path / "a.npz", X=x, y=np.arange(30) % 2, groups=np.arange(30))
    assert_refused(run(tmp_path / "a.npz", out, kind="npz"), out, "No client of", "has 10 points")
