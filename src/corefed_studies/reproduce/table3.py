"""Table 3 and Figure 5 of the paper: rounds and bytes to a target accuracy, by coreset size.

The paper prints, for each size, an accuracy and the round at which training had converged to it.
Rounds to different accuracies cannot be compared. So here each data set has one target: 99 % of
the personal accuracy of full data in the last round. What a size needs to get there is read off its
learning curve, per seed: the first evaluated round at or above the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console

from corefed.base.panels import labelled, legend_below, panels, save
from corefed.training.summaries import over_seeds
from corefed_studies.pages import Table
from corefed_studies.reproduce import results, table1, tables
from corefed_studies.reproduce.cells import MATCHING, Flags, StudyCell
from corefed_studies.reproduce.paper import TABLE_3
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.reproduce.tables import Options

FULL = "PFedBayes"
SHARE = 0.99
"""Part of full data's last accuracy that is the target."""

SIZES = (50, 30, 15, 10)
ROWS: dict[str, Flags] = {
    FULL: {"method": "pfedbayes"},
    "Random 50 %": {"method": "random-subset", "fraction": 0.5},
    **{f"CoreSet {size} %": {**MATCHING, "fraction": size / 100} for size in SIZES},
}


def cells(scale: str) -> Iterator[StudyCell]:
    """The settings of Table 1; those of its cells that are here too are the same runs."""
    for data, shared in table1.common(scale).items():
        for row, own in ROWS.items():
            yield StudyCell(row, data, {**shared, **own})


def reproduce(
    name: str, scale: str, folder: Path, console: Console, **options: Unpack[Options]
) -> None:
    """Write table3.json, .md and .html."""
    tables.make(name, scale, folder, console, lambda: list(cells(scale)), make_tables, **options)


def reproduce_figure5(
    name: str, scale: str, folder: Path, console: Console, **options: Unpack[Options]
) -> None:
    """Write figure5.png and figure5.md from the runs, or the result file, of table3."""
    found = tables.make(
        "table3", scale, folder, console, lambda: list(cells(scale)), make_tables, **options
    )
    draw(found, folder / f"{name}.png")
    text = "Personal accuracy over rounds, by coreset size: figure5.png.\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")


def make_tables(found: Results) -> Sequence[Table]:
    columns = (
        "", "paper: accuracy", "rounds", "ours: last accuracy", "rounds to target",
        "of full data's", "MB per client to target", "points through gradients to target",
    )  # fmt: skip
    laid = []
    for data in dict.fromkeys(column for _, column in found):
        goal = target(found, data)
        if goal is None:
            continue
        rows = [_row(found, row, data, goal) for row, column in found if column == data]
        mine = {key: result for key, result in found.items() if key[1] == data}
        title = f"{table1.title(found, data)}; target {100 * goal:.2f}, {SHARE:.0%} of full data's"
        laid.append(Table(title, columns, rows, table1.remarks(mine)))
    return laid


def target(found: Results, data: str) -> float | None:
    last = results.metric(found, (FULL, data), "personal_accuracy")
    return SHARE * math.fsum(last) / len(last) if last else None


def reached(result: Result, goal: float, what: str) -> list[float]:
    """`what` (round, bytes, examples) at the first evaluated round at the target, by seed.

    Infinite for a seed that does not get there.
    """
    curve = result["curve"]
    seeds = len(curve["personal_accuracy"][0])
    first = []
    for seed in range(seeds):
        hits = [i for i, each in enumerate(curve["personal_accuracy"]) if each[seed] >= goal]
        first.append(float(curve[what][hits[0]]) if hits else math.inf)
    return first


def _row(found: Results, row: str, data: str, goal: float) -> list[str]:
    result = found[row, data]
    if "failure" in result:
        return [row, *["failed"] * 7]
    printed = TABLE_3.get((row, data))
    rounds, full = reached(result, goal, "round"), reached(found[FULL, data], goal, "round")
    sent = [each / result["clients"] / 2**20 for each in reached(result, goal, "bytes")]
    return [
        row,
        f"{printed.accuracy:.2f}" if printed else "-",
        str(printed.rounds) if printed else "-",
        results.percent(results.metric(found, (row, data), "personal_accuracy")),
        _spread(rounds, 0),
        _share(rounds, full),
        _spread(sent, 1),
        _spread(reached(result, goal, "examples"), 0),
    ]


def _spread(each: Sequence[float], digits: int) -> str:
    met = [value for value in each if math.isfinite(value)]
    if not met:
        return "not reached"
    spread = over_seeds(met)
    text = f"{spread['mean']:,.{digits}f} ± {spread['std']:,.{digits}f}"
    return text if len(met) == len(each) else f"{text} ({len(met)} of {len(each)} seeds)"


def _share(each: Sequence[float], full: Sequence[float]) -> str:
    if not all(map(math.isfinite, (*each, *full))):
        return "-"
    return f"{math.fsum(each) / math.fsum(full):.2f}"


def draw(found: Results, path: Path) -> None:
    """Personal accuracy against rounds; bands are one standard deviation over seeds."""
    columns = list(dict.fromkeys(column for _, column in found))
    figure, axes = panels(len(columns), legend=2)
    for axis, data in zip(axes, columns, strict=True):
        lowest = []
        for row in ROWS:
            result = found.get((row, data), {})
            if "curve" not in result:
                continue
            curve = result["curve"]
            spread = [over_seeds(each) for each in curve["personal_accuracy"]]
            mean = [100 * each["mean"] for each in spread]
            std = [100 * each["std"] for each in spread]
            axis.plot(curve["round"], mean, label=row, **_style(row))
            low = [m - d for m, d in zip(mean, std, strict=True)]
            high = [m + d for m, d in zip(mean, std, strict=True)]
            axis.fill_between(curve["round"], low, high, color=_style(row)["color"], alpha=0.1)
            lowest.append(mean[len(mean) // 10])
        goal = target(found, data)
        if goal is not None:
            axis.axhline(100 * goal, color="0.5", linewidth=0.8, linestyle=":")
        axis.set(title=data, xlabel="round")
        axis.set_ylim(bottom=min(lowest, default=0.0))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("personal accuracy %")
    legend_below(figure, labelled(axes), across=3)
    save(figure, path)


def _style(row: str) -> dict[str, Any]:
    if row == FULL:
        return {"color": "black"}
    if row.startswith("Random"):
        return {"color": "#D55E00", "linestyle": "--"}
    shades = dict(zip(SIZES, ("#08306b", "#2171b5", "#6baed6", "#9ecae1"), strict=True))
    return {"color": shades[int(row.split()[1])]}
