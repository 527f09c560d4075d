"""Predictions as a CSV table: a heading and one row per point."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from corefed.data.cells import marked
from corefed.data.preparation import Preparation
from corefed.use.predictions import Predictions, half_width


def as_csv(
    ids: Sequence[str],
    found: Predictions,
    level: float,
    preparation: Preparation,
    whose: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Numbers have float32's seven digits; text that a spreadsheet would compute is marked. `whose`
    has columns to put after the ids."""
    columns: dict[str, Sequence[Any]] = dict(whose or {})
    if preparation.labels:
        columns |= _class_columns(found, preparation)
    else:
        columns |= _target_columns(found, level, preparation)
    if found.outside is not None:
        columns["outside"] = [f"yes: {why}" if why else "no" for why in found.outside.why]
    if found.review is not None:
        columns["review"] = ["yes" if each else "no" for each in found.review.tolist()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", *map(marked, columns)])
    for row in zip(ids, *columns.values(), strict=True):
        writer.writerow([f"{v:.7g}" if isinstance(v, float) else marked(v) for v in row])
    return text.getvalue()


def _class_columns(found: Predictions, preparation: Preparation) -> dict[str, list[Any]]:
    said, labels = found.said, preparation.labels
    best = said.mean.argmax(-1)
    return {
        "predicted": [labels[each] for each in best.tolist()],
        "probability": said.mean.amax(-1).tolist(),
        **{f"p({label})": said.mean[:, c].tolist() for c, label in enumerate(labels)},
        "total": said.total.tolist(),
        "aleatoric": said.aleatoric.tolist(),
        "epistemic": said.epistemic.tolist(),
    }


def _target_columns(
    found: Predictions, level: float, preparation: Preparation
) -> dict[str, list[Any]]:
    said, half = found.said, half_width(found.said, level)
    values = {
        "mean": said.mean,
        "lower": said.mean - half,
        "upper": said.mean + half,
        "std": said.total.sqrt(),
        "aleatoric": said.aleatoric.sqrt(),
        "epistemic": said.epistemic.sqrt(),
    }
    names = preparation.targets
    return {
        name if len(names) == 1 else f"{name}({target})": value[:, d].tolist()
        for d, target in enumerate(names)
        for name, value in values.items()
    }
