"""Which classes are told apart? Areas, sensitivity and specificity, by class and by client."""

from __future__ import annotations

from typing import Any

from corefed.base.types import Tree
from corefed.show.page.content import (
    DASH,
    Fold,
    Missing,
    Part,
    ReportTable,
    Row,
    Section,
    TableCell,
    missing,
)
from corefed.show.page.gather import RunFolder
from corefed.training import classification, fitted

NAMES = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "f1": "F1",
}
MOST_CLASSES = 20
"""Of a confusion matrix that fits a page."""


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}classes", "Which classes are told apart?"
    if isinstance(run.held_out, Missing):
        return Section(name, title, "", [missing(run.held_out)])
    if not run.labels:
        return Section(name, title, "", [missing("This run predicts numbers, not classes.")])
    kind = "personal" if "personal.mean" in run.held_out else "global"
    found = classification.take(run.held_out, kind, 0, len(run.names))
    if found is None:
        return Section(name, title, "", [missing("No client of this run has test points.")])
    chosen = classification.take(_validation(run), kind, 0, len(run.names))
    at = classification.thresholds(chosen, len(run.labels))
    all_ = classification.measure(found, run.labels, at)
    aid = (
        "Each class against all others. AUROC: how often a point of the class has a higher "
        "probability for it than another point. Sensitivity: the share of the class that is found; "
        f"specificity: the share of the others that is not mistaken for it. "
        f"{classification.how(all_, len(run.labels))}"
    )
    parts: list[Part] = [_by_class(all_, kind, run.seeds[0]), _by_client(run, found, at)]
    if len(run.labels) <= MOST_CLASSES:
        parts.append(Fold("Confusion matrix", _confusion(all_["confusion"], run.labels)))
    return Section(name, title, aid, parts)


def _validation(run: RunFolder) -> Tree:
    path = run.path / fitted.VALIDATION
    if not path.exists():
        import torch

        return {"row": torch.zeros(0, dtype=torch.int64)}
    return fitted.read_tensors(run.path, fitted.VALIDATION)


def _cell(value: dict[str, Any]) -> TableCell:
    if value["value"] is None:
        return TableCell(DASH, float("nan"))
    ends = value["interval"]
    more = f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
    return TableCell(f"{value['value']:.3f}{more}", value["value"])


def _by_class(found: dict[str, Any], kind: str, seed: int) -> ReportTable:
    rows: list[Row] = [
        (
            label,
            TableCell(str(each["points"]), each["points"]),
            *(_cell(each[key]) for key in NAMES),
        )
        for label, each in found["classes"].items()
    ]
    return ReportTable(
        f"By class: {kind} models, {found['points']:,} test points, seed {seed}",
        ("class", "points", *NAMES.values()),
        rows,
        sortable=True,
        note=f"95 % intervals over {found['intervals_over']}.",
    )


def _by_client(run: RunFolder, found: classification.Predicted, at: list[float] | None) -> Part:
    """Of two classes those of the second; of more, accuracy and the mean AUROC."""
    two = len(run.labels) == 2
    rows: list[Row] = []
    for i, name in enumerate(run.names):
        mine = found.of(found.client == i)
        if not len(mine.y):
            continue
        one = classification.measure(mine, run.labels, at, intervals=False)
        cells = [_cell(one["accuracy"])]
        if two:
            cells += [_cell(one["classes"][run.labels[1]][key]) for key in NAMES]
        else:
            cells.append(_cell({"value": one["auroc"], "interval": None}))
        rows.append((name, TableCell(str(len(mine.y)), len(mine.y)), *cells))
    own = tuple(NAMES.values()) if two else ("AUROC, mean over classes",)
    caption = f"By client, class {run.labels[1]}" if two else "By client"
    table = ReportTable(caption, ("client", "points", "accuracy", *own), rows, sortable=True)
    return Fold(caption, table)


def _confusion(counts: list[list[int]], labels: tuple[str, ...]) -> ReportTable:
    rows: list[Row] = [
        (label, *(TableCell(str(each), each) for each in row))
        for label, row in zip(labels, counts, strict=True)
    ]
    return ReportTable("Rows are true classes, columns predicted ones", ("", *labels), rows)
