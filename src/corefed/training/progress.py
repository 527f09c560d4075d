"""A run's progress on stderr: a bar with the last known numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from corefed.base.progress import bars
from corefed.training.record import main_model


@contextmanager
def progress(total: int, *, silent: bool = False) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that shows a round's line; without a terminal, only those with metrics."""
    known: dict[str, str] = {}
    with bars(keep=True, silent=silent) as shown:
        shown.show("round", 0, total, f"0/{total}  preparing")

        def show(line: dict[str, Any]) -> None:
            known.update(_numbers(line))
            done = f"{line['round']}/{total}"
            text = "  ".join([done, *(f"{name} {value}" for name, value in known.items())])
            plain = f"round {text}" if "metrics" in line else ""
            shown.show("round", line["round"], total, text, line=plain)

        yield show


def _numbers(line: dict[str, Any]) -> dict[str, str]:
    """The numbers to show, as means over seeds."""
    numbers = {"loss": f"{_mean(line['loss']):.3f}"} if None not in line["loss"] else {}
    metrics = line.get("metrics", {})
    model = main_model(metrics)
    if f"{model}_accuracy" in metrics:
        numbers[model] = f"{100 * _mean(metrics[f'{model}_accuracy']):.1f} %"
    elif f"{model}_rmse" in metrics:
        numbers["RMSE"] = f"{_mean(metrics[f'{model}_rmse']):.3f}"
    errors = [e for e in line["coreset"].get("held_out_error", []) if e is not None]
    if errors:
        numbers["coreset error"] = f"{_mean(errors):.3f}"
    return numbers


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
