"""Learning curves: the score against rounds, passes, data sent or time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from corefed.show.curves import EvaluatedRound, curve
from corefed.show.page import charts
from corefed.show.page.content import (
    Figure,
    Figures,
    ReportTable,
    Section,
    missing,
    number,
)
from corefed.show.page.gather import (
    RunFolder,
    capitalize,
    score_axis,
    score_cell,
    score_name,
    score_text,
)
from corefed.training.cost import of_summary
from corefed.training.record import MODELS


class Axis(NamedTuple):
    """What a score is drawn against: a field of `EvaluatedRound`."""

    caption: str
    title: str
    ticks: str  # format of its ticks
    cells: str  # format of its numbers in a table


AXES = {
    "round": Axis("Against rounds", "round", "d", ",.0f"),
    "passes": Axis("Against passes", "passes per seed, selection included", "~s", ",.0f"),
    "megabytes": Axis("Against data sent", "MB sent and received per seed", ".4~r", ".4g"),
    "seconds": Axis("Against time", "seconds of training, all seeds", ".4~r", ".4g"),
}


class Curve(NamedTuple):
    """One line of a chart."""

    series: str
    points: Sequence[EvaluatedRound]


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}curves", "Learning curves"
    aid = (
        f"The {score_name(run.score)} on the clients' own test points: personal models, the global "
        "model, and the global model localized to each client."
    )
    lines = model_curves(run)
    if not lines:
        return Section(name, title, "", [missing("No round of this run was evaluated.")])
    findings = {
        "round": _finding(lines, run.score),
        "passes": passes(lines[0], run.score) + lower_bound([run]),
    }
    return Section(name, title, aid, [figures(lines, MODELS, run.score, name, findings)])


def model_curves(run: RunFolder) -> list[Curve]:
    """One curve per model; none where no round was evaluated."""
    models = run.models_with(run.score) if run.score else []
    lines = [Curve(m, curve(run.lines, f"{m}_{run.score}")) for m in models]
    return [line for line in lines if line.points]


def figures(
    lines: Sequence[Curve],
    domain: Sequence[str],
    score: str,
    name: str,
    findings: Mapping[str, str],  # by AXES
) -> Figures:
    """One chart per axis of the same curves, each with its table."""
    factor, unit = score_axis(score)
    band = any(point.std > 0 for line in lines for point in line.points)
    spread = " Bands are one standard deviation over seeds." if band else ""
    found = []
    for key, finding in findings.items():
        axis = AXES[key]
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
            rows, domain, axis.title, unit, form=".3~g", log=key == "passes", band=band,
            x_form=axis.ticks,
        )  # fmt: skip
        table = _table(lines, score, key)
        found.append(Figure(f"{name}-{key}", axis.caption, spec, finding + spread, table))
    return Figures(found)


def _table(lines: Sequence[Curve], score: str, key: str) -> ReportTable:
    axis = AXES[key]
    rows = [
        (
            line.series,
            number(getattr(point, key), axis.cells),
            score_cell(point.mean, score),
            score_cell(point.std, score),
            ", ".join(score_text(each, score, 2) for each in point.per_seed),
        )
        for line in lines
        for point in line.points
    ]
    heads = ("series", axis.title, "mean", "std over seeds", "by seed")
    return ReportTable(f"{capitalize(score_name(score))} by {axis.title}", heads, rows)


def _finding(lines: Sequence[Curve], score: str) -> str:
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


def passes(line: Curve, score: str) -> str:
    """Passes that a curve took to come close to its end."""
    last = line.points[-1]
    slack, close = (
        (0.01, "1 percentage point") if score == "accuracy" else (0.01 * last.mean, "1 %")
    )
    soon = next(p for p in line.points if abs(p.mean - last.mean) <= slack or p is last)
    who = f"The {line.series} model" if line.series in MODELS else line.series
    return (
        f"{who} was within {close} of its final {score_name(score)} after {soon.passes:,.0f} of "
        f"{last.passes:,.0f} passes (per seed)."
    )


def lower_bound(runs: Sequence[RunFolder]) -> str:
    """A sentence for runs whose passes are not all counted; empty where there are none."""
    short = [run.label for run in runs if not of_summary(run.summary).complete]
    if not short:
        return ""
    return f" What selecting the points took is not counted: {', '.join(short)}."
