"""What is known of a run, read from its folder; what is not there is a sentence instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.data.preparation import Preparation
from corefed.settings.config import Experiment, resolve
from corefed.show import report
from corefed.show.page.content import Missing
from corefed.training import fitted, record

T = TypeVar("T")

KINDS = ("personal", "global", "localised", "others")
"""Models by the names that a reader sees, in the order of their colours."""
_SHOWN = dict(zip(record.MODELS, KINDS, strict=True))


class RunFolder(NamedTuple):
    """One run's folder, read."""

    path: Path
    label: str  # tells it from the other runs of the page
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    experiment: Experiment | Missing
    clients: list[list[dict[str, Any]]] | Missing  # by seed: name, train, test, classes
    preparations: tuple[Preparation, ...]  # one a seed; empty where clients are missing
    models: Tree | Missing  # fitted.safetensors
    held_out: Tree | Missing  # held_out.safetensors

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
        main = record.main_model(self.metrics)
        return next((m for m in ("accuracy", "rmse") if f"{main}_{m}" in self.metrics), "")

    @property
    def main(self) -> str:
        """The model that a method is about, as metrics name it."""
        return record.main_model(self.metrics)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; empty for a regression, and where they are not known."""
        return self.preparations[0].labels if self.preparations else ()

    @property
    def names(self) -> list[str]:
        """Of the clients."""
        if isinstance(self.clients, Missing):
            return [f"client {i}" for i in range(self.summary["clients"])]
        return [each["name"] for each in self.clients[0]]

    @property
    def seeds(self) -> list[int]:
        seeds: list[int] = self.summary["seeds"]
        return seeds

    def models_with(self, metric: str) -> list[str]:
        """Models, as metrics name them, that have this metric."""
        return [m for m in record.MODELS if f"{m}_{metric}" in self.metrics]


class EvaluatedRound(NamedTuple):
    """An evaluated round. What adds up over rounds is that of one seed, up to this round."""

    round: int
    examples: float
    megabytes: float
    seconds: float  # of all seeds together, which train side by side
    mean: float
    std: float
    per_seed: list[float]


def curve(run: RunFolder, name: str) -> list[EvaluatedRound]:
    """A metric over the evaluated rounds."""
    seeds = len(run.seeds)
    totals = zip(
        accumulate(sum(line["examples"]) / seeds for line in run.lines),
        accumulate((sum(line["bytes_up"]) + sum(line["bytes_down"])) / seeds for line in run.lines),
        accumulate(line["seconds"] for line in run.lines),
        strict=True,
    )
    return [
        EvaluatedRound(line["round"], examples, sent / 1e6, seconds, *over.values())
        for line, (examples, sent, seconds) in zip(run.lines, totals, strict=True)
        if name in line.get("metrics", {})
        for over in [record.over_seeds(line["metrics"][name])]
    ]


def shown(model: str) -> str:
    """What a reader sees for the name that metrics have."""
    return _SHOWN[model]


def score_name(score: str) -> str:
    return {"accuracy": "accuracy", "rmse": "RMSE"}.get(score, "score")


def heading(text: str) -> str:
    """With a capital, and RMSE as it is."""
    return f"{text[:1].upper()}{text[1:]}"


def score_text(value: float, score: str, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %" if score == "accuracy" else f"{value:.4g}"


def read(folders: Sequence[Path]) -> list[RunFolder]:
    """The runs in these folders, each of them once."""
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{folder} is named twice; name each run once.")
    results = report.load(folders)
    return [_run(result, label) for result, label in zip(results, _labels(results), strict=True)]


def _run(result: report.RunResult, label: str) -> RunFolder:
    path = result.path
    about = _or_reason(lambda: fitted.read_data(path))
    gone = isinstance(about, Missing)
    return RunFolder(
        path,
        label,
        result.summary,
        result.lines,
        _or_reason(lambda: resolve(path / record.EXPERIMENT)),
        about if isinstance(about, Missing) else about["clients"],
        () if isinstance(about, Missing) else _preparations(about),
        Missing(about) if gone else _or_reason(lambda: fitted.read_tensors(path, fitted.MODELS)),
        Missing(about) if gone else _or_reason(lambda: fitted.read_tensors(path, fitted.HELD_OUT)),
    )


def _preparations(about: dict[str, Any]) -> tuple[Preparation, ...]:
    return tuple(Preparation.from_dict(each) for each in about["preparations"])


def _or_reason(read: Callable[[], T]) -> T | Missing:
    try:
        return read()
    except UserError as error:
        return Missing(error)


def _labels(results: Sequence[report.RunResult]) -> list[str]:
    """Method and fraction; with the folder where that does not tell two runs apart."""
    plain = []
    for _, summary, _ in results:
        fraction = summary["coreset"]["fraction"]
        plain.append(summary["method"] + (f", {100 * fraction:g} %" if fraction < 1 else ""))
    names = [result.path.name for result in results]
    found = []
    for text, result in zip(plain, results, strict=True):
        unique = names.count(result.path.name) == 1
        where = result.path.name if unique else str(result.path)
        found.append(f"{text} ({where})" if plain.count(text) > 1 else text)
    return found
