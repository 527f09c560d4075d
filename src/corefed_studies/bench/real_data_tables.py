"""The tables of docs/real-data-study.md, from the results of `corefed bench real-data`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corefed.show.pairs import by_seed
from corefed_studies.pages import Table

TITLES = {"accuracy": "accuracy %", "nll": "NLL", "rmse": "RMSE"}
KINDS = {
    "global": "the shared model as it is",
    "personal": "personalised",
    "alone": "trained alone, same steps",
}


def tables(study: Mapping[str, Any]) -> list[Table]:
    """Two tables per set: beside scikit-learn, and the newcomer."""
    seeds, found = len(study["seeds"]), []
    for name, each in study["sets"].items():
        sites = ", ".join(f"{site} {rows:,}" for site, rows in each["sites"].items())
        found.append(
            Table(
                name,
                ("model", *_columns(each["models"], "corefed better by")),
                _rows(each["models"], "corefed", {key: key for key in each["models"]}),
                f"Sites and their rows: {sites}. Means over {seeds} seeds, on the test rows of "
                "all sites. Better by: paired by seed, ± half of the 95 % interval.",
            )
        )
        new = each["newcomer"]
        found.append(
            Table(
                f"{name}, {new['site']} joins later with {study['newcomer_rows']} rows",
                ("model", *_columns(new["models"], "personalised better by")),
                _rows(new["models"], "personal", KINDS),
                f"On its {new['tested']:,} other rows; the other sites are trained without it.",
            )
        )
    return found


def _columns(models: Mapping[str, Any], better: str) -> list[str]:
    metrics = next(iter(models.values()))
    return [title for metric in metrics for title in (TITLES[metric], better)]


def _rows(models: Mapping[str, Any], own: str, words: Mapping[str, str]) -> list[list[str]]:
    rows = []
    for key, scores in models.items():
        row = [words[key]]
        for metric, values in scores.items():
            row.append(_value(float(np.mean(values)), metric))
            row.append("" if key == own else _gain(models[own][metric], values, metric))
        rows.append(row)
    return rows


def _value(value: float, metric: str) -> str:
    if metric == "accuracy":
        return f"{100 * value:.2f}"
    return f"{value:,.0f}" if metric == "rmse" else f"{value:.3f}"


def _gain(own: Sequence[float], others: Sequence[float], metric: str) -> str:
    """Positive where `own` is better: points of accuracy, nats, percent of the other's RMSE."""
    factor = {"accuracy": 100.0, "nll": -1.0, "rmse": -100.0 / float(np.mean(others))}[metric]
    found = by_seed([factor * v for v in own], [factor * v for v in others])
    half = "" if math.isnan(found.low) else f" ± {(found.high - found.low) / 2:.2g}"
    unit = " %" if metric == "rmse" else ""
    return f"{found.mean:+.3g}{half}{unit}"
