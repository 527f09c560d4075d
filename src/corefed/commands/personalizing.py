"""`corefed personalize`: read a newcomer's data, train it (`newcomers.py`), keep and print it.

What is kept is a folder like a run's, of one client, in DIR/personalized/NAME, so that everything
that reads runs reads newcomers too.
"""

from __future__ import annotations

import dataclasses
import json as jsonlib
import re
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from corefed.base import arrays, rng
from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.data import inputs
from corefed.data.clients import FederatedData
from corefed.data.inputs import Inputs
from corefed.show import report
from corefed.training import fitted, newcomers, record
from corefed.training.fitted import Fitted
from corefed.training.newcomers import Newcomer

TEST_FRACTION = 0.2
FEWEST = 2
"""Training points."""
NAME = r"\w([\w .-]{0,98}[\w-])?"
"""Of a client: what is the same folder's name on every machine."""
ROWS = {
    "personal": "personalised",
    "global": "the shared model as it is",
    "alone": "trained alone, same steps",
}
METRICS = {"accuracy": "accuracy %", "rmse": "RMSE", "nll": "NLL", "ece": "ECE"}


def execute(
    folder: Path,
    path: Path,
    *,
    name: str | None,
    steps: int | None,
    fraction: float | None,
    test_fraction: float | None,
    seed: int | None,
    device: str,
    out: Path | None,
    json: bool,
) -> None:
    """Read, train, write, print; whatever can be refused is refused before."""
    model = fitted.load(folder)
    name = path.stem if name is None else name
    place = out or folder / fitted.PERSONALIZED / name
    refuse_name(model, name, place)
    g = model.place(model.names[0], seed)[0]
    memory = model.experiment.run.memory_mb
    data = read(path, model, g, name, test_fraction, memory)
    for note in data.notes:
        print(f"note: {note}", file=sys.stderr, flush=True)
    joined = newcomers.join(model, data, steps=steps, fraction=fraction, seed=seed, device=device)
    keep(place, joined)
    if json:
        print(jsonlib.dumps({"folder": str(place), **joined.summary}, indent=1))
        return
    report.console().print(table(joined))
    print(f"written to {place}; corefed predict {out or folder} --client {name!r} uses it")


def refuse_name(model: Fitted, name: str, place: Path) -> None:
    if not re.fullmatch(NAME, name):
        raise UserError(
            f"{name!r} is no good name for a folder; give --name of letters, digits, spaces, dots "
            "and dashes, at most 100."
        )
    if name in model.names:
        raise UserError(
            f"The run in {model.folder} has a client {name!r} already, who took part; give the new "
            "one another --name."
        )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(
            f"{place} is there already and is not overwritten; give another --name, or remove it."
        )


# --- reading --------------------------------------------------------------------------------------


def read(
    path: Path, model: Fitted, g: int, name: str, test_fraction: float | None, memory_mb: int
) -> FederatedData:
    """The newcomer as a federation of one: its points to train on, and those to test on.

    Test points are those of the file where it says so (X_test), else a part of the others, drawn at
    random. Where clients have scales of their own, the newcomer's is that of the points read first.
    """
    preparation = model.preparations[g]
    if test_fraction is not None and not 0 <= test_fraction < 1:
        raise UserError(f"--test-fraction is {test_fraction:g}; it must be in [0, 1).")
    found = inputs.read(path, preparation, name, target_wanted=True, memory_mb=memory_mb)
    notes = list(found.notes)
    if test_fraction is None and has_test_part(path):
        train, notes = found, []  # the one there is says that the test part was not read
        test = inputs.read(path, found.preparation, name, memory_mb=memory_mb)
    else:
        part = TEST_FRACTION if test_fraction is None else test_fraction
        seed = model.experiment.run.seeds[g]
        train, test = divide(found, part, seed, path)
    if len(train.x) < FEWEST:
        raise UserError(f"{path} has {len(train.x)} training points; it takes at least {FEWEST}.")
    own = found.preparation
    kept = dataclasses.replace(own, clients={k: v for k, v in own.clients.items() if k == name})
    assert train.y is not None and test.y is not None
    return FederatedData(
        train=_stacked(train._replace(y=own.standardised(train.y) if own.targets else train.y)),
        test=_stacked(test),
        classes=len(own.labels),
        targets=len(own.targets),
        names=[name],
        labels=own.labels,
        notes=(*notes, *_notes(name, train, own.labels)),
        preparations=(kept,),
    )


def has_test_part(path: Path) -> bool:
    if path.suffix.lower() != ".npz":
        return False
    names = {name.lower() for name in arrays.headers(path)}
    return {"x_train", "x_test", "y_test"} <= names and "x" not in names


def divide(found: Inputs, part: float, seed: int, path: Path) -> tuple[Inputs, Inputs]:
    """Training and test points, drawn at random by the seed."""
    n = len(found.x)
    held = round(part * n) or int(part > 0)
    if held and n < FEWEST + held:
        raise UserError(
            f"{path} has {n} points, too few to train on {FEWEST} and test on {held}; use "
            "--test-fraction 0, which tests on none."
        )
    order = torch.randperm(n, generator=rng.generator(seed, 0, rng.SERVER, "newcomer"))
    return _some(found, order[held:].sort().values), _some(found, order[:held].sort().values)


def _some(found: Inputs, rows: torch.Tensor) -> Inputs:
    assert found.y is not None
    ids = tuple(found.ids[row] for row in rows.tolist())
    return found._replace(x=found.x[rows], y=found.y[rows], ids=ids)


def _stacked(points: Inputs) -> ClientData:
    assert points.y is not None
    return ClientData(points.x.unsqueeze(0), points.y.unsqueeze(0), torch.ones(1, len(points.x)))


def _notes(name: str, train: Inputs, labels: tuple[str, ...]) -> list[str]:
    assert train.y is not None
    if not labels or int(train.y.min()) != int(train.y.max()):
        return []
    only = labels[int(train.y[0])]
    return [f"all training points of {name} are of class {only!r}: its model will lean to it."]


# --- writing --------------------------------------------------------------------------------------


def keep(place: Path, joined: Newcomer) -> None:
    """The files of a run; summary.json comes last and says that all are there."""
    folder = record.Folder(place)
    folder.create(joined.setup.experiment)
    folder.keep(lambda path: fitted.keep_data(path, joined.setup.data))
    for line in joined.lines:
        folder.append(line)
    folder.keep(lambda path: fitted.keep_models(path, joined.setup.trees([joined.server])))
    folder.finish(joined.summary)


def table(joined: Newcomer) -> Table:
    """The personalised model beside the shared one and one trained alone."""
    summary, data = joined.summary, joined.setup.data
    metrics: dict[str, Any] = summary["metrics"]
    found = [m for m in METRICS if f"personal_{m}" in metrics]
    points = int(data.test.weight.sum())
    title = f"{data.names[0]} on {points} held-out points" if points else data.names[0]
    shown = Table(title=title)
    shown.add_column("model")
    for metric in found:
        shown.add_column(METRICS[metric], justify="right")
    for kind, words in ROWS.items():
        if any(f"{kind}_{metric}" in metrics for metric in found):
            cells = [_cell(metrics.get(f"{kind}_{m}"), m) for m in found]
            shown.add_row(words, *cells)
    told, cost = summary["personalized"], summary["cost"]
    shown.caption = (
        f"{told['steps']} steps on {summary['coreset'].get('size', data.train.weight.sum()):.0f} "
        f"of {int(data.train.weight.sum())} points in {cost['seconds']:.1f} s"
    )
    return shown


def _cell(value: dict[str, Any] | None, metric: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value['mean']:.2f}" if metric == "accuracy" else f"{value['mean']:.3f}"
