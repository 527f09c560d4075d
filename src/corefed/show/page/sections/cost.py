"""The cost of a run: rounds, bytes, seconds and examples, against the score."""

from __future__ import annotations

from corefed.show.page import charts
from corefed.show.page.content import (
    Figure,
    Figures,
    Part,
    ReportTable,
    Section,
    TableCell,
    missing,
)
from corefed.show.page.gather import (
    RunFolder,
    capitalize,
    score_axis,
    score_cell,
    score_name,
    score_text,
)
from corefed.show.page.sections.overview import duration
from corefed.show.report import curve
from corefed.training.record import MODELS


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}cost", "Cost"
    early = "rises" if run.score == "accuracy" else "falls"
    aid = f"Data sent and time needed to reach the score; a curve that {early} early was cheap."
    parts: list[Part] = [_totals(run)]
    models = run.models_with(run.score) if run.score else []
    lines = {model: curve(run.lines, f"{model}_{run.score}") for model in models}
    lines = {model: points for model, points in lines.items() if points}
    if not lines:
        return Section(name, title, aid, [*parts, missing("No round of this run was evaluated.")])
    factor, unit = score_axis(run.score)
    items = []
    for key, caption, axis in (
        ("megabytes", "Against data sent", "MB sent and received per seed"),
        ("seconds", "Against time", "seconds of training, all seeds"),
    ):
        data = [
            {"series": model, "x": getattr(point, key), "y": factor * point.mean}
            for model, points in lines.items()
            for point in points
        ]
        model, points = next(iter(lines.items()))
        last = points[-1]
        measure = "MB" if key == "megabytes" else "s"
        finding = (
            f"{capitalize(model)}: {score_text(points[0].mean, run.score)} after "
            f"{getattr(points[0], key):.3g} {measure}, {score_text(last.mean, run.score)} after "
            f"{getattr(last, key):.3g} {measure}."
        )
        table = ReportTable(
            f"{capitalize(score_name(run.score))} by {axis}",
            ("model", "round", axis, score_name(run.score)),
            [
                (model, str(p.round), TableCell(f"{getattr(p, key):.4g}", getattr(p, key)),
                 score_cell(p.mean, run.score))
                for model, points in lines.items()
                for p in points
            ],
        )  # fmt: skip
        spec = charts.series(data, MODELS, axis, unit, form=".3~g", x_form=".4~r")
        items.append(Figure(f"{name}-{key}", caption, spec, finding, table))
    return Section(name, title, aid, [Figures(items), *parts])


def _totals(run: RunFolder) -> ReportTable:
    cost, summary = run.summary["cost"], run.summary
    rows: list[tuple[str, TableCell | str]] = [
        ("rounds", str(summary["rounds"])),
        ("training", duration(cost["seconds"])),
        ("per round", f"{cost['seconds_per_round']:.3g} s"),
        ("evaluation", duration(cost["evaluate_seconds"])),
        ("examples processed", f"{cost['examples_processed']:,}"),
        ("sent by clients", f"{cost['bytes_up'] / 1e6:,.3f} MB"),
        ("sent to clients", f"{cost['bytes_down'] / 1e6:,.3f} MB"),
        ("peak memory", f"{cost['peak_memory_mb']:,.0f} MB"),
    ]
    if "overhead_seconds_per_round" in cost:
        rows.insert(3, ("per round, not training", f"{cost['overhead_seconds_per_round']:.3g} s"))
    return ReportTable("Cost of the run, all seeds together", ("cost", "amount"), rows)
