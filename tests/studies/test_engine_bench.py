"""`corefed bench engine` and `corefed bench pfl`: what they write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corefed

from corefed.data.dataset import Dataset
from corefed_studies import pages
from corefed_studies.bench import (
    engine,
    engine_rounds,
    engine_runs,
    engine_tables,
    isolated,
    pfl,
    timed,
)
from corefed_studies.bench.engine_settings import QUICK, SETTINGS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
CPU = torch.device("cpu")


def marked_page(folder: Path, name: str) -> Path:
    page = folder / "page.md"
    page.write_text(
        f"above\n<!-- bench {name}: begin -->\nto be replaced\n<!-- bench {name}: end -->\nbelow\n"
    )
    return page


# --- engine ---------------------------------------------------------------------------------------


def test_engine_measures_every_part_and_its_file_makes_the_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_runs, "has_mnist", lambda: False)
    page, out = marked_page(tmp_path, "engine"), tmp_path / "out"
    words = ("bench", "engine", "--device=cpu", "--scale=quick", f"--out={out}")
    done = corefed(*words, f"--page={page}")
    assert done.code == 0, done.err
    parts = json.loads((out / "engine-cpu.json").read_text())["parts"]
    assert list(parts) == list(engine_tables.PARTS)
    assert not [row for rows in parts.values() for row in rows if "failed" in row]
    assert [row["clients"] for row in parts["rounds"]] == [*QUICK.clients]
    for row in parts["rounds"]:
        assert row["best"] == "stacked" and row["times_best"]["stacked"] == 1
        assert {*row["seconds"]} == {"one by one", "stacked"}
    assert [row["what"] for row in parts["stacking"]] == [
        "10 clients of one run", "5 seeds of 2 clients", "5 settings of 2 clients",
    ]  # fmt: skip
    for row in parts["runs"]:
        assert row["rounds"] == QUICK.run_rounds and row["checkpoints"] >= 2
        spent = row["start"] + row["first"] + row["training"] + row["evaluation"]
        assert 0 < spent <= row["wall"] * 1.001  # numbers are rounded
    assert [row["clients"] for row in parts["many"]] == [QUICK.many_clients, QUICK.linear_clients]
    assert all(row["host_mb"] > 50 and row["folder_mb"] > 0 for row in parts["many"])
    assert [path.name for path in out.iterdir() if path.is_dir()] == []  # runs are removed
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "to be replaced" not in text
    assert text.count("CPU thread") == len(engine_tables.PARTS)
    again = marked_page(tmp_path, "engine")
    file = out / "engine-cpu.json"
    done = corefed("bench", "engine", "--from", file, "--page", again, "--out", tmp_path / "two")
    assert done.code == 0 and again.read_text() == text
    done = corefed(
        "bench", "engine", "--from", file, "--from", file, "--page", again, "--out", tmp_path / "x"
    )
    assert again.read_text().count("CPU thread") == 2 * len(engine_tables.PARTS)


def test_a_part_that_fails_is_a_row_that_says_so() -> None:
    def fail() -> dict[str, Any]:
        raise torch.OutOfMemoryError("no room\nand more")

    rows = engine.attempt("a round of 9 clients", fail)
    assert rows == [{"failed": "a round of 9 clients", "why": "no room"}]
    assert engine.attempt("x", lambda: iter([{"a": 1}])) == [{"a": 1}]
    for make in engine_tables.PARTS.values():
        (row,) = make(rows).rows
        assert row[:2] == ["a round of 9 clients", "failed: no room"]
        assert len(row) == len(make(rows).columns)


def test_the_fastest_runtime_is_that_of_the_nearest_number_of_clients() -> None:
    rows = [
        {"clients": 10, "best": "graph"},
        {"failed": "a round of 100 clients", "why": "no room"},
        {"clients": 1000, "best": "compiled"},
    ]
    assert engine.fastest(rows, 20) == "graph"
    assert engine.fastest(rows, 900) == "compiled"
    assert engine.fastest(rows[1:2], 900) == "stacked"


def test_steps_that_were_not_compiled_are_not_measured_as_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*rest: object, **more: object) -> None:
        raise ValueError("a compiler that fails")

    monkeypatch.setattr("corefed.training.compiled.make_fx", fail)
    monkeypatch.setattr("corefed.training.compiling.missing_for", lambda device: "")
    why = "local steps could not be compiled"
    row = engine_rounds.rounds(CPU, QUICK._replace(compiled=True), 2)
    assert row["missing"] == {"compiled": why} and {*row["seconds"]} == {"one by one", "stacked"}
    assert engine_tables.rounds([row]).note.endswith(
        f"2 clients, compiled, could not be measured: {why}."
    )
    monkeypatch.setattr(engine_rounds, "ways", lambda device, setting: ["compiled"])
    (row,) = engine.attempt("rounds", lambda: engine_rounds.rounds(CPU, QUICK, 2))
    assert row == {"failed": "rounds", "why": f"compiled: {why}"}


def test_times_are_taken_in_turn_until_they_are_enough() -> None:
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = timed.in_turn(works, CPU, 3)
    assert calls == list("ababab") and [len(each) for each in found.values()] == [3, 3]
    calls.clear()
    timed.in_turn(works, CPU, 3, enough=0)
    assert calls == list("ab")


def test_peak_memory_is_that_of_the_process_itself() -> None:
    """Not of the one that started it, which has had 300 MB more."""
    mine = torch.ones(300 << 18)
    assert isolated.peak_mb() > mine.numel() * 4 / 2**20
    found = isolated.measure("corefed_studies.bench.isolated")
    assert found["peak_mb"] < 100


def test_paper_scale_has_the_sizes_of_the_aims() -> None:
    for setting in SETTINGS.values():
        assert setting.clients == (10, 100, 1000)
        assert (setting.many_clients, setting.many_cohort) == (10_000, 100)
        assert (setting.linear_clients, setting.run_rounds) == (100_000, 100)


# --- pfl ------------------------------------------------------------------------------------------

SMALL = pfl.PflSetting(
    clients=6, points=10, cohort=2, rounds=3, local_steps=2, batch_size=5, evaluate_every=2,
    channels=(2,), hidden=(4,),
)  # fmt: skip


def images() -> Dataset:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(78) % 3
    x = torch.rand(78, 3, 8, 8, generator=g) + y.view(-1, 1, 1, 1)
    return Dataset("images", x, y, 3, held_out=torch.arange(78) >= 66)


def test_pfl_trains_every_method_and_its_file_makes_the_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pfl, "read_points", images)
    monkeypatch.setitem(pfl.SETTINGS, "quick", SMALL)
    page, out = marked_page(tmp_path, "pfl"), tmp_path / "out"
    words = ("bench", "pfl", "--device=cpu", "--scale=quick", f"--out={out}", f"--page={page}")
    done = corefed(*words, "--rounds=4")
    assert done.code == 0, done.err
    rows = json.loads((out / "pfl.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [*pfl.METHODS]
    for row in rows:
        assert row["rounds"] == 4 and row["training"] + row["evaluation"] < row["wall"] * 1.001
        assert row["trainings_per_second"] > 0 and 0 <= row["accuracy"] <= 1
        assert row["weights"] == (27 + 1) * 2 + (2 * 16 + 1) * 4 + (4 + 1) * 3
    text = page.read_text()
    assert "6 clients, cohort 2, 4 rounds" in text and text.endswith("below\n")
    again = marked_page(tmp_path, "pfl")
    done = corefed(
        "bench", "pfl", "--from", out / "pfl.json", "--page", again, "--out", tmp_path / "two"
    )
    assert done.code == 0 and again.read_text() == text


def test_pfl_tests_the_shared_model_on_all_test_points_once() -> None:
    data = pfl.split(images(), SMALL)
    assert data.train.weight.shape == (6, 10) and bool(data.train.weight.all())
    setup = timed.make_setup(
        data, CPU, (0, 4, 3), method="fedavg", model="cnn", channels=(2,), scale="standard",
    )  # fmt: skip
    central = pfl.Central(setup)
    assert central.points.x.shape == (1, 12, 3, 8, 8)
    assert central.points.y.flatten().sort().values.tolist() == sorted([0, 1, 2] * 4)
    ours = central.evaluate(0, setup.servers)["metrics"]["global_accuracy"]
    by_clients = pfl.Simulation(setup).evaluate(0, setup.servers)["metrics"]["global_accuracy"]
    assert ours == pytest.approx(by_clients)


def test_pfl_needs_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREFED_DATA", str(tmp_path))
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))
    done = corefed("bench", "pfl", "--scale=quick", "--device=cpu", "--out", tmp_path / "out")
    assert done.code == 2 and "cifar10 is not at hand" in done.err
    assert not (tmp_path / "out").exists()


# --- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["engine", "pfl"])
def test_foreign_files_are_refused(name: str, tmp_path: Path) -> None:
    for content, message in (
        ("{", "is no result file"),
        ('{"schema": 1, "name": "other"}', f"is no result file of bench {name}"),
        (f'{{"schema": 1, "name": "{name}", "scale": "paper"}}', "it lacks machine"),
    ):
        (tmp_path / "x.json").write_text(content)
        out = tmp_path / "out"
        done = corefed("bench", name, "--from", tmp_path / "x.json", "--out", out)
        assert done.code == 2 and message in done.err
        assert not out.exists()


def test_options_of_others_are_refused(tmp_path: Path) -> None:
    for words, message in (
        (("engine", "--rounds=3"), "--rounds is for bench pfl"),
        (("pfl", "--rounds=0"), "--rounds is 0"),
        (("runtime", "--from=x.json"), "--from is for bench engine and pfl and"),
        (("defaults", "--from=x.json", "--from=y.json"), "takes one --from, not 2"),
    ):
        done = corefed("bench", *words, "--out", tmp_path / "out")
        assert done.code == 2 and message in done.err, done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "files"), [("engine", "engine-*.json"), ("pfl", "pfl*.json")])
def test_the_page_is_what_the_files_make_it(name: str, files: str, tmp_path: Path) -> None:
    found = sorted((ROOT / "results").glob(files), reverse=True)
    if not found:  # nothing was measured yet, and the page says nothing
        assert pages.Marked(PAGE, f"bench {name}").part.strip() == ""
        return
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    sources = [word for path in found for word in ("--from", str(path))]
    done = corefed("bench", name, *sources, "--page", copy, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
