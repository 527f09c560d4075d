"""`corefed predict`: predict new points; writes a CSV and a summary."""

from __future__ import annotations

import csv
import io
import json as jsonlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.base.shown import printable, say, say_note
from corefed.commands.options import Json, RunFolder, Seed

if TYPE_CHECKING:
    from corefed.data.preparation import Preparation
    from corefed.use.predictions import Predictions, PredictionSettings

SCHEMA = 1
"""Of the summary that --json prints."""

EXAMPLES = """Examples:

corefed predict runs/site-model --client north --input new.csv --out predictions.csv

corefed predict runs/site-model --client north --input new.csv --target-error 0.01

corefed predict runs/prices --client north --input new.csv --tolerance 10 --level 0.9 --json"""


def predict(
    folder: RunFolder,
    client: Annotated[str, typer.Option(help="Whose model, by the client's name.")],
    points: Annotated[
        Path,
        typer.Option("--input", help="New points: a table, .npz or images as in training."),
    ],
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
    seed: Seed = None,
    target_error: Annotated[
        float, typer.Option(help="Error allowed among predictions that are not for review.")
    ] = 0.05,
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
    """Predict new points of a client: how sure the model is, and which a person should review."""
    from corefed.data import inputs
    from corefed.models import own
    from corefed.training import fitted
    from corefed.use import predictions  # torch takes a second

    # A mistake is found before anything is written.
    code = next((each for each in models or [] if ":" in each), None)
    model = next((each for each in models or [] if ":" not in each), None)
    if model not in (None, "personal", "global"):
        raise UserError(f"--model is {model!r}; it must be personal or global.")
    if out is not None:
        _refuse_place(out, points)
    settings = predictions.PredictionSettings(by, target_error, confidence, tolerance, level)
    run = fitted.load(folder, own.named(code), client=client)
    g, _ = run.place(client, seed)
    kind = predictions.kind_of(run, model or "")
    preparation = run.preparations[g]
    predictions.check(settings, preparation)
    given = inputs.read(points, preparation, client)
    with _progress(len(given.x), predictions.BLOCK, silent=json) as show:
        found = predictions.predict(
            run, client, given, settings, seed=seed, kind=kind, on_block=show
        )
    text = _csv(given.ids, found, settings, preparation)
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
        "points": len(given.x),
        "out": str(out) if out is not None else None,
        **_summary(found, settings),
    }
    if given.y is not None:
        about["truth"] = predictions.truth(found, given.y, settings, len(preparation.labels))
    for note in found.notes:
        say_note(note)
    if json:
        say(jsonlib.dumps({**about, "notes": list(found.notes)}, indent=1))
        return
    if out is None:
        _print(text)
    say("\n".join(_sentences(about)), file=sys.stderr if out is None else sys.stdout)


def _refuse_place(out: Path, points: Path) -> None:
    if not out.parent.is_dir():
        raise UserError(f"--out is {out}, but there is no folder {out.parent}; make it first.")
    if out.is_dir():
        raise UserError(f"--out is {out}, which is a folder; name a file in it.")
    if out.resolve() == points.resolve():
        raise UserError(f"--out is {out}, the input itself; name another file.")


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


# --- the table ------------------------------------------------------------------------------------


def _csv(
    ids: Sequence[str], found: Predictions, settings: PredictionSettings, preparation: Preparation
) -> str:
    """A heading and one row per point, numbers to float32's seven digits."""
    if preparation.labels:
        columns = _class_columns(found, preparation)
    else:
        columns = _target_columns(found, settings, preparation)
    if found.review is not None:
        columns["review"] = ["yes" if each else "no" for each in found.review.tolist()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", *columns])
    for row in zip(ids, *columns.values(), strict=True):
        writer.writerow([f"{v:.7g}" if isinstance(v, float) else v for v in row])
    return text.getvalue()


def _class_columns(found: Predictions, preparation: Preparation) -> dict[str, list[Any]]:
    said, labels = found.said, preparation.labels
    best = said.mean.argmax(-1)
    return {
        "predicted": [labels[each] for each in best.tolist()],
        "probability": said.mean.amax(-1).tolist(),
        **{f"p({label})": said.mean[:, c].tolist() for c, label in enumerate(labels)},
        "total": said.total.tolist(),
        "aleatoric": said.aleatoric.tolist(),
        "epistemic": said.epistemic.tolist(),
    }


def _target_columns(
    found: Predictions, settings: PredictionSettings, preparation: Preparation
) -> dict[str, list[Any]]:
    from corefed.use.predictions import half_width  # torch takes a second

    said, half = found.said, half_width(found.said, settings.level)
    values = {
        "mean": said.mean,
        "lower": said.mean - half,
        "upper": said.mean + half,
        "std": said.total.sqrt(),
        "aleatoric": said.aleatoric.sqrt(),
        "epistemic": said.epistemic.sqrt(),
    }
    names = preparation.targets
    return {
        name if len(names) == 1 else f"{name}({target})": value[:, d].tolist()
        for d, target in enumerate(names)
        for name, value in values.items()
    }


def _print(text: str) -> None:
    try:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; nor may Python complain as it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- the summary ----------------------------------------------------------------------------------


def _summary(found: Predictions, settings: PredictionSettings) -> dict[str, Any]:
    """How the review threshold was chosen, and how many points it flagged."""
    if found.flag is None or found.review is None:
        return {}
    threshold, source, _ = found.flag
    flagged = int(found.review.sum())
    return {
        "review": {
            "by": settings.by,
            "target_error": settings.target_error,
            "confidence": settings.confidence,
            "tolerance": settings.tolerance,
            "chosen_on": source,
            "threshold": threshold.value if math.isfinite(threshold.value) else None,
            "held_out": threshold.points,
            "held_out_kept": threshold.kept,
            "held_out_wrong": threshold.wrong,
            "kept": len(found.review) - flagged,
            "flagged": flagged,
        }
    }


def _sentences(about: dict[str, Any]) -> list[str]:
    """The summary for the terminal."""
    review, truth = about.get("review"), about.get("truth", {})
    lines = [f"{about['points']} points by the {about['model']} model of {about['client']}"]
    if review:
        lines.append(f"kept {review['kept']}, for review {review['flagged']}: {_promise(review)}")
    names = {
        "accuracy": "accuracy",
        "rmse": "RMSE",
        "interval_coverage": "targets in their interval",
        "error": "error",
        "error_kept": "error among kept",
        "error_flagged": "error among those for review",
    }
    known = [
        f"{names[name]} {value:.4g}" if name == "rmse" else f"{names[name]} {100 * value:.2f} %"
        for name, value in truth.items()
        if value is not None
    ]
    if known:
        lines.append("against the truth in the file: " + ", ".join(known))
    if about["out"] is not None:
        lines.append(f"written to {about['out']}")
    return lines


def _promise(review: dict[str, Any]) -> str:
    if review["chosen_on"] == "none":
        return "no threshold can be promised"
    value = review["threshold"]
    limit = "all are kept" if value is None else f"kept below {value:.4g} ({review['by']})"
    return (
        f"{limit}, for an error of at most {100 * review['target_error']:g} % among the kept, as "
        f"{review['held_out_wrong']} of {review['held_out_kept']} held-out points were wrong there"
    )
