"""Table 1 of the paper: every method on MNIST, Fashion-MNIST and CIFAR-10, on all data and on half.

All have the same splits, initial weights, rounds, local steps and minibatches: at scale paper on
shards-large, at scale quick with 250 points per client and without CIFAR-10. The rows "50 %" of
FedAvg to PFedBayes train on a random half of each client's points (`keep` = 0.5). "Random 50 %" is
PFedBayes on a half with weights n/k, so that the prior counts as much as on all data. "redrawn" is
redrawn as often as the coreset of preset `matching` is refreshed. "CoreSet" is by that preset,
"CoreSet, default" by corefed's default. All other settings are corefed's defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from rich.console import Console

from corefed_studies.pages import Table
from corefed_studies.reproduce import results, tables
from corefed_studies.reproduce.cells import DEFAULT, MATCHING, Flags, StudyCell
from corefed_studies.reproduce.paper import NOTHING, TABLE_1
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.tables import Options

REFERENCE = "CoreSet 50 %"
"""What every other row is compared with, seed by seed."""

BNFED: Flags = {"learning_rate": 0.003}
"""The best rate on another seed (10) of the same split. The study of defaults has no BNFed."""

ROWS: dict[str, Flags] = {
    "FedAvg": {"method": "fedavg"},
    "BNFed": {"method": "bnfed", **BNFED},
    "pFedMe": {"method": "pfedme"},
    "Per-FedAvg": {"method": "per-fedavg"},
    "PFedBayes": {"method": "pfedbayes"},
    "Independent": {"method": "independent"},
    "Random 50 %": {"method": "random-subset", "fraction": 0.5},
    "Random 50 %, redrawn": {"method": "random-subset", "fraction": 0.5, "redraw_every": 100},
    "CoreSet 50 %": {**MATCHING, "fraction": 0.5},
    "Random 10 %, redrawn": {"method": "random-subset", "fraction": 0.1, "redraw_every": 100},
    "CoreSet 10 %": {**MATCHING, "fraction": 0.1},
    "CoreSet 50 %, default": {**DEFAULT, "fraction": 0.5},
    "CoreSet 10 %, default": {**DEFAULT, "fraction": 0.1},
}
HALVED = ("FedAvg", "BNFed", "pFedMe", "Per-FedAvg", "PFedBayes")
"""Rows that the paper has on half of the data as well."""

SETTINGS: dict[str, Flags] = {
    "paper": {"partition": "shards-large", "rounds": 400, "seeds": (0, 1, 2)},
    "quick": {"partition": "labels:5:50", "rounds": 20, "seeds": (0, 1), "evaluate_draws": 4},
}
DATA: dict[str, dict[str, Flags]] = {
    "paper": {"mnist": {}, "fashion-mnist": {}, "cifar10": {"rounds": 60}},
    "quick": {"mnist": {}, "fashion-mnist": {}},
}
EVALUATE_EVERY = {"paper": 4, "quick": 4}

WITHOUT = {("BNFed", "cifar10")}
"""BNFed matches neurons of networks without convolutions."""


def common(scale: str) -> dict[str, Flags]:
    """Data set -> what all its cells share, those of Table 3 too."""
    kept: Flags = {"checkpoint_every": 20, "evaluate_every": EVALUATE_EVERY[scale]}
    return {
        data: {"data": data, **SETTINGS[scale], **own, **kept} for data, own in DATA[scale].items()
    }


def cells(scale: str) -> Iterator[StudyCell]:
    for data, shared in common(scale).items():
        for row, own in ROWS.items():
            if (row, data) in WITHOUT:
                continue
            flags = {**shared, **own}
            yield StudyCell(row, data, flags)
            if row in HALVED:
                yield StudyCell(f"{row}, 50 %", data, {**flags, "keep": 0.5})


def reproduce(
    name: str, scale: str, folder: Path, console: Console, **options: Unpack[Options]
) -> None:
    """Write table1.json, .md and .html."""
    tables.make(name, scale, folder, console, lambda: list(cells(scale)), make_tables, **options)


def make_tables(found: Results) -> Sequence[Table]:
    """One table a data set: the paper's figure, ours, the difference, and against the coreset."""
    laid = []
    for data in dict.fromkeys(column for _, column in found):
        rows = [_row(found, row, data) for row, column in found if column == data]
        columns = (
            "", "personal: paper", "ours", "difference", "global: paper", "ours", "difference",
            "localized", f"against {REFERENCE}", "NLL",
        )  # fmt: skip
        laid.append(Table(title(found, data), columns, rows, _note(found, data)))
    return laid


def _row(found: Results, row: str, data: str) -> list[str]:
    if "failure" in found[row, data]:
        return [row, *["failed"] * 9]
    printed = TABLE_1.get((row, data), NOTHING)
    key, reference = (row, data), (REFERENCE, data)
    personal, global_, localized = (
        results.metric(found, key, f"{model}_accuracy")
        for model in ("personal", "global", "localized")
    )
    model = "personal" if personal else "global"
    other = results.metric(found, reference, f"{model}_accuracy")
    nll = results.metric(found, key, f"{model}_nll")
    return [
        row,
        _printed(printed.personal),
        results.percent(personal),
        _difference(personal, printed.personal),
        _printed(printed.global_),
        results.percent(global_),
        _difference(global_, printed.global_),
        results.percent(localized),
        "" if row == REFERENCE else results.against(personal or global_, other),
        f"{sum(nll) / len(nll):.3f}" if nll else "-",
    ]


def _printed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _difference(each: Sequence[float], printed: float | None) -> str:
    if not each or printed is None:
        return ""
    return f"{100 * sum(each) / len(each) - printed:+.2f}"


def title(found: Results, data: str) -> str:
    every = [r for (_, column), r in found.items() if column == data and "config" in r]
    if not every:
        return data
    one = max(every, key=lambda r: int(r["rounds"]))
    seeds = len(one["seeds"])
    return (
        f"{data}, {one['partition']}, {one['clients']} clients, {one['rounds']} rounds of "
        f"{one['config']['local_steps']} steps, {seeds} seeds: accuracy (%)"
    )


def _note(found: Results, data: str) -> str:
    mine = {key: r for key, r in found.items() if key[1] == data}
    said = (
        f'Last round, mean ± std over seeds. "Against {REFERENCE}": mean of the differences by '
        "seed in personal accuracy (global for a method without personal models), paired t-test. "
        "NLL of the same model."
    )
    return " ".join(filter(None, (said, remarks(mine))))


def remarks(mine: Results) -> str:
    """Rows with fewer rounds than the others, where cells were trained, and what failed."""
    rounds = max((r["rounds"] for r in mine.values() if "rounds" in r), default=0)
    fewer = [
        f"{row}: {r['rounds']} rounds."
        for (row, _), r in mine.items()
        if r.get("rounds", rounds) != rounds
    ]
    return " ".join(filter(None, (*fewer, results.machines(mine), results.failures(mine))))
