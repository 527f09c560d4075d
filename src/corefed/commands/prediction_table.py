"""What `corefed predict` reads and writes: points in, a CSV and a summary out."""

from __future__ import annotations

import csv
import io
import json as jsonlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from corefed.base import files
from corefed.base.errors import UserError
from corefed.data import inputs
from corefed.data.preparation import Preparation
from corefed.training import fitted
from corefed.use import predictions
from corefed.use.predictions import Predictions, PredictionSettings

SCHEMA = 1
"""Of the summary that --json prints."""


def execute(
    folder: Path,
    client: str,
    path: Path,
    settings: PredictionSettings,
    *,
    out: Path | None,
    seed: int | None,
    kind: str,
    json: bool,
) -> None:
    """Read, predict, write. A mistake is found before anything is written."""
    if out is not None:
        _refuse_place(out, path)
    model = fitted.load(folder, client=client)
    g, _ = model.place(client, seed)
    kind = predictions.kind_of(model, kind)
    preparation = model.preparations[g]
    predictions.check(settings, preparation)
    points = inputs.read(path, preparation, client)
    with progress(len(points.x)) as show:
        found = predictions.predict(
            model, client, points, settings, seed=seed, kind=kind, on_block=show
        )
    text = "".join(lines(points.ids, found, settings, preparation))
    if out is not None:
        try:
            files.replace(out, text.encode())
        except OSError as error:
            raise UserError(f"Cannot write {out}: {error.strerror}.") from error
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "folder": str(folder),
        "client": client,
        "seed": model.experiment.run.seeds[g],
        "model": kind,
        "points": len(points.x),
        "out": str(out) if out is not None else None,
        **summary(found, settings),
    }
    if points.y is not None:
        about["truth"] = predictions.truth(found, points.y, settings, len(preparation.labels))
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    if json:
        print(jsonlib.dumps({**about, "notes": list(found.notes)}, indent=1))
        return
    if out is None:
        _print(text)
    print("\n".join(sentences(about)), file=sys.stderr if out is None else sys.stdout)


def _refuse_place(out: Path, path: Path) -> None:
    if not out.parent.is_dir():
        raise UserError(f"--out is {out}, but there is no folder {out.parent}; make it first.")
    if out.is_dir():
        raise UserError(f"--out is {out}, which is a folder; name a file in it.")
    if out.resolve() == path.resolve():
        raise UserError(f"--out is {out}, the input itself; name another file.")


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """On stderr, for inputs of several blocks: a bar, or a line now and then without a terminal."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=total <= predictions.BLOCK)
    shown = 0

    def show(done: int) -> None:
        nonlocal shown
        if console.is_terminal:
            bar.update(bar.task_ids[0], completed=done)
        elif total > 10 * predictions.BLOCK and 10 * done // total > shown:
            shown = 10 * done // total
            print(f"{done} of {total} points", file=sys.stderr, flush=True)

    if not console.is_terminal:
        yield show
        return
    with bar:
        bar.add_task("points", total=total)
        yield show


# --- the table ------------------------------------------------------------------------------------


def lines(
    ids: Sequence[str], found: Predictions, settings: PredictionSettings, preparation: Preparation
) -> Iterator[str]:
    """The CSV, a row a point after the heading; numbers to float32's seven digits."""
    classes = bool(preparation.labels)
    columns = (_of_classes if classes else _of_targets)(found, settings, preparation)
    if found.review is not None:
        columns["review"] = ["yes" if each else "no" for each in found.review.tolist()]
    yield _csv(["id", *columns])
    for row in zip(ids, *columns.values(), strict=True):
        yield _csv([f"{v:.7g}" if isinstance(v, float) else v for v in row])


def _of_classes(
    found: Predictions, settings: PredictionSettings, preparation: Preparation
) -> dict[str, list[Any]]:
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


def _of_targets(
    found: Predictions, settings: PredictionSettings, preparation: Preparation
) -> dict[str, list[Any]]:
    said, half = found.said, predictions.half_width(found.said, settings.level)
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


def _csv(row: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(row)
    return line.getvalue()


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; nor may Python complain as it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- the summary ----------------------------------------------------------------------------------


def summary(found: Predictions, settings: PredictionSettings) -> dict[str, Any]:
    """What the flag is and did."""
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


def sentences(about: dict[str, Any]) -> list[str]:
    """The summary for the terminal."""
    review, truth = about.get("review"), about.get("truth", {})
    told = [f"{about['points']} points by the {about['model']} model of {about['client']}"]
    if review:
        told.append(f"kept {review['kept']}, for review {review['flagged']}: {_promise(review)}")
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
        told.append("against the truth in the file: " + ", ".join(known))
    if about["out"] is not None:
        told.append(f"written to {about['out']}")
    return told


def _promise(review: dict[str, Any]) -> str:
    if review["chosen_on"] == "none":
        return "no threshold can be promised"
    value = review["threshold"]
    limit = "all are kept" if value is None else f"kept below {value:.4g} ({review['by']})"
    return (
        f"{limit}, for an error of at most {100 * review['target_error']:g} % among the kept, as "
        f"{review['held_out_wrong']} of {review['held_out_kept']} held-out points were wrong there"
    )
