"""One picture per problem of `bench selectors`: accuracy by fraction, and by cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base.panels import labelled, legend_below, panels, save
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.selectors.report import at, local_steps, percents, unit
from corefed_studies.reproduce.selectors.study import (
    CURVED,
    DEFAULT,
    FULL,
    MAIN,
    ONCE,
    REDRAWN,
    ROWS,
    StudyProblem,
)
from corefed_studies.reproduce.selectors.verdicts import Mean, mean_of, passes, scores


class Style(NamedTuple):
    color: str
    line: str = "-"
    marker: str = ""
    width: float = 1.3


# Colours of Okabe and Ito, which the colour-blind tell apart; lines and markers tell them too.
STYLES = {
    FULL: Style("black"),
    DEFAULT: Style("#0072B2", marker="o", width=3.0),
    REDRAWN: Style("#D55E00", "--", "s", 2.0),
    ONCE: Style("#E69F00", "--", "v"),
    "matching": Style("#56B4E9", "-.", "D"),
    "craig": Style("#009E73", "-", "^"),
    "gradmatch": Style("#009E73", ":", "P"),
    "herding": Style("#CC79A7", "-", "X"),
    "k-centre": Style("#CC79A7", ":", "*"),
    "loss": Style("#999999", "-", "<"),
    "gradient-norm": Style("#999999", ":", ">"),
    "leverage": Style("#555555", "-.", "d"),
}
TENTH = 10
"""The percentage of the panel of time, or the nearest to it that there is."""


def draw(found: Results, problem: StudyProblem, path: Path) -> None:
    """One panel for each number of local steps, then the learning curves over seconds."""
    steps = local_steps(found, problem)
    figure, axes = panels(len(steps) + 1, height=3.0, legend=3)
    for axis, each in zip(axes, steps, strict=False):
        _fractions(axis, found, problem, each)
    _learning(axes[-1], found, problem, steps[0])
    axes[0].set_ylabel(f"personal {unit(found, problem)}")
    figure.suptitle(problem.label)
    lines = labelled(axes)
    legend_below(figure, {row: lines[row] for row in ROWS if row in lines})
    save(figure, path)


def _fractions(axis: Any, found: Results, problem: StudyProblem, steps: int) -> None:
    """The metric against the percentage; bands are 95 % intervals."""
    shown = percents(found, problem, steps)
    inside: list[float] = []
    for row in ROWS:
        cells = [(p, scores(at(found, row, problem, p, steps))[0]) for p in shown]
        points = [(p, mean_of(each)) for p, each in cells if each]
        if not points:
            continue
        style, where = STYLES.get(row, Style("#bbbbbb")), [p for p, _ in points]
        means = [mean for _, mean in points]
        _line(axis, where, [mean.value for mean in means], style, row)
        if row in CURVED:
            _band(axis, where, means, style)
        if row in MAIN:
            inside += [mean.value for mean in means]
    axis.set(title=f"{steps} steps per round", xscale="log", xlabel="% of the data")
    axis.set_xticks(shown, list(map(str, shown)))
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3)
    _limits(axis, inside)


def _line(axis: Any, x: Sequence[float], y: Sequence[float], style: Style, label: str) -> None:
    axis.plot(
        x, y, style.line, color=style.color, marker=style.marker, markersize=4,
        linewidth=style.width, label=label, zorder=2 + style.width,
    )  # fmt: skip


def _band(axis: Any, x: Sequence[float], means: Sequence[Mean], style: Style) -> None:
    low, high = ([m.value + sign * m.half for m in means] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=style.color, alpha=0.12, linewidth=0)


def _limits(axis: Any, inside: Sequence[float]) -> None:
    """Room for the main rows; selectors that fall far below them leave the panel."""
    if inside:
        low, high = min(inside), max(inside)
        room = 0.12 * (high - low) or 0.01 * abs(high) or 1.0
        axis.set_ylim(low - room, high + room)


def _learning(axis: Any, found: Results, problem: StudyProblem, steps: int) -> None:
    """Learning curves of a tenth, named where they end."""
    shown = percents(found, problem, steps)
    percent = min(shown, key=lambda p: abs(p - TENTH), default=TENTH)
    late: list[float] = []
    for row in CURVED:
        result = at(found, row, problem, percent, steps)
        curve = result.get("curve")
        if not curve:
            continue
        factor = 1 if scores(result)[1] else 100
        mean = [factor * value for value in curve["personal"]]
        style = STYLES[row]._replace(marker="")
        spent = passes(curve) / 1e6
        _line(axis, list(spent), mean, style, f"_{row}")
        axis.plot(spent[-1], mean[-1], "o", color=style.color, markersize=5)
        late += mean[len(mean) // 5 :]
    axis.set(
        title=f"{percent} %, {steps} steps per round",
        xlabel="million passes, with selection",
    )
    axis.grid(alpha=0.3)
    _limits(axis, late)
