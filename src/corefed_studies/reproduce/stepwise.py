"""Runs advanced round by round, to look inside them: shared by figures 3 and 4."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from corefed.base import rng
from corefed.base.panels import panels, save
from corefed.base.tables import markdown_table
from corefed.base.types import Tree
from corefed.training.setup import Setup

RoundCurves = dict[str, list[float]]
"""Label -> a number after each round."""


def read_or_compute(path: Path, work: Callable[[], RoundCurves]) -> RoundCurves:
    """What an earlier call wrote to the file; else the work is done now and written."""
    if not path.exists():
        path.write_text(json.dumps(work()) + "\n")
    curves: RoundCurves = json.loads(path.read_text())
    return curves


def advance(setup: Setup, servers: list[Tree], t: int) -> list[Tree]:
    run = setup.experiment.run
    cohorts = [rng.choose(seed, t, run.clients, run.cohort or run.clients) for seed in run.seeds]
    updates, _, _ = setup.clients.train(t, servers, cohorts)
    return [setup.method.aggregate(s, u) for s, u in zip(servers, updates, strict=True)]


def table(curves: RoundCurves, digits: int, marks: Sequence[int] = (1, 5, 10, 20, 40)) -> list[str]:
    """Markdown: the numbers after some rounds and the last."""
    length = len(next(iter(curves.values())))
    shown = [m for m in sorted({*marks, length}) if m <= length]
    body = [[name, *(f"{c[m - 1]:.{digits}f}" for m in shown)] for name, c in curves.items()]
    return markdown_table(["round", *map(str, shown)], body)


def picture(
    curves: RoundCurves,
    path: Path,
    *,
    label: str,
    scale: str,
    style: Callable[[str], dict[str, Any]],
) -> None:
    figure, (axis,) = panels(1, height=3.6)
    for name, curve in curves.items():
        axis.plot(range(1, len(curve) + 1), curve, label=name, **style(name))
    axis.set(xlabel="round", ylabel=label, yscale=scale)
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    save(figure, path)
