"""`make same`: what is the same is called so, and a change of the last digit is seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import run_cases
import same
import torch

CASE = "methods/fedavg"
CHANGE = """
import sys

sys.argv = [word.replace("learning_rate=0.05", "learning_rate=0.0500001") for word in sys.argv]
"""
UNKNOWN = """
import sys

if any(word.startswith("rounds=") for word in sys.argv):
    sys.exit("error: There is no setting 'rounds' (--set rounds=2) in a fedavg run.")
"""


def changed(folder: Path, start: str) -> Path:
    """A copy of this tree whose program begins with these lines."""
    shutil.copytree(same.TREE / "src/corefed", folder / "src/corefed")
    shutil.copytree(same.TREE / "tests/golden", folder / "tests/golden")
    program = folder / "src/corefed/__main__.py"
    program.write_text(start + program.read_text())
    return folder


@pytest.fixture
def repository() -> None:
    if same.git("rev-parse", "HEAD").returncode != 0:
        pytest.skip("this is no git repository")


@pytest.mark.usefixtures("repository")
def test_a_tree_is_the_same_as_its_commit(capfd: pytest.CaptureFixture[str]) -> None:
    assert same.compare({"one": same.TREE, "other": same.TREE}, CASE, 1) == 0
    assert f"{CASE}: the same\n" in capfd.readouterr().out
    with same.worktree("HEAD") as place:
        assert (place / "src/corefed/__init__.py").exists()
        assert str(place) in same.git("worktree", "list").stdout
    assert not place.exists() and str(place) not in same.git("worktree", "list").stdout


def test_a_change_is_seen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trees = {"before": same.TREE, "after": changed(tmp_path, CHANGE)}
    assert same.compare(trees, CASE, 1) == 1
    said = capfd.readouterr().out
    assert "values differ, by at most" in said and "rounds/examples" not in said
    assert "0 of 1 cases are the same to the bit" in said


def test_a_setting_that_one_side_does_not_know_is_left_out_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    same.compare({"before": changed(tmp_path, UNKNOWN), "after": same.TREE}, CASE, 1)
    assert f"{CASE}: without rounds in before, which does not know it" in capfd.readouterr().out


def test_a_case_that_fails_is_not_the_same() -> None:
    failed = {"left_out": [], "failed": "RuntimeError: no"}
    _, differing = same.judge({"a": failed, "b": {"left_out": [], "fields": {}}})
    assert differing == ["not compared, a fails: RuntimeError: no"]


def test_differences_are_named() -> None:
    ones = torch.ones(3)
    assert same.difference(ones, ones.clone()) == ""
    assert same.difference([1.0, float("nan")], [1.0, float("nan")]) == ""
    said = same.difference(ones, torch.tensor([1.0, 1.0, 1.5]))
    assert said == "1 of 3 values differ, by at most 0.5, 0.5 of the largest"
    assert same.difference(torch.tensor(0.0), torch.tensor(-0.0)) != ""  # bits, not values
    assert same.difference(ones, ones.double()) == "torch.float32 [3] -> torch.float64 [3]"
    assert same.difference("a", "b") == "a -> b"


def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert same.main(["HEAD", "--cases", "no such"]) == 2
    assert same.main(["no-such-commit"]) == 2
    assert "no golden case has 'no such' in its name" in capsys.readouterr().err
    assert [run_cases.name_of(case) for case in run_cases.chosen("resume-fed")] == [
        "others/resume-fedavg"
    ]
