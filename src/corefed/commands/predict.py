"""`corefed predict`: predict new points; writes a CSV and a summary."""

from __future__ import annotations

import json as jsonlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.base.shown import printable, say, say_note
from corefed.commands.options import Force, Json, RunFolder, Seed

if TYPE_CHECKING:
    from corefed.data.raw import Raw
    from corefed.training.fitted import Fitted
    from corefed.use.predictions import Predictions
    from corefed.use.review import PredictionSettings

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
    from corefed.use import prediction_table, predictions, review  # torch takes a second

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
        routed = _routed(folder, run, client, raw, settings, seed, kind, show)
    found = routed.found
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
    say("\n".join(_sentences(about)), file=sys.stderr if out is None else sys.stdout)


class _Routed(NamedTuple):
    found: Predictions
    about: dict[str, Any]  # for the summary
    columns: dict[str, list[str]]  # for the table, where rows have several models


def _routed(
    folder: Path,
    run: Fitted,
    client: str | None,
    raw: Raw,
    settings: PredictionSettings,
    seed: int | None,
    kind: str,
    show: Callable[[int], None],
) -> _Routed:
    """All rows by the model of --client, or each by that of its own client."""
    import torch

    from corefed.data import inputs
    from corefed.data.cells import shorten
    from corefed.training import fitted
    from corefed.use import predictions, routing  # torch takes a second

    g, _ = run.place(run.names[0] if client is None else client, seed)
    if client is not None:
        given = inputs.prepare(raw, run.preparations[g], client)
        found = predictions.predict(
            run, client, given, settings, seed=seed, kind=kind, on_block=show
        )
        others, notes = routing.rows_of_others(raw, client)
        if found.review is not None:
            found.review[torch.tensor(others, dtype=torch.int64)] = True
        found = found._replace(notes=(*found.notes, *notes))
        return _Routed(found, _summary(found, settings), {})
    if not raw.clients:
        column = run.preparations[g].client
        why = f"the file has no column {column!r}" if column else "the file names none"
        raise UserError(
            f"Say whose model predicts by --client: {why}. The run has {shorten(run.names)}."
        )
    shares, notes = routing.divide(
        run, raw, lambda name: fitted.load(folder, run.factory, client=name)
    )
    parts, each, done = [], [], 0
    names, models = [""] * len(raw.x), [""] * len(raw.x)
    for share in shares:
        own = share.model.preparations[share.model.place(share.model.names[0], seed)[0]]
        given = inputs.prepare(raw.of(share.rows), own, share.name)
        part = predictions.predict(
            share.model, share.client, given, settings, seed=seed, kind=kind,
            on_block=partial(_later, show, done),
        )  # fmt: skip
        done += len(share.rows)
        used = kind if share.client is not None else fitted.SHARED
        parts.append(part)
        each.append({"client": share.name, "model": used, "points": len(share.rows),
                     **_summary(part, settings)})  # fmt: skip
        for row in share.rows:
            names[row], models[row] = share.name, used
    found = routing.merge(shares, parts)
    found = found._replace(notes=(*found.notes, *notes))
    return _Routed(found, {"clients": each}, {"client": names, "model": models})


def _later(show: Callable[[int], None], before: int, now: int) -> None:
    show(before + now)


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


# --- the summary ----------------------------------------------------------------------------------


def _summary(found: Predictions, settings: PredictionSettings) -> dict[str, Any]:
    """How the review threshold was chosen, and how many points it flagged."""
    if found.flag is None or found.review is None:
        return {}
    threshold, flag = found.flag.threshold, found.flag
    flagged = int(found.review.sum())
    return {
        "review": {
            "by": settings.by,
            "target_error": flag.target,
            "confidence": settings.confidence,
            "tolerance": settings.tolerance,
            "chosen_on": flag.source,
            "threshold": threshold.value if math.isfinite(threshold.value) else None,
            "held_out": threshold.points,
            "held_out_kept": threshold.kept,
            "held_out_wrong": threshold.wrong,
            "kept": len(found.review) - flagged,
            "flagged": flagged,
            "reachable": [
                {"target_error": target, "flagged": count} for target, count in found.at_targets
            ],
        }
    }


def _sentences(about: dict[str, Any]) -> list[str]:
    """The summary for the terminal."""
    truth, lines = about.get("truth", {}), []
    for part in about.get("clients", [about]):
        whose = part["client"] or "rows without a client"
        lines.append(f"{part['points']} points by the {part['model']} model of {whose}")
        if part["model"] == "global" and part is not about:
            lines[-1] = f"{part['points']} points of {whose} by the shared model"
        review = part.get("review")
        if review:
            kept = f"kept {review['kept']}, for review {review['flagged']}"
            lines.append(f"{kept}: {_promise(review)}")
            if review["chosen_on"] == "none" and review["reachable"]:
                at = [
                    f"{each['flagged']} at {100 * each['target_error']:g} %"
                    for each in review["reachable"]
                ]
                lines.append(f"for review at targets that can be promised: {', '.join(at)}")
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
