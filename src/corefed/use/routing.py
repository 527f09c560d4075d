"""Give every row of a table the model of its client, by the table's client column.

a client of the run            its own model
one that joined after training its model in DIR/personalized/NAME
any other, or none             the shared model
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from corefed.base.errors import UserError
from corefed.bayes.uncertainty import Prediction
from corefed.data import inputs
from corefed.data.cells import shorten
from corefed.data.raw import Raw
from corefed.training import fitted
from corefed.training.fitted import SHARED, Fitted
from corefed.training.reach import Outside
from corefed.use import predictions
from corefed.use.prediction_summary import summarise
from corefed.use.predictions import Predictions
from corefed.use.review import PredictionSettings


class Share(NamedTuple):
    """Rows that one model predicts."""

    name: str  # as the rows say; may be empty
    client: str | None  # whose model; None: the shared one
    model: Fitted
    rows: list[int]


def divide(model: Fitted, raw: Raw, load: Callable[[str], Fitted]) -> tuple[list[Share], list[str]]:
    """Shares in the order of their first rows, and notes; `load` reads the model of a newcomer."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(raw.clients):
        rows.setdefault(name, []).append(row)
    joined = fitted.newcomers(model.folder)
    shares, foreign = [], {}
    for name, mine in rows.items():
        if name in model.names:
            shares.append(Share(name, name, model, mine))
        elif name in joined:
            shares.append(Share(name, name, load(name), mine))
        else:
            foreign[name] = len(mine)
            shares.append(Share(name, None, model, mine))
    if foreign and SHARED not in model.kinds:
        raise UserError(
            f"The run in {model.folder} has no model for rows of {_listed(foreign)}: its clients "
            "share nothing. Leave those rows out, or name a model by --client."
        )
    notes = []
    if foreign:
        notes.append(
            f"The run does not know {_listed(foreign)}; these rows have the shared model, and what "
            "is promised about review is about the run's clients, not about theirs."
        )
    return shares, notes


def rows_of_others(raw: Raw, client: str) -> tuple[list[int], list[str]]:
    """Rows that the client column says are not the named client's, and a note about them."""
    others = [row for row, name in enumerate(raw.clients) if name != client]
    if not others:
        return [], []
    counts = Counter(raw.clients[row] for row in others)
    return others, [
        f"{len(others)} of {len(raw.clients)} rows are of {_listed(counts)}, and not of {client}, "
        "whose model --client names. No promise holds for them, so they are for review; without "
        "--client every row has the model of its own client."
    ]


def _listed(counts: dict[str, int]) -> str:
    """`south (3), west (1)`."""
    return shorten([f"{name or 'no client'} ({count})" for name, count in counts.items()], 5)


def merge(shares: Sequence[Share], each: Sequence[Predictions]) -> Predictions:
    """All rows in the order of the file; notes are said once."""
    order = torch.tensor([row for share in shares for row in share.rows]).argsort()
    said = Prediction(
        *(torch.cat(field)[order] for field in zip(*(one.said for one in each), strict=True))
    )
    reviews = [one.review for one in each if one.review is not None]
    known = [one.outside for one in each if one.outside is not None]
    outside = None
    if len(known) == len(each):
        why = [words for one in known for words in one.why]
        far = torch.cat([one.far for one in known])[order]
        outside = Outside(far, tuple(why[place] for place in order.tolist()))
    notes = tuple(dict.fromkeys(note for one in each for note in one.notes))
    flagged = torch.cat(reviews)[order] if reviews else None
    return Predictions(said, flagged, None, notes, outside)


class Routed(NamedTuple):
    found: Predictions
    about: dict[str, Any]  # for the summary
    columns: dict[str, list[str]]  # for the table, where rows have several models


def predict(
    run: Fitted,
    client: str | None,
    raw: Raw,
    settings: PredictionSettings,
    seed: int | None,
    kind: str,
    show: Callable[[int], None],
) -> Routed:
    """All rows by the model of --client, or each by that of its own client."""
    g, _ = run.place(run.names[0] if client is None else client, seed)
    if client is not None:
        given = inputs.prepare(raw, run.preparations[g], client)
        found = predictions.predict(
            run, client, given, settings, seed=seed, kind=kind, on_block=show
        )
        others, notes = rows_of_others(raw, client)
        if found.review is not None:
            found.review[torch.tensor(others, dtype=torch.int64)] = True
        found = found._replace(notes=(*found.notes, *notes))
        return Routed(found, summarise(found, settings), {})
    if not raw.clients:
        column = run.preparations[g].client
        why = f"the file has no column {column!r}" if column else "the file names none"
        raise UserError(
            f"Say whose model predicts by --client: {why}. The run has {shorten(run.names)}."
        )
    shares, notes = divide(run, raw, lambda name: fitted.load(run.folder, run.factory, client=name))
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
        used = kind if share.client is not None else SHARED
        parts.append(part)
        each.append({"client": share.name, "model": used, "points": len(share.rows),
                     **summarise(part, settings)})  # fmt: skip
        for row in share.rows:
            names[row], models[row] = share.name, used
    found = merge(shares, parts)
    found = found._replace(notes=(*found.notes, *notes))
    return Routed(found, {"clients": each}, {"client": names, "model": models})


def _later(show: Callable[[int], None], before: int, now: int) -> None:
    show(before + now)
