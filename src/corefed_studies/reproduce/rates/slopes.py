"""Slopes of errors in n and n_k, with confidence intervals, as tables.

A slope is that of the least-squares line through log(error) against log(size), fitted per seed.
Seeds have their own functions, points and networks, so their slopes are independent, and Student's
t gives an interval for the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from corefed_studies import pages
from corefed_studies.reproduce import results
from corefed_studies.reproduce.rates import posterior_errors
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.theory.quantities import rate_exponent

FULL, CORESET = "PFedBayes, all points", "CoreSet-PFedBayes"
ONCE, REDRAWN = "random subset, chosen once", "random subset, redrawn"
SUBSETS = (CORESET, ONCE, REDRAWN)
PROCESS = "Gaussian process"
FRACTION = 0.2
"""Of n_k to n where n changes."""
SURE = 0.05
"""A difference with a smaller p is counted."""

RateProblem = tuple[float, int]  # beta, Lambda


class Slope(NamedTuple):
    """Mean over seeds, and the half-width of its 95 % interval."""

    value: float
    half: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.half:.2f}"


def slope(sizes: Sequence[float], errors: Sequence[Sequence[float]]) -> Slope:
    """Of errors by size and seed."""
    from scipy.stats import t

    logs = np.log(np.asarray(errors, float))  # [sizes, seeds]
    each = np.polyfit(np.log(np.asarray(sizes, float)), logs, 1)[0]
    seeds = len(each)
    if seeds < 2:
        return Slope(float(each[0]), math.nan)
    half = float(t.ppf(0.975, seeds - 1)) * float(each.std(ddof=1)) / math.sqrt(seeds)
    return Slope(float(each.mean()), half)


def problems(found: Results) -> list[RateProblem]:
    return list(dict.fromkeys((r["beta"], r["dimension"]) for r in found.values() if "beta" in r))


def cells_of(found: Results, row: str, problem: RateProblem) -> list[Result]:
    """The cells of a row for a problem, by n and n_k."""
    mine = [
        r
        for (name, _), r in found.items()
        if name == row and (r.get("beta"), r.get("dimension")) == problem
    ]
    return sorted(mine, key=lambda r: (r["n"], r["k"]))


def along_n(found: Results, row: str, problem: RateProblem) -> list[Result]:
    """Those where n changes, at one n_k / n."""
    whole = row in (FULL, PROCESS)
    fraction = 1.0 if whole else FRACTION
    return [r for r in cells_of(found, row, problem) if r["k"] == round(fraction * r["n"])]


def along_k(found: Results, row: str, problem: RateProblem) -> list[Result]:
    """Those of the largest n, where n_k changes."""
    mine = cells_of(found, row, problem)
    return [r for r in mine if r["n"] == mine[-1]["n"]]


def fitted_slope(cells: Sequence[Result], size: str, metric: str = "error") -> Slope | None:
    if len(cells) < 2:
        return None
    return slope([r[size] for r in cells], [r["metrics"][metric]["per_seed"] for r in cells])


# --- tables ---------------------------------------------------------------------------------------


def make_tables(found: Results) -> list[pages.Table]:
    tables = [_slopes_in_n(found), _slopes_in_k(found), _errors(found), _subsets(found)]
    tables.append(_against_random(found))
    tables += [_coverage(found, "f", "f(x), the truth"), _coverage(found, "y", "a new y")]
    tables.append(_bounds(found))
    note = " ".join(filter(None, (results.machines(found), results.failures(found))))
    return [*tables[:-1], tables[-1]._replace(note=f"{tables[-1].note} {note}".strip())]


def _called(problem: RateProblem) -> str:
    return f"{problem[0]:g}, {problem[1]}"


def _slopes_in_n(found: Results) -> pages.Table:
    columns = ("beta, Lambda", "predicted", FULL, PROCESS, *SUBSETS)
    rows = []
    for problem in problems(found):
        cells = [_format_slope(fitted_slope(along_n(found, FULL, problem), "n"))]
        process = along_n(found, PROCESS, problem)
        cells.append(_format_slope(fitted_slope(process, "n", "mean")))
        cells += [_format_slope(fitted_slope(along_n(found, row, problem), "k")) for row in SUBSETS]
        rows.append([_called(problem), f"{-rate_exponent(*problem):.2f}", *cells])
    title = (
        f"Slope of log error in log n, and of subsets in log n_k with n_k = {FRACTION:g} n: "
        "mean over seeds ± half of its 95 % interval"
    )
    return pages.Table(title, columns, rows)


def _slopes_in_k(found: Results) -> pages.Table:
    largest = max(r["n"] for r in found.values() if "n" in r)
    columns = ("beta, Lambda", "predicted", *SUBSETS)
    rows = []
    for problem in problems(found):
        cells = [_format_slope(fitted_slope(along_k(found, row, problem), "k")) for row in SUBSETS]
        rows.append([_called(problem), f"{-rate_exponent(*problem):.2f}", *cells])
    return pages.Table(f"Slope of log error in log n_k, n = {largest} fixed", columns, rows)


def _format_slope(found: Slope | None) -> str:
    return "-" if found is None else str(found)


def _errors(found: Results) -> pages.Table:
    sizes = sorted({r["n"] for r in found.values() if "n" in r})
    rows = []
    for problem in problems(found):
        for row, metric in ((FULL, "error"), (FULL, "mean"), (PROCESS, "mean")):
            by_n = {r["n"]: r for r in along_n(found, row, problem)}
            what = "error" if metric == "error" else "its mean's" if row == FULL else row
            cells = [_thousandths(by_n.get(n), metric) for n in sizes]
            rows.append([f"{_called(problem)}: {what}", *cells])
    columns = ("beta, Lambda", *(f"n = {n}" for n in sizes))
    return pages.Table("Error on all points, in thousandths of the variance of f", columns, rows)


def _subsets(found: Results) -> pages.Table:
    rows = []
    sizes = sorted({r["k"] for p in problems(found) for r in along_k(found, ONCE, p)})
    largest = max(r["n"] for r in found.values() if "n" in r)
    for problem in problems(found):
        whole = {r["n"]: r for r in along_n(found, FULL, problem)}
        for row in SUBSETS:
            by_k = {r["k"]: r for r in along_k(found, row, problem)}
            cells = [_thousandths(by_k.get(k), "error") for k in sizes]
            last = _thousandths(whole.get(largest), "error") if row == SUBSETS[0] else ""
            rows.append([f"{_called(problem)}: {row}", *cells, last])
    columns = ("beta, Lambda", *(f"n_k = {k}" for k in sizes), "all points")
    title = f"Error at n = {largest} on subsets, in thousandths"
    return pages.Table(title, columns, rows)


def _against_random(found: Results) -> pages.Table:
    rows, told = [], []
    sizes = sorted({r["k"] for p in problems(found) for r in along_k(found, ONCE, p)})
    for row in (ONCE, REDRAWN):
        better = worse = 0
        for problem in problems(found):
            mine = {r["k"]: r for r in along_k(found, CORESET, problem)}
            theirs = {r["k"]: r for r in along_k(found, row, problem)}
            each = [ratio(mine.get(k, {}), theirs.get(k, {})) for k in sizes]
            rows.append([f"{_called(problem)}: over {row}", *map(_ratio_said, each)])
            better += sum(one is not None and one.p < SURE and one.value < 1 for one in each)
            worse += sum(one is not None and one.p < SURE and one.value > 1 for one in each)
        told.append(f"than the {row}, better in {better} and worse in {worse}")
    columns = ("beta, Lambda", *(f"n_k = {k}" for k in sizes))
    title = (
        "Error of the coreset over that of a random subset of its size (below 1: better), same n"
    )
    cells = len(problems(found)) * len(sizes)
    note = (
        "Geometric means over seeds; p of the paired t-test of logarithms, one test per cell. With "
        f"p < {SURE:g}, of {cells} cells: {'; '.join(told)}."
    )
    return pages.Table(title, columns, rows, note)


class Ratio(NamedTuple):
    """A geometric mean over seeds, and p of its being 1; NaN of a single seed."""

    value: float
    p: float


def ratio(mine: Result, other: Result, metric: str = "error") -> Ratio | None:
    """Of mine over other, paired by seed."""
    logs = [np.log(r["metrics"][metric]["per_seed"]) for r in (mine, other) if "metrics" in r]
    if len(logs) < 2:
        return None
    value = math.exp(float(np.mean(logs[0] - logs[1])))
    if len(logs[0]) < 2:
        return Ratio(value, math.nan)
    from scipy.stats import ttest_rel

    return Ratio(value, float(ttest_rel(*logs).pvalue))


def _ratio_said(found: Ratio | None) -> str:
    if found is None:
        return "-"
    if math.isnan(found.p):
        return f"{found.value:.2f}"
    return f"{found.value:.2f} (p {'< 0.001' if found.p < 0.001 else format(found.p, '.3f')})"


def _thousandths(result: Result | None, metric: str) -> str:
    spread = (result or {}).get("metrics", {}).get(metric)
    if spread is None:
        return "-"
    return f"{1000 * spread['mean']:.1f} ± {1000 * spread['std']:.1f}"


def _coverage(found: Results, kind: str, what: str) -> pages.Table:
    """At the largest n; subsets of the usual fraction."""
    levels = posterior_errors.LEVELS
    rows = []
    for row in (FULL, *SUBSETS):
        cells = []
        for problem in problems(found):
            mine = along_n(found, row, problem)
            shares = [
                f"{100 * mine[-1]['metrics'][f'{kind} {level}']['mean']:.0f}"
                for level in levels
                if mine
            ]
            cells.append(" / ".join(shares) or "-")
        rows.append([row, *cells])
    largest = max(r["n"] for r in found.values() if "n" in r)
    said = ", ".join(f"{level} %" for level in levels)
    title = (
        f"Coverage in % of {what} by intervals of {said}: n = {largest}, n_k = "
        f"{round(FRACTION * largest)}"
    )
    columns = ("beta, Lambda", *(_called(problem) for problem in problems(found)))
    return pages.Table(title, columns, rows)


def _bounds(found: Results) -> pages.Table:
    """The error in the Hellinger distance, and the bound that has no unknown constant."""
    rows = []
    for row in (FULL, *SUBSETS):
        cells = []
        for problem in problems(found):
            mine = along_n(found, row, problem)
            values = [mine[-1]["metrics"][key]["mean"] for key in ("hellinger", "bound") if mine]
            cells.append(" / ".join(f"{value:.3f}" for value in values) or "-")
        rows.append([row, *cells])
    columns = ("beta, Lambda", *(_called(problem) for problem in problems(found)))
    title = "Squared Hellinger distance / its bound without unknown constants, same runs"
    pairs = [
        pair
        for result in found.values()
        if "bound" in result.get("metrics", {})
        for pair in zip(
            *(result["metrics"][key]["per_seed"] for key in ("hellinger", "bound")), strict=True
        )
    ]
    held, telling = sum(d <= b for d, b in pairs), sum(b < 1 for _, b in pairs)
    note = (
        f"Of all {len(pairs)} runs' seeds, means over clients, the bound held in {held} and is "
        f"below 1 in {telling}."
    )
    return pages.Table(title, columns, rows, note)
