"""The study of the leaders: equal budgets, cells that go on, and tables from a file alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corefed.base.errors import UserError
from corefed.data.partition import SPECS
from corefed.methods import registry
from corefed.settings.config import resolve
from corefed_studies import pages
from corefed_studies.leaders import (
    cells,
    overview,
    published,
    report,
    results,
    running,
    study,
)
from corefed_studies.leaders.cells import SHOWN, TUNED
from corefed_studies.leaders.rows import ALONE, ROWS, known_rows, row_of
from corefed_studies.leaders.settings import (
    CANDIDATES,
    PAPER,
    QUICK,
    STUDIES,
    TUNING_SEED,
    settings_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All quick settings, as `make test` has time for."""
    place = tmp_path_factory.mktemp("leaders")
    said: list[str] = []
    study.work(STUDIES, "quick", place, said.append, jobs=1, device="cpu")
    assert any("cells are done" in each for each in said)
    return place


def test_every_cell_has_its_two_parts(folder: Path) -> None:
    lines = results.read(folder / results.RESULT)
    for setting in QUICK:
        rows, _ = known_rows(setting)
        assert rows
        for row in rows:
            tuned, shown = (lines[setting.name, row.name, part] for part in (TUNED, SHOWN))
            assert tuned["candidates"] == setting.candidates
            assert tuned["nll"][1] <= tuned["nll"][0]
            kinds = shown["metrics"]
            assert kinds
            for metrics in kinds.values():
                assert {len(each) for each in metrics.values()} == {len(setting.seeds)}
            assert shown["cost"]["seconds"] > 0
    assert "global" not in lines["pfllib-digits", ALONE, SHOWN]["metrics"]
    assert "personal" not in lines["pfllib-digits", "fedavg", SHOWN]["metrics"]
    assert "personal" in lines["pfllib-digits", "fedavg-ft", SHOWN]["metrics"]


def test_a_second_call_trains_nothing_and_another_setting_is_not_mixed_up(folder: Path) -> None:
    before = (folder / results.LINES).read_text()
    said: list[str] = []
    study.work(("pfllib",), "quick", folder, said.append, jobs=1, device="cpu", show=False)
    assert (folder / results.LINES).read_text() == before
    assert "5 of 5 cells are on record" in said
    setting = QUICK[0]._replace(flags={**QUICK[0].flags, "rounds": 5})
    cell = setting, row_of(setting, "fedavg")
    lines = results.read_lines(folder / results.LINES)
    assert running.next_part(cell, lines) == (TUNED, {})


def test_time_that_is_over_starts_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    study.work(
        ("pfllib",), "quick", tmp_path, said.append, jobs=1, device="cpu", minutes=1e-9, show=False
    )
    assert not (tmp_path / results.LINES).exists()
    assert any(each.startswith("0 of 5 cells are done") for each in said)


def test_what_failed_is_tried_again_and_what_diverged_is_not() -> None:
    setting = QUICK[0]
    cell = setting, row_of(setting, "fedavg")
    lost = {**cells.identity(*cell, TUNED), "failure": "All 3 candidates diverged."}
    lines = {results.key_of(lost): lost}
    assert running.next_part(cell, lines) is None
    missing = {**lost, "failure": "There is no such file.", "again": True}
    assert running.next_part(cell, {results.key_of(missing): missing}) == (TUNED, {})


def test_a_mistake_in_a_cell_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(cells, "tune", broken)
    line = cells.work("quick", QUICK[0].name, "fedavg", TUNED, {}, "cpu")
    assert line["failure"] == "RuntimeError: out of memory"
    assert line["again"]


def test_tables_are_made_from_the_file_alone(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- leaders: begin -->\n<!-- leaders: end -->\nafter\n")
    study.work(
        ("pfllib",), "paper", tmp_path / "out", print, source=folder / results.RESULT, page=page
    )
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    for setting in QUICK:
        assert setting.title in text
    assert "| best |" in text
    assert " ± " in text
    assert "What the searches chose" in text
    assert (
        results.read(folder / results.LINES).keys() == results.read(folder / results.RESULT).keys()
    )


def test_a_line_that_was_cut_off_does_not_count(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / results.LINES
    whole = (folder / results.LINES).read_text().splitlines()
    path.write_text(whole[0] + "\n" + whole[1][:40])
    assert len(results.read_lines(path)) == 1
    path.write_text("no line at all\n")
    with pytest.raises(UserError, match="has no results of the leaders"):
        results.read(path)


def test_settings_are_what_they_say() -> None:
    assert {each.study for each in PAPER} == {each.study for each in QUICK} == set(STUDIES)
    for setting in (*PAPER, *QUICK):
        assert TUNING_SEED not in setting.seeds
        assert setting.flags["partition"] in SPECS
        assert 0 < setting.tuning_rounds <= setting.flags["rounds"]
        names = {row.name for row in ROWS}
        assert set(setting.rows) <= names
        assert not setting.rows or ALONE in setting.rows or setting in QUICK
        for row in known_rows(setting)[0]:
            flags = {k: v for k, v in setting.flags.items() if k != "data"}
            resolve(flags={**flags, **row.flags, "seeds": setting.seeds})
    assert all(each.candidates == CANDIDATES for each in PAPER if each.study != "cifar10")
    assert [each.name for each in settings_of("paper", ("cifar10",))] == ["cifar10-shards-large"]


def test_the_most_telling_cells_come_first() -> None:
    ranks = [row.rank for _, row in running.planned(PAPER)]
    assert ranks == sorted(ranks)
    assert running.planned(PAPER)[0][0] == PAPER[0]


def test_methods_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: entry for name, entry in registry.METHODS.items() if name != "pfedbayes"}
    monkeypatch.setattr(registry, "METHODS", known)
    rows, missing = known_rows(PAPER[0])
    assert "pfedbayes" in missing
    assert "fedavg" in [row.name for row in rows]


def test_published_figures_belong_to_settings_and_rows() -> None:
    known, rows = {each.name for each in PAPER}, {row.name for row in ROWS}
    assert set(published.FIGURES) == set(published.SOURCES)
    assert set(published.FIGURES) <= known
    for figures in published.FIGURES.values():
        assert set(figures) <= rows


def test_it_trains_with_torch_and_numpy_alone() -> None:
    """What a lent GPU has: no command line library, no tables, no plots."""
    code = (
        "import sys; import corefed_studies.leaders.__main__, corefed.training.rounds;"
        "print([m for m in ('typer', 'rich', 'sklearn', 'scipy', 'matplotlib', 'pandas', "
        "'safetensors', 'pooch', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no study 'pflib'"):
        study.check_studies(("pflib",))
    with pytest.raises(UserError, match="--minutes is 0"):
        study.work(("pfllib",), "quick", tmp_path, print, minutes=0)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"schema": 1, "name": "defaults"}))
    with pytest.raises(UserError, match="no result file of bench leaders"):
        results.read(other)


def test_the_page_has_its_marks() -> None:
    page = Path(__file__).parents[2] / "docs" / "leaders-study.md"
    assert page.read_text().count(f"<!-- {results.NAME}: begin -->") == 1
    assert report.tables({}) == []


@pytest.mark.parametrize(
    ("page", "mark", "tables"),
    [("leaders-study", results.NAME, report.tables), ("leaders", overview.MARK, overview.tables)],
)
def test_pages_show_the_result_file(page: str, mark: str, tables: Any) -> None:
    root = Path(__file__).parents[2]
    lines = results.read(root / "results" / "leaders.json")
    part = pages.Marked(root / "docs" / f"{page}.md", mark).part
    assert part.strip() == pages.markdown(tables(lines)).strip()


def test_all_settings_side_by_side() -> None:
    """Two settings: rows of both come first, those behind by less before the others."""

    def line(setting: str, row: str, kind: str, accuracy: float) -> dict[str, Any]:
        metrics = {"accuracy": [accuracy, accuracy + 0.02], "nll": [0.5, 0.7], "ece": [0.0, 0.0]}
        return {"setting": setting, "row": row, "part": SHOWN, "metrics": {kind: metrics}}

    told = [
        line("shards-mnist", "ditto", "personal", 0.95),
        line("shards-mnist", "pfedbayes", "personal", 0.96),
        line("chest-xray", "pfedbayes", "personal", 0.70),
        line("shards-mnist", "independent", "personal", 0.86),
        line("chest-xray", "independent", "personal", 0.74),
        line("niid-dir-cifar10", "fedavg", "global", 0.40),
    ]
    told[-1]["failure"] = "All 8 candidates diverged."
    lines = {results.key_of(each): each for each in told}
    personal, shared = overview.tables(lines)
    assert [row[0] for row in personal.rows] == ["pfedbayes", "independent", "ditto"]
    assert personal.rows[0][1:] == ("2.00", "71.00, 0.600", "97.00, 0.600")
    assert personal.rows[1][1] == "5.00" and personal.rows[2][1] == "-"
    assert personal.rows[2][2] == "-"
    assert shared.rows[1][0] == "MNIST, shards-medium"
    assert len(shared.rows) == 2 and set(shared.rows[0][1:]) == {"-"}
    assert overview.tables({}) == []


def test_seconds_on_another_device_say_so() -> None:
    def done(device: str) -> dict[str, Any]:
        metrics = {"accuracy": [0.5], "nll": [1.0], "ece": [0.1]}
        return {
            "metrics": {"personal": metrics}, "cost": {"seconds": 2.0, "bytes": 1e6},
            "environment": {"device": device, "torch": "2"},
        }  # fmt: skip

    name = PAPER[1].name
    lines = {(name, row, SHOWN): done(device) for row, device in
             (("ditto", "a GPU"), ("fedrep", "a GPU"), ("pfedme", "a CPU"))}  # fmt: skip
    table = report.tables(lines)[0]
    assert {row[0]: row[9] for row in table.rows} == {
        "ditto": "2.0", "fedrep": "2.0", "pfedme": "2.0 on a CPU",
    }  # fmt: skip


def test_training_that_diverges_is_repeated_with_smaller_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice it diverges; then the rates are a quarter, and the line says so."""
    setting = settings_of("quick", ("niid-bench",))[0]
    row = row_of(setting, "fedavg")
    rates: list[float] = []
    plain = cells.rounds.train

    def train(experiment: Any, **given: Any) -> Any:
        rates.append(experiment.settings.learning_rate)
        if len(rates) < 3:
            raise UserError("Training diverged: in round 1 the loss of seed 0 is nan.")
        return plain(experiment, **given)

    monkeypatch.setattr(cells.rounds, "train", train)
    line = cells.show(setting, row, {"chosen": {"learning_rate": 0.2}}, "cpu")
    assert rates == pytest.approx([0.2, 0.1, 0.05]) and line["rates"] == 0.25
    assert "fedavg (0.25)" in report._note(setting, {}, {"fedavg": line})
