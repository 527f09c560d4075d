"""`corefed reproduce` and `corefed bench`: they run, go on where they were, and write."""

import json

import pytest
import torch
from commands import corefed

from corefed.coreset.solvers import SOLVERS
from corefed.settings.config import resolve
from corefed_studies import bench, reproduce
from corefed_studies.bench import runtime, solvers, timed
from corefed_studies.reproduce import cells as cells_
from corefed_studies.reproduce import figure3, figure4, shards, subsets


def test_shards_quick_writes_a_table_and_goes_on_where_it_was(tmp_path, monkeypatch):
    cells = [c for c in shards.cells("shards-medium", "quick") if "10 %" in c.row]
    for cell in cells:
        cell.flags["rounds"] = 1
    monkeypatch.setattr(shards, "cells", lambda partition, scale: iter(cells))
    reproduce.main("shards-medium", "quick", tmp_path)
    table = (tmp_path / "shards-medium.md").read_text()
    assert "| coreset 10 % |" in table
    assert "| random 10 % redrawn |" in table

    def refuse(*arguments, **options):
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(cells_.rounds, "train", refuse)
    reproduce.main("shards-medium", "quick", tmp_path)
    assert (tmp_path / "shards-medium.md").read_text() == table


def test_grid_names_the_worst_gap(tmp_path, monkeypatch):
    cells = list(subsets.grid("quick"))[:2]
    for cell in cells:
        cell.flags["rounds"] = 1
    monkeypatch.setattr(subsets, "grid", lambda scale: iter(cells))
    reproduce.main("grid", "quick", tmp_path)
    assert "points, at fraction 0.1" in (tmp_path / "grid.md").read_text()


def test_grid_spans_what_the_rule_promises():
    flags = [cell.flags for cell in subsets.grid("paper")]
    assert {0.01, 1.0} <= {f["fraction"] for f in flags}
    assert {1, 300} <= {f["local_steps"] for f in flags}
    for f in flags:
        resolve(flags=f)  # every cell is a valid experiment


def test_divergence_of_equal_runs_is_zero_and_of_subsets_positive():
    common = {"data": "digits", "rounds": 2, "local_steps": 3}
    curves = figure3.divergences(
        {
            "full": resolve(flags={**common, "method": "pfedbayes"}),
            "same": resolve(flags={**common, "method": "coreset-pfedbayes", "fraction": 1.0}),
            "random": resolve(flags={**common, "method": "random-subset", "fraction": 0.3}),
        }
    )
    assert curves["same"] == [0.0, 0.0]
    assert min(curves["random"]) > 0


def test_training_loss_is_of_all_data_and_falls():
    flags = {"data": "digits", "rounds": 3, "method": "random-subset", "fraction": 0.3}
    (curve,) = figure4.training_losses({"random": resolve(flags=flags)}).values()
    assert curve[2] < curve[0] < 4  # about log 10 = 2.3 before training, more with initial draws


def test_figure3_draws_what_was_kept(tmp_path):
    (tmp_path / "kl.json").write_text(json.dumps({"coreset 10 %": [0.2, 0.1]}))
    reproduce.main("figure3", "quick", tmp_path)
    assert "| coreset 10 % | 0.2000 | 0.1000 |" in (tmp_path / "figure3.md").read_text()
    assert (tmp_path / "figure3.png").stat().st_size > 1000


def test_unknown_names_are_one_sentence(tmp_path):
    for command in (["bench", "nothing"], ["reproduce", "nothing", "--out", str(tmp_path / "x")]):
        done = corefed(*command)
        assert done.code == 2
        assert done.err.startswith("error: There is no")
        assert not (tmp_path / "x").exists()


def test_bench_measures_both_runtimes(tmp_path, monkeypatch):
    """Small widths and few clients: the figures are not looked at, only that they are there."""
    monkeypatch.setattr(runtime, "WIDTHS", (5, 4, 3))
    monkeypatch.setattr(runtime, "CLIENTS", (3, 12))
    monkeypatch.setattr(runtime, "REPEATS", 1)
    bench.main("runtime", device="cpu", out=tmp_path)
    rows = json.loads((tmp_path / "bench-runtime-cpu.json").read_text())
    assert [row["clients"] for row in rows] == [3, 12]
    assert all(row["loop / vmap"] > 0 and row["textbook / vmap"] > 0 for row in rows)


def test_bench_measures_coresets(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "WIDTHS", (5, 4, 3))
    monkeypatch.setattr(runtime, "REPEATS", 1)
    bench.main("coreset", device="cpu", out=tmp_path)
    rows = json.loads((tmp_path / "bench-coreset-cpu.json").read_text())
    assert [row["fraction"] for row in rows] == [0.1, 0.5]
    assert all(row["ratio"] > 0 and row["refreshes per client"] >= 1 for row in rows)


def test_bench_measures_an_own_network_beside_plain_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "STEPS", 1)
    monkeypatch.setattr(runtime, "OWN_TURNS", 1)
    threads = torch.get_num_threads()
    bench.main("own", device="cpu", out=tmp_path)
    (row,) = json.loads((tmp_path / "bench-own-cpu.json").read_text())
    assert row["ratio"] > 0 and torch.get_num_threads() == threads
    assert sum(p.numel() for p in runtime.own_cnn(10).parameters()) == row["weights"]


@pytest.mark.parametrize("clients", [1, 4])
def test_bench_trains_real_clients(clients):
    data = timed.random_data(clients, 20)
    group = timed.make_clients(data, torch.device("cpu"), method="pfedbayes")
    before = group.clients.private["q"].clone()
    group.train()
    assert not torch.equal(group.clients.private["q"], before)


def test_bench_solvers_writes_its_part_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    marks = "<!-- bench solvers: begin -->", "<!-- bench solvers: end -->"
    page.write_text("above\n{}\nold\n{}\nbelow\n".format(*marks))
    arguments = ("bench", "solvers", "--scale=quick", "--device=cpu", f"--out={tmp_path / 'out'}")
    assert corefed(*arguments, f"--page={page}").code == 0
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text
    figures = json.loads((tmp_path / "out" / "solvers.json").read_text())
    assert {line["solver"] for line in figures["lines"]} == set(SOLVERS)
    assert {line["problem"] for line in figures["lines"]} == set(solvers.CASES)
    assert (tmp_path / "out" / "solvers.png").stat().st_size > 10_000
    once = (tmp_path / "out" / "solvers.jsonl").read_text()
    assert corefed(*arguments, f"--page={page}").code == 0  # nothing is measured twice
    assert (tmp_path / "out" / "solvers.jsonl").read_text() == once


def test_bench_solvers_needs_a_page_with_marks(tmp_path):
    (tmp_path / "page.md").write_text("no marks")
    done = corefed("bench", "solvers", "--scale=quick", f"--page={tmp_path / 'page.md'}")
    assert done.code == 2 and "once each" in done.err
    assert corefed("bench", "runtime", f"--page={tmp_path / 'page.md'}").code == 2
    assert corefed("bench", "million", "--scale=huge").code == 2


def test_bench_million_is_linear_work_in_processes_of_its_own(tmp_path):
    done = corefed("bench", "million", "--scale=quick", "--device=cpu", f"--out={tmp_path}")
    assert done.code == 0
    rows = json.loads((tmp_path / "bench-million-cpu.json").read_text())
    assert [row["n"] for row in rows] == [2000, 4000, 4000, 4000]
    assert [row["potentials in"] for row in rows] == ["pool", "pool", "disk", "memory"]
    assert all(row["on fresh draws"] < row["uniform"] for row in rows)


def test_solvers_table_has_a_row_for_each(tmp_path, monkeypatch):
    cells = [c for c in subsets.solver_cells("quick") if c.row in ("exchange", "full data")]
    monkeypatch.setattr(subsets, "solver_cells", lambda scale: iter(cells))
    assert corefed("reproduce", "solvers", f"--out={tmp_path}").code == 0
    text = (tmp_path / "solvers.md").read_text()
    assert "| exchange |  | " in text and "| full data | " in text


def test_data_is_for_figure2_alone(tmp_path):
    done = corefed("reproduce", "grid", f"--data={tmp_path}", f"--out={tmp_path / 'x'}")
    assert done.code == 2 and "figure2" in done.err
    assert not (tmp_path / "x").exists()
