"""Tables for the terminal and plots of learning curves, from summaries and round lines alone."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from corefed.base.errors import UserError
from corefed.base.panels import panels
from corefed.training import record
from corefed.training.record import MODELS, main_model

HEADINGS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE"}


def console() -> Console:
    """As wide as the terminal; a file or a pipe has room for a whole table."""
    return Console() if sys.stdout.isatty() else Console(width=120)


class RunResult(NamedTuple):
    """One run's folder, read."""

    path: Path
    summary: dict[str, Any]
    lines: list[dict[str, Any]]


def load(folders: Sequence[Path]) -> list[RunResult]:
    return [RunResult(path, *record.read(path)) for path in folders]


class EvaluatedRound(NamedTuple):
    """An evaluated round. Examples and megabytes are totals so far, per seed."""

    round: int
    examples: float
    megabytes: float
    seconds: float  # so far, of all seeds together: they train side by side
    mean: float
    std: float
    per_seed: list[float]


def curve(lines: Sequence[Mapping[str, Any]], name: str) -> list[EvaluatedRound]:
    """A metric over the evaluated rounds."""
    totals = zip(
        accumulate(statistics.fmean(line["examples"]) for line in lines),
        accumulate(
            (sum(line["bytes_up"]) + sum(line["bytes_down"])) / len(line["examples"])
            for line in lines
        ),
        accumulate(line["seconds"] for line in lines),
        strict=True,
    )
    return [
        EvaluatedRound(line["round"], examples, sent / 1e6, seconds, *over.values())
        for line, (examples, sent, seconds) in zip(lines, totals, strict=True)
        if name in line.get("metrics", {})
        for over in [record.over_seeds(line["metrics"][name])]
    ]


def labels(results: Sequence[RunResult]) -> list[str]:
    """Method and fraction; with the folder where that does not tell two runs apart."""
    plain = [(r.summary["method"], r.summary["coreset"]["fraction"]) for r in results]
    names = [result.path.name for result in results]
    found = []
    for (method, fraction), name, result in zip(plain, names, results, strict=True):
        more = [f"{100 * fraction:g} %"] if fraction < 1 else []
        if plain.count((method, fraction)) > 1:
            more.append(name if names.count(name) == 1 else str(result.path))
        found.append(f"{method} ({', '.join(more)})" if more else method)
    return found


def metrics_table(summary: dict[str, Any]) -> Table:
    """One row per model, one column per metric, at the end of a run."""
    metrics = summary["metrics"]
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
    coreset, cost = summary["coreset"], summary["cost"]
    words = [f"{100 * coreset['fraction']:g} % of the data"]
    if "held_out_error" in coreset:
        words.append(f"coreset error {coreset['held_out_error']:.3f}")
    if "refreshes" in coreset:
        words.append(f"{coreset['refreshes']:.1f} refreshes per client")
    words.append(f"{cost['seconds_per_round']:.2f} s per round")
    words += _temperature(summary)
    if "overhead_seconds_per_round" in cost:
        words.append(f"{cost['overhead_seconds_per_round']:.2f} s of them not training")
    if "privacy" in summary:
        words.append(_spent(summary["privacy"]))
    return ", ".join(words)


def _temperature(summary: Mapping[str, Any]) -> list[str]:
    """Of the main model, where predictions were calibrated on validation points."""
    main = summary.get("calibration", {}).get(main_model(summary["metrics"]))
    if main is None:
        return []
    return [f"calibrated at temperature {main['temperature']['all_clients']['mean']:.2f}"]


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
    """One row per run; what all runs share is in the title. Costs are totals over seeds."""
    summaries = [result.summary for result in results]
    regression = all(f"{main_model(s['metrics'])}_rmse" in s["metrics"] for s in summaries)
    score = "rmse" if regression else "accuracy"
    about = [
        {"data": s["data"], "seeds": str(len(s["seeds"])), "rounds": _rounds(s)} for s in summaries
    ]
    differing = [key for key in about[0] if len({each[key] for each in about}) > 1]
    shared = [f"{key} {about[0][key]}" for key in about[0] if key not in differing]
    title = ", ".join([HEADINGS[score], *shared, "last round, mean ± std"])
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method")
    models = [m for m in MODELS if any(f"{m}_{score}" in s["metrics"] for s in summaries)]
    for heading in (*differing, "k/n", *models, "NLL", "ECE", "s/round", "examples"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary, each in zip(summaries, about, strict=True):
        metrics, cost = summary["metrics"], summary["cost"]
        table.add_row(
            summary["method"],
            *(each[key] for key in differing),
            f"{summary['coreset']['fraction']:g}",
            *(_cell(metrics, f"{model}_{score}") for model in models),
            _cell(metrics, f"{main_model(metrics)}_nll", spread=False),
            _cell(metrics, f"{main_model(metrics)}_ece", spread=False),
            f"{cost['seconds_per_round']:.3f}",
            f"{cost['examples_processed']:,}",
        )
    calibrated = [summary for summary in summaries if "calibration" in summary]
    if calibrated:
        whose = "" if len(calibrated) == len(summaries) else " of runs with validation points"
        table.caption = f"NLL and ECE{whose} are after calibration."
    return table


def comparison_json(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """The summaries, each with the folder it comes from."""
    return [{"folder": str(result.path), **result.summary} for result in results]


def plot(results: Sequence[RunResult], file: Path) -> None:
    """Accuracy (or RMSE) against rounds, and against examples processed.

    Of the personal models, or of the global one where a method has no others. The band is one
    standard deviation over seeds.
    """
    from matplotlib.ticker import NullFormatter  # matplotlib takes half a second

    first = results[0].summary["metrics"]
    metric = next((m for m in ("accuracy", "rmse") if f"{main_model(first)}_{m}" in first), "")
    if not metric:
        raise UserError(f"{results[0].path} has no evaluated round to draw.")
    factor = 100 if metric == "accuracy" else 1
    figure, axes = panels(2)
    axes[1].sharey(axes[0])
    axes[1].tick_params(labelleft=False)
    for result, label in zip(results, labels(results), strict=True):
        points = curve(result.lines, f"{main_model(result.summary['metrics'])}_{metric}")
        mean = [factor * point.mean for point in points]
        low = [factor * (point.mean - point.std) for point in points]
        high = [factor * (point.mean + point.std) for point in points]
        for axis, key in zip(axes, ("round", "examples"), strict=True):
            x = [getattr(point, key) for point in points]
            axis.plot(x, mean, marker=".", label=label)
            axis.fill_between(x, low, high, alpha=0.15)
    kinds = {main_model(result.summary["metrics"]) for result in results}
    axes[0].set(xlabel="round", ylabel=f"{' or '.join(sorted(kinds))} {HEADINGS[metric]}")
    axes[1].set(xlabel="examples processed per seed", xscale="log")
    axes[1].xaxis.set_minor_formatter(NullFormatter())
    axes[1].legend(fontsize="small")
    for axis in axes:
        axis.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a suffix matplotlib does not know
        raise UserError(f"Cannot write the picture {file}: {error}.") from error


def _rounds(summary: dict[str, Any]) -> str:
    """`30`, or `12 of 30` for an unfinished run."""
    wanted = summary["config"].get("rounds", summary["rounds"])
    return str(wanted) if summary["rounds"] == wanted else f"{summary['rounds']} of {wanted}"


def _cell(metrics: dict[str, Any], name: str, *, spread: bool = True) -> str:
    """mean ± std, accuracies in percent; a dash where a run has no such metric."""
    values = metrics.get(name)
    if values is None:
        return "-"
    factor, digits = (100, 2) if name.endswith("accuracy") else (1, 3)
    mean = f"{factor * values['mean']:.{digits}f}"
    if not spread or len(values["per_seed"]) == 1:
        return mean
    return f"{mean} ± {factor * values['std']:.{digits}f}"
