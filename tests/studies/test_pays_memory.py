"""`corefed bench pays --parts memory` and `deadlines`: rows are kept and shown; one is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corefed_studies import bench
from corefed_studies.bench import deadlines, isolated, pays_memory

MARKS = "a\n<!-- bench {0}: begin -->\n<!-- bench {0}: end -->\nb\n"


def made(module: str, *words: str, **_: object) -> dict[str, Any]:
    """What a process would measure; no table fits but as a coreset."""
    _, data, _, run, _ = words
    if data == "table" and run.startswith("all"):
        return {"fits": False, "cpu s": 1.0, "peak MB": 9.0}
    return {
        "fits": True, "cpu s": 3.0, "peak MB": 50.0, "points": 80, "resident": 8, "read": 100,
        "read s": 4.0 if run == pays_memory.ALL else 0.5, "accuracy": 0.9,
    }  # fmt: skip


def test_rows_are_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pays_memory, "make", lambda data, path, count: None)
    monkeypatch.setattr(isolated, "measure", made)
    page = tmp_path / "page.md"
    page.write_text(MARKS.format("pays memory"))
    bench.main("pays", scale="quick", out=tmp_path / "out", page=page, parts=("memory",))
    kept = json.loads((tmp_path / "out" / "pays.json").read_text())["memory"]
    assert len(kept) == len(list(pays_memory.jobs(pays_memory.SCALES["quick"])))
    shown = page.read_text()
    assert (
        "| images | 100 | coreset, streamed | 8 | 0.100 | 50 |  | 100 | 0.5 | 8.0x | 3 |" in shown
    )
    assert "| table | 4,000 | all, in memory | does not fit |" in shown

    def never(*_: object, **__: object) -> dict[str, Any]:
        raise AssertionError("measured again")

    monkeypatch.setattr(isolated, "measure", never)
    bench.main("pays", scale="quick", out=tmp_path / "out", page=page, parts=("memory",))
    assert page.read_text() == shown


@pytest.mark.parametrize("data", pays_memory.FEATURES)
def test_a_file_is_measured_in_a_process_of_its_own(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(size: pays_memory.Scale) -> Iterator[tuple[str, int, str]]:
        yield data, 1_000, "coreset, streamed"

    monkeypatch.setattr(pays_memory, "jobs", one)
    bench.main("pays", scale="quick", out=tmp_path, parts=("memory",))
    (row,) = json.loads((tmp_path / "pays.json").read_text())["memory"]
    assert row["fits"] and 700 < row["points"] < 900
    assert 0 < row["resident"] < row["points"] <= row["read"]
    assert row["peak MB"] > 0


def test_deadlines_are_a_part_and_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []

    def compare(name: str, setting: object, waited: object) -> dict[str, Any]:
        calls.append((name, waited is None))
        return {
            "rival": name, "batch": 10, "time": [4.0 if name == "wait" else 2.0],
            "personal": [0.9], "global": [0.8], "seconds": [5.0],
        }  # fmt: skip

    monkeypatch.setattr(deadlines, "compare", compare)
    page = tmp_path / "page.md"
    page.write_text(MARKS.format("deadlines"))
    bench.main("deadlines", scale="quick", out=tmp_path / "alone", page=page)
    assert "| coreset | 10 | 2 | 2x (2 to 2) | 1 of 1 |" in page.read_text()
    assert calls == [(name, name == "wait") for name in deadlines.RIVALS]
    bench.main("deadlines", scale="quick", out=tmp_path / "alone")
    assert len(calls) == len(deadlines.RIVALS)  # nothing is measured again
    bench.main("pays", scale="quick", out=tmp_path / "part", parts=("deadlines",))
    alone = json.loads((tmp_path / "alone" / "deadlines.json").read_text())["rows"]
    assert json.loads((tmp_path / "part" / "pays.json").read_text())["deadlines"] == alone
