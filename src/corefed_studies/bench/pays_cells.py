"""Cells of `bench selectors` again, with their constants: `seen` against the default and a random
subset redrawn as often, seed by seed, at the end of training."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from corefed.settings.config import resolve
from corefed.training.loop import run_rounds
from corefed.training.rounds import Simulation
from corefed.training.setup import prepare
from corefed_studies.bench.parted import Shown
from corefed_studies.reproduce.cells import Flags, published
from corefed_studies.reproduce.selectors import study as cells

Row = dict[str, Any]

CELL_ROWS: dict[str, Flags] = {
    "seen": {**cells.CORESET, "selector": "seen"},
    "random, redrawn": {**cells.ROWS[cells.REDRAWN], "check_every": 10**6},
    "calibrated": cells.ROWS[cells.DEFAULT],
    "calibrated, a fifth looked at": cells.ROWS[cells.FRUGAL],
}


def measure(
    spots: Sequence[tuple[str, int, int]],
    seeds: Sequence[int],
    console: Shown,
    known: Sequence[Row],
) -> Iterator[Row]:
    """Row after row of each cell (problem, percent, local steps), less those that are known."""
    for spot in (cells.Spot(*each) for each in spots):
        for row, own in CELL_ROWS.items():
            name = {"cell": str(spot), "row": row}
            earlier = [r for r in known if {**r, **name} == r]
            yield earlier[0] if earlier else {**name, **of_cell(spot, own, seeds)}
            console.print(f"{spot}, {row}: done")


def of_cell(spot: cells.Spot, own: Flags, seeds: Sequence[int]) -> Row:
    """A cell of `bench selectors`, evaluated at its end."""
    setup = prepare(resolve(None, dict(flags_of(spot, own, seeds))))
    lines: list[Row] = []
    run_rounds(setup.method, Simulation(setup), setup.servers, setup.experiment.run, lines)
    metrics = lines[-1]["metrics"]
    metric = next(name for name in ("personal_accuracy", "personal_rmse") if name in metrics)
    looked = sum(sum(line.get("selection_examples", [0.0])) for line in lines) / 3
    total = sum(sum(line["passes"]) for line in lines)
    return {"metric": metric, "values": metrics[metric], "selection": looked / (total - looked)}


def flags_of(spot: cells.Spot, own: Flags, seeds: Sequence[int]) -> Flags:
    problem = cells.problem_of(spot.problem)
    rounds = problem.rounds[spot.steps]
    return published(
        {
            **problem.flags, **own, "fraction": spot.percent / 100, "seeds": tuple(seeds),
            "local_steps": spot.steps, "rounds": rounds, "evaluate_every": rounds,
            "checkpoint_every": 0, "compile": "off",
        }
    )  # fmt: skip


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table."""
    lines = [
        "**Cells of the selectors' study: `seen` less another, by seed**",
        "",
        "| cell | | mean | `seen` less this one | least and most over seeds | selection, of the "
        "passes |",
        "|---" * 6 + "|",
    ]
    mine = {row["cell"]: row["values"] for row in rows if row["row"] == "seen"}
    for row in rows:
        sign = "error" if row["metric"] == "personal_rmse" else "accuracy"
        each = [a - b for a, b in zip(mine[row["cell"]], row["values"], strict=True)]
        shown = (
            ["", ""]
            if row["row"] == "seen"
            else [f"{statistics.fmean(each):+.4g}", f"{min(each):+.4g} to {max(each):+.4g}"]
        )
        mean = f"{sign} {statistics.fmean(row['values']):.4g}"
        share = f"{row['selection']:.1%}"
        lines.append("| " + " | ".join([row["cell"], row["row"], mean, *shown, share]) + " |")
    return [*lines, ""]
