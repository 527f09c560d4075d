"""`corefed predict`: predict new points; writes a CSV and a summary."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.base.shown import printable, say, say_note
from corefed.commands.options import Force, Json, RunFolder, Seed

SCHEMA = 1
"""Of the summary that --json prints."""

EXAMPLES = """Examples:

corefed predict runs/site-model --client north --input new.csv --out predictions.csv

corefed predict runs/site-model --input all-sites.csv — each row by the model of its client.

corefed predict runs/site-model --client north --input new.csv --target-error 0.01

corefed predict runs/prices --client north --input new.csv --tolerance 10 --level 0.9 --json"""


def predict(
    folder: RunFolder,
    points: Annotated[
        Path,
        typer.Option("--input", help="New points: a table, .npz or images as in training."),
    ],
    client: Annotated[
        str | None,
        typer.Option(
            help="Whose model, by the client's name. If not given, each row of a table has the "
            "model of the client that its client column names."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="CSV to write; to standard output if not given.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="personal or global; personal where there is one. Of a run with a network of your "
            "own also package.module:factory, which runs that code. May be repeated.",
        ),
    ] = None,
    force: Force = False,
    seed: Seed = None,
    target_error: Annotated[
        float | None,
        typer.Option(
            help="Error allowed among predictions that are not for review; 0.05, or the smallest "
            "round one that the held-out points can promise, if not given."
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Confidence level of the --target-error guarantee.")
    ] = 0.9,
    by: Annotated[
        str, typer.Option(help="What review goes by: total, epistemic or confidence.")
    ] = "total",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Regression: further off than this is an error, in the target's unit."),
    ] = None,
    level: Annotated[
        float, typer.Option(help="Regression: coverage of the prediction interval.")
    ] = 0.95,
    json: Json = False,
) -> None:
    """Predict new points of clients: how sure the model is, and which a person should review."""
    from corefed.data import inputs
    from corefed.models import own
    from corefed.training import fitted
    from corefed.use import (  # torch takes a second
        prediction_summary,
        prediction_table,
        predictions,
        review,
        routing,
        seen,
    )

    # A mistake is found before anything is written.
    code = next((each for each in models or [] if ":" in each), None)
    model = next((each for each in models or [] if ":" not in each), None)
    if model not in (None, "personal", "global"):
        raise UserError(f"--model is {model!r}; it must be personal or global.")
    if out is not None:
        _refuse_place(out, points, force=force)
    settings = review.PredictionSettings(by, target_error, confidence, tolerance, level)
    run = fitted.load(folder, own.named(code), client=client or "")
    g, _ = run.place(run.names[0] if client is None else client, seed)
    kind = review.kind_of(run, model or "")
    preparation = run.preparations[g]
    review.check(settings, preparation)
    raw = inputs.read_raw(points, preparation)
    with _progress(len(raw.x), predictions.BLOCK, silent=json) as show:
        routed = routing.predict(run, client, raw, settings, seed, kind, show)
    found = routed.found
    if client is None or client in run.names:  # newcomers have tables of their own
        found = found._replace(notes=(*found.notes, *seen.note(run, raw, g)))
    text = prediction_table.as_csv(raw.ids, found, level, preparation, routed.columns)
    if out is not None:
        try:
            files.replace(out, text.encode())
        except OSError as error:
            raise UserError(f"Cannot write {out}: {error.strerror}.") from error
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "folder": str(folder),
        "client": client,
        "seed": run.experiment.run.seeds[g],
        "model": kind,
        "points": len(raw.x),
        "outside": None if found.outside is None else int(found.outside.far.sum()),
        "out": str(out) if out is not None else None,
        **routed.about,
    }
    if raw.y is not None:
        about["truth"] = predictions.truth(found, raw.y, settings, len(preparation.labels))
    for note in found.notes:
        say_note(note)
    if json:
        say(jsonlib.dumps({**about, "notes": list(found.notes)}, indent=1))
        return
    if out is None:
        _print(text)
    say(
        "\n".join(prediction_summary.sentences(about)),
        file=sys.stderr if out is None else sys.stdout,
    )


def _refuse_place(out: Path, points: Path, *, force: bool) -> None:
    if not out.parent.is_dir():
        raise UserError(f"--out is {out}, but there is no folder {out.parent}; make it first.")
    if out.is_dir():
        raise UserError(f"--out is {out}, which is a folder; name a file in it.")
    if out.resolve() == points.resolve():
        raise UserError(f"--out is {out}, the input itself; name another file.")
    files.refuse_file(out, force=force)


@contextmanager
def _progress(total: int, block: int, *, silent: bool) -> Iterator[Callable[[int], None]]:
    """For inputs of several blocks. Without a terminal, a line per tenth of many blocks."""
    tenths = 0
    with bars(silent=silent or total <= block) as shown:

        def show(done: int) -> None:
            nonlocal tenths
            line = ""
            if total > 10 * block and 10 * done // total > tenths:
                tenths = 10 * done // total
                line = f"{done} of {total} points"
            shown.show("points", done, total, line=line)

        yield show


def _print(text: str) -> None:
    try:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; nor may Python complain as it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
