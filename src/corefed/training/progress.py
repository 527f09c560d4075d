"""A run's progress on stderr: a bar with the last known numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corefed.training.record import main_model


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar on stderr with the last known figures; plain lines where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=20))
    bar = Progress(
        *columns, TextColumn("{task.description}"), TimeRemainingColumn(), console=console
    )
    known: dict[str, str] = {}

    def show(line: dict[str, Any]) -> None:
        known.update(_figures(line))
        text = "  ".join(f"{name} {value}" for name, value in known.items())
        if console.is_terminal:
            if not bar.live.is_started:
                bar.start()
                bar.add_task("", total=total)
            bar.update(bar.task_ids[0], completed=line["round"], description=text)
        elif "metrics" in line:
            print(f"round {line['round']}/{total}  {text}", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _figures(line: dict[str, Any]) -> dict[str, str]:
    """What is worth watching, as means over seeds."""
    figures = {"loss": f"{_mean(line['loss']):.3f}"} if None not in line["loss"] else {}
    metrics = line.get("metrics", {})
    model = main_model(metrics)
    if f"{model}_accuracy" in metrics:
        figures[model] = f"{100 * _mean(metrics[f'{model}_accuracy']):.1f} %"
    elif f"{model}_rmse" in metrics:
        figures["RMSE"] = f"{_mean(metrics[f'{model}_rmse']):.3f}"
    errors = [e for e in line["coreset"].get("held_out_error", []) if e is not None]
    if errors:
        figures["coreset error"] = f"{_mean(errors):.3f}"
    return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
