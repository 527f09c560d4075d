"""A run read from its folder. Where something is missing, a sentence takes its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.data.preparation import Preparation
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.show import report
from corefed.show.distinguish import labels
from corefed.show.page.content import Missing, TableCell, number, percent
from corefed.training import fitted, record

T = TypeVar("T")


class RunFolder(NamedTuple):
    """One run's folder, read."""

    path: Path
    label: str  # unique on the page
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    experiment: Experiment | Missing
    clients: list[list[dict[str, Any]]] | Missing  # by seed: name, train, test, classes
    preparations: tuple[Preparation, ...]  # one per seed; empty where clients are missing
    models: Tree | Missing  # fitted.safetensors
    held_out: Tree | Missing  # held_out.safetensors
    place: str = ""  # what a page calls the folder, where that is not its path

    @property
    def where(self) -> str:
        return self.place or str(self.path)

    @property
    def result(self) -> report.RunResult:
        """The same as a table in the terminal has it."""
        return report.RunResult(self.path, self.summary, self.lines)

    @property
    def finished(self) -> bool:
        return (self.path / record.SUMMARY).exists()

    @property
    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = self.summary["metrics"]
        return metrics

    @property
    def score(self) -> str:
        """accuracy or rmse; empty where no round was evaluated."""
        return next((m for m in ("accuracy", "rmse") if f"{self.main}_{m}" in self.metrics), "")

    @property
    def main(self) -> str:
        """The model that a method is about."""
        return record.main_model(self.metrics)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; empty for a regression, and where they are unknown."""
        return self.preparations[0].labels if self.preparations else ()

    @property
    def names(self) -> list[str]:
        """Names of the clients."""
        if isinstance(self.clients, Missing):
            return [f"client {i}" for i in range(self.summary["clients"])]
        return [each["name"] for each in self.clients[0]]

    @property
    def seeds(self) -> list[int]:
        seeds: list[int] = self.summary["seeds"]
        return seeds

    def models_with(self, metric: str) -> list[str]:
        """Models that have this metric."""
        return [m for m in record.MODELS if f"{m}_{metric}" in self.metrics]


def score_name(score: str) -> str:
    return {"accuracy": "accuracy", "rmse": "RMSE"}.get(score, "score")


def score_axis(score: str) -> tuple[float, str]:
    """The factor by which a score is shown, and the title of its axis."""
    return (100, "accuracy, %") if score == "accuracy" else (1, "RMSE")


def capitalize(text: str) -> str:
    """Like str.capitalize, but leaves the other letters alone: RMSE."""
    return f"{text[:1].upper()}{text[1:]}"


def score_text(value: float, score: str, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %" if score == "accuracy" else f"{value:.4g}"


def score_cell(value: float | None, score: str) -> TableCell:
    return percent(value, 2) if score == "accuracy" else number(value, ".4g")


def read(folders: Sequence[Path], shown: Mapping[Path, str] | None = None) -> list[RunFolder]:
    """The runs in these folders, each of them once; `shown` is what to call some of them."""
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{folder} is named twice; name each run once.")
    results = report.load(folders)
    found = [_read_run(each, label) for each, label in zip(results, labels(results), strict=True)]
    return [run._replace(place=(shown or {}).get(run.path, "")) for run in found]


def _read_run(result: report.RunResult, label: str) -> RunFolder:
    path, summary, lines = result
    experiment = _or_reason(lambda: resolve(record.settings_file(path)))
    about = _or_reason(lambda: fitted.read_data(path))
    if isinstance(about, Missing):
        return RunFolder(path, label, summary, lines, experiment, about, (), about, about)
    held_out = _or_reason(lambda: fitted.read_tensors(path, fitted.HELD_OUT))
    return RunFolder(
        path,
        label,
        summary,
        lines if isinstance(held_out, Missing) else _clients_of_kept(summary, lines, held_out),
        experiment,
        about["clients"],
        tuple(Preparation.from_dict(each) for each in about["preparations"]),
        _or_reason(lambda: fitted.read_tensors(path, fitted.MODELS)),
        held_out,
    )


def _clients_of_kept(
    summary: dict[str, Any], lines: list[dict[str, Any]], held_out: Tree
) -> list[dict[str, Any]]:
    """The lines; the last has the clients' scores of the predictions that are kept.

    Of a run that ended early they are of its best round, as its other scores are.
    """
    kind = next((each for each in fitted.KINDS if f"{each}.mean" in held_out), "")
    last = lines[-1] if lines else {}
    if not kind or "clients" not in last or "metrics" not in summary.get("measures", {}):
        return lines
    mean, y, count = held_out[f"{kind}.mean"], held_out["y"], summary["clients"]
    loss = (
        (mean - y).square().mean(-1) if y.is_floating_point() else (mean.argmax(-1) == y).double()
    )
    points = held_out["row"].bincount(minlength=count * len(summary["seeds"]))
    sums = held_out["row"].bincount(loss.double(), minlength=len(points))
    score = (sums / points).sqrt() if y.is_floating_point() else sums / points
    found = [None if value != value else value for value in score.tolist()]
    clients = [found[g : g + count] for g in range(0, len(found), count)]
    return [*lines[:-1], {**last, "clients": clients}]


def _or_reason(read: Callable[[], T]) -> T | Missing:
    try:
        return read()
    except UserError as error:
        return Missing(error)
