"""Folders of runs that were never trained and grow as a test wants."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from corefed.training import record

SETTINGS = """method = "coreset-pfedbayes"
data = "wards"
partition = "iid"
clients = 3
rounds = 4
seeds = [0, 1]
fraction = 0.1
"""
NOW = 1_000_000.0


def line(number: int, accuracy: float = 0.5, **more: Any) -> record.Line:
    """A round of two seeds that took 10 seconds, 2 of them for its evaluation."""
    return {
        "round": number, "loss": [1.0, 3.0], "examples": [400, 600], "bytes_up": [1500, 500],
        "bytes_down": [10, 20], "seconds": 8.0, "evaluate_seconds": 2.0, "peak_memory_mb": 1.0,
        "coreset": {"held_out_error": [0.2 / number, 0.4 / number]},
        "metrics": {"personal_accuracy": [accuracy, accuracy + 0.1], "global_accuracy": [0.3, 0.3]},
        **more,
    }  # fmt: skip


def write(folder: Path, *lines: record.Line, ago: float = 3.0) -> None:
    with (folder / record.ROUNDS).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)
    os.utime(folder / record.ROUNDS, (NOW - ago, NOW - ago))


def begin(folder: Path) -> Path:
    """A run that began 20 seconds ago and has no round yet."""
    folder.mkdir()
    (folder / record.EXPERIMENT).write_text(SETTINGS)
    os.utime(folder / record.EXPERIMENT, (NOW - 20, NOW - 20))
    return folder
