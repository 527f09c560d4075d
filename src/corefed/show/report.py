"""Tables for the terminal, from summaries alone; `curves.py` has the curves over rounds."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from corefed.base import shown
from corefed.show import kept
from corefed.show.distinguish import differences, labels, words
from corefed.training import cost, record
from corefed.training.record import MODELS, main_model

HEADINGS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE"}


WIDTH = 80
"""Columns of a comparison: what a terminal has that nobody has widened."""


def console() -> Console:
    """As wide as the terminal; a file or a pipe has room for a whole table."""
    return shown.console() if sys.stdout.isatty() else shown.console(width=120)


def wrapped(sentence: str) -> str:
    """Within `WIDTH` columns, unless a path is longer; a number stays with its percent sign."""
    bound = sentence.replace(" %", "\u00a0%").replace("  ", 2 * "\u00a0")
    lines = textwrap.wrap(bound, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\u00a0", " ")


class RunResult(NamedTuple):
    """One run's folder, read."""

    path: Path
    summary: dict[str, Any]
    lines: list[dict[str, Any]]


def find_runs(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The folders of runs among `paths` and one level below them, and what is neither.

    So `runs/*` may hold pages, and folders that keep several runs together.
    """
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        inside = [path] if record.begun(path) else sorted(filter(record.begun, _entries(path)))
        found += inside
        others += [] if inside else [path]
    return list(dict.fromkeys(found)), others


def _entries(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def load(folders: Sequence[Path]) -> list[RunResult]:
    """The runs in these folders, with the scores of the predictions that they keep."""
    return [RunResult(path, *kept.shown(*record.read(path))) for path in folders]


def metrics_table(summary: dict[str, Any]) -> Table:
    """One row per model, one column per metric, at the end of a run."""
    metrics = kept.scores(summary)["metrics"]
    found = [m for m in HEADINGS if any(f"{model}_{m}" in metrics for model in MODELS)]
    seeds = len(summary["seeds"])
    over = f"mean ± std over {seeds} seeds" if seeds > 1 else f"seed {summary['seeds'][0]}"
    table = Table(title=f"{summary['method']} on {summary['data']}, {over}")
    table.add_column("model")
    for metric in found:
        table.add_column(HEADINGS[metric], justify="right")
    for model in MODELS:
        if any(f"{model}_{metric}" in metrics for metric in found):
            table.add_row(model, *(_cell(metrics, f"{model}_{metric}") for metric in found))
    table.caption = _caption(summary)
    return table


def _caption(summary: dict[str, Any]) -> str:
    """The part of the data, and the cost."""
    coreset, spent = summary["coreset"], summary["cost"]
    said = [f"{100 * coreset['fraction']:g} % of the data"]
    if "held_out_error" in coreset:
        said.append(f"coreset error {coreset['held_out_error']:.3f}")
    if "over_uniform" in coreset:
        said[-1] += f" ({coreset['over_uniform']:.2f} times a random subset's)"
    if "refreshes" in coreset:
        said.append(f"{coreset['refreshes']:.1f} refreshes per client")
    said.append(f"{spent['seconds_per_round']:.2f} s per round")
    if "overhead_seconds_per_round" in spent:
        said.append(f"{spent['overhead_seconds_per_round']:.2f} s of them not training")
    said.append(cost.of_summary(summary).words)
    said += [
        *auroc(summary),
        *stopped(summary),
        *_temperature(summary),
        *sample(summary),
        *_coverage(summary),
    ]
    if "privacy" in summary:
        said.append(_spent(summary["privacy"]))
    return ", ".join(said)


def _temperature(summary: Mapping[str, Any]) -> list[str]:
    """Of the main model, where predictions were calibrated on validation points."""
    main = summary.get("calibration", {}).get(main_model(summary["metrics"]))
    if main is None:
        return []
    return [f"calibrated at temperature {main['temperature']['all_clients']['mean']:.2f}"]


def auroc(summary: Mapping[str, Any]) -> list[str]:
    """Of a classification whose predictions are kept."""
    found = summary.get("measures", {}).get("auroc", {})
    if found.get("value") is None:
        return []
    ends = found["interval"]
    more = f" ({ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
    return [f"AUROC {found['value']:.3f}{more}"]


def stopped(summary: Mapping[str, Any]) -> list[str]:
    """Of a run that stops early: whose models it keeps."""
    found = summary.get("stopping")
    if found is None:
        return []
    best = ", ".join(map(str, found["best_round"]))
    rounds = f"rounds {best} (by seed)" if len(found["best_round"]) > 1 else f"round {best}"
    return [f"models of {rounds}, the best of {summary['rounds']} by validation NLL"]


def sample(summary: Mapping[str, Any]) -> list[str]:
    """For readers of metrics that are of some of the clients."""
    if "evaluated_clients" not in summary:
        return []
    evaluated, clients = summary["evaluated_clients"], summary["clients"]
    return [f"evaluated on {evaluated:,} of {clients:,} clients"]


def _coverage(summary: Mapping[str, Any]) -> list[str]:
    """Of a federation: whose test points the metrics are of, and what most clients have."""
    if "coverage" not in summary:
        return []
    covered, main = summary["coverage"], main_model(summary["metrics"])
    said = [f"metrics of {covered['clients']} of {covered['of']} clients"]
    for metric, form in (("accuracy", "{:.2%}"), ("rmse", "{:.4g}")):
        each = covered["median"].get(f"{main}_{metric}")
        said += [f"median {metric} over clients {form.format(each[0])}"] if each else []
    return said


def _spent(privacy: Mapping[str, Any]) -> str:
    """Differential privacy at the end of a federation's run."""
    views = {"server": "anyone who sees uploads", "average": "anyone who sees only averages"}
    parts = [
        f"{privacy[view]:.3g} against {words}"
        for view, words in views.items()
        if privacy[view] is not None
    ]
    return f"epsilon {', '.join(parts)} at delta {privacy['delta']:g}"


def comparison_table(results: Sequence[RunResult]) -> Table:
    """One row per run, within 80 columns; what all runs share is in the title.

    Scores of personal and global models, and of the main model where it is neither; the standard
    deviation over seeds and the other columns are of the main model. Costs are sums over seeds.
    """
    summaries = [result.summary for result in results]
    score = _score(summaries)
    table = Table(
        title=_shared(summaries, score), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        pad_edge=False, show_edge=False,
    )  # fmt: skip
    table.add_column("")
    table.add_column("method", overflow="fold")
    mains = {main_model(s["metrics"]) for s in summaries}
    models = [
        m
        for m in MODELS
        if m in {"personal", "global", *mains}
        and any(f"{m}_{score}" in s["metrics"] for s in summaries)
    ]
    several = any(len(s["seeds"]) > 1 for s in summaries)
    spread = ["±"] if several else []
    for heading in ("k/n", *models, *spread, "NLL", "ECE", "sec", "passes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, summary in enumerate(summaries, 1):
        metrics, main = summary["metrics"], main_model(summary["metrics"])
        seconds, passes = summary["cost"]["seconds"], cost.of_summary(summary)
        table.add_row(
            str(number),
            summary["method"],
            f"{summary['coreset']['fraction']:g}",
            *(_cell(metrics, f"{m}_{score}", spread=False) for m in models),
            *([_std(metrics, f"{main}_{score}")] if several else []),
            _cell(metrics, f"{main}_nll", spread=False),
            _cell(metrics, f"{main}_ece", spread=False),
            f"{seconds:.{0 if seconds >= 100 else 1}f}",
            f"{'' if passes.complete else '≥'}{short(passes.total)}",
        )
    calibrated = [summary for summary in summaries if "calibration" in summary]
    if calibrated:
        whose = "" if len(calibrated) == len(summaries) else " of runs with validation points"
        table.caption = f"NLL and ECE{whose} are after calibration."
    return table


def legend(results: Sequence[RunResult]) -> list[str]:
    """For each row of the table the folder of the run, and the settings in which runs differ."""
    lines = []
    for number, (result, own) in enumerate(zip(results, differences(results), strict=True), 1):
        unfinished = _rounds(result.summary)
        more = [f"rounds {unfinished}"] if " of " in unfinished else []
        more += [words(own)] if own else []
        more += [*stopped(result.summary), *sample(result.summary)]
        lines.append(f"{number}  {result.path}{': ' if more else ''}{', '.join(more)}")
    if not all(cost.of_summary(result.summary).complete for result in results):
        lines.append(cost.LOWER_BOUND)
    return lines


def _score(summaries: Sequence[dict[str, Any]]) -> str:
    regression = all(f"{main_model(s['metrics'])}_rmse" in s["metrics"] for s in summaries)
    return "rmse" if regression else "accuracy"


def _shared(summaries: Sequence[dict[str, Any]], score: str) -> str:
    """The title: what the scores are, and what all runs have in common."""
    about = [
        {"data": s["data"], "seeds": str(len(s["seeds"])), "rounds": _rounds(s)} for s in summaries
    ]
    same = [key for key in about[0] if len({each[key] for each in about}) == 1]
    spread = ["± std over seeds"] if any(len(s["seeds"]) > 1 for s in summaries) else []
    return ", ".join([HEADINGS[score], *(f"{key} {about[0][key]}" for key in same), *spread])


def comparison_json(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """The summaries, each with its folder, its label, and the settings in which runs differ."""
    found = zip(results, labels(results), differences(results), strict=True)
    return [
        {"folder": str(result.path), "label": label, "differs_in": own, **result.summary}
        for result, label, own in found
    ]


def short(number: float) -> str:
    """1.35 M, 270 k: three digits and a unit."""
    for unit in ("", " k", " M"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g} G"


def _rounds(summary: dict[str, Any]) -> str:
    """`30`, or `12 of 30` for an unfinished run, or `12` for one that stopped early."""
    wanted = summary["config"].get("rounds", summary["rounds"])
    if all(summary.get("stopping", {}).get("stopped", [False])):
        return str(summary["rounds"])
    return str(wanted) if summary["rounds"] == wanted else f"{summary['rounds']} of {wanted}"


def _cell(metrics: dict[str, Any], name: str, *, spread: bool = True) -> str:
    """mean ± std, accuracies in percent; a dash where a run has no such metric."""
    if name not in metrics or math.isnan(metrics[name]["mean"]):  # also without test points
        return "-"
    factor, digits = _scale(name)
    mean = f"{factor * metrics[name]['mean']:.{digits}f}"
    std = _std(metrics, name) if spread else "-"
    return mean if std == "-" else f"{mean} ± {std}"


def _std(metrics: dict[str, Any], name: str) -> str:
    """A dash where there is no such metric, no test point, or one seed."""
    if (
        name not in metrics
        or len(metrics[name]["per_seed"]) == 1
        or math.isnan(metrics[name]["std"])
    ):
        return "-"
    factor, digits = _scale(name)
    return f"{factor * metrics[name]['std']:.{digits}f}"


def _scale(name: str) -> tuple[int, int]:
    """The factor to what is shown, and its digits."""
    return (100, 2) if name.endswith("accuracy") else (1, 3)
