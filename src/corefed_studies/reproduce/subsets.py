"""Coresets by solver, and by fraction and local steps, beside full data and random subsets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from corefed.base.tables import markdown_table
from corefed.coreset.solvers import SOLVERS
from corefed_studies.reproduce.cells import (
    MATCHING,
    Flags,
    StudyCell,
    published,
    summaries,
)


def _markdown(
    found: dict[tuple[str, str], dict[str, Any]], metric: str, factor: float = 100.0
) -> list[str]:
    """mean ± std over seeds, one row per method and one column per data set."""
    columns = list(dict.fromkeys(column for _, column in found))
    rows = list(dict.fromkeys(row for row, _ in found))
    digits = 2 if factor == 100.0 else 3

    def cell(key: tuple[str, str]) -> str:
        if key not in found:
            return ""
        value = found[key]["metrics"][metric]
        return f"{factor * value['mean']:.{digits}f} ± {factor * value['std']:.{digits}f}"

    body = [[row, *(cell((row, column)) for column in columns)] for row in rows]
    return markdown_table(["", *columns], body)


def _held_out(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    columns = ("", "data", "error on fresh draws", "refreshes per client", "s/round")
    body = [
        [
            row,
            column,
            f"{summary['coreset']['held_out_error']:.3f}",
            f"{summary['coreset']['refreshes']:.1f}",
            f"{summary['cost']['seconds_per_round']:.3f}",
        ]
        for (row, column), summary in found.items()
        if "held_out_error" in summary["coreset"]
    ]
    return markdown_table(columns, body)


# --- solvers: what the choice of solver does to accuracy ------------------------------------------


def solver_cells(scale: str) -> Iterator[StudyCell]:
    """shards-medium with the paper's constants: one row per solver, beside full data and redrawn
    random subsets."""
    settings: Flags = {"partition": "shards-medium", "zeta": 1.0, "evaluate_every": 50}
    settings |= {"rounds": 100, "seeds": (0, 1, 2)} if scale == "paper" else {"rounds": 2}
    settings |= {"checkpoint_every": 20}
    names = [name for name, entry in SOLVERS.items() if not entry.resample]
    for data in ("mnist", "fashion-mnist") if scale == "paper" else ("digits",):
        yield StudyCell(
            "full data", data, published({"data": data, **settings, "method": "pfedbayes"})
        )
        for percent in (10, 50):
            column = f"{data} {percent} %"
            own = {"data": data, **settings, "fraction": percent / 100}
            for name in names:
                yield StudyCell(name, column, published({**own, **MATCHING, "solver": name}))
            redrawn = {**own, "method": "random-subset", "redraw_every": 100}
            yield StudyCell("random redrawn", column, published(redrawn))


def reproduce_solvers(name: str, scale: str, folder: Path, console: Console) -> None:
    found = summaries(list(solver_cells(scale)), folder, console)
    text = []
    for metric in ("personal_accuracy", "global_accuracy"):
        text += [f"**{metric.replace('_', ' ')} (%)**", "", *_markdown(found, metric), ""]
    text += ["**personal NLL**", "", *_markdown(found, "personal_nll", 1.0), ""]
    text += ["**error of the coreset on fresh draws, and seconds per round**"]
    text += ["", *_held_out(found), ""]
    (folder / "solvers.md").write_text("\n".join(text))


# --- grid: a coreset run never falls below a random subset ----------------------------------------


def grid(scale: str) -> Iterator[StudyCell]:
    """Fractions from 0.01 to 1 against local steps from 1 to 300, 900 steps in all."""
    fractions = (0.01, 0.1, 0.5, 1.0) if scale == "paper" else (0.1, 1.0)
    steps = (1, 20, 300) if scale == "paper" else (5, 20)
    data = "mnist" if scale == "paper" else "digits"
    total = 900 if scale == "paper" else 100
    for local_steps in steps:
        for fraction in fractions:
            for method in ("coreset-pfedbayes", "random-subset"):
                yield StudyCell(
                    f"{method} R {local_steps}",
                    f"{fraction:g}",
                    {
                        "data": data,
                        "method": method,
                        "fraction": fraction,
                        "local_steps": local_steps,
                        "rounds": total // local_steps,
                        "evaluate_every": total // local_steps,
                        "seeds": (0, 1) if scale == "paper" else (0,),
                        "checkpoint_every": max(1, 100 // local_steps),
                    },
                )


def reproduce_grid(name: str, scale: str, folder: Path, console: Console) -> None:
    found = summaries(list(grid(scale)), folder, console)
    text = ["**personal accuracy (%)**", "", *_markdown(found, "personal_accuracy"), ""]
    text += ["**worst coreset minus random**", ""]
    gaps = {
        key: found[key]["metrics"]["personal_accuracy"]["mean"]
        - found[key[0].replace("coreset-pfedbayes", "random-subset"), key[1]]["metrics"][
            "personal_accuracy"
        ]["mean"]
        for key in found
        if key[0].startswith("coreset")
    }
    worst = min(gaps, key=lambda key: gaps[key])
    text.append(f"{100 * gaps[worst]:+.2f} points, at fraction {worst[1]}, {worst[0]}")
    (folder / "grid.md").write_text("\n".join(text) + "\n")
