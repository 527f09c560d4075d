"""shards-medium and shards-large: all data, coresets and random subsets, with corefed's defaults.

R = 20, b = 100, 100 rounds, three seeds. "Coreset" is chosen by the default selector, "matching" by
the paper's. Random subsets are drawn once, or redrawn every 100 local steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from rich.console import Console

from corefed.base.panels import labelled, legend_below, panels, save
from corefed.base.passes import FORWARD
from corefed.training.summaries import over_seeds
from corefed_studies.pages import Table
from corefed_studies.reproduce import results, table1, tables
from corefed_studies.reproduce.cells import DEFAULT, MATCHING, Flags, StudyCell
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.reproduce.tables import Options

_RANDOM: Flags = {"method": "random-subset"}
ROWS: dict[str, Flags] = {
    "full data": {"method": "pfedbayes"},
    "coreset 10 %": {**DEFAULT, "fraction": 0.1},
    "coreset 50 %": {**DEFAULT, "fraction": 0.5},
    "random 10 % once": {**_RANDOM, "fraction": 0.1},
    "random 10 % redrawn": {**_RANDOM, "fraction": 0.1, "redraw_every": 100},
    "random 50 % once": {**_RANDOM, "fraction": 0.5},
    "random 50 % redrawn": {**_RANDOM, "fraction": 0.5, "redraw_every": 100},
    "matching 10 %": {**MATCHING, "fraction": 0.1},
    "matching 50 %": {**MATCHING, "fraction": 0.5},
}
STYLES = {"full": ("black", "-"), "coreset": ("tab:blue", "-"), "random": ("tab:red", "--")}
"""First word of a row -> colour and line; other rows are not drawn."""


def cells(partition: str, scale: str) -> Iterator[StudyCell]:
    common: Flags = {"partition": partition, "checkpoint_every": 20}
    common |= {"rounds": 100, "seeds": (0, 1, 2)} if scale == "paper" else {"rounds": 5}
    common |= {"evaluate_every": 10} if scale == "paper" else {}
    for data in ("mnist", "fashion-mnist") if scale == "paper" else ("digits",):
        for row, own in ROWS.items():
            yield StudyCell(row, data, {"data": data, **common, **own})


def reproduce(
    name: str, scale: str, folder: Path, console: Console, **options: Unpack[Options]
) -> None:
    """Write NAME.json, .md, .html and .png; the name is that of the partition."""
    found = tables.make(
        name, scale, folder, console, lambda: list(cells(name, scale)), make_tables, **options
    )
    draw(found, folder / f"{name}.png")


COLUMNS = (
    "", "personal", "global", "localized", "NLL", "ECE", "passes, millions",
    "error on fresh draws", "selections",
)  # fmt: skip


def make_tables(found: Results) -> Sequence[Table]:
    """One table per data set: accuracies of the three models, then the personal one's numbers."""
    laid = []
    for data in dict.fromkeys(column for _, column in found):
        mine = {key: result for key, result in found.items() if key[1] == data}
        rows = [[row, *_numbers(result)] for (row, _), result in mine.items()]
        note = (
            "Last round, mean ± std over seeds; NLL and ECE of the personal model. Passes of one "
            "seed through a gradient, a forward pass of a selection counted as a third."
        )
        remarks = table1.remarks(mine)
        laid.append(Table(table1.title(found, data), COLUMNS, rows, f"{note} {remarks}"))
    return laid


def _numbers(result: Result) -> list[str]:
    if "failure" in result:
        return ["failed"] * (len(COLUMNS) - 1)
    metrics, coreset = result["metrics"], result["coreset"]
    accuracies = [
        results.percent(metrics.get(f"{model}_accuracy", {}).get("per_seed", []))
        for model in ("personal", "global", "localized")
    ]
    error = coreset.get("held_out_error")
    return [
        *accuracies,
        f"{metrics['personal_nll']['mean']:.3f} ± {metrics['personal_nll']['std']:.3f}",
        f"{metrics['personal_ece']['mean']:.3f}",
        f"{_passes(result) / 1e6:.2f}",
        "-" if error is None else f"{error:.3f}",
        f"{coreset['refreshes']:.0f}" if "refreshes" in coreset else "-",
    ]


def _passes(result: Result) -> float:
    cost = result["cost"]
    total = cost["examples_processed"] + FORWARD * cost.get("selection_examples", 0)
    return float(total) / len(result["seeds"])


def draw(found: Results, path: Path) -> None:
    """Personal accuracy against rounds, a panel per data set; bands are one std over seeds."""
    columns = list(dict.fromkeys(column for _, column in found))
    figure, axes = panels(len(columns), legend=3)
    for axis, data in zip(axes, columns, strict=True):
        for (row, column), result in found.items():
            if column != data or "curve" not in result or row.split()[0] not in STYLES:
                continue
            curve = result["curve"]
            spread = [over_seeds(each) for each in curve["personal_accuracy"]]
            mean = [100 * each["mean"] for each in spread]
            std = [100 * each["std"] for each in spread]
            color, line = STYLES[row.split()[0]]
            alpha = 0.45 if "10 %" in row else 1.0
            line = ":" if "redrawn" in row else line
            axis.plot(curve["round"], mean, line, color=color, alpha=alpha, marker=".", label=row)
            low = [m - d for m, d in zip(mean, std, strict=True)]
            high = [m + d for m, d in zip(mean, std, strict=True)]
            axis.fill_between(curve["round"], low, high, color=color, alpha=0.08)
        axis.set(title=data, xlabel="round")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("personal accuracy %")
    legend_below(figure, labelled(axes), across=3)
    save(figure, path)
