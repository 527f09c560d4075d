"""`corefed reproduce newcomer`: measured, resumed, tabulated; the page shows its result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import corefed

from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.training import newcomers
from corefed_studies import pages
from corefed_studies.reproduce import newcomer, results

ROOT = Path(__file__).parents[2]


def test_a_small_study_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = newcomer.flags("quick")
    small = {**full["digits"], "rounds": 1, "local_steps": 2, "seeds": (0,), "hidden": (8,)}
    monkeypatch.setattr(newcomer, "flags", lambda scale: {"digits": small})
    monkeypatch.setattr(newcomer, "SIZES", (5,))
    monkeypatch.setattr(newcomer, "ALONE_STEPS", 3)
    monkeypatch.setattr(newcomers, "STEPS", 3)
    assert corefed("reproduce", "newcomer", "--out", tmp_path).code == 0
    found = results.read(tmp_path / "newcomer.json", "newcomer")
    rows = {(row, column) for row in newcomer.ROWS for column in ("digits 5", "digits 75")}
    assert set(found) == rows
    assert all(result["newcomers"] == 2 for result in found.values())
    text = (tmp_path / "newcomer.md").read_text()
    assert "| own points | 5 | 75 |" in text
    assert (tmp_path / "newcomer.png").stat().st_size > 10_000

    lines = (tmp_path / "digits-newcomers.jsonl").read_text().splitlines()
    cut = [line for line in lines if json.loads(line)["client"] == 8]
    (tmp_path / "digits-newcomers.jsonl").write_text("\n".join(cut) + "\n")
    asked: list[int] = []
    ways = newcomer.ways
    monkeypatch.setattr(newcomer, "ways", lambda *a: (asked.append(1), ways(*a))[1])
    assert corefed("reproduce", "newcomer", "--out", tmp_path).code == 0
    assert len(asked) == 2  # client 9 alone, with 5 and 75 points
    again = results.read(tmp_path / "newcomer.json", "newcomer")
    for key, result in found.items():
        for metric in ("accuracy", "nll"):
            assert again[key]["metrics"][metric] == result["metrics"][metric]


def test_logistic_regression_knows_what_it_has_not_seen() -> None:
    """Classes without a point have probability 0; one class alone is certain."""
    x = torch.tensor([[[0.0], [0.1], [0.9], [1.0]]])
    data = ClientData(x, torch.tensor([[1, 1, 3, 3]]), torch.ones(1, 4))
    there = FederatedData(data, data, 5, 0, ["a"])
    assert newcomer.logistic(there)["accuracy"] == 1.0
    only = data._replace(y=torch.ones(1, 4, dtype=torch.int64))
    assert newcomer.logistic(there._replace(train=only))["accuracy"] == 0.5


def test_the_page_shows_the_result_file() -> None:
    found = results.read(ROOT / "results" / "newcomer.json", "newcomer")
    text = pages.markdown(newcomer.make_tables(found))
    part = pages.Marked(ROOT / "docs" / "newcomers-study.md", "newcomer").part
    assert part.strip() == text.strip()
