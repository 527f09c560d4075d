"""`corefed bench tables`: what it makes, writes and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import corefed

from corefed.data import table
from corefed_studies import pages
from corefed_studies.bench import isolated, tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_have_the_rows_and_sites_they_should(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / f"t.{kind}"
    tables.make(tables.Table(kind, 2000, 4, 1.0, 1, 1), path)
    found = table.read(path, table.Settings("outcome", "site"), 1024)
    assert found.x.shape == (2000, 4)
    assert found.classes == 2
    assert 30 < len(found.group_names) <= tables.SITES


def test_it_writes_json_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    asked: list[tuple[str, ...]] = []

    def measure(module: str, *words: str, **rest: Any) -> dict[str, float]:
        asked.append(words)
        seconds = 6.0 if words[2] else 2.0
        return {"cpu s": seconds, "wall s": 7.0, "peak MB": 300.0, "import MB": 200.0}

    monkeypatch.setattr(isolated, "measure", measure)
    (tmp_path / "old" / "src" / "corefed").mkdir(parents=True)
    done = corefed(
        "bench", "tables", "--scale=quick", "--out", tmp_path / "out", "--from", tmp_path / "old"
    )
    assert done.code == 0, done.err
    assert [words[2] for words in asked] == ["", str(tmp_path / "old"), ""]
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "| 3,000 x 5, csv | differ | 1 | this checkout | 2.0 | 1 | 7.0 | 300 |" in text
    assert "| old | 6.0 | 3.00 |" in text
    assert (tmp_path / "out" / "tables.json").exists()


def test_mistakes_are_refused(tmp_path: Path) -> None:
    done = corefed("bench", "tables", "--device=cuda", "--out", tmp_path / "out")
    assert done.code == 2 and "measures a CPU" in done.err
    done = corefed("bench", "tables", "--from", tmp_path, "--out", tmp_path / "out")
    assert done.code == 2 and "no checkout" in done.err
    assert not (tmp_path / "out").exists()


def test_the_page_has_room_for_the_table() -> None:
    pages.Marked(ROOT / "docs" / "performance.md", "bench tables")
