"""A folder that is not empty is refused, in one sentence, wherever something is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corefed.base import files
from corefed.base.errors import UserError


def refused(folder: Path, among: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as error:
        files.refuse_existing(folder, "choose another --out", among=among)
    return str(error.value)


def test_new_and_empty_folders_will_do(tmp_path: Path) -> None:
    files.refuse_existing(tmp_path / "new", "choose another")
    files.refuse_existing(tmp_path, "choose another")


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    assert refused(tmp_path) == f"{tmp_path} is not empty, it has mine; choose another --out."
    file = tmp_path / "mine"
    assert refused(file) == f"{file} is a file; choose another --out."


def test_only_some_files_may_be_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.log").touch()
    files.refuse_existing(tmp_path, "choose another", among=("rounds.jsonl",))
    (tmp_path / "rounds.jsonl").touch()
    assert "it has rounds.jsonl" in refused(tmp_path, ("summary.json", "rounds.jsonl"))


def test_what_an_interrupted_attempt_left_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / f".weights{files.TEMPORARY}").touch()
    files.refuse_existing(tmp_path, "choose another")


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    assert "cannot be read: Permission denied; choose another --out." in refused(tmp_path)
