"""The coreset: its size, weights, quality and points."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from corefed.show.page import charts
from corefed.show.page.content import (
    TIMES,
    Card,
    Figure,
    Figures,
    Fold,
    Gallery,
    Group,
    Missing,
    Part,
    ReportTable,
    Row,
    Section,
    TableCell,
    Text,
    missing,
    number,
)
from corefed.show.page.gather import RunFolder
from corefed.show.page.points import ShownPoints
from corefed.show.page.sections.clients import span
from corefed.training import fitted

BINS = 24
COLUMNS = 12
"""Columns of a data table that are shown."""
AID = (
    "Each client trains on a few weighted points that stand in for all of its data. A weight is "
    "the number of points that one represents. A ratio below 1 means a better fit than a random "
    "subset of the same size."
)


class Most(NamedTuple):
    """How many points are shown."""

    clients: int = 10
    per_class: int = 3
    rows: int = 5
    examples: int = 12


def section(run: RunFolder, points: ShownPoints | Missing, most: Most, prefix: str) -> Section:
    name, title = f"{prefix}coreset", "The coreset"
    quality = _quality(run, name)
    if isinstance(run.models, Missing):
        parts: list[Part] = [Figures(quality)] if quality else []
        return Section(name, title, AID if quality else "", [*parts, missing(run.models)])
    if "weight" not in run.models:
        sentence = f"{run.summary['method']} trains on all data: it has no coreset."
        return Section(name, title, "", [Text(sentence)])
    per_run = run.summary["clients"]
    weight = fitted.weights(run.models, per_run).double()
    if isinstance(run.clients, Missing):
        parts = [Figures(quality)] if quality else []
        return Section(name, title, AID, [*parts, missing(run.clients)])
    sizes = [client["train"] for client in run.clients[0]]
    parts = [Figures([_histogram(run, weight, sizes, name), *quality])]
    parts.append(Fold("The coreset of each client", _by_client(run, weight, sizes)))
    if isinstance(points, Missing):
        parts.append(missing(points))
    elif points.columns:
        parts.append(_rows(run, weight, points, most))
    else:
        parts.append(_gallery(run, weight, points, most))
    return Section(name, title, AID, parts)


def _histogram(run: RunFolder, weight: Tensor, sizes: Sequence[int], name: str) -> Figure:
    own = weight[weight > 0].numpy()
    chosen = (weight > 0).sum(-1).tolist()
    spread = np.ptp(own) > 1e-6 * own.max()
    low, high = (0.0, float(own.max())) if spread else (float(own.min()) * 0.9, own.max() * 1.1)
    counts, edges = np.histogram(own, bins=BINS if spread else 3, range=(low, high))
    data = [
        {"low": float(a), "high": float(b), "y": int(count)}
        for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    finding = (
        f"{span(chosen)} of {span(sizes)} points per client, {sum(chosen)} in total; weights "
        f"{own.min():.3g} to {own.max():.3g}, median {np.median(own):.3g} (seed {run.seeds[0]})."
    )
    table = ReportTable(
        "Number of chosen points by weight",
        ("weight", "points"),
        [
            (f"{row['low']:.3g} to {row['high']:.3g}", TableCell(f"{row['y']}", float(row["y"])))
            for row in data
        ],
    )
    spec = charts.histogram(data, "weight of a point", "points")
    return Figure(f"{name}-weights", "Weights of the chosen points", spec, finding, table)


MEASURES = {
    "held_out_error": ("Error on fresh draws", "held-out error"),
    "over_uniform": ("Error against a random subset's", "ratio of errors; below 1 is better"),
}
"""Of a coreset's quality: title of the chart, and of its axis."""


def _quality(run: RunFolder, name: str) -> list[Figure]:
    """The measured quality of the coresets over rounds, one chart per measure."""
    found = [_over_rounds(run, key, name) for key in MEASURES]
    return [figure for figure in found if figure is not None]


def measured(run: RunFolder, key: str) -> list[tuple[int, list[float]]]:
    """(round, value of each seed) of rounds in which some client's coreset was measured.

    A line repeats the last measurement of every client, so a round without one has the same values
    as the round before.
    """
    found: list[tuple[int, list[float]]] = []
    for line in run.lines:
        each = [v for v in line["coreset"].get(key, []) if v is not None]
        if each and (not found or found[-1][1] != each):
            found.append((line["round"], each))
    return found


def _over_rounds(run: RunFolder, key: str, name: str) -> Figure | None:
    title, axis = MEASURES[key]
    series = [
        (at, statistics.fmean(each), statistics.stdev(each) if len(each) > 1 else 0.0)
        for at, each in measured(run, key)
    ]
    if not series:
        return None
    data = [
        {"series": title, "x": at, "y": mean, "low": mean - std, "high": mean + std}
        for at, mean, std in series
    ]
    finding = f"{series[-1][1]:.3g} when last measured, after round {series[-1][0]}"
    refreshes = run.lines[-1]["coreset"].get("refreshes", [None])
    if None not in refreshes:
        finding += f"; {statistics.fmean(refreshes):.1f} refreshes per client"
    table = ReportTable(
        f"{title}, mean over clients",
        ("round", "mean", "std over seeds"),
        [(str(at), number(mean, ".4g"), number(std, ".2g")) for at, mean, std in series],
    )
    spec = charts.series(
        data, [title], "round", axis, form=".2~g", x_form="d",
        band=any(std > 0 for *_, std in series), points=len(data) <= 80, zero=True, step=True,
    )  # fmt: skip
    part = {"held_out_error": "quality", "over_uniform": "ratio"}[key]
    return Figure(f"{name}-{part}", title, spec, f"{finding}.", table)


def compared(runs: Sequence[RunFolder]) -> list[Section]:
    """The coresets of several runs side by side."""
    rows: list[Row] = []
    for run in runs:
        coreset = run.summary["coreset"]
        if coreset["fraction"] < 1:
            rows.append(
                (
                    run.label,
                    number(100 * coreset["fraction"], "g", " %"),
                    number(coreset.get("size"), ".1f"),
                    number(coreset.get("held_out_error"), ".3g"),
                    number(coreset.get("over_uniform"), ".3g"),
                    number(coreset.get("refreshes"), ".1f"),
                )
            )
    if not rows:
        return []
    heads = ("run", "of the data", "points per client", "error on fresh draws",
             "ratio to a random subset", "refreshes per client")  # fmt: skip
    table = ReportTable("At the end, means over clients and seeds", heads, rows, sortable=True)
    return [Section("all-coresets", "Coresets of all runs", AID, [table])]


def _by_client(run: RunFolder, weight: Tensor, sizes: Sequence[int]) -> ReportTable:
    """Number of points, sum of weights, and effective number of points."""
    rows = []
    for name, w, n in zip(run.names, weight, sizes, strict=True):
        own = w[w > 0]
        total = own.sum().item()
        rows.append(
            (
                name,
                TableCell(str(n), n),
                TableCell(str(len(own)), len(own)),
                number(total, ".4g"),
                number(own.max().item() if len(own) else math.nan, ".3g"),
                number(total**2 / own.square().sum().item() if len(own) else math.nan, ".1f"),
            )
        )
    heads = ("client", "points", "chosen", "sum of weights", "largest weight", "effective points")
    return ReportTable(
        f"The coreset of each client, seed {run.seeds[0]}", heads, rows,
        note="Effective points: (sum of w)² / sum of w², which is the number of points where all "
        "weights are equal.",
    )  # fmt: skip


def _gallery(run: RunFolder, weight: Tensor, points: ShownPoints, most: Most) -> Part:
    """Images with the largest weights of every client and class."""
    groups, gone = [], 0
    for client, (name, w) in enumerate(list(zip(run.names, weight, strict=True))[: most.clients]):
        cards = []
        for place in largest(w, points.y.train[client], most.per_class):
            picture = points.picture("train", client, place)
            if picture is None:
                gone += 1
                continue
            label, value = run.labels[int(points.y.train[client][place])], w[place].item()
            words = f"Image of class {label}, weight {value:.1f}"
            cards.append(Card((label, f"{TIMES} {value:.1f}"), picture.source, words, picture.size))
        groups.append(Group(shown_of(name, len(cards), int((w > 0).sum())), cards))
    note = (
        f"At most {most.per_class} images of each class, those with the largest weights; {TIMES} "
        "is the weight."
    )
    if len(groups) < len(run.names):
        note += f" The first {len(groups)} of {len(run.names)} clients are shown."
    note += f" {gone} images can no longer be read." if gone else ""
    return Gallery(f"Chosen images, seed {run.seeds[0]}", groups, small=True, note=note)


def shown_of(name: str, shown: int, chosen: int) -> str:
    """The title of a client's pictures: as many as there are, or how many of them."""
    part = f"all {chosen}" if shown == chosen else f"{shown} of {chosen}"
    return f"{name}, {part} chosen points"


def largest(w: Tensor, y: Tensor, per_class: int) -> list[int]:
    """Positions of the largest weights of every class, by class and then by falling weight."""
    found: list[int] = []
    own = w[: len(y)]
    for label in y.unique().tolist():
        order = own.masked_fill(y != label, 0.0).argsort(descending=True, stable=True)
        found += [
            place for place in order[:per_class].tolist() if own[place] > 0 and y[place] == label
        ]
    return found


def _rows(run: RunFolder, weight: Tensor, points: ShownPoints, most: Most) -> Part:
    """The rows with the largest weights of every client."""
    rows = []
    for client, (name, w) in enumerate(list(zip(run.names, weight, strict=True))[: most.clients]):
        y = points.y.train[client]
        order = w[: len(y)].argsort(descending=True, stable=True)[: most.rows]
        for place in order.tolist():
            if w[place] > 0:
                shown = points.row("train", client, place)[:COLUMNS]
                rows.append((name, number(w[place].item(), ".3g"), truth(run, y[place]), *shown))
    dropped = len(points.columns) - COLUMNS
    note = f"{dropped} more columns are not shown." if dropped > 0 else ""
    if most.clients < len(run.names):
        note += f" The first {most.clients} of {len(run.names)} clients are shown."
    heads = ("client", "weight", target_name(run), *points.columns[:COLUMNS])
    caption = f"Chosen rows with the largest weights, seed {run.seeds[0]}"
    return ReportTable(caption, heads, rows, note=note.strip())


def target_name(run: RunFolder) -> str:
    first = run.preparations[0]
    return first.target or ("class" if first.labels else ", ".join(first.targets))


def truth(run: RunFolder, y: Tensor) -> str | TableCell:
    """A label by its name, or targets."""
    if run.labels:
        return run.labels[int(y)]
    if y.numel() == 1:
        return number(y.item(), ".4g")
    return ", ".join(f"{value:.4g}" for value in y.flatten().tolist())
