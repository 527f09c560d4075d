"""Every solver at every coreset size: solve, keep what was measured, tabulate and draw it.

Shared by `figure2.py` and `glm.py`. A measurement is a flat dict. It is written as a line of JSON
at once, so that a command that was stopped continues where it was.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.panels import grid, labelled, legend_below, save
from corefed.base.tables import markdown_table
from corefed.coreset import solvers
from corefed.coreset.problem import Problem, Solution
from corefed.coreset.sparse_vi import Resample
from corefed.training.summaries import over_seeds

Measurement = dict[str, Any]


class Contender(NamedTuple):
    """One row of a table: a solver, and how many iterations it makes where it does not decide."""

    label: str
    solver: str
    iterations: int = 0

    def options(self, resample: Resample) -> dict[str, Any]:
        """What this solver takes beside what all do. Iterations that were asked for are made."""
        needed = solvers.SOLVERS[self.solver].resample
        options: dict[str, Any] = {"resample": resample} if needed else {}
        return options | ({"tolerance": -1.0} if self.iterations else {})


LONG = Contender("aiht-2, 3000 iterations", "aiht-2", 3000)
"""The paper's own solver with ten times its iterations: what the default must not fall behind."""


def contenders(names: Iterable[str]) -> list[Contender]:
    return [Contender(name, name) for name in names]


def relative_objective(problem: Problem, w: Tensor) -> float:
    """||y - Phi w||^2 / ||y||^2 of one client's w [1, n]."""
    return float(problem.objective(w) / problem.y.square().sum(-1))


def solve(
    contender: Contender, problem: Problem, generator: torch.Generator, resample: Resample
) -> tuple[Tensor, Measurement]:
    """w [1, n], and what there is to say about it without a posterior."""
    solver: Callable[..., Solution] = solvers.get(contender.solver)
    options = contender.options(resample)
    start = time.perf_counter()
    found = solver(problem, iterations=contender.iterations, generators=[generator], **options)
    seconds = time.perf_counter() - start
    return found.w, {
        "objective": relative_objective(problem, found.w),
        "points": int((found.w > 0).sum()),
        "iterations": found.iterations,
        "seconds": seconds,
    }


# --- a file that grows ----------------------------------------------------------------------------


class Kept:
    """Measurements by key, in a file of one line each under a first line of settings."""

    def __init__(self, path: Path, settings: Mapping[str, Any], fields: Sequence[str]) -> None:
        self.path, self.fields = path, tuple(fields)
        self.lines: dict[tuple[Any, ...], Measurement] = {}
        settings = json.loads(json.dumps(settings))  # as a file gives them back: tuples are lists
        whole = self._read()
        if whole and whole[0] != {"settings": settings}:
            raise UserError(
                f"{path} holds results of other settings; choose another --out, or remove it."
            )
        for line in whole[1:]:
            self.lines[self.key(line)] = line
        if not whole:
            self._append({"settings": settings})

    def key(self, line: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(line[field] for field in self.fields)

    def __contains__(self, line: Mapping[str, Any]) -> bool:
        return self.key(line) in self.lines

    def add(self, line: Measurement) -> None:
        self._append(line)
        self.lines[self.key(line)] = line

    def _read(self) -> list[Measurement]:
        """The whole lines; one that was cut short is cut off, to be measured again."""
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            end = content.rfind(b"\n") + 1
            if end < len(content):
                self.path.write_bytes(content[:end])
            return [json.loads(raw) for raw in content[:end].splitlines()]
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror}.") from error
        except ValueError as error:
            raise UserError(f"{self.path} is damaged ({error}); remove it.") from error

    def _append(self, line: Measurement) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}.") from error


# --- tables and pictures --------------------------------------------------------------------------


def values(lines: Iterable[Measurement], metric: str, **wanted: object) -> list[float]:
    """A metric of the lines that match, one a trial."""
    return [
        line[metric]
        for line in lines
        if metric in line and all(line[field] == value for field, value in wanted.items())
    ]


def cell(each: Sequence[float]) -> str:
    """mean ± standard deviation over trials; a dash where there is none."""
    if not each:
        return "-"
    spread = over_seeds(each)
    mean = f"{spread['mean']:.3g}"
    return f"{mean} ± {spread['std']:.2g}" if len(each) > 1 else mean


def table(
    lines: Sequence[Measurement],
    rows: Sequence[str],
    columns: Mapping[str, tuple[str, dict[str, object]]],
) -> list[str]:
    """Markdown, one row per solver. A column: its heading, the metric, and which lines it takes."""
    body = [
        [
            label,
            *(cell(values(lines, metric, solver=label, **own)) for metric, own in columns.values()),
        ]
        for label in rows
    ]
    return [*markdown_table(["", *columns], body), ""]


# Colours that eyes of every kind tell apart; one colour a family of solvers.
STYLES: dict[str, dict[str, Any]] = {
    "exchange": {"color": "black", "marker": "o", "linewidth": 2.2},
    "omp": {"color": "#0072B2", "marker": "s"},
    "omp-block": {"color": "#56B4E9", "marker": "D"},
    "aiht-2": {"color": "#D55E00", "marker": "^"},
    LONG.label: {"color": "#D55E00", "marker": "*", "linestyle": ":", "markersize": 9},
    "aiht": {"color": "#E69F00", "marker": "v"},
    "iht": {"color": "#8C6D31", "marker": "<"},
    "giga": {"color": "#009E73", "marker": "P"},
    "frank-wolfe": {"color": "#7FBC41", "marker": "X"},
    "sparse-vi": {"color": "#CC79A7", "marker": "h"},
    "uniform": {"color": "0.55", "marker": "o", "linestyle": "--"},
    "uniform-refit": {"color": "0.55", "marker": "s"},
}


def picture(
    groups: Mapping[str, Sequence[Measurement]],
    metrics: Mapping[str, str],
    path: Path,
    floor: float,
) -> None:
    """Metrics against k: a panel per metric and group, one line per solver.

    A line is the mean over trials, its band the least and the greatest. Values below `floor` are
    rounding and are drawn on it, lest they squeeze everything else into the top of a log scale.
    """
    from matplotlib.ticker import LogFormatterSciNotation, NullFormatter, ScalarFormatter

    across = min(3, len(groups))
    deep = -(-len(groups) // across)
    figure, axes = grid(len(metrics) * deep, across, legend=3)
    for row, (metric, name) in enumerate(metrics.items()):
        here = axes[row * deep : (row + 1) * deep].ravel()
        for spare in here[len(groups) :]:
            spare.set_axis_off()
        for axis, (title, lines) in zip(here, groups.items(), strict=False):
            for order, label in enumerate(dict.fromkeys(line["solver"] for line in lines)):
                style = {"markersize": 4, **STYLES.get(label, {"color": f"C{order}"})}
                sizes = sorted({line["k"] for line in lines if line["solver"] == label})
                each = [values(lines, metric, solver=label, k=k) for k in sizes]
                mean = [max(floor, math.fsum(trials) / len(trials)) for trials in each]
                axis.plot(sizes, mean, label=label, **style)
                low = [max(floor, min(trials)) for trials in each]
                high = [max(floor, max(trials)) for trials in each]
                axis.fill_between(sizes, low, high, color=style["color"], alpha=0.1, linewidth=0)
            axis.set(xscale="log", yscale="log", title=f"{name}, {title}" if title else name)
            axis.set_xticks(_apart(sorted({line["k"] for line in lines})))
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.tick_params(axis="x", which="minor", bottom=False)
            # 3 x 10^0 is worth its room only where no two powers of ten are in view.
            axis.yaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(1, 0.5)))
            axis.grid(alpha=0.25)
    for axis in axes[-1]:
        axis.set_xlabel("points in the coreset, k")
    legend_below(figure, labelled(axes.flat))
    save(figure, path)


def _apart(sizes: Sequence[int]) -> list[int]:
    """Sizes whose numbers do not run into each other on a log scale, the greatest among them."""
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if kept[-1] >= 1.3 * size:
            kept.append(size)
    return kept


def summary(
    lines: Sequence[Measurement], fields: Sequence[str], metrics: Sequence[str]
) -> list[Measurement]:
    """Mean, standard deviation and every trial of each metric, for each value of the fields."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for line in lines:
        groups.setdefault(tuple(line[field] for field in fields), []).append(line)
    return [
        dict(zip(fields, key, strict=True))
        | {metric: over_seeds(values(group, metric)) for metric in metrics if metric in group[0]}
        for key, group in groups.items()
    ]
