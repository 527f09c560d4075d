"""Locks: one process at a time in a folder, and who looks at a lock disturbs nobody."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from corefed.base import locks
from corefed.base.errors import UserError


def test_one_process_at_a_time(tmp_path: Path) -> None:
    taken = pytest.raises(UserError, match="Another process is at work")
    assert not locks.is_locked(tmp_path)
    assert not (tmp_path / locks.LOCK).exists()
    with locks.exclusively(tmp_path), taken, locks.exclusively(tmp_path):
        pass
    with locks.exclusively(tmp_path):
        assert locks.is_locked(tmp_path)
    assert not locks.is_locked(tmp_path)


def test_a_look_at_a_lock_neither_refuses_nor_ages_it(tmp_path: Path) -> None:
    with locks.exclusively(tmp_path):
        pass
    os.utime(tmp_path / locks.LOCK, (1.0, 1.0))
    assert not locks.is_locked(tmp_path)
    assert locks.locked_since(tmp_path) == 1.0
    handle = locks._take(tmp_path)  # as `is_locked` has it for a moment
    assert handle is not None
    threading.Timer(0.1, os.close, [handle]).start()
    with locks.exclusively(tmp_path):
        assert time.time() - locks.locked_since(tmp_path) < 60


def test_a_folder_that_is_made_is_gone_if_nothing_came_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with (
        locks.made_exclusively(path, "choose another"),
        pytest.raises(UserError, match="choose another"),
        locks.exclusively(path, "choose another"),
    ):
        pass
    assert not (tmp_path / "a").exists()
    with locks.made_exclusively(path, "choose another"):
        (path / "kept").touch()
    assert (path / "kept").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="Cannot write into"),
        locks.made_exclusively(tmp_path / "file" / "run", "choose another"),
    ):
        pass
