"""A search for people, from made-up reports."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from corefed import UserError
from corefed.show import tuning

REPORT: dict[str, Any] = {
    "method": "pfedbayes",
    "data": "digits",
    "validation_points": 1500,
    "given": "the defaults",
    "space": [
        {"name": "eta_1", "log": True, "values": []},
        {"name": "optimizer", "log": False, "values": ["adam", "sgd"]},
    ],
    "candidates": [
        {"number": 2, "settings": {"eta_1": 0.01, "optimizer": "adam"}, "outcome": "finished",
         "round": 4, "score": 0.13, "nll": 0.1234, "accuracy": 0.975},
        {"number": 0, "settings": {"eta_1": 0.004, "optimizer": "adam"}, "outcome": "finished",
         "round": 4, "score": 0.21, "nll": 0.2, "accuracy": 0.97},
        {"number": 1, "settings": {"eta_1": 0.02, "optimizer": "sgd"}, "outcome": "dropped",
         "round": 1, "score": 0.91, "nll": 0.9, "accuracy": 0.5},
        {"number": 3, "settings": {"eta_1": 0.5, "optimizer": "sgd"}, "outcome": "diverged",
         "round": 3},
    ],
    "chosen": {"number": 2, "settings": {"eta_1": 0.01, "optimizer": "adam"}, "best": 2,
               "difference": -0.0766, "standard_error": 0.01},
    "cost": {"seconds": 61.2, "passes": 1e6, "runs": 8.75},
}  # fmt: skip


def changed(**chosen: Any) -> dict[str, Any]:
    report = copy.deepcopy(REPORT)
    report["chosen"] |= chosen
    return report


def test_table() -> None:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(tuning.table(REPORT))
    lines = [line.strip() for line in capture.get().splitlines()]
    assert "4 candidates on 1,500 validation points" in " ".join(lines[:2])
    found = [line.split() for line in lines if "0." in line]
    assert found == [
        ["chosen", "0.01", "adam", "4", "0.1300", "0.1234", "97.50"],
        ["defaults", "0.004", "adam", "4", "0.2100", "0.2000", "97.00"],
        ["0.02", "sgd", "1,", "dropped", "0.9100", "0.9000", "50.00"],
        ["0.5", "sgd", "diverged", "in", "3", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (
            {},
            "Chose eta_1=0.01, optimizer=adam (validation NLL 0.1234). With the defaults it is "
            "0.2000; the score is lower by 0.0766 ± 0.0100 (± one standard error over 1,500 "
            "points).",
        ),
        (
            {"number": 0, "difference": -0.002, "standard_error": 0.01},
            "Kept the defaults (validation NLL 0.2000): the best candidate, eta_1=0.01, "
            "optimizer=adam (validation NLL 0.1234), has a score that is lower by 0.0020 ± 0.0100. "
            "More than two standard errors are needed, otherwise it may be chance.",
        ),
        (
            {"number": 0, "best": 0, "difference": None},
            "Kept the defaults: no candidate has a lower score on the validation points.",
        ),
        (
            {"difference": None},
            "Chose eta_1=0.01, optimizer=adam (validation NLL 0.1234); the defaults diverged.",
        ),
    ],
)
def test_conclusion(chosen: dict[str, Any], words: str) -> None:
    assert tuning.conclusion(changed(**chosen)) == words


def test_sentences() -> None:
    _, cost, command = tuning.sentences(REPORT, Path("runs/my search"))
    assert "61 s, and the passes of 8.8 runs" in cost
    assert command.endswith("corefed run --config 'runs/my search/experiment.toml'")


def test_picture(tmp_path: Path) -> None:
    tuning.picture(REPORT, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    negative = copy.deepcopy(REPORT)
    negative["candidates"][0]["score"] = -1.0  # of a regression
    tuning.picture(negative, tmp_path / "q.png")
    with pytest.raises(UserError, match="Cannot write the picture"):
        tuning.picture(REPORT, tmp_path / "none" / "p.png")
