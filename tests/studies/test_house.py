"""The counts of the project's structure: right on a small tree, and within bounds on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from corefed.base.errors import UserError
from corefed_studies.house import picture, probe
from corefed_studies.house.counting import BEFORE, ROWS, SRC, Counts, count, table


@pytest.fixture(scope="module")
def counts() -> Counts:
    """Of this checkout, with a tiny run."""
    return count(SRC, [], ["run", "--rounds", "1", "--clients", "2", "--set", "local_steps=1"])


def test_this_checkout_keeps_its_structure(counts: Counts) -> None:
    assert counts["files_at_root"] <= 10
    assert counts["packages_in_cycles"] == 0
    assert counts["upward_imports"] == 0
    assert counts["lines_without_studies"] < counts["lines"]


def test_a_run_is_followed(counts: Counts) -> None:
    assert 1 < counts["package_switches"] < counts["file_switches"] < counts["functions"]
    assert counts["files"] <= counts["functions"]


def test_the_table_has_every_number(counts: Counts) -> None:
    lines = table(counts)
    assert len(lines) == len(ROWS) + 2
    assert lines[2] == f"| files at the root of the package | 46 | {counts['files_at_root']} |"
    assert {key for _, key in ROWS} <= json.loads(BEFORE.read_text(encoding="utf-8")).keys()


def test_the_picture_is_the_same_for_the_same_numbers(counts: Counts, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        picture.draw(counts["rooms"], counts["edges"], tmp_path / name)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert all(room.removeprefix("corefed_") in text for room, _, _ in counts["rooms"])
    assert picture.DOWN[0] in text


def test_the_picture_shows_an_import_that_goes_up(tmp_path: Path) -> None:
    picture.draw([("top", 1, 2), ("low", 1, 2)], [("low", "top", 3)], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert picture.UP[0] in text and picture.WRONG in text


EDGES = {("a", "b"): 2, ("b", "c"): 1, ("c", "a"): 1, ("d", "a"): 5, ("e", "f"): 1, ("f", "e"): 1}


def test_cycles_and_upward_imports_are_found() -> None:
    assert probe.cycles(EDGES) == [{"a", "b", "c"}, {"e", "f"}]
    assert probe.cycles({("a", "b"): 2, ("b", "c"): 1, ("a", "c"): 1}) == []
    assert probe.upward({("a", "b"): 2, ("c", "a"): 3, ("a", "root"): 1}, ["a", "b", "c"]) == 3


def test_switches_are_changes_along_the_calls() -> None:
    assert probe._changes(["a", "a", "b", "a"]) == 2
    assert probe._changes([]) == 0


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be counted"):
        count(tmp_path)
    page = str(tmp_path / "none.md")
    ended = subprocess.run(
        [sys.executable, "-m", "corefed_studies.house", "--page", page],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr == f"error: Cannot read {page}: No such file or directory.\n"
