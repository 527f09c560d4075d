"""Table 2 of the paper: accuracy by class at two hospitals, nine methods.

Each hospital has one disease and half of the normal images (partition shared-normal). Images are
embedded by a frozen ImageNet network; the head is federated. The paper's three data sets are not
available here. The chest X-rays of Kermany et al. (2018) take their place, and the paper's numbers
for its own X-rays are shown beside ours for orientation only. Any other folder of three classes
works as well: --data PATH.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from rich.console import Console

from corefed_studies.pages import Table
from corefed_studies.reproduce import results, tables
from corefed_studies.reproduce.cells import DEFAULT, MATCHING, Flags, StudyCell
from corefed_studies.reproduce.paper import TABLE_2, TABLE_2_CLASSES
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.tables import Options

FOLDER = "chest-xray"
REFERENCE = "CoreSet 50 %"

ROWS: dict[str, Flags] = {
    "FedAvg": {"method": "fedavg"},
    "PFedBayes": {"method": "pfedbayes"},
    "Independent": {"method": "independent"},
    "Random 50 %": {"method": "random-subset", "fraction": 0.5},
    "Random 50 %, FedAvg": {"method": "random-subset", "fraction": 0.5, "base": "fedavg"},
    "LogDet 50 %": {"method": "submodular-logdet", "fraction": 0.5},
    "DispSum 50 %": {"method": "submodular-dispsum", "fraction": 0.5},
    "DispMin 50 %": {"method": "submodular-dispmin", "fraction": 0.5},
    "CoreSet 50 %": {**MATCHING, "fraction": 0.5},
    "CoreSet 10 %": {**MATCHING, "fraction": 0.1},
    "CoreSet 50 %, default": {**DEFAULT, "fraction": 0.5},
    "CoreSet 10 %, default": {**DEFAULT, "fraction": 0.1},
}

SETTINGS: dict[str, Flags] = {
    "paper": {"rounds": 40, "seeds": (0, 1, 2, 3, 4)},
    "quick": {"rounds": 10, "seeds": (0,)},
}
BAYESIAN: Flags = {"zeta": 10.0}
"""The paper's zeta, for methods that have one."""


def cells(scale: str, data: str = FOLDER) -> Iterator[StudyCell]:
    common: Flags = {
        "data": f"image-folder:{data}",
        "partition": "shared-normal",
        "clients": 2,
        "scale": "standard",
        "checkpoint_every": 20,
        **SETTINGS[scale],
    }
    for row, own in ROWS.items():
        plain = own.get("base") == "fedavg" or not str(own["method"]).endswith(("bayes", "subset"))
        yield StudyCell(row, Path(data).name, {**common, **({} if plain else BAYESIAN), **own})


def reproduce(
    name: str,
    scale: str,
    folder: Path,
    console: Console,
    *,
    data: Path | None = None,
    **options: Unpack[Options],
) -> None:
    """Write table2.json, .md and .html; `data` is a folder of images of three classes."""
    wanted = FOLDER if data is None else str(data)
    tables.make(
        name, scale, folder, console, lambda: list(cells(scale, wanted)), make_tables,
        classes=True, **options,
    )  # fmt: skip


def make_tables(found: Results) -> Sequence[Table]:
    """Of the global model, as in the paper, and of the personal ones."""
    first = next(result for result in found.values() if "config" in result)
    about = (
        f"{first['data'].removeprefix('image-folder:')}, {first['clients']} clients, "
        f"{first['rounds']} rounds, {len(first['seeds'])} seeds"
    )
    note = (
        f'Mean ± std over seeds. "Against {REFERENCE}": mean of the differences by seed in the '
        "accuracy over all classes, paired t-test. The paper's figures are of its COVID-19 X-rays "
        f"({', '.join(TABLE_2_CLASSES)}), another data set. Independent has no global model: its "
        "row is each hospital's own model, under global on the other hospital's images."
    )
    tail = " ".join(filter(None, (results.machines(found), results.failures(found))))
    return [
        _make_table(found, model, f"{model} model, {about}: accuracy by class (%)", text)
        for model, text in (("global", note), ("personal", tail))
    ]


def _make_table(found: Results, model: str, title: str, note: str) -> Table:
    labels = list(
        dict.fromkeys(
            label for r in found.values() for row in r.get("classes", {}).values() for label in row
        )
    )
    printed = [f"paper: {label}" for label in TABLE_2_CLASSES] if model == "global" else []
    columns = ["", *labels, "all", f"against {REFERENCE}", *printed]
    rows = []
    for (row, column), result in found.items():
        if "failure" in result:
            rows.append([row, *["failed"] * (len(columns) - 1)])
            continue
        classes = result["classes"].get(model, {})
        score = _score(result, model)
        overall = results.metric(found, (row, column), score)
        if not overall:
            continue
        other = results.metric(found, (REFERENCE, column), f"{model}_accuracy")
        figures = TABLE_2.get(row)
        rows.append(
            [
                row,
                *(results.percent(classes.get(label, {}).get("per_seed", [])) for label in labels),
                results.percent(overall),
                "" if row == REFERENCE else results.against(overall, other),
                *([f"{f:.1f}" for f in figures] if figures else ["-"] * 3)[: len(printed)],
            ]
        )
    return Table(title, columns, rows, note)


def _score(result: dict[str, object], model: str) -> str:
    """A client that learns alone has no global model; the other's images stand in for it."""
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    alone = model == "global" and "global_accuracy" not in metrics
    return "others_accuracy" if alone else f"{model}_accuracy"
