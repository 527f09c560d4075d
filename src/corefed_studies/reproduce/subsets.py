"""Full data, coresets and random subsets: shards-medium, shards-large, solvers and grid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from corefed.base.panels import panels
from corefed.base.tables import markdown_table
from corefed.coreset.solvers import SOLVERS
from corefed.training import record
from corefed.training.summaries import over_seeds
from corefed_studies.reproduce.cells import MATCHING, Flags, StudyCell, place_of, summaries

# --- shards-medium and shards-large: full data, coresets and random subsets -----------------------

SUBSETS = (
    ("full data", {"method": "pfedbayes"}),
    ("coreset 10 %", {**MATCHING, "fraction": 0.1}),
    ("coreset 50 %", {**MATCHING, "fraction": 0.5}),
    ("random 10 % once", {"method": "random-subset", "fraction": 0.1}),
    ("random 10 % redrawn", {"method": "random-subset", "fraction": 0.1, "redraw_every": 100}),
    ("random 50 % once", {"method": "random-subset", "fraction": 0.5}),
    ("random 50 % redrawn", {"method": "random-subset", "fraction": 0.5, "redraw_every": 100}),
)


def shards(partition: str, scale: str) -> Iterator[StudyCell]:
    """R = 20, b = 100, learning rates 0.001, zeta = 1; 3 seeds, last round."""
    settings: Flags = {"partition": partition, "zeta": 1.0, "evaluate_every": 20}
    settings |= {"rounds": 100, "seeds": (0, 1, 2)} if scale == "paper" else {"rounds": 5}
    for data in ("mnist", "fashion-mnist") if scale == "paper" else ("digits",):
        for row, flags in SUBSETS:
            yield StudyCell(row, data, {"data": data, **settings, "checkpoint_every": 10, **flags})


def reproduce_shards(partition: str, scale: str, folder: Path, console: Console) -> None:
    cells = list(shards(partition, scale))
    found = summaries(cells, folder, console)
    text = []
    for metric in ("personal_accuracy", "global_accuracy", "localized_accuracy"):
        text += [f"**{metric.replace('_', ' ')} (%)**", "", *_markdown(found, metric), ""]
    text += ["**personal NLL**", "", *_markdown(found, "personal_nll", 1.0), ""]
    text += ["**personal ECE (%)**", "", *_markdown(found, "personal_ece"), ""]
    text += ["**held-out error of the coreset**", "", *_held_out(found), ""]
    (folder / f"{partition}.md").write_text("\n".join(text))
    _curves(cells, folder, folder / f"{partition}.png")


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


def _curves(cells: list[StudyCell], folder: Path, path: Path) -> None:
    """Personal accuracy against rounds, a panel a data set; bands are one std over seeds."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    figure, axes = panels(len(columns))
    styles = {"full": ("black", "-"), "coreset": ("tab:blue", "-"), "random": ("tab:red", "--")}
    for axis, column in zip(axes, columns, strict=True):
        for cell in (c for c in cells if c.column == column):
            _, lines = record.read(place_of(cell, folder))
            evaluated = [line for line in lines if "metrics" in line]
            spread = [over_seeds(e["metrics"]["personal_accuracy"]) for e in evaluated]
            mean = [100 * each["mean"] for each in spread]
            std = [100 * each["std"] for each in spread]
            color, line = styles[cell.row.split()[0]]
            alpha = 0.45 if "10 %" in cell.row else 1.0
            line = ":" if "redrawn" in cell.row else line
            xs = [e["round"] for e in evaluated]
            axis.plot(xs, mean, line, color=color, alpha=alpha, marker=".", label=cell.row)
            low = [m - d for m, d in zip(mean, std, strict=True)]
            high = [m + d for m, d in zip(mean, std, strict=True)]
            axis.fill_between(xs, low, high, color=color, alpha=0.08)
        axis.set(title=column, xlabel="round", ylabel="personal accuracy %")
        axis.grid(alpha=0.3)
    axes[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


def _held_out(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    columns = ("", "data", "error on fresh draws", "refreshes a client", "s/round")
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
    """shards-medium as above, one row per solver, beside full data and redrawn random subsets."""
    settings: Flags = {"partition": "shards-medium", "zeta": 1.0, "evaluate_every": 50}
    settings |= {"rounds": 100, "seeds": (0, 1, 2)} if scale == "paper" else {"rounds": 2}
    settings |= {"checkpoint_every": 20}
    names = [name for name, entry in SOLVERS.items() if not entry.resample]
    for data in ("mnist", "fashion-mnist") if scale == "paper" else ("digits",):
        yield StudyCell("full data", data, {"data": data, **settings, "method": "pfedbayes"})
        for percent in (10, 50):
            column = f"{data} {percent} %"
            own = {"data": data, **settings, "fraction": percent / 100}
            for name in names:
                yield StudyCell(name, column, {**own, **MATCHING, "solver": name})
            redrawn = {**own, "method": "random-subset", "redraw_every": 100}
            yield StudyCell("random redrawn", column, redrawn)


def reproduce_solvers(name: str, scale: str, folder: Path, console: Console) -> None:
    found = summaries(list(solver_cells(scale)), folder, console)
    text = []
    for metric in ("personal_accuracy", "global_accuracy"):
        text += [f"**{metric.replace('_', ' ')} (%)**", "", *_markdown(found, metric), ""]
    text += ["**personal NLL**", "", *_markdown(found, "personal_nll", 1.0), ""]
    text += ["**error of the coreset on fresh draws, seconds a round**", "", *_held_out(found), ""]
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
