"""Prices and positions from every kind of file, and the sets of the coreset literature."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from corefed.base.errors import UserError
from corefed_studies.data import coreset_sets, positions

needs_data = pytest.mark.skipif(
    "COREFED_DATA" not in os.environ, reason="COREFED_DATA does not name a folder of data"
)

SALES = """\
"{A}","250000","2018-01-05 00:00","SW1A 1AA","T","N","F","1","","A ST","","LONDON","X","Y","A","A"
"{B}","1000","2018-01-06 00:00","sw1a1ab","T","N","F","2","","A ST","","LONDON","X","Y","A","A"
"{C}","300000","2018-01-07 00:00","ZZ9 9ZZ","T","N","F","3","","A ST","","LONDON","X","Y","A","A"
"{D}","300000","2018-01-07 00:00","","T","N","F","4","","A ST","","LONDON","X","Y","A","A"
"""

POSTCODES = """\
pcd,pcds,oa21,lat,long
SW1A1AA,SW1A 1AA,E1,51.501,-0.142
SW1A1AB,SW1A 1AB,E2,51.502,-0.143
AB1 0AA,AB1 0AA,E3,99.999999,0.0
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def assert_two_sales(found: positions.Positions, dropped: int) -> None:
    expected = torch.tensor([[-0.142, 51.501], [-0.143, 51.502]], dtype=torch.float64)
    assert torch.equal(found.where, expected)
    torch.testing.assert_close(found.log_price, torch.tensor([250000.0, 1000.0]).double().log10())
    assert found.dropped == dropped


def test_price_paid_file_joined_to_postcodes(tmp_path: Path) -> None:
    """As published: no header, quoted; spaces and letters of a postcode as anybody types them."""
    sales = written(tmp_path, "pp-2018.csv", SALES)
    postcodes = written(tmp_path, "postcodes.csv", POSTCODES)
    found = positions.load(sales, postcodes)
    assert found.name == "pp-2018"
    assert_two_sales(found, dropped=2)


def test_sales_with_a_header_joined_to_postcodes(tmp_path: Path) -> None:
    text = "Postcode,Price Paid\nSW1A 1AA,250000\nSW1A 1AB,1000\nAB1 0AA,5\n"
    sales = written(tmp_path, "sales.csv", text)
    postcodes = written(tmp_path, "postcodes.csv", POSTCODES)
    assert_two_sales(positions.load(sales, postcodes), dropped=1)


def test_csv_with_positions_in_any_order(tmp_path: Path) -> None:
    text = "\ufeffid,Price,LNG,lat\na,250000,-0.142,51.501\n\nb,1000,-0.143,51.502\n"
    text += "c,,0,0\nd,-5,0,0\ne,0,0,0\nf,7,NA,0\ng,inf,0,0\n"
    assert_two_sales(positions.load(written(tmp_path, "some.csv", text)), dropped=5)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_array_of_latitude_longitude_price(tmp_path: Path, suffix: str) -> None:
    table = np.array([[51.501, -0.142, 250000], [51.502, -0.143, 1000], [np.nan, 0, 3]])
    path = tmp_path / f"prices.{suffix}"
    if suffix == "npy":
        np.save(path, table)
    else:
        np.savez_compressed(path, prices=table)
    assert_two_sales(positions.load(path), dropped=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "does not start with a header"),
        ("price,lat,lon\n1,2\n", "Line 2 of .* has 2 cells where the first has 3"),
        ("price,lat,lon\n1,2,3\ndear,2,3\n", "Line 3 of .* has 'dear' where a number belongs"),
        ("price,lat,lon\n0,2,3\n", "None of the 1 rows"),
        ("price,lat,lon\n", "None of the 0 rows"),
        ('price,lat,lon\n1,2,"3\n', "is not a CSV"),
        (SALES, "by its postcode only; name a CSV of postcodes"),
    ],
)
def test_a_bad_csv_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        positions.load(written(tmp_path, "bad.csv", text))


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"price,lat,lon\n\xff\xfe,1,2\n")
    with pytest.raises(UserError, match="is not a CSV in UTF-8"):
        positions.load(path)
    with pytest.raises(UserError, match=r"Cannot read .*none\.csv: No such file"):
        positions.load(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"Cannot read .*none\.npy: No such file"):
        positions.load(tmp_path / "none.npy")


def test_postcodes_are_asked_for_what_they_must_have(tmp_path: Path) -> None:
    sales = written(tmp_path, "sales.csv", SALES)
    for text, message in (("", "needs a header"), ("postcode,lat\nA,1\n", "needs a header")):
        with pytest.raises(UserError, match=message):
            positions.load(sales, written(tmp_path, "postcodes.csv", text))
    located = written(tmp_path, "located.csv", "price,lat,lon\n1,2,3\n")
    with pytest.raises(UserError, match="positions of its own"):
        positions.load(located, written(tmp_path, "postcodes.csv", POSTCODES))
    with pytest.raises(UserError, match="--postcodes goes with a CSV"):
        positions.load(None, sales)


def test_bad_arrays_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "prices.npy"
    for table, message in (
        (np.zeros((4, 2)), r"shape \(4, 2\)"),
        (np.array([["a", "b", "c"]]), "not of numbers"),
        (np.array([[{}, 1, 2]]), "not of numbers"),
    ):
        np.save(path, table)
        with pytest.raises(UserError, match=message):
            positions.load(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=r"is not a whole \.npy file"):
        positions.load(path)
    np.savez(tmp_path / "two.npz", a=np.zeros((1, 3)), b=np.zeros((1, 3)))
    with pytest.raises(UserError, match="holds 2 arrays"):
        positions.load(tmp_path / "two.npz")


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_header_that_lies_is_refused_before_memory_is_taken(tmp_path: Path, suffix: str) -> None:
    """40 billion rows in 200 bytes; numpy alone would try to allocate a terabyte."""
    header = io.BytesIO()
    shape = {"descr": "<f8", "fortran_order": False, "shape": (40_000_000_000, 3)}
    np.lib.format.write_array_header_1_0(header, shape)  # type: ignore[arg-type]
    path = tmp_path / f"prices.{suffix}"
    if suffix == "npy":
        path.write_bytes(header.getvalue())
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("prices.npy", header.getvalue())
    with pytest.raises(UserError, match=r"claims shape \(40000000000, 3\), more than it has"):
        positions.load(path)


def test_missing_default_says_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COREFED_DATA", raising=False)
    with pytest.raises(UserError, match=r"california_housing.csv is not at hand; put it under"):
        positions.load(data_dir=tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        positions.load(data_dir=tmp_path / "nowhere")


@needs_data
def test_california() -> None:
    found = positions.load()
    assert found.where.shape == (20640, 2)
    assert found.dropped == 0
    longitude, latitude = found.where.T
    assert longitude.min() > -125 and longitude.max() < -114
    assert latitude.min() > 32 and latitude.max() < 42
    assert found.log_price.min() > 4 and found.log_price.max() < 6


# --- sets of the coreset literature ---------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("name", coreset_sets.SETS)
def test_published_sets(name: str) -> None:
    found = coreset_sets.load(name)
    assert len(found.x) == len(found.y) == 500
    assert (found.x == found.x[0]).all(0).sum() == 1  # one constant column, no second was added
    if found.family == "logistic":
        assert set(found.y.tolist()) == {0.0, 1.0}


def saved(folder: Path, name: str, **arrays: np.ndarray) -> None:
    (folder / "coresets").mkdir(exist_ok=True)
    np.savez(folder / "coresets" / f"{name}.npz", **arrays)


def test_labels_and_constants_are_made_alike(tmp_path: Path) -> None:
    x = np.array([[1.0], [2.0], [3.0]])
    saved(tmp_path, "ds1", X=x, y=np.array([-1, 1, -1]))
    found = coreset_sets.load("ds1", tmp_path)
    assert found.x.tolist() == [[1, 1], [2, 1], [3, 1]]
    assert found.y.tolist() == [0, 1, 0]


def test_bad_sets_are_one_sentence(tmp_path: Path) -> None:
    x = np.array([[1.0], [2.0]])
    with pytest.raises(UserError, match="There is no set 'ds2'"):
        coreset_sets.load("ds2", tmp_path)
    for name, arrays, message in (
        ("ds1", {"X": x, "y": np.array([0, 2])}, "-1 / 1 or 0 / 1 for y; row 1"),
        ("biketrips", {"X": x, "y": np.array([0.5, 2])}, "counts for y; row 0"),
        ("biketrips", {"X": x, "y": np.array([1])}, r"shape \(2, 1\) and 1 of y"),
        ("biketrips", {"X": x * np.nan, "y": np.array([1, 1])}, "NaN"),
        ("biketrips", {"X": x}, "has no array y; it holds X"),
    ):
        saved(tmp_path, name, **arrays)
        with pytest.raises(UserError, match=message):
            coreset_sets.load(name, tmp_path)
