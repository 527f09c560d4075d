"""Can the intervals of a regression be trusted? Their coverage, and predictions against truth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from corefed.base.types import Tree
from corefed.show.page import charts
from corefed.show.page.content import Figure, Missing, ReportTable, TableCell, number, percent
from corefed.show.page.gather import RunFolder, capitalize
from corefed.training.record import MODELS
from corefed.use import selective

LEVELS = tuple(level / 20 for level in range(1, 20))
SCATTER = 600
"""Points drawn."""


def sentence(words: Sequence[str]) -> str:
    return capitalize("; ".join(words)) + "."


def coverage(run: RunFolder, held: Tree, kinds: Sequence[str], name: str) -> Figure:
    data, rows, words = [], [], []
    for kind in kinds:
        parts = selective.coverage_curve(
            held["y"].flatten(), held[f"{kind}.mean"].flatten(), held[f"{kind}.total"].flatten(),
            LEVELS,
        )  # fmt: skip
        words.append(f"{kind} 90 % intervals contain {100 * parts[LEVELS.index(0.9)]:.1f} %")
        for level, part in zip(LEVELS, parts.tolist(), strict=True):
            data.append({"series": kind, "x": level, "y": part})
            rows.append((kind, percent(level, 0), percent(part)))
    spec = charts.series(
        data, MODELS, "nominal level", "targets inside", form=".1f", x_form=".1f", diagonal=True,
        zero=True,
    )  # fmt: skip
    table = ReportTable("Targets inside central intervals", ("model", "nominal", "inside"), rows)
    return Figure(f"{name}-coverage", "Coverage of intervals", spec, sentence(words), table)


def coverage_at(run: RunFolder, level: float) -> float | None:
    """The share of targets inside intervals of a regression's main model."""
    held = run.held_out
    if isinstance(held, Missing) or run.labels or not len(held["y"]):
        return None
    kind = next((kind for kind in MODELS if f"{kind}.total" in held), None)
    if kind is None:
        return None
    mean, total = held[f"{kind}.mean"].flatten(), held[f"{kind}.total"].flatten()
    found = selective.coverage_curve(held["y"].flatten(), mean, total, (level,))
    return float(found[0])


def against(held: Tree, kind: str, name: str) -> Figure:
    y, mean = held["y"].double().flatten().numpy(), held[f"{kind}.mean"].double().flatten().numpy()
    places = np.unique(np.linspace(0, len(y) - 1, min(len(y), SCATTER)).round().astype(int))
    data = [{"series": kind, "x": y[i].item(), "y": mean[i].item()} for i in places]
    low, high = float(min(y.min(), mean.min())), float(max(y.max(), mean.max()))
    off = mean - y
    correlation = float(np.corrcoef(y, mean)[0, 1]) if np.ptp(y) and np.ptp(mean) else math.nan
    finding = (
        f"{len(y):,} predictions: RMSE {math.sqrt((off**2).mean()):.4g}, mean error "
        f"{off.mean():+.3g}, correlation {correlation:.3f}."
    )
    edges = np.quantile(y, np.linspace(0, 1, 11))
    index = np.clip(np.searchsorted(edges, y, side="right") - 1, 0, 9)
    rows = [
        (
            f"{edges[b]:.3g} to {edges[b + 1]:.3g}",
            TableCell(str(int((index == b).sum())), float((index == b).sum())),
            number(float(mean[index == b].mean()), ".4g"),
            number(float(np.sqrt((off[index == b] ** 2).mean())), ".4g"),
        )
        for b in range(10)
        if (index == b).any()
    ]
    table = ReportTable(
        "By deciles of the truth", ("truth", "points", "mean prediction", "RMSE"), rows
    )
    spec = charts.scatter(
        data, MODELS, "truth", "prediction", form=".3~g", diagonal=(low, high), legend=False
    )
    return Figure(f"{name}-against", "Predicted against true", spec, finding, table)
