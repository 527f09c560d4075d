"""`corefed personalize`: a model for a client that did not take part in training.

It is kept in DIR/personalized/NAME, a folder like a run's.
"""

from __future__ import annotations

import json as jsonlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.shown import say, say_note
from corefed.commands.options import Json, OwnModel, RunFolder, Seed

if TYPE_CHECKING:
    from rich.table import Table

    from corefed.training.fitted import Fitted
    from corefed.training.newcomers import Newcomer

NAME = r"\w([\w .-]{0,98}[\w-])?"
"""Of a client: a valid name of a folder on every machine."""
ROWS = {
    "personal": "personalised",
    "global": "the shared model as it is",
    "alone": "trained alone, same steps",
}
METRICS = {"accuracy": "accuracy %", "rmse": "RMSE", "nll": "NLL", "ece": "ECE"}

EXAMPLES = """Examples:

corefed personalize runs/site-model --data south.csv — a site that took no part.

corefed personalize runs/site-model --data south.csv --name south --steps 400 --test-fraction 0"""


def personalize(
    folder: RunFolder,
    data: Annotated[
        Path, typer.Option(help="The new client's points: a table, .npz or images as in training.")
    ],
    name: Annotated[
        str | None,
        typer.Option(
            help="The new client's. Of a table with rows of several clients, those of this name "
            "are taken. If not given, the one that the client column names, or that of the file."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps; 200 if not given.")] = None,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="Size of its coreset; the run's, but at least a minibatch, if not given."
        ),
    ] = None,
    test_fraction: Annotated[
        float | None,
        typer.Option(help="Part of the points to test on; a fifth, or X_test, if not given."),
    ] = None,
    validation: Annotated[
        float,
        typer.Option(
            help="Part of the training points to fit its own temperature on; with 0 it has that of "
            "the run's clients."
        ),
    ] = 0.0,
    share: Annotated[
        float | None,
        typer.Option(
            help="How much of its own training it keeps, from 0 (what it started from) to 1; "
            "fitted to its points if not given."
        ),
    ] = None,
    own_classes: Annotated[
        bool,
        typer.Option(
            help="Start with its own class shares, as its points and the run's clients show them, "
            "or with those of the shared model."
        ),
    ] = True,
    seed: Seed = None,
    model: OwnModel = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; DIR/personalized/NAME by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Give a client that took no part a model of its own, in seconds; nobody else is retrained."""
    from corefed.models import own
    from corefed.show import report
    from corefed.training import fitted, newcomers  # torch takes a second
    from corefed.use import newcomer

    # Whatever can be refused is refused before training.
    run = fitted.load(folder, own.named(model))
    if out is not None:
        files.refuse_existing(out, "give another --out, or remove it")
    g = run.place(run.names[0], seed)[0]
    name, raw = newcomer.rows_of(newcomer.read_raw(data, run, g), data, name)
    place = out or folder / fitted.PERSONALIZED / name
    _refuse_name(run, name)
    files.refuse_existing(place, "give another --name, or remove it")
    memory = run.experiment.run.memory_mb
    points = newcomer.read(data, run, g, name, test_fraction, memory, validation, raw)
    for note in points.notes:
        say_note(note)
    joined = newcomers.join(
        run, points, steps=steps, fraction=fraction, seed=seed, device=device, share=share,
        own_classes=own_classes,
    )  # fmt: skip
    newcomer.keep(place, joined)
    if json:
        say(jsonlib.dumps({"folder": str(place), **joined.summary}, indent=1))
        return
    report.console().print(_table(joined))
    say(f"written to {place}; corefed predict {out or folder} --client {name!r} uses it")


def _refuse_name(run: Fitted, name: str) -> None:
    if not re.fullmatch(NAME, name):
        raise UserError(
            f"{name!r} is no good name for a folder; give --name of letters, digits, spaces, dots "
            "and dashes, at most 100."
        )
    if name in run.names:
        raise UserError(
            f"The run in {run.folder} has a client {name!r} already, who took part; give the new "
            "one another --name."
        )


def _table(joined: Newcomer) -> Table:
    """The personalised model beside the shared one and one trained alone."""
    from rich.table import Table

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
    about, cost = summary["personalized"], summary["cost"]
    shown.caption = (
        f"{about['steps']} steps on {summary['coreset'].get('size', data.train.weight.sum()):.0f} "
        f"of {int(data.train.weight.sum())} points in {cost['seconds']:.1f} s"
        + (", from the shared model with its own class shares" if about["own_classes"] else "")
        + f"; {100 * about['share']:.0f} % of its own training are kept"
    )
    found = summary.get("calibration", {}).get("personal")
    if found is not None:
        T = found["temperature"]["median"]
        shown.caption += f"; calibrated at temperature {T:.2f}, but for the one trained alone"
    return shown


def _cell(value: dict[str, Any] | None, metric: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value['mean']:.2f}" if metric == "accuracy" else f"{value['mean']:.3f}"
