"""The picture of a rate study: error against n, and against n_k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corefed.base.panels import grid, labelled, legend_below, save
from corefed_studies.reproduce.rates.slopes import (
    CORESET,
    FULL,
    ONCE,
    PROCESS,
    REDRAWN,
    SUBSETS,
    along_k,
    along_n,
    problems,
)
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.theory.quantities import rate_exponent

STYLES = {
    FULL: ("black", "-", "o"), PROCESS: ("tab:gray", ":", "s"),
    CORESET: ("tab:blue", "-", "o"), ONCE: ("tab:red", "--", "v"),
    REDRAWN: ("tab:orange", "--", "^"),
}  # fmt: skip


ACROSS = 3


def draw(found: Results, path: Path) -> None:
    """Of each problem, error against n, and below it against n_k at the largest n.

    Bands are one standard deviation over seeds. The green line has the predicted slope and goes
    through the first point.
    """
    shown = problems(found)
    deep = -(-len(shown) // ACROSS)
    figure, axes = grid(2 * deep, min(ACROSS, len(shown)), legend=3)
    for place, problem in enumerate(shown):
        band, column = divmod(place, ACROSS)
        above, below = axes[2 * band, column], axes[2 * band + 1, column]
        rate, whole = rate_exponent(*problem), along_n(found, FULL, problem)
        for row in (FULL, PROCESS):
            _line(above, along_n(found, row, problem), "n", row)
        for row in SUBSETS:
            _line(below, along_k(found, row, problem), "k", row)
        _predicted(above, whole, "n", rate)
        _predicted(below, along_k(found, ONCE, problem), "k", rate)
        if whole:
            best = whole[-1]["metrics"]["error"]["mean"]
            below.axhline(best, color="black", lw=0.8, label="all points")
        title = rf"$\beta$ {problem[0]:g}, $\Lambda$ {problem[1]}: slope -{rate:.2f}"
        above.set(title=title, xlabel="points n")
        below.set(xlabel=f"n_k, of {whole[-1]['n'] if whole else ''} points")
        _scales(above, [r["n"] for r in whole], first=column == 0)
        _scales(below, [r["k"] for r in along_k(found, ONCE, problem)], first=column == 0)
    legend_below(figure, labelled(axes[:2, 0]), across=3)
    for axis in axes.flat:
        if not axis.lines:
            axis.set_axis_off()
    save(figure, path)


def _scales(axis: Any, sizes: Sequence[int], *, first: bool) -> None:
    """Both logarithmic, with the sizes that there are below."""
    axis.set(xscale="log", yscale="log", ylabel="error" if first else None)
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3, which="both")


def _line(axis: Any, cells: Sequence[Result], size: str, row: str) -> None:
    metric = "mean" if row == PROCESS else "error"
    spreads = [r["metrics"][metric] for r in cells]
    mean = np.array([s["mean"] for s in spreads])
    std = np.array([s["std"] for s in spreads])
    color, line, marker = STYLES[row]
    where = [r[size] for r in cells]
    axis.plot(where, mean, line, color=color, marker=marker, markersize=3.5, label=row)
    axis.fill_between(where, np.maximum(mean - std, mean / 10), mean + std, color=color, alpha=0.1)


def _predicted(axis: Any, cells: Sequence[Result], size: str, rate: float) -> None:
    if cells:
        where = np.array([r[size] for r in cells], float)
        first = cells[0]["metrics"]["error"]["mean"]
        values = first * (where / where[0]) ** -rate
        axis.plot(where, values, ":", color="tab:green", lw=2, label="predicted slope")
