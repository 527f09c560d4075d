"""`corefed bench newcomers`: a row per set and number of points, with differences in pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import corefed

from corefed_studies.bench import newcomers


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "ROUNDS", 2)
    monkeypatch.setattr(newcomers, "SIZES", (5,))
    sets = ("breast cancer, by texture", "diabetes, by blood pressure")
    monkeypatch.setitem(newcomers.SETS, "quick", sets)
    monkeypatch.setitem(newcomers.SEEDS, "quick", (0,))
    done = corefed("bench", "newcomers", "--scale=quick", "--device=cpu", "--out", tmp_path)
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "bench-newcomers-cpu.json").read_text())
    assert [(row["data"], row["points"], row["newcomers"]) for row in rows] == [
        (name, 5, 2) for name in sets
    ]
    for row in rows:
        assert row["kept NLL"] - row["shared NLL"] == pytest.approx(row["kept - shared"])
        assert 0 <= row["share"] <= 1
