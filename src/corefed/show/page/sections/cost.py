"""The cost of a run: rounds, bytes, seconds and passes, against the score."""

from __future__ import annotations

from corefed.show.page.content import Missing, Part, ReportTable, Section, TableCell, missing
from corefed.show.page.gather import RunFolder, capitalize, score_text
from corefed.show.page.sections.learning import figures, lower_bound, model_curves
from corefed.show.page.sections.overview import duration
from corefed.training.cost import of_summary
from corefed.training.record import MODELS


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}cost", "Cost"
    early = "rises" if run.score == "accuracy" else "falls"
    aid = f"Data sent and time needed to reach the score; a curve that {early} early was cheap."
    parts: list[Part] = [_totals(run)]
    lines = model_curves(run)
    if not lines:
        return Section(name, title, aid, [*parts, missing("No round of this run was evaluated.")])
    first, last = lines[0].points[0], lines[0].points[-1]
    before, after = (score_text(point.mean, run.score) for point in (first, last))
    findings = {
        key: f"{capitalize(lines[0].series)}: {before} after {getattr(first, key):.3g} {unit}, "
        f"{after} after {getattr(last, key):.3g} {unit}."
        for key, unit in (("megabytes", "MB"), ("seconds", "s"))
    }
    return Section(name, title, aid, [figures(lines, MODELS, run.score, name, findings), *parts])


def _totals(run: RunFolder) -> ReportTable:
    cost, summary = run.summary["cost"], run.summary
    rows: list[tuple[str, TableCell | str]] = [
        ("rounds", str(summary["rounds"])),
        ("training", duration(cost["seconds"])),
        ("per round", f"{cost['seconds_per_round']:.3g} s"),
        ("evaluation", duration(cost["evaluate_seconds"])),
        ("passes, selection included", _passes(run)),
        ("points through gradients", f"{cost['examples_processed']:,}"),
        ("sent by clients", f"{cost['bytes_up'] / 1e6:,.3f} MB"),
        ("sent to clients", f"{cost['bytes_down'] / 1e6:,.3f} MB"),
        ("peak memory", f"{cost['peak_memory_mb']:,.0f} MB"),
    ]
    if "overhead_seconds_per_round" in cost:
        rows.insert(3, ("per round, not training", f"{cost['overhead_seconds_per_round']:.3g} s"))
    if "selection_examples" in cost:
        looked = f"{cost['selection_examples']:,.0f}"
        rows.insert(-3, ("points through selection, forward only", looked))
    if "wall_seconds" in cost:
        rows.insert(1, ("start to end", duration(cost["wall_seconds"])))
    title = "Cost of the run, all seeds together"
    note = (
        "A pass is one point forward and backward at one draw of the weights. A forward pass alone "
        f"counts a third.{lower_bound([run])}"
    )
    return ReportTable(title, ("cost", "amount"), rows, note=note)


def _passes(run: RunFolder) -> str:
    """The count, and how often it is over all training points."""
    passes = of_summary(run.summary)
    if isinstance(run.clients, Missing):
        return str(passes)
    points = sum(client["train"] for seed in run.clients for client in seed)
    return f"{passes} ({passes.total / max(1, points):,.1f} over the data)"
