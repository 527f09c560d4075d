"""Learning curves: a metric over the rounds of a run, and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base.errors import UserError
from corefed.base.panels import labelled, legend_below, panels, save
from corefed.show.distinguish import labels
from corefed.show.report import HEADINGS, RunResult
from corefed.training import cost, summaries
from corefed.training.record import main_model


class EvaluatedRound(NamedTuple):
    """An evaluated round. Passes and megabytes are totals so far, per seed."""

    round: int
    passes: float  # including those of selection, see `training/cost.py`
    megabytes: float
    seconds: float  # so far, of all seeds together: they train side by side
    mean: float
    std: float
    per_seed: list[float]


def curve(lines: Sequence[Mapping[str, Any]], name: str) -> list[EvaluatedRound]:
    """A metric over the evaluated rounds, of lines as `record.read` gives them."""
    totals = zip(
        accumulate(statistics.fmean(line["passes"]) for line in lines),
        accumulate(
            (sum(line["bytes_up"]) + sum(line["bytes_down"])) / len(line["examples"])
            for line in lines
        ),
        accumulate(line["seconds"] for line in lines),
        strict=True,
    )
    return [
        EvaluatedRound(line["round"], passes, sent / 1e6, seconds, *over.values())
        for line, (passes, sent, seconds) in zip(lines, totals, strict=True)
        if name in line.get("metrics", {})
        for over in [summaries.over_seeds(line["metrics"][name])]
    ]


def plot(results: Sequence[RunResult], file: Path) -> None:
    """Accuracy (or RMSE) against rounds, and against passes, those of selection included.

    Of the personal models, or of the global one where a method has no others. The band is one
    standard deviation over seeds.
    """
    from matplotlib.ticker import LogFormatterSciNotation  # matplotlib takes half a second

    first = results[0].summary["metrics"]
    metric = next((m for m in ("accuracy", "rmse") if f"{main_model(first)}_{m}" in first), "")
    if not metric:
        raise UserError(f"{results[0].path} has no evaluated round to draw.")
    factor = 100 if metric == "accuracy" else 1
    figure, axes = panels(2, legend=2)
    axes[1].sharey(axes[0])
    axes[1].tick_params(labelleft=False)
    for result, label in zip(results, labels(results), strict=True):
        points = curve(result.lines, f"{main_model(result.summary['metrics'])}_{metric}")
        complete = cost.of_summary(result.summary).complete
        mean = [factor * point.mean for point in points]
        low = [factor * (point.mean - point.std) for point in points]
        high = [factor * (point.mean + point.std) for point in points]
        for axis, key in zip(axes, ("round", "passes"), strict=True):
            x = [getattr(point, key) for point in points]
            axis.plot(x, mean, marker=".", label=f"{label}{'' if complete else ', passes ≥'}")
            axis.fill_between(x, low, high, alpha=0.15)
    kinds = {main_model(result.summary["metrics"]) for result in results}
    axes[0].set(xlabel="round", ylabel=f"{' or '.join(sorted(kinds))} {HEADINGS[metric]}")
    axes[1].set(xlabel="passes per seed, selection included", xscale="log")
    # Where no power of ten is in view, the places between have labels.
    axes[1].xaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(1, 0.5)))
    legend_below(figure, labelled(axes), across=2)
    for axis in axes:
        axis.grid(alpha=0.3)
    try:
        save(figure, file)
    except (OSError, ValueError) as error:  # ValueError: a suffix matplotlib does not know
        raise UserError(f"Cannot write the picture {file}: {error}.") from error
