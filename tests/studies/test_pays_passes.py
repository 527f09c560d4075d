"""`corefed bench pays --parts passes`: what is made of learning curves, and one tiny run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from corefed.base.errors import UserError
from corefed_studies import bench
from corefed_studies.bench import pays, pays_cells, pays_passes
from corefed_studies.bench.pays_passes import FULL, best, cost, goals_of, reached
from corefed_studies.reproduce.selectors.study import Spot

CONSOLE = Console(quiet=True)


def made(row: str, batch: int, accuracy: list[list[float | None]], **more: Any) -> dict[str, Any]:
    """Two seeds, each round of `batch` passes and a second; a tenth of it is selection."""
    rounds = len(accuracy[0])
    return {
        "problem": "p", "row": row, "batch": batch, "accuracy": accuracy,
        "passes": [[float(batch)] * rounds] * 2, "seconds": [t + 1.0 for t in range(rounds)],
        "selecting": [0.1 * (t + 1) for t in range(rounds)], "selection": 0.2 * batch, **more,
    }  # fmt: skip


FOUND = [
    made(FULL, 16, [[None, 0.5, None, 0.99], [None, 0.7, None, 0.8]]),
    made(FULL, 100, [[None, 1.0, None, 0.9], [None, 0.795, None, 0.79]]),
    made("seen", 100, [[None, 0.9, None, 0.995], [None, 0.8, None, 0.8]]),
    made("calibrated", 100, [[None, 0.9, None, 0.98], [None, 0.8, None, 0.8]]),
]


def test_goals_are_the_best_of_any_batch_size_seed_by_seed() -> None:
    goals = goals_of(FOUND)
    assert goals == pytest.approx([0.99, 0.792])  # of 1.0 at 100, and of 0.8 at 16
    assert reached(FOUND[0]["accuracy"], goals) == [3, 3]
    assert reached(FOUND[1]["accuracy"], goals) == [1, 1]
    assert reached(FOUND[3]["accuracy"], goals) == [None, 1]


def test_costs_and_the_rival() -> None:
    """Full data at 16: 4 rounds of 16 passes; at 100: 2 of 100. It depends on what is counted."""
    goals = goals_of(FOUND)
    assert [cost(FOUND[0], goals, kind) for kind in ("rounds", "passes", "seconds")] == [4, 64, 4]
    assert [cost(FOUND[1], goals, kind) for kind in ("rounds", "passes", "seconds")] == [2, 200, 2]
    assert cost(FOUND[2], goals, "passes") == 300  # 4 and 2 rounds
    assert math.isinf(cost(FOUND[3], goals, "passes"))
    assert best(FOUND, "passes")["batch"] == 16 and best(FOUND, "seconds")["batch"] == 100
    text = pays_passes.table(FOUND)
    assert "| full data | 16 | 4.0 | 64 | 1.00 | 4.00 | 2.00 |  |  |" in text
    assert "| seen | 100 | 3.0 | 300 | 4.69 | 3.00 | 1.50 | 2.6% | 11.1% |" in text
    assert "| calibrated | 100 | not in 4: 0.8900 |" in text


def test_cells_are_compared_seed_by_seed() -> None:
    rows = [
        {"cell": "c", "row": row, "metric": "personal_rmse", "values": values, "selection": 0.01}
        for row, values in (("seen", [2.0, 3.0]), ("random, redrawn", [2.5, 4.5]))
    ]
    assert "| c | random, redrawn | error 3.5 | -1 | -1.5 to -0.5 | 1.0% |" in pays_passes.table(
        rows
    )


def test_a_run_is_measured_once_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**pays_passes.SMALL, "data": "digits", "clients": 2, "rounds": 2, "hidden": (4,)}
    setting = pays_passes.Setting({"tiny": small}, (16,), (), (0,))
    monkeypatch.setitem(pays_passes.SETTINGS, "quick", setting)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench pays passes: begin -->\n<!-- bench pays passes: end -->\nb\n")
    out = tmp_path / "out"
    bench.main("pays", scale="quick", out=out, page=page, parts=("passes",))
    kept = json.loads((out / "pays.json").read_text())
    assert [row["row"] for row in kept["passes"]] == [
        FULL, *(name for name in pays_passes.CORESETS if name != pays_passes.BY_GAIN)
    ]  # fmt: skip
    of_seen = kept["passes"][1]
    total = sum(of_seen["passes"][0])
    assert 0 <= of_seen["selection"] <= 0.02 * total
    assert 0 < of_seen["selecting"][-1] < of_seen["seconds"][-1]
    assert page.read_text().count("| seen | 16 |") == 1

    def never(*_: object) -> dict[str, Any]:
        raise AssertionError("measured again")

    monkeypatch.setattr(pays_passes, "trained", never)
    pays.main("quick", out, CONSOLE, "cpu", parts=["passes"])
    pays.main("quick", None, CONSOLE, "cpu", page=page, source=out)  # the parts that it has


def test_cells_have_the_constants_of_the_study() -> None:
    """A cell's flags, but for how often it is evaluated, are those of `bench selectors`."""
    spot = Spot("housing", 10, 20)
    (planned,) = (
        cell for cell in pays_cells.cells.plan("paper", ["housing"])
        if (cell.row, cell.column) == (pays_cells.cells.DEFAULT, str(spot))
    )  # fmt: skip
    mine = pays_cells.flags_of(spot, pays_cells.CELL_ROWS["calibrated"], (0, 1, 2, 3, 4))
    free = {"evaluate_every", "compile"}
    assert {k: v for k, v in mine.items() if k not in free} == {
        k: v for k, v in planned.flags.items() if k not in free
    }


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match="no part 'pases' of bench pays; there are nuts, passes"):
        bench.main("pays", parts=("pases",))
    with pytest.raises(UserError, match="--parts is for bench pays"):
        bench.main("runtime", parts=("nuts",))
