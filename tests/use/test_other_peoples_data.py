"""`predict` and `personalize` on tables of several sites: whose model, and what is outside."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import Result, corefed

from corefed.data import cells
from corefed.data import table as table_data
from corefed.data.table import Settings
from corefed.training import fitted, reach
from corefed.use import selective

SITES = ("north", "south", "east")
HEAD = ["patient", "site", "age", "grade", "ill"]


def rows_of(site: str, n: int, seed: int) -> list[list[object]]:
    """Above 50 people are ill in the north and well in the south."""
    rng = np.random.default_rng(seed)
    found: list[list[object]] = []
    for number in range(n):
        age = round(float(rng.uniform(30, 70)), 1)
        ill = (age > 50) != (site == "south")
        found.append([f"{site}-{number}", site, age, "ab"[number % 2], "yes" if ill else "no"])
    return found


def write(path: Path, rows: list[list[object]], head: list[str] = HEAD) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("sites")
    rows = [row for seed, site in enumerate(SITES) for row in rows_of(site, 120, seed)]
    table = write(here / "all.csv", rows)
    result = corefed(
        "run", f"--data=table:{table}", "--target=ill", "--client=site", "--method=pfedbayes",
        "--set=ignore=patient", "--rounds=15", "--set=hidden=8", "--set=evaluate_draws=4",
        "--set=eta_1=0.05", "--device=cpu", "--out", here / "run", "--quiet",
    )  # fmt: skip
    assert result.code == 0, result.err
    return here / "run"


def table(result: Result) -> list[dict[str, str]]:
    assert result.code == 0, result.err
    return list(csv.DictReader(io.StringIO(result.out)))


def refused(result: Result, *words: str) -> None:
    assert result.code == 2, result
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err, result.err


# --- outside --------------------------------------------------------------------------------------


def test_impossible_values_are_flagged(run: Path, tmp_path: Path) -> None:
    """Age 900: the class stays, but nothing is certain about it."""
    rows = rows_of("north", 3, 9)
    rows[1][2], rows[2][3] = 900, "z"
    result = corefed("predict", run, "--client=north", "--input", write(tmp_path / "a.csv", rows))
    said = table(result)
    assert said[0]["outside"] == "no"
    assert said[1]["outside"].startswith("yes: age 900 (training: 30")
    assert said[2]["outside"] == "yes: grade is no category of training"
    assert "2 of 3 points are outside" in result.err
    assert "north-1: age 900" in result.err
    for row in said[1:]:
        assert row["review"] == "yes"
        assert float(row["total"]) == pytest.approx(math.log(2))
        parts = float(row["aleatoric"]) + float(row["epistemic"])
        assert parts == pytest.approx(math.log(2), abs=1e-6)
    assert float(said[1]["epistemic"]) > 0.5 > float(said[0]["epistemic"])


def test_an_older_run_says_that_it_cannot_tell(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / reach.FILE).unlink()
    points = write(tmp_path / "a.csv", rows_of("north", 2, 9))
    result = corefed("predict", tmp_path / "run", "--client=north", "--input", points)
    assert "outside" not in table(result)[0]
    assert "made by an older version" in result.err


def test_a_regression_outside_knows_no_more_than_the_spread_of_its_targets(tmp_path: Path) -> None:
    rows = [["north", age, 3 * age + 7] for _, _, age, *_ in rows_of("north", 100, 0)]
    data = write(tmp_path / "a.csv", rows, ["site", "age", "cost"])
    made = corefed(
        "run", f"--data=table:{data}", "--target=cost", "--client=site", "--method=pfedbayes",
        "--rounds=3", "--set=hidden=4", "--device=cpu", "--out", tmp_path / "run", "--quiet",
    )  # fmt: skip
    assert made.code == 0, made.err
    new = write(tmp_path / "b.csv", [["north", 50, 0], ["north", 900, 0]], ["site", "age", "cost"])
    inside, outside = table(corefed("predict", tmp_path / "run", "--input", new))
    costs = np.array([row[2] for row in rows], dtype=float)
    assert inside["outside"] == "no"
    assert float(outside["epistemic"]) >= 0.9 * costs.std()
    assert float(outside["upper"]) - float(outside["lower"]) > 3.5 * costs.std()


# --- whose model ----------------------------------------------------------------------------------


def test_rows_go_to_the_model_of_their_client(run: Path, tmp_path: Path) -> None:
    """The same answers as file by file; in the order of the rows."""
    both = zip(rows_of("north", 20, 7), rows_of("south", 20, 8), strict=True)
    rows = [row for pair in both for row in pair]
    result = corefed("predict", run, "--input", write(tmp_path / "all.csv", rows))
    said = table(result)
    assert [row["id"] for row in said] == [row[0] for row in rows]
    assert [row["client"] for row in said] == [row[1] for row in rows]
    assert {row["model"] for row in said} == {"personal"}
    for site in ("north", "south"):
        own = write(tmp_path / f"{site}.csv", [row for row in rows if row[1] == site])
        alone = table(corefed("predict", run, "--client", site, "--input", own))
        mine = [row for row in said if row["client"] == site]
        for one, other in zip(mine, alone, strict=True):
            assert {k: v for k, v in one.items() if k not in ("client", "model")} == other
    north = table(corefed("predict", run, "--client=north", "--input", tmp_path / "south.csv"))
    assert all(one["total"] != other["total"] for one, other in zip(north, mine, strict=True))
    assert "20 points by the personal model of south" in result.err


def test_mixed_rows_under_one_model_are_said_and_for_review(run: Path, tmp_path: Path) -> None:
    rows = [*rows_of("north", 10, 7), *rows_of("south", 5, 8)]
    points = write(tmp_path / "a.csv", rows)
    result = corefed("predict", run, "--client=north", "--input", points)
    assert "5 of 15 rows are of south (5), and not of north" in result.err
    assert {row["review"] for row in table(result)[10:]} == {"yes"}
    assert "no" in {row["review"] for row in table(result)[:10]}


def test_unknown_clients_have_the_shared_model(run: Path, tmp_path: Path) -> None:
    rows = [*rows_of("north", 3, 7), *rows_of("west", 4, 8)]
    rows[-1][1] = ""
    points = write(tmp_path / "a.csv", rows)
    result = corefed("predict", run, "--input", points, "--json", "--out", tmp_path / "p.csv")
    about = json.loads(result.out)
    assert [(each["client"], each["model"], each["points"]) for each in about["clients"]] == [
        ("north", "personal", 3), ("west", "global", 3), ("", "global", 1)
    ]  # fmt: skip
    assert "does not know west (3), no client (1)" in result.err
    with (tmp_path / "p.csv").open() as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["personal"] * 3 + ["global"] * 4


def test_without_a_column_the_client_must_be_named(run: Path, tmp_path: Path) -> None:
    rows = [row[2:] for row in rows_of("north", 3, 7)]
    points = write(tmp_path / "a.csv", rows, HEAD[2:])
    refused(corefed("predict", run, "--input", points), "--client", "no column 'site'", "north")


# --- personalize ----------------------------------------------------------------------------------


def test_personalize_takes_the_rows_of_its_client(run: Path, tmp_path: Path) -> None:
    """The column names the newcomer; then rows of this name have its model."""
    shutil.copytree(run, tmp_path / "run")
    rows = [*rows_of("west", 30, 7), *rows_of("north", 20, 8)]
    points = write(tmp_path / "a.csv", rows)
    asked = ["personalize", tmp_path / "run", "--data", points, "--steps=4"]
    refused(corefed(*asked), "rows of several clients", "west, north", "--name")
    refused(corefed(*asked, "--name=oslo"), "no rows of 'oslo'")
    refused(corefed(*asked, "--name=north"), "has a client 'north' already")
    result = corefed(*asked, "--name=west", "--test-fraction=0")
    assert result.code == 0, result.err
    assert "20 of 50 rows are not of west; they are left out" in result.err
    assert fitted.load(tmp_path / "run", client="west").clients[0][0]["train"] == 30

    # It has no held-out points, so nothing can be promised: everything is for review.
    said = corefed("predict", tmp_path / "run", "--input", points)
    mine = [row for row in table(said) if row["client"] == "west"]
    assert {row["model"] for row in mine} == {"personal"}
    assert {row["review"] for row in mine} == {"yes"}
    assert "there are no held-out points" in said.err

    alone = write(tmp_path / "b.csv", rows_of("oslo", 30, 7))
    result = corefed("personalize", tmp_path / "run", "--data", alone, "--steps=4")
    assert "--client 'oslo' uses it" in result.out


# --- files ----------------------------------------------------------------------------------------


def test_rows_of_training_are_said(run: Path, tmp_path: Path) -> None:
    """Once with the target and once without it, and not about rows that only look alike."""
    with (run.parent / "all.csv").open(newline="") as file:
        head, *rows = list(csv.reader(file))
    for name, columns in (("whole", head), ("blind", head[:-1])):
        given = write(tmp_path / f"{name}.csv", [row[: len(columns)] for row in rows], columns)
        result = corefed("predict", run, "--input", given)
        found = re.search(r"(\d+) of 360 rows are rows that the run was trained on", result.err)
        assert found is not None, result.err
        assert 288 <= int(found[1]) < 360  # four in five, and a few that are like one of those
    new = write(tmp_path / "new.csv", rows_of("north", 20, 99))
    assert "trained on" not in corefed("predict", run, "--client=north", "--input", new).err


def test_rows_of_training_are_not_known_without_their_table(run: Path, tmp_path: Path) -> None:
    """Also where the table has changed: then it does not say which rows were training rows."""
    table = run.parent / "all.csv"
    given = Path(shutil.copy(table, tmp_path / "same.csv"))
    before = table.read_text()
    try:
        table.write_text(before.replace("north-0,north,", "north-0,north,9"))
        changed = corefed("predict", run, "--input", given)
        table.unlink()
        gone = corefed("predict", run, "--input", given)
    finally:
        table.write_text(before)
    for result in (changed, gone):
        assert result.code == 0
        assert "trained on" not in result.err


def test_few_different_rows_are_alike_by_chance(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def rows(n: int) -> list[list[object]]:
        return [[*each, int(each[0] != each[1])] for each in rng.integers(0, 2, (n, 2)).tolist()]

    data = write(tmp_path / "few.csv", rows(60), ["a", "b", "y"])
    trained = corefed(
        "run", f"--data=table:{data}", "--target=y", "--method=fedavg", "--clients=2",
        "--rounds=1", "--set=hidden=4", "--device=cpu", "--out", tmp_path / "run", "--quiet",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    new = write(tmp_path / "new.csv", rows(30), ["a", "b", "y"])
    result = corefed("predict", tmp_path / "run", "--client=client 0", "--input", new)
    assert result.code == 0
    assert "trained on" not in result.err


def test_no_file_is_overwritten_without_force(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "training.csv"
    mine.write_text("precious\n")
    points = write(tmp_path / "a.csv", rows_of("north", 2, 9))
    asked = ["predict", run, "--client=north", "--input", points, "--out", mine]
    refused(corefed(*asked), "training.csv exists already", "--force")
    refused(corefed("report", run, "--out", mine), "training.csv exists already", "--force")
    assert mine.read_text() == "precious\n"
    assert corefed(*asked, "--force").code == 0
    assert mine.read_text().startswith("id,")
    refused(corefed(*asked[:-1], points, "--force"), "the input itself")


# --- review on small sets -------------------------------------------------------------------------


def test_the_smallest_target_in_reach_is_taken_and_said(run: Path, tmp_path: Path) -> None:
    """40 held-out points cannot promise 5 %. If that is named, all is flagged, and it says why."""
    from safetensors.torch import save_file

    shutil.copytree(run, tmp_path / "run")
    held = fitted.read_tensors(run, fitted.HELD_OUT)
    kept = {name: value[:40].clone() for name, value in held.items()}
    best = kept["personal.mean"].argmax(-1)
    order = kept["personal.total"].argsort()
    kept["y"] = best.clone()
    kept["y"][order[-6:]] = 1 - best[order[-6:]]  # the six least certain are wrong
    save_file(kept, tmp_path / "run" / fitted.HELD_OUT)
    points = write(tmp_path / "a.csv", rows_of("north", 40, 9))
    asked = ["predict", tmp_path / "run", "--client=north", "--input", points]
    result = corefed(*asked)
    assert "smallest round target that can be promised is 0.15" in result.err
    assert {row["review"] for row in table(result)} == {"yes", "no"}
    about = json.loads(corefed(*asked, "--json").out)["review"]
    assert about["target_error"] == 0.15
    assert [each["target_error"] for each in about["reachable"]] == [0.15, 0.2, 0.25, 0.3]
    counts = [each["flagged"] for each in about["reachable"]]
    assert counts[0] == about["flagged"]
    assert counts == sorted(counts, reverse=True)
    named = corefed(*asked, "--target-error=0.05")
    assert {row["review"] for row in table(named)} == {"yes"}
    assert "Everything is flagged" in named.err
    assert "smallest round target that can be promised is 0.15" in named.err
    assert "for review at targets that can be promised: " in named.err


def test_limits_of_reachable_targets_hold_at_once() -> None:
    """Broken in at most a tenth of 400 draws; exact where nothing is wrong."""
    (whole,) = selective.reachable(np.arange(40.0), np.zeros(40), 0.9)
    above = np.nextafter(np.float32(39), np.float32(40))
    assert whole.threshold == selective.Threshold(above, 40, 40, 0)
    assert whole.target == pytest.approx(1 - 0.025 ** (1 / 39))
    rng = np.random.default_rng(0)
    broken = 0
    for _ in range(400):
        u = rng.uniform(size=60)
        wrong = rng.uniform(size=60) < 0.4 * u  # R(t) = 0.2 t
        limits = selective.reachable(u, wrong, 0.9)
        broken += any(0.2 * min(each.threshold.value, 1) > each.target for each in limits)
    assert 0 < broken < 40
    assert selective.reachable([], [], 0.9) == []
    assert selective.rounded(selective.reachable([0.1], [1], 0.9)) == []


# --- spreadsheets ---------------------------------------------------------------------------------


def test_a_spreadsheet_computes_no_cell_of_the_predictions(tmp_path: Path) -> None:
    """Names of patients, sites and classes that are formulas; read again, they are the same."""
    rng = np.random.default_rng(0)
    lines = [["patient", "site", "dose", "ill"]]
    for i in range(90):
        dose = rng.normal()
        names = (f"@p{i}", ("=1+1", "north")[i % 2], f"{dose:.4f}", ("-no", "+yes")[dose > 0])
        lines.append(list(names))
    mine = tmp_path / "own.csv"
    with mine.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    done = corefed(
        "run", f"--data=table:{mine}", "--target=ill", "--client=site", "--rounds=2",
        "--local-steps=5", "--set=hidden=4", "--set=evaluate_draws=2", "--set=ignore=patient",
        "--device=cpu", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0, done.err
    out = tmp_path / "p.csv"
    done = corefed("predict", tmp_path / "run", "--input", mine, "--out", out)
    assert done.code == 0, done.err
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [row["id"] for row in rows] == [f"'@p{i}" for i in range(90)]
    assert {row["client"] for row in rows} == {"'=1+1", "north"}
    assert {row["predicted"] for row in rows} <= {"'-no", "'+yes"}
    texts = [cell for row in rows for cell in row.values() if not cells.is_number(cell)]
    assert not any(text[:1] in "=+-@" for text in texts if text)
    ignored = ("id", "model", "outside", "review", "predicted")
    assert table_data.read(out, Settings("client", ignore=ignored), 100).labels == (
        "=1+1", "north",
    )  # fmt: skip


def test_numbers_stay_numbers_in_a_file_for_spreadsheets() -> None:
    for text in ("-0.5", "+3", "-1e-7", "north", "a=b", ""):
        assert cells.marked(text) == text
    for text in ("=1+1", "+cmd", "-x", "@sum", "\tx"):
        assert cells.marked(text) == f"'{text}"
    assert cells.as_name("'=1+1") == "=1+1" and cells.as_name("'quoted") == "'quoted"
