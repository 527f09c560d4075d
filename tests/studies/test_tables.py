"""Tables 1 to 3: cells trained and kept, result files, what the pages say, and figures by hand."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import corefed
from rich.console import Console

from corefed.base.errors import UserError
from corefed.methods.registry import METHODS
from corefed.settings.config import resolve
from corefed.training import record, summaries
from corefed_studies import pages
from corefed_studies.reproduce import cells, paper, results, table1, table2, table3
from corefed_studies.reproduce.cells import Flags, StudyCell

QUIET = Console(quiet=True)
SMALL: Flags = {
    "data": "digits", "rounds": 3, "local_steps": 2, "clients": 4, "hidden": (8,), "seeds": (0, 1),
    "evaluate_every": 1, "evaluate_draws": 2, "checkpoint_every": 1, "device": "cpu",
}  # fmt: skip
IN_THE_PAPER = {
    "coreset-pfedbayes", "pfedbayes", "random-subset", "fedavg", "pfedme", "per-fedavg", "bnfed",
    "independent", "submodular-logdet", "submodular-dispsum", "submodular-dispmin",
}  # fmt: skip


def small(row: str, **flags: object) -> StudyCell:
    return StudyCell(row, "digits", {**SMALL, **flags})


TWO = [small("Full", method="pfedbayes"), small("Plain", method="fedavg")]


# Cells


def test_side_by_side_is_one_after_the_other(tmp_path: Path) -> None:
    serial = cells.outcomes(TWO, tmp_path / "serial", QUIET, jobs=1)
    parallel = cells.outcomes(TWO, tmp_path / "parallel", QUIET, jobs=2)
    assert list(serial) == list(parallel) == [("Full", "digits"), ("Plain", "digits")]
    for key, outcome in serial.items():
        assert outcome.summary["metrics"] == parallel[key].summary["metrics"]


def test_finished_cells_are_read_and_begun_ones_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cells.outcomes(TWO, tmp_path / "whole", QUIET, jobs=1)
    cut = tmp_path / "cut"
    cells.outcomes(TWO[:1], cut, QUIET, jobs=1)
    begun = cells.place_of(TWO[1], cut)
    cells.train(small("Plain", method="fedavg", rounds=1, planned_rounds=SMALL["rounds"]), cut)
    (begun / record.SUMMARY).unlink()
    asked: list[Path] = []
    train = cells.rounds.train
    monkeypatch.setattr(
        cells.rounds,
        "train",
        lambda experiment, out, **rest: (asked.append(out), train(experiment, out, **rest))[1],
    )
    found = cells.outcomes(TWO, cut, QUIET, jobs=1)
    assert asked == [begun]
    assert (
        found["Plain", "digits"].summary["metrics"] == whole["Plain", "digits"].summary["metrics"]
    )


def test_a_cell_that_fails_leaves_the_others(tmp_path: Path) -> None:
    diverges = small("Wild", method="fedavg", learning_rate=1e30)
    found = cells.outcomes([diverges, *TWO[1:]], tmp_path, QUIET, jobs=1)
    assert "diverged" in found["Wild", "digits"].failure
    assert found["Plain", "digits"].summary["rounds"] == 3
    laid = table1.make_tables(results.keep(found))
    assert ["Wild", *["failed"] * 9] in laid[0].rows
    assert "diverged" in laid[0].note


def test_a_cell_of_other_settings_is_refused(tmp_path: Path) -> None:
    cells.outcomes(TWO[1:], tmp_path, QUIET, jobs=1)
    other = [small("Plain", method="fedavg", learning_rate=0.5)]
    with pytest.raises(UserError, match=r"learning_rate \(0.07 there, 0.5 here\)"):
        cells.outcomes(other, tmp_path, QUIET, jobs=1)


@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_every_cell_is_a_valid_experiment(scale: str) -> None:
    every = [*table1.cells(scale), *table2.cells(scale), *table3.cells(scale)]
    for cell in every:
        resolve(flags=cell.flags)
    assert {str(cell.flags["method"]) for cell in every} == IN_THE_PAPER <= set(METHODS)
    for table in (table1, table2, table3):
        mine = list(table.cells(scale))
        places = {cells.place_of(cell, Path()) for cell in mine}
        assert len(places) == len({(cell.row, cell.column) for cell in mine}) == len(mine)


def test_table_3_shares_its_runs_with_table_1() -> None:
    ours = {(c.row, c.column): c.flags for c in table1.cells("paper")}
    shared = [c for c in table3.cells("paper") if (c.row, c.column) in ours]
    assert {c.row for c in shared} == {"PFedBayes", "Random 50 %", "CoreSet 50 %", "CoreSet 10 %"}
    assert all(ours[c.row, c.column] == c.flags for c in shared)


def test_printed_figures_belong_to_rows_that_exist() -> None:
    one = {(c.row, c.column) for c in table1.cells("paper")} | {
        (row, "cifar10") for row in ("BNFed", "BNFed, 50 %")
    }
    assert set(paper.TABLE_1) <= one
    assert set(paper.TABLE_2) <= set(table2.ROWS)
    assert set(paper.TABLE_3) == {(c.row, c.column) for c in table3.cells("paper")}


# Result files


def made(accuracies: dict[str, list[list[float]]], classes: bool = False) -> results.Results:
    """Results with a personal learning curve by row: [round][seed]; bytes grow by 2 MiB a round."""
    found: results.Results = {}
    for row, curve in accuracies.items():
        last = summaries.over_seeds(curve[-1])
        rounds = list(range(1, len(curve) + 1))
        labels = {"normal": last, "virus": last}
        found[row, "mnist"] = {
            "method": "m", "data": "mnist", "partition": "p", "clients": 2, "rounds": len(curve),
            "seeds": list(range(len(curve[0]))), "config": {"local_steps": 20},
            "metrics": {
                "personal_accuracy": last, "personal_nll": summaries.over_seeds([0.5, 0.5])
            },
            "classes": {"personal": labels, "global": labels} if classes else {},
            "cost": {"seconds": 30.0, "evaluate_seconds": 30.0},
            "environment": {"device": "a GPU", "torch": "2"},
            "curve": {
                "round": rounds, "personal_accuracy": curve,
                "bytes": [2 * 2**20 * r for r in rounds], "examples": [100.0 * r for r in rounds],
            },
        }  # fmt: skip
    return found


def test_a_result_file_gives_back_what_was_written(tmp_path: Path) -> None:
    found = made({"PFedBayes": [[0.5, 0.6], [0.912345678, 0.9]]})
    found["Wild", "mnist"] = {"failure": "Training diverged."}
    path = tmp_path / "table1.json"
    results.write(path, "table1", "paper", found)
    again = results.read(path, "table1")
    assert list(again) == list(found)
    assert again["Wild", "mnist"] == {"failure": "Training diverged."}
    per_seed = again["PFedBayes", "mnist"]["metrics"]["personal_accuracy"]["per_seed"]
    assert per_seed == [0.91235, 0.9]
    assert len(path.read_text().splitlines()) == 4  # a cell a line
    results.write(tmp_path / "again.json", "table1", "paper", again)
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not a result"), ("[]", "not a result"), ('{"schema": 1}', "not a result"),
     ('{"schema": 1, "name": "table2", "cells": []}', "holds table2")],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=words):
        results.read(tmp_path / "x.json", "table1")
    with pytest.raises(UserError, match="Cannot read"):
        results.read(tmp_path / "missing.json", "table1")


def test_curves_add_up_what_was_sent_and_seen() -> None:
    lines = [
        {"round": r, "bytes_up": [10, 30], "bytes_down": [1, 3], "examples": [5, 7], "seconds": 2.0}
        for r in (1, 2, 3)
    ]
    for r in (1, 2):
        lines[r]["metrics"] = {"personal_accuracy": [0.1, 0.2], "personal_nll": [1.0, 1.0]}
    assert results.curve(lines) == {
        "round": [2, 3], "bytes": [44.0, 66.0], "examples": [12.0, 18.0], "seconds": [4.0, 6.0],
        "personal_accuracy": [[0.1, 0.2]] * 2,
    }  # fmt: skip


def test_paired_differences_by_hand() -> None:
    """Gaps 1, 2, 3 points: mean 2, t = 2 / (1 / sqrt 3), p of |t| with 2 degrees of freedom."""
    t = 2 * math.sqrt(3)
    p = 1 - t / math.sqrt(2 + t * t)  # two-sided, closed form for 2 degrees of freedom
    assert results.against([0.91, 0.92, 0.93], [0.9, 0.9, 0.9]) == f"+2.00 (p {p:.3f})"
    assert results.against([0.9, 0.9], [0.9, 0.9]) == "+0.00"
    assert results.against([0.8], [0.9]) == "-10.00"
    assert results.against([], [0.9]) == results.against([0.1], [0.1, 0.2]) == "-"


# What the tables say


def test_table_1_shows_the_paper_ours_and_the_difference() -> None:
    found = made({"CoreSet 50 %": [[0.95, 0.97]], "PFedBayes": [[0.94, 0.98]]})
    (table,) = table1.make_tables(found)
    rows = {row[0]: dict(zip(table.columns[1:4], row[1:4], strict=True)) for row in table.rows}
    assert rows["CoreSet 50 %"] == {
        "personal: paper": "92.48", "ours": "96.00 ± 1.41", "difference": "+3.52",
    }  # fmt: skip
    assert rows["PFedBayes"]["difference"] == "-2.79"
    assert table.rows[1][8] == "+0.00 (p 1.000)"
    assert "a GPU, torch 2 (2 minutes)" in table.note
    found["PFedBayes", "mnist"]["rounds"] = 7
    assert "CoreSet 50 %: 1 rounds." in table1.make_tables(found)[0].note


def test_table_2_is_by_class_of_both_models() -> None:
    found = made({"CoreSet 50 %": [[0.9, 0.8]], "FedAvg": [[0.7, 0.9]]}, classes=True)
    for result in found.values():
        result["metrics"]["global_accuracy"] = result["metrics"]["personal_accuracy"]
    shared, own = table2.make_tables(found)
    assert list(shared.columns[:4]) == ["", "normal", "virus", "all"]
    assert shared.rows[0][:4] == ["CoreSet 50 %", *["85.00 ± 7.07"] * 3]
    assert shared.rows[1][-3:] == ["91.4", "92.4", "89.8"]
    assert "global" in shared.title and "personal" in own.title


def test_table_3_reads_rounds_and_bytes_off_the_curve() -> None:
    found = made({
        "PFedBayes": [[0.5, 0.5], [0.8, 0.995], [1.0, 1.0]],
        "CoreSet 10 %": [[0.991, 0.2], [0.1, 0.99], [0.3, 0.3]],
        "CoreSet 30 %": [[0.1, 0.1], [0.1, 0.1], [0.1, 0.995]],
        "CoreSet 15 %": [[0.1, 0.1], [0.1, 0.1], [0.1, 0.1]],
    })  # fmt: skip
    assert table3.target(found, "mnist") == pytest.approx(0.99)
    assert table3.reached(found["PFedBayes", "mnist"], 0.99, "round") == [3, 2]
    (table,) = table3.make_tables(found)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["PFedBayes"][3:] == ["2 ± 1", "1.00", "2.5 ± 0.7", "250 ± 71"]
    assert rows["CoreSet 10 %"][:2] == ["85.43", "32"]
    assert rows["CoreSet 10 %"][3:6] == ["2 ± 1", "0.60", "1.5 ± 0.7"]
    assert rows["CoreSet 30 %"][3:5] == ["3 ± 0 (1 of 2 seeds)", "-"]
    assert rows["CoreSet 15 %"][3] == "not reached"


def test_figure_5_is_drawn_from_a_result_file(tmp_path: Path) -> None:
    found = made({"PFedBayes": [[0.5], [0.9]], "CoreSet 10 %": [[0.4], [0.8]]})
    results.write(tmp_path / "t.json", "table3", "paper", found)
    done = corefed("reproduce", "figure5", "--from", tmp_path / "t.json", "--out", tmp_path / "o")
    assert done.code == 0, done.err
    assert (tmp_path / "o" / "figure5.png").stat().st_size > 5000


# What is committed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["table1", "table2", "table3"])
def test_the_documentation_shows_the_committed_results(name: str) -> None:
    module = {"table1": table1, "table2": table2, "table3": table3}[name]
    found = results.read(ROOT / "results" / f"{name}.json", name)
    shown = pages.Marked(ROOT / "docs" / "results-study.md", name).part
    assert shown == "\n" + pages.markdown(module.make_tables(found))
    assert (ROOT / "results" / f"{name}.json").stat().st_size < 500_000
    assert all({"torch", "device"} <= set(cell["environment"]) for cell in found.values())


# Pages


class Text(HTMLParser):
    """Tags must nest, and the text of cells comes back."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_web_page_nests_and_escapes() -> None:
    table = pages.Table("a < b", ["", "x & y"], [["<script>", "+1.0"], ["r", "-2"]], "note <i>")
    reader = Text()
    page = pages.web("t", [table])
    reader.feed(page)
    assert reader.open == [] and "<script>" not in page and "http" not in page
    assert reader.cells == ["x & y", "<script>", "+1.0", "r", "-2"]
    assert 'class="up">+1.0' in page and 'class="down">-2' in page


def test_a_table_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table1, "cells", lambda scale: iter(TWO))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table1: begin -->\n<!-- table1: end -->\nafter\n")
    out = tmp_path / "out"
    done = corefed("reproduce", "table1", "--jobs=1", "--out", out, "--page", page)
    assert done.code == 0, done.err
    text = (out / "table1.md").read_text()
    assert (
        page.read_text() == f"before\n<!-- table1: begin -->\n{text}<!-- table1: end -->\nafter\n"
    )
    assert "| Full |" in text and "| Plain |" in text
    assert "<td" in (out / "table1.html").read_text()
    again = tmp_path / "again"
    done = corefed("reproduce", "table1", "--from", out / "table1.json", "--out", again)
    assert done.code == 0, done.err
    assert (again / "table1.md").read_text() == text
    assert json.loads((out / "table1.json").read_text())["scale"] == "quick"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["table1", "--jobs=0"], "--jobs is 0"), (["grid", "--jobs=2"], "--jobs is for table1"),
     (["table1", "--data=x"], "--data is for table2, figure2"),
     (["table1", "--from=missing.json"], "Cannot read missing.json"),
     (["table3", "--page=missing.md"], "Cannot read missing.md"),
     (["figure9"], "There is no table or figure 'figure9'")],
)  # fmt: skip
def test_mistakes_are_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = corefed("reproduce", *arguments, "--out", tmp_path / "out")
    assert done.code == 2 and words in done.err and len(done.err.splitlines()) == 1
