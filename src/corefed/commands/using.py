"""After training: `corefed predict`, `personalize`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corefed.base.errors import UserError
from corefed.commands.options import Json

PREDICT_EXAMPLES = """Examples:

corefed predict runs/site-model --client north --input new.csv --out predictions.csv

corefed predict runs/site-model --client north --input new.csv --target-error 0.01

corefed predict runs/prices --client north --input new.csv --tolerance 10 --level 0.9 --json"""


def predict(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")],
    client: Annotated[str, typer.Option(help="Whose model, by the client's name.")],
    points: Annotated[
        Path,
        typer.Option("--input", help="New points: a table, .npz or images as in training."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="CSV to write; to standard output if not given.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="personal or global; personal where there is one.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="A seed of the run; its first if not given.")
    ] = None,
    target_error: Annotated[
        float, typer.Option(help="Error allowed among predictions that are not for review.")
    ] = 0.05,
    confidence: Annotated[float, typer.Option(help="Of that promise.")] = 0.9,
    by: Annotated[
        str, typer.Option(help="What review goes by: total, epistemic or confidence.")
    ] = "total",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Regression: further off than this is an error, in the target's unit."),
    ] = None,
    level: Annotated[float, typer.Option(help="Regression: of the interval.")] = 0.95,
    json: Json = False,
) -> None:
    """Predict new points of a client: how sure the model is, and which a person should review."""
    if model not in (None, "personal", "global"):
        raise UserError(f"--model is {model!r}; it must be personal or global.")
    from corefed.commands import prediction_table
    from corefed.use.predictions import PredictionSettings

    settings = PredictionSettings(by, target_error, confidence, tolerance, level)
    prediction_table.execute(
        folder, client, points, settings, out=out, seed=seed, kind=model or "", json=json
    )


PERSONALIZE_EXAMPLES = """Examples:

corefed personalize runs/site-model --data south.csv — a site that took no part.

corefed personalize runs/site-model --data south.csv --name south --steps 400 --test-fraction 0"""


def personalize(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")],
    data: Annotated[
        Path, typer.Option(help="The new client's points: a table, .npz or images as in training.")
    ],
    name: Annotated[
        str | None, typer.Option(help="The new client's; that of the file if not given.")
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
    seed: Annotated[
        int | None, typer.Option(help="A seed of the run; its first if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; DIR/personalized/NAME by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Give a client that took no part a model of its own, in seconds; nobody else is retrained."""
    from corefed.commands import personalizing

    personalizing.execute(
        folder,
        data,
        name=name,
        steps=steps,
        fraction=fraction,
        test_fraction=test_fraction,
        seed=seed,
        device=device,
        out=out,
        json=json,
    )


EXPORT_EXAMPLES = """Examples:

corefed export runs/site-model --client north --out north-model

corefed export runs/site-model --global --out shared-model"""


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")],
    out: Annotated[Path, typer.Option(help="A new folder for the files.")],
    client: Annotated[str | None, typer.Option(help="Whose model, by the client's name.")] = None,
    shared: Annotated[
        bool, typer.Option("--global", help="The shared model in place of a personal one.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="A seed of the run; its first if not given.")
    ] = None,
    program: Annotated[bool, typer.Option(help="Make the program of torch.export too.")] = True,
    json: Json = False,
) -> None:
    """Write a model for use without corefed: weights, a program of torch.export, a model card."""
    from corefed.use.export import package

    package.execute(
        folder, out, client=client, shared=shared, seed=seed, with_program=program, json=json
    )
