"""A run is resumed on the data it began with; what has changed is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import Result, corefed
from PIL import Image

from corefed.data import fingerprint
from corefed.data.datasets import load
from corefed.data.table import Settings
from corefed.training import fitted

QUICK = (
    "--method=fedavg", "--device=cpu", "--local-steps=2", "--set=hidden=4",
    "--set=evaluate_draws=1",
)  # fmt: skip
HEADER = ["age", "grade", "site", "y"]
ROWS = [[str(20 + i), "uvw"[i % 3], "ab"[i % 2], "xy"[i // 2 % 2]] for i in range(40)]


def write(path: Path, rows: list[list[str]] = ROWS, header: list[str] = HEADER) -> Path:
    path.write_text("".join(",".join(row) + "\n" for row in [header, *rows]), encoding="utf-8")
    return path


def resume(folder: Path) -> Result:
    return corefed("run", f"--resume={folder}", "--rounds=2")


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """One round of a run on a.csv."""
    data = f"--data=table:{write(tmp_path / 'a.csv')}"
    folder = tmp_path / "run"
    result = corefed(
        "run", data, "--target=y", "--client=site", "--rounds=1", *QUICK, f"--out={folder}"
    )
    assert result.code == 0, result.err
    return folder


def changed(row: int, column: int, value: str) -> list[list[str]]:
    rows = [list(each) for each in ROWS]
    rows[row][column] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        (changed(7, 0, "27.5"), HEADER, "other values are in age"),
        (changed(7, 1, "w"), HEADER, "other values are in grade"),
        (changed(7, 3, "x"), HEADER, "the target has other values"),
        (changed(7, 2, "a"), HEADER, "rows belong to other clients"),
        (ROWS[:-1], HEADER, "they had 40 rows and have 39"),
        ([[b, a, *rest] for a, b, *rest in ROWS], ["grade", "age", "site", "y"], "another order"),
        (ROWS, ["years", "grade", "site", "y"], "they lack age and they have in addition years"),
    ],
)
def test_a_run_is_not_resumed_on_other_data(
    begun: Path, rows: list[list[str]], header: list[str], words: str
) -> None:
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    write(begun.parent / "a.csv", rows, header)
    result = resume(begun)
    assert result.code == 2 and words in result.err, result.err
    assert f"The data of the run in {begun} have changed since it began" in result.err
    assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == before


def test_a_run_is_resumed_on_the_same_data(begun: Path) -> None:
    text = (begun.parent / "a.csv").read_text()
    (begun.parent / "a.csv").write_text(text.replace("\n", "\r\n").replace("20,", "20.0,"))
    result = resume(begun)
    assert result.code == 0, result.err


def test_an_older_run_is_not_resumed_with_its_columns_in_another_order(begun: Path) -> None:
    """It has no fingerprint, and its columns were in alphabetical order."""
    kept = json.loads((begun / fitted.DATA).read_text())
    del kept["fingerprint"]
    (begun / fitted.DATA).write_text(json.dumps(kept))
    write(
        begun.parent / "a.csv",
        [[b, a, *rest] for a, b, *rest in ROWS],
        ["grade", "age", "site", "y"],
    )
    result = resume(begun)
    assert result.code == 2 and "their columns, or the order of these, are others" in result.err
    write(begun.parent / "a.csv")
    assert resume(begun).code == 0


def test_an_older_run_predicts_by_its_own_order(begun: Path) -> None:
    """data.json says which column is which feature, whatever the order in the file."""
    new, turned = begun.parent / "new.csv", begun.parent / "turned.csv"
    write(new)
    write(turned, [[b, a, *rest] for a, b, *rest in ROWS], ["grade", "age", "site", "y"])
    said = []
    for path in (new, turned):
        out = path.with_suffix(".said")
        result = corefed("predict", begun, "--client=a", f"--input={path}", f"--out={out}")
        assert result.code == 0, result.err
        said.append(out.read_text())
    assert said[0] == said[1]


def arrays(path: Path, change: Callable[[dict[str, np.ndarray]], None] = lambda own: None) -> Path:
    own = {
        "X": np.arange(60.0).reshape(20, 3), "y": np.arange(20) % 2, "client": np.arange(20) % 2,
    }  # fmt: skip
    change(own)
    np.savez(path, **own)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [("X", "other values are in X"), ("y", "the target has other values"), ("client", "clients")],
)
def test_arrays(tmp_path: Path, name: str, words: str) -> None:
    def of(path: Path) -> fingerprint.Fingerprint:
        data = load(f"npz:{path}", reading=Settings(client_column="client"))
        return json.loads(json.dumps(fingerprint.of(data)))

    def change(own: dict[str, np.ndarray]) -> None:
        own[name] = own[name].copy()
        own[name].flat[4] += 1

    before = of(arrays(tmp_path / "a.npz"))
    assert fingerprint.difference(before, of(arrays(tmp_path / "b.npz"))) == ""
    assert words in fingerprint.difference(before, of(arrays(tmp_path / "c.npz", change)))


def test_images(tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.new("L", (8, 8), 20 * i).save(tmp_path / "ab"[i % 2] / f"{i}.png")

    def found() -> fingerprint.Fingerprint:
        return fingerprint.of(load(f"image-folder:{tmp_path}", embedding="none"))

    before = found()
    assert fingerprint.difference(before, found()) == ""
    Image.new("L", (8, 8), 99).save(tmp_path / "a" / "0.png")
    assert fingerprint.difference(before, found()) == "other values are in images"
