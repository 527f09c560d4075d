"""Learning curves: the score against rounds, and against points that went through a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from corefed.show.page import charts
from corefed.show.page.content import (
    Figure,
    Figures,
    ReportTable,
    Section,
    TableCell,
    missing,
    number,
    percent,
)
from corefed.show.page.gather import (
    KINDS,
    EvaluatedRound,
    RunFolder,
    curve,
    heading,
    score_name,
    score_text,
    shown,
)


class Line(NamedTuple):
    """A curve and the name it goes by."""

    series: str
    points: Sequence[EvaluatedRound]


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}curves", "Learning curves"
    aid = (
        f"How the {score_name(run.score)} on the clients' own test points grew"
        if run.score == "accuracy"
        else f"How the {score_name(run.score)} on the clients' own test points fell"
    )
    aid += ": personal models, the global model, and the global model localised to each client."
    lines = [Line(shown(m), curve(run, f"{m}_{run.score}")) for m in run.models_with(run.score)]
    lines = [line for line in lines if line.points]
    if not lines:
        return Section(name, title, "", [missing("No round of this run was evaluated.")])
    finding = _finding(lines, run.score)
    return Section(name, title, aid, [figures(lines, KINDS, run.score, name, finding)])


def figures(
    lines: Sequence[Line], domain: Sequence[str], score: str, name: str, finding: str
) -> Figures:
    """Two charts of the same curves, and one table behind each."""
    factor = 100 if score == "accuracy" else 1
    unit = "accuracy, %" if score == "accuracy" else "RMSE"
    band = any(point.std > 0 for line in lines for point in line.points)
    spread = " Bands are one standard deviation over seeds." if band else ""
    found = []
    for key, title, axis in (
        ("round", "Against rounds", "round"),
        ("examples", "Against examples processed", "examples processed a seed"),
    ):
        rows = [
            {
                "series": line.series,
                "x": getattr(point, key),
                "y": factor * point.mean,
                "low": factor * (point.mean - point.std),
                "high": factor * (point.mean + point.std),
            }
            for line in lines
            for point in line.points
        ]
        spec = charts.series(
            rows, domain, axis, unit, form=".3~g", log=key == "examples", band=band,
            x_form="d" if key == "round" else "~s",
        )  # fmt: skip
        said = finding if key == "round" else _examples(lines, score)
        found.append(
            Figure(f"{name}-{key}", title, spec, said + spread, table(lines, score, key, axis))
        )
    return Figures(found)


def table(lines: Sequence[Line], score: str, key: str, axis: str) -> ReportTable:
    rows = [
        (
            line.series,
            TableCell(f"{getattr(point, key):,.0f}", getattr(point, key)),
            score_cell(point.mean, score),
            score_cell(point.std, score),
            ", ".join(score_text(each, score, 2) for each in point.per_seed),
        )
        for line in lines
        for point in line.points
    ]
    heads = ("series", axis, "mean", "std over seeds", "by seed")
    return ReportTable(f"{heading(score_name(score))} by {axis}", heads, rows)


def score_cell(value: float, score: str) -> TableCell:
    return percent(value, 2) if score == "accuracy" else number(value, ".4g")


def _finding(lines: Sequence[Line], score: str) -> str:
    first, last = lines[0].points[0], lines[0].points[-1]
    ends = [
        (
            line.series,
            score_text(line.points[0].mean, score),
            score_text(line.points[-1].mean, score),
        )
        for line in lines
    ]
    if first is last:
        return f"Round {last.round}: {'; '.join(f'{name} {end}' for name, _, end in ends)}."
    parts = "; ".join(f"{name} {begin} to {end}" for name, begin, end in ends)
    return f"Round {first.round} to {last.round}: {parts}."


def _examples(lines: Sequence[Line], score: str) -> str:
    """Points that the first curve took to come within a hundredth of its end."""
    main = lines[0]
    last = main.points[-1]
    slack = 0.01 if score == "accuracy" else 0.01 * last.mean
    soon = next(p for p in main.points if abs(p.mean - last.mean) <= slack or p is last)
    return (
        f"{heading(main.series)} came within 1 % of its end after {soon.examples:,.0f} of "
        f"{last.examples:,.0f} examples a seed."
    )
