"""What `bench selectors` set out to show, line by line, and whether the results show it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corefed_studies.pages import Table
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.selectors.study import (
    DEFAULT,
    FRUGAL,
    FULL,
    ONCE,
    REDRAWN,
    ROWS,
    SCALES,
    Spot,
    problem_of,
)
from corefed_studies.reproduce.selectors.verdicts import (
    Compared,
    Mean,
    Saving,
    compare,
    costs,
    count,
    savings,
)

TENTH, HALF = 10, 50
"""Percentages that are compared with full data."""
WORST = 6
"""Cells that a line names, at most."""

AimRow = tuple[str, str, str]
"""What was to be shown, what was measured, whether that is reached."""


def table(found: Results) -> Table:
    lines = [*_against_random(found), *_tenth(found), _half(found)]
    lines += [_cheaper(found, *each) for each in _costs(found)]
    lines += [_cheaper(found, *each) for each in _frugal(found)]
    note = (
        "A cell is a problem, a fraction and a number of local steps; its differences are paired "
        "by seed, ± is half of the 95 % interval of their mean (Student's t), in points of "
        "personal accuracy, for regression in percent of RMSE, up is better. Below or above: the "
        "interval is on one side of 0. That happens by chance in 1 of 20 cells without any "
        "difference; Holm's correction over the cells bounds the chance of a single such error "
        "by 5 %. Cheaper: cost to 99 % of full data's last accuracy (RMSE: within 1 %), read off "
        "the mean learning curve; ratios are full data's cost over the default's."
    )
    return Table("What was to be shown", ("to show", "measured", "reached"), lines, note)


def describe_spot(spot: Spot) -> str:
    return f"{spot.problem} {spot.percent} %, {spot.steps} steps"


def format_mean(mean: Mean) -> str:
    """+0.12 ± 0.05; a single seed has no interval."""
    value = f"{mean.value:+.2f}"
    return value if math.isnan(mean.half) else f"{value} ± {mean.half:.2f}"


def _against_random(found: Results) -> list[AimRow]:
    cells = compare(found, DEFAULT, REDRAWN)
    counts = count(cells)
    corrected = "with Holm's correction"
    level = _row(
        "at or above random redrawn at the same cadence in every cell",
        cells,
        f"{counts.at_or_above} of {counts.cells} cells; below in {counts.below}, {corrected} in "
        f"{counts.surely_below}{_worst(cells)}",
        counts.below == 0,
    )
    above = _row(
        "significantly above it in at least half of the cells",
        cells,
        f"{counts.above} of {counts.cells}; {corrected} {counts.surely_above}",
        2 * counts.above >= counts.cells,
    )
    fixed = compare(found, DEFAULT, ONCE)
    others = count(fixed)
    never = _row(
        "never below random chosen once",
        fixed,
        f"below in {others.below} of {others.cells} cells, {corrected} in {others.surely_below}; "
        f"above in {others.above}{_worst(fixed)}",
        others.below == 0,
    )
    return [level, above, never]


def _tenth(found: Results) -> list[AimRow]:
    """One line for each distance that problems ask for."""
    lines = []
    cells = compare(found, DEFAULT, FULL, TENTH)
    asked = {problem.name: problem.within for problem in SCALES["paper"].problems}
    for within in dict.fromkeys(value for value in asked.values() if value is not None):
        names = [problem_of(name).label for name, value in asked.items() if value == within]
        mine = [each for each in cells if asked.get(each.spot.problem) == within]
        good = sum(each.gap.value >= -within for each in mine)
        listed = "; ".join(f"{describe_spot(each.spot)} {format_mean(each.gap)}" for each in mine)
        lines.append(
            _row(
                f"{TENTH} %: within {within:g} points of full data ({'; '.join(names)})",
                mine,
                f"{good} of {len(mine)}: {listed}",
                good == len(mine),
            )
        )
    return lines


def _half(found: Results) -> AimRow:
    cells = compare(found, DEFAULT, FULL, HALF)
    counts = count(cells)
    return _row(
        f"{HALF} %: not below full data anywhere",
        cells,
        f"{counts.at_or_above} of {counts.cells} not below; above in {counts.above}{_worst(cells)}",
        counts.below == 0,
    )


def _worst(cells: Sequence[Compared]) -> str:
    """The cells that are below, the worst first."""
    below = sorted((each for each in cells if each.gap.below), key=lambda each: each.gap.value)
    words = [f"{describe_spot(each.spot)} {format_mean(each.gap)}" for each in below[:WORST]]
    words += [f"{len(below) - WORST} more"] if len(below) > WORST else []
    return f": {'; '.join(words)}" if words else ""


def _row(aim: str, cells: Sequence[object], measured: str, reached: bool) -> AimRow:
    return (aim, measured, "yes" if reached else "no") if cells else (aim, "not measured", "-")


def rivals(found: Results) -> list[Table]:
    """The default against every other row; no table where there is none."""
    rows = []
    for row in (name for name in ROWS if name not in (DEFAULT, FRUGAL)):
        cells = compare(found, DEFAULT, row)
        counts = count(cells)
        if not cells:
            continue
        ranked = sorted(cells, key=lambda each: each.gap.value)
        level = counts.cells - counts.above - counts.below
        figures = map(str, (counts.cells, counts.above, level, counts.below))
        ends = (
            f"{format_mean(each.gap)} ({describe_spot(each.spot)})"
            for each in (ranked[0], ranked[-1])
        )
        rows.append([row, *figures, *ends])
    columns = ("", "cells", "default above", "level", "default below", "least", "most")
    note = "Differences of the default from the row, as above; level: the interval holds 0."
    return [Table("The default against every other row", columns, rows, note)] if rows else []


# --- costs ----------------------------------------------------------------------------------------


def _costs(found: Results) -> list[tuple[str, list[Saving]]]:
    """Seconds on every machine that timed runs alone, or of all runs; then examples."""
    timed = savings(found, DEFAULT, "seconds", alone=True)
    machines = dict.fromkeys(each.spot.machine for each in timed)
    lines = [
        (f"in seconds on {machine}", [each for each in timed if each.spot.machine == machine])
        for machine in machines
    ]
    if not lines:
        lines = [("in seconds (several runs at once)", savings(found, DEFAULT, "seconds"))]
    others = {what: words for what, words in costs(found).items() if what != "seconds"}
    return lines + [
        (f"in {words}", savings(found, DEFAULT, what)) for what, words in others.items()
    ]


def _frugal(found: Results) -> list[tuple[str, list[Saving]]]:
    """The same of the row that looks at fewer points, which was timed alone only."""
    lines = []
    for what, words in costs(found).items():
        cells = savings(found, FRUGAL, what, alone=True)
        if cells:
            lines.append((f"with a fifth of the points looked at (`pool=0.2`), in {words}", cells))
    return lines


def _cheaper(found: Results, what: str, cells: Sequence[Saving]) -> AimRow:
    """Reached where, for every problem and number of steps, some fraction is cheaper."""
    pairs = {(each.spot.problem, each.spot.steps) for each in cells}
    good = {(each.spot.problem, each.spot.steps) for each in cells if each.ratio > 1}
    parts = []
    for percent in sorted({each.spot.percent for each in cells}):
        ratios = [each.ratio for each in cells if each.spot.percent == percent]
        met = [ratio for ratio in ratios if ratio > 0]
        part = f"{percent} %: in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        if met:
            part += f", ratio {min(met):.2f} to {max(met):.2f}"
        if len(met) < len(ratios):
            part += f", target not reached in {len(ratios) - len(met)}"
        parts.append(part)
    return _row(
        f"cheaper than full data to 99 % of its accuracy, {what}",
        cells,
        f"at some fraction in {len(good)} of {len(pairs)} pairs of problem and steps; by fraction "
        + "; ".join(parts),
        len(good) == len(pairs),
    )
