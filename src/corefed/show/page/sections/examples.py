"""Single test points: the most uncertain ones, and the most confident errors."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from corefed.base.types import Tree
from corefed.show.page.content import (
    Card,
    Gallery,
    Group,
    Missing,
    Part,
    ReportTable,
    Row,
    Section,
    Share,
    Text,
    missing,
    number,
)
from corefed.show.page.gather import RunFolder
from corefed.show.page.points import ShownPoints
from corefed.show.page.sections.chosen import COLUMNS, Most, target_name, truth
from corefed.training.record import MODELS

AID = (
    "Whether their predictions are right or wrong. Aleatoric uncertainty is noise in the data and "
    "stays; epistemic uncertainty is the model's and shrinks with more similar data."
)
SHARES = 3
"""Classes shown per prediction."""
SURE = 0.9
"""Confidence from which a prediction counts as sure."""


def section(run: RunFolder, points: ShownPoints | Missing, most: Most, prefix: str) -> Section:
    name, title = f"{prefix}examples", "The most uncertain test points"
    if isinstance(run.held_out, Missing):
        return Section(name, title, "", [missing(run.held_out)])
    held = run.held_out
    kind = next((kind for kind in MODELS if f"{kind}.mean" in held), "")
    first = held["row"] < run.summary["clients"]
    if not kind or not bool(first.any()):
        return Section(name, title, "", [missing("No client of this run has test points.")])
    own = {key: value[first] for key, value in held.items()}
    found = {key: own[key] for key in ("row", "point", "y")}
    found |= {key: own[f"{kind}.{key}"] for key in ("mean", "total", "aleatoric", "epistemic")}
    total = found["total"] if run.labels else found["total"].mean(-1)
    unsure = total.argsort(descending=True, stable=True)[: most.examples].tolist()
    if run.labels:
        wrongs, heading = _sure_and_wrong(found, most.examples)
    else:
        off = ((found["y"] - found["mean"]).square() / found["total"]).mean(-1)
        wrongs = off.argsort(descending=True, stable=True)[: most.examples].tolist()
        heading = "Largest errors relative to the predicted uncertainty"
    show = _cards if not isinstance(points, Missing) and not points.columns else _table
    parts: list[Part] = []
    if isinstance(points, Missing):
        parts.append(missing(points))
    about = f"{kind} model, seed {run.seeds[0]}"
    parts.append(show(run, points, found, unsure, f"Most uncertain, {about}"))
    if wrongs:
        parts.append(show(run, points, found, wrongs, f"{heading}, {about}"))
    else:
        parts.append(Text(heading))
    return Section(name, title, AID, parts)


def _sure_and_wrong(found: Tree, most: int) -> tuple[list[int], str]:
    """Places of wrong predictions that are sure, surest first; and a heading, or why none."""
    confidence, guess = found["mean"].double().max(-1)
    wrong = guess != found["y"]
    if not bool(wrong.any()):
        return [], "No test point of this seed is wrong."
    ranked = confidence.masked_fill(~wrong, -1.0)
    sure = int((ranked >= SURE).sum())
    level = f"{100 * SURE:g} %"
    if not sure:
        return [], (
            f"No wrong prediction is sure: the highest confidence among {int(wrong.sum())} wrong "
            f"ones is {100 * ranked.max().item():.0f} %, below {level}."
        )
    places: list[int] = ranked.argsort(descending=True, stable=True)[: min(sure, most)].tolist()
    part = f"{len(places)} of {sure}" if len(places) < sure else f"{sure}"
    heading = f"Wrong at {level} confidence or more ({part}; {int(wrong.sum())} wrong in all)"
    return places, heading


def _cards(
    run: RunFolder, points: ShownPoints | Missing, found: Tree, places: list[int], title: str
) -> Gallery:
    assert not isinstance(points, Missing)
    cards = []
    for place in places:
        client, point = int(found["row"][place]), int(found["point"][place])
        picture = points.picture("test", client, point)
        p, y = found["mean"][place], int(found["y"][place])
        guess = int(p.argmax())
        lines = (
            f"{run.names[client]}: {run.labels[y]}"
            + ("" if guess == y else f", predicted {run.labels[guess]}"),
            f"total {found['total'][place]:.2f} = {found['aleatoric'][place]:.2f} aleatoric + "
            f"{found['epistemic'][place]:.2f} epistemic",
        )
        words = f"Test image of class {run.labels[y]}, predicted {run.labels[guess]}"
        cards.append(
            Card(lines, picture.source, words, picture.size, _shares(run, p, y))
            if picture is not None
            else Card(lines, shares=_shares(run, p, y))
        )
    return Gallery(title, [Group("", cards)], note="Green: true class. Uncertainties in nats.")


def _shares(run: RunFolder, p: Tensor, y: int) -> list[Share]:
    """The most likely classes, and the true one."""
    order = p.argsort(descending=True, stable=True)[:SHARES].tolist()
    shown = order if y in order else [*order[:-1], y]
    return [
        Share(
            run.labels[c], f"{100 * p[c]:.0f} %" if p[c] >= 0.01 else "< 1 %", float(p[c]), c == y
        )
        for c in shown
    ]


def _table(
    run: RunFolder, points: ShownPoints | Missing, found: Tree, places: list[int], title: str
) -> ReportTable:
    columns = () if isinstance(points, Missing) else points.columns[:COLUMNS]
    row: Callable[[int, int], Row] = (
        (lambda client, point: [])
        if isinstance(points, Missing)
        else (lambda client, point: points.row("test", client, point)[:COLUMNS])
    )
    rows = []
    for place in places:
        client, point = int(found["row"][place]), int(found["point"][place])
        mean = found["mean"][place]
        predicted = (
            (run.labels[int(mean.argmax())], number(100 * mean.max().item(), ".0f", " %"))
            if run.labels
            else (truth(run, mean),)
        )
        spread = [found[key][place].mean().item() for key in ("total", "aleatoric", "epistemic")]
        shown = [number(value if run.labels else value**0.5, ".3g") for value in spread]
        rows.append(
            (
                run.names[client],
                truth(run, found["y"][place]),
                *predicted,
                *shown,
                *row(client, point),
            )
        )
    confidence = ("confidence",) if run.labels else ()
    heads = ("client", f"true {target_name(run)}", "predicted", *confidence, "total", "aleatoric",
             "epistemic", *columns)  # fmt: skip
    unit = "entropies in nats" if run.labels else "standard deviations in the target's unit"
    dropped = 0 if isinstance(points, Missing) else len(points.columns) - COLUMNS
    more = f" {dropped} more columns are not shown." if dropped > 0 else ""
    return ReportTable(title, heads, rows, note=f"Uncertainties are {unit}.{more}")
