"""Several runs side by side: results, paired tests, curves, and cost against score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corefed.show import distinguish
from corefed.show.contrast import Comparisons, Contrast
from corefed.show.curves import curve
from corefed.show.page import charts, paired
from corefed.show.page.content import (
    DASH,
    Figure,
    Figures,
    Fold,
    Missing,
    Part,
    ReportTable,
    Row,
    Section,
    TableCell,
    Text,
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
from corefed.show.page.sections import learning
from corefed.show.pairs import FEWEST_SEEDS
from corefed.training.cost import of_summary

COSTS = {
    "passes": ("passes", "passes per seed, selection included"),
    "bytes": ("bytes", "bytes sent and received per seed"),
    "seconds": ("seconds", "seconds of training, all seeds"),
}


def sections(
    runs: Sequence[RunFolder], baseline: RunFolder, comparisons: Comparisons
) -> list[Section]:
    """The table, the curves, and cost against score."""
    scored = [run for run in runs if run.score == baseline.score and run.score]
    first = Section(
        "comparison",
        "Comparison",
        "One row per run; click a header to sort. Differences are from "
        f"{baseline.label}, with 95 % intervals.",
        table(runs, baseline, comparisons),
    )
    if not scored:
        return [first]
    domain = [run.label for run in runs]
    left_out = len(runs) - len(scored)
    note: list[Part] = (
        [Text(f"{left_out} runs without {score_name(baseline.score)} are left out.")]
        if left_out
        else []
    )
    return [first, *_curves(scored, domain, note), *_costs(scored, domain, note)]


def table(runs: Sequence[RunFolder], baseline: RunFolder, comparisons: Comparisons) -> list[Part]:
    """The results of every run, and the difference from the baseline where they can be paired."""
    others = [run for run in runs if run is not baseline]
    found = {run.path: paired.compare(run, baseline, comparisons) for run in others}
    tested = [d for many in found.values() if not isinstance(many, Missing) for d in many]
    differing = [
        key for key in ("data", "partition", "clients") if len({r.summary[key] for r in runs}) > 1
    ]
    models = [
        m for m in ("personal", "global", "localized")
        if any(run.score and f"{m}_{run.score}" in run.metrics for run in runs)
    ]  # fmt: skip
    units = {run.score for run in runs if run.score}
    unit = "%" if units == {"accuracy"} else "RMSE" if units == {"rmse"} else "score"
    scores = [f"{m}, {unit}" for m in models]
    heads = ["run", *scores[:1], "difference", "95 % interval", "NLL", "ECE", "passes"]
    main = len(heads)
    heads += [*differing, "p (Holm)", *scores[1:], "k/n, %", "seeds", "rounds", "seconds"]
    heads += ["MB sent", "interval over", "differs in", "folder"]
    own = distinguish.differences([run.result for run in runs])
    rows: list[Row] = []
    for run, settings in zip(runs, own, strict=True):
        difference, interval, p, pairs = _difference(found.get(run.path))
        each = [_score(run, f"{m}_{run.score}") for m in models]
        rows.append(
            (
                run.label,
                *each[:1],
                difference,
                interval,
                *(_metric(run, metric) for metric in ("nll", "ece")),
                TableCell(str(of_summary(run.summary)), of_summary(run.summary).total),
                *(str(run.summary[key]) for key in differing),
                p,
                *each[1:],
                number(100 * run.summary["coreset"]["fraction"], "g"),
                TableCell(str(len(run.seeds)), len(run.seeds)),
                _rounds(run),
                number(run.summary["cost"]["seconds"], ".1f"),
                number(cost_of(run, "bytes") * len(run.seeds) / 1e6, ",.1f"),
                pairs,
                distinguish.words(settings) or DASH,
                run.where,
            )
        )
    over = "mean ± std over seeds" if any(len(run.seeds) > 1 for run in runs) else "one seed"
    caption = f"Last evaluated round, {over}; costs are totals over seeds"
    note = f"{_explain(tested, comparisons.tests)}{learning.lower_bound(runs)}".strip()
    parts: list[Part] = [
        ReportTable(caption, heads, rows, sortable=True, note=note, main=main),
        *_by_metric(runs, baseline, found),
    ]
    reasons = {
        f"{run.label}: {d}." for run in runs if isinstance(d := found.get(run.path), Missing)
    }
    return parts + [missing(reason) for reason in sorted(reasons)]


def _by_metric(
    runs: Sequence[RunFolder],
    baseline: RunFolder,
    found: Mapping[Path, list[Contrast] | Missing],
) -> list[Part]:
    """Every metric that runs are tested by, folded away: the table above has the first."""
    rows: list[Row] = [
        (run.label, each.metric.word, *_cells(each))
        for run in runs
        if not isinstance(many := found.get(run.path, []), Missing)
        for each in many
    ]
    if not rows:
        return []
    heads = ("run", "metric", "difference", "95 % interval", "p (Holm)", "interval over")
    caption = f"Differences from {baseline.label} by score, NLL and AUROC"
    return [Fold(caption, ReportTable(caption, heads, rows, sortable=True))]


def _explain(tested: Sequence[Contrast], tests: int) -> str:
    if not tested:
        return ""
    words = [
        "Differences, intervals and p-values are of the test points' predictions that runs keep, "
        "as the scores are. Intervals allow for points of the same client, where there are five "
        "or more, and of the same seed, where there are three or more."
    ]
    if any(each.seeds < FEWEST_SEEDS for each in tested):
        words.append(
            "With fewer than three seeds there is no p-value: they compare these trained models, "
            "not training with another seed. Run three."
        )
    if tests > 1:
        words.append(
            f"P-values are corrected for the {tests} comparisons of this page by Holm's method."
        )
    return " ".join(words)


def _rounds(run: RunFolder) -> TableCell:
    done, wanted = run.summary["rounds"], run.summary["config"]["rounds"]
    return TableCell(str(done) if run.finished else f"{done} of {wanted}", done)


def _score(run: RunFolder, name: str) -> TableCell:
    each = run.metrics.get(name)
    if each is None:
        return number(None)
    if run.score == "accuracy":
        mean, spread = 100 * each["mean"], f" ± {100 * each['std']:.2f}"
        return TableCell(f"{mean:.2f}{spread if len(run.seeds) > 1 else ''}", mean)
    spread = f" ± {each['std']:.2g}" if len(run.seeds) > 1 else ""
    return TableCell(f"{each['mean']:.4g}{spread}", each["mean"])


def _metric(run: RunFolder, metric: str) -> TableCell:
    each = run.metrics.get(f"{run.main}_{metric}")
    return number(None if each is None else each["mean"])


def _difference(found: list[Contrast] | Missing | None) -> tuple[str | TableCell, ...]:
    if found is None:
        return TableCell("baseline", 0.0), number(None), number(None), DASH
    if isinstance(found, Missing):
        return number(None), number(None), number(None), "see below"
    return _cells(found[0])


def _cells(found: Contrast) -> tuple[str | TableCell, ...]:
    factor = found.metric.factor
    form = {"accuracy": "+.2f", "rmse": "+.3g"}.get(found.metric.key, "+.3f")
    ends = f"{factor * found.low:{form}} to {factor * found.high:{form}}"
    p = found.corrected
    few = "one seed: run three" if found.seeds == 1 else "two seeds: run three"
    test = few if found.seeds < FEWEST_SEEDS else DASH
    return (
        TableCell(f"{factor * found.difference:{form}}", found.difference),
        TableCell(DASH if math.isnan(found.low) else ends, found.low),
        TableCell(test if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001", p),
        found.over or DASH,
    )


def _curves(runs: Sequence[RunFolder], domain: Sequence[str], note: list[Part]) -> list[Section]:
    lines = [learning.Curve(run.label, curve(run.lines, f"{run.main}_{run.score}")) for run in runs]
    lines = [line for line in lines if line.points]
    if not lines:
        return []
    score = runs[0].score
    ends = "; ".join(
        f"{line.series}: {score_text(line.points[-1].mean, score)}"
        for line in sorted(lines, key=lambda one: one.points[-1].mean, reverse=score == "accuracy")
    )
    models = " or ".join(dict.fromkeys(run.main for run in runs))
    aid = f"The {models} {score_name(score)} of every run; a run has one colour in all charts."
    spent = learning.passes(lines[0], score) + learning.lower_bound(runs)
    findings = {"round": f"At the end: {ends}.", "passes": spent}
    figures = learning.figures(lines, domain, score, "all-curves", findings)
    return [Section("all-curves", "Learning curves of all runs", aid, [figures, *note])]


def cost_of(run: RunFolder, what: str) -> float:
    """Per seed; seconds are of all seeds together, since they train side by side."""
    cost = run.summary["cost"]
    if what == "seconds":
        return float(cost["seconds"])
    sent: float = cost["bytes_up"] + cost["bytes_down"]
    total = sent if what == "bytes" else of_summary(run.summary).total
    return total / len(run.seeds)


def front(points: Sequence[tuple[float, float]], *, higher: bool) -> list[tuple[float, float]]:
    """The Pareto front, by rising cost: each point is better than all cheaper ones."""
    found: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda p: (p[0], -p[1] if higher else p[1])):
        if not found or (score > found[-1][1] if higher else score < found[-1][1]):
            found.append((cost, score))
    return found


def _costs(runs: Sequence[RunFolder], domain: Sequence[str], note: list[Part]) -> list[Section]:
    score = runs[0].score
    factor, unit = score_axis(score)
    items = []
    for what, (short, axis) in COSTS.items():
        each = [
            (run, cost_of(run, what), run.metrics[f"{run.main}_{score}"]["mean"]) for run in runs
        ]
        best = front([(cost, value) for _, cost, value in each], higher=score == "accuracy")
        on_front = [run.label for run, cost, value in each if (cost, value) in best]
        data: list[dict[str, Any]] = [
            {"series": run.label, "x": cost, "y": factor * value} for run, cost, value in each
        ]
        line = [{"x": cost, "y": factor * value} for cost, value in best]
        spec = charts.scatter(
            data, domain, axis, unit, form=".3~g", log=True, front=line if len(line) > 1 else ()
        )
        rows = [
            (run.label, number(cost, ",.4g" if what == "seconds" else ",.0f"),
             score_cell(value, score), "yes" if run.label in on_front else "no")
            for run, cost, value in each
        ]  # fmt: skip
        best_names = ", ".join(
            f"{run.label} ({score_text(value, score)})"
            for run, _, value in each
            if run.label in on_front
        )
        finding = f"On the Pareto front: {best_names}."
        if spec is None:
            finding = f"All runs have the same cost: {each[0][1]:,.4g} {axis}."
        finding += learning.lower_bound(runs) if what == "passes" else ""
        title = f"{capitalize(score_name(score))} against {short}"
        heads = ("run", axis, score_name(score), "on the Pareto front")
        items.append(
            Figure(f"all-cost-{short}", title, spec, finding, ReportTable(title, heads, rows))
        )
    aid = "The dashed line is the Pareto front: no run is both cheaper and better than these."
    return [Section("all-cost", "Cost against score", aid, [Figures(items), *note])]
