"""Sites by the numbers: scores, data and calibration of each, to sort and to search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from corefed.show.page import charts
from corefed.show.page.content import (
    Figure,
    Figures,
    Missing,
    Part,
    ReportTable,
    Row,
    Section,
    TableCell,
    number,
    percent,
)
from corefed.show.page.gather import (
    RunFolder,
    capitalize,
    score_axis,
    score_cell,
    score_name,
    score_text,
)
from corefed.show.page.sections import trust
from corefed.training.record import MODELS

MOST = 1000
"""Rows of a table. Of more sites, the weakest are shown."""
IN_MAP = 60
"""Sites in a map of sites and runs."""
TARGET = 0.05
"""Error rate among predictions that nobody reviews."""


def scores(run: RunFolder) -> dict[str, float]:
    """The last score of each site that has test points, mean over seeds."""
    last = next((line for line in reversed(run.lines) if "clients" in line), None)
    if last is None:
        return {}
    found = {}
    for name, *each in zip(run.names, *last["clients"], strict=True):
        tested = [value for value in each if value is not None]
        if tested:
            found[name] = statistics.fmean(tested)
    return found


def weakest_first(found: dict[str, float], score: str) -> list[str]:
    return sorted(found, key=lambda name: found[name], reverse=score == "rmse")


def section(runs: Sequence[RunFolder]) -> list[Section]:
    """The scores of every site under every run, where runs have the same sites."""
    each = {run.label: scores(run) for run in runs}
    score = runs[0].score
    if len({run.score for run in runs}) > 1 or not score or not all(each.values()):
        return []
    names = list(next(iter(each.values())))
    if any(set(found) != set(names) for found in each.values()):
        return []
    mean = {name: statistics.fmean(found[name] for found in each.values()) for name in names}
    order = weakest_first(mean, score)
    rows: list[Row] = [
        (name, *(score_cell(found[name], score) for found in each.values()),
         _range([found[name] for found in each.values()], score))
        for name in order[:MOST]
    ]  # fmt: skip
    over = "mean over seeds" if any(len(run.seeds) > 1 for run in runs) else "one seed"
    caption = f"{capitalize(score_name(score))} of each site"
    table = ReportTable(
        f"{caption}, last evaluated round, {over}", ("site", *each, "range over runs"), rows,
        sortable=True, filtered=True, note=_left_out(len(order), MOST),
    )  # fmt: skip
    aid = "Which sites gain and which lose by the choice of a run. The weakest sites come first."
    figure = _map(each, order[:IN_MAP], score, table)
    return [Section("all-sites", "Sites under every run", aid, [Figures([figure], wide=True)])]


def _range(values: Sequence[float], score: str) -> TableCell:
    return score_cell(max(values) - min(values), score)


def _left_out(number_of: int, most: int) -> str:
    return f"The {most:,} weakest of {number_of:,} sites are shown." if number_of > most else ""


def _map(
    each: dict[str, dict[str, float]], order: list[str], score: str, table: ReportTable
) -> Figure:
    factor, unit = score_axis(score)
    data: list[dict[str, Any]] = [
        {"x": label, "y": name, "v": factor * found[name]}
        for label, found in each.items()
        for name in order
    ]
    shown = [row["v"] for row in data]
    low, high = min(shown), max(shown)
    spec = charts.heat(
        data, "run", "site", unit, form=".3~g" if score == "accuracy" else ".2~g",
        legend=".0f" if score == "accuracy" else ".2~g", columns=list(each), rows=order,
        domain=(low, high if high > low else low + 1),
    )  # fmt: skip
    worst = {label: weakest_first(found, score)[0] for label, found in each.items()}
    words = "; ".join(
        f"{label}: {name} ({score_text(each[label][name], score)})" for label, name in worst.items()
    )
    finding = f"Weakest site of each run: {words}."
    if len(order) < len(next(iter(each.values()))):
        finding += f" The {len(order)} weakest are drawn."
    return Figure("all-sites-map", "Score by site and run", spec, finding, table, opened=True)


def table(run: RunFolder) -> list[Part]:
    """One row per site of one run: points, score, calibration, and what a person should review."""
    found = scores(run)
    if not found:
        return []
    order = weakest_first(found, run.score)
    about = {} if isinstance(run.clients, Missing) else {c["name"]: c for c in run.clients[0]}
    gaps, shares = _predictions(run)
    heads = ["site", score_name(run.score)]
    heads += ["training points", "test points"] if about else []
    heads += ["confidence minus accuracy"] if gaps else []
    heads += [f"to review at {100 * TARGET:g} % error"] if shares else []
    rows: list[Row] = []
    for name in order[:MOST]:
        cells: list[str | TableCell] = [name, score_cell(found[name], run.score)]
        if about:
            one = about.get(name, {})
            cells += [number(one.get(key), ",d") for key in ("train", "test")]
        if gaps:
            cells.append(number(_times(gaps.get(name), 100), "+.1f", " points"))
        if shares:
            cells.append(percent(shares.get(name)))
        rows.append(tuple(cells))
    over = f"mean over {len(run.seeds)} seeds" if len(run.seeds) > 1 else f"seed {run.seeds[0]}"
    notes = [_left_out(len(order), MOST)]
    if gaps:
        notes.append(
            "Confidence minus accuracy: above 0 a site's predictions are surer than right, "
            "below 0 less sure; with few test points either may be chance."
        )
    if about and len(run.seeds) > 1:
        notes.append(f"Numbers of points are of seed {run.seeds[0]}.")
    caption = f"Sites, {over}, weakest first"
    note = " ".join(filter(None, notes))
    return [ReportTable(caption, heads, rows, sortable=True, filtered=True, note=note)]


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _predictions(run: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
    """By site, over seeds: mean confidence minus accuracy, and the share to review."""
    held = run.held_out
    if isinstance(held, Missing) or not run.labels or not len(held["y"]):
        return {}, {}
    kind = next((kind for kind in MODELS if f"{kind}.mean" in held), None)
    if kind is None:
        return {}, {}
    sure, guess = held[f"{kind}.mean"].double().max(-1)
    gap = sure - (guess == held["y"]).double()
    client = held["row"] % len(run.names)
    threshold = trust.review(run, TARGET)
    gaps = _by_site(run, gap, client)
    if threshold is None or (not threshold.kept and math.isinf(threshold.value)):
        return gaps, {}
    above = (held[f"{kind}.total"].double() >= threshold.value).double()
    return gaps, _by_site(run, above, client)


def _by_site(run: RunFolder, values: Tensor, client: Tensor) -> dict[str, float]:
    sums, sizes = (client.bincount(weights, len(run.names)) for weights in (values, None))
    return {
        name: (total / count).item()
        for name, total, count in zip(run.names, sums, sizes, strict=True)
        if count
    }
