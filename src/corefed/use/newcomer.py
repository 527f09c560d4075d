"""Read the data of a newcomer, and save its model.

A newcomer is a client that joins after training (`training/newcomers.py` trains it). It is saved as
the folder of a run with one client, so that everything that reads runs reads newcomers too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from corefed.base import arrays, rng
from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.data import inputs
from corefed.data.cells import shorten
from corefed.data.clients import FederatedData
from corefed.data.inputs import Inputs
from corefed.data.raw import Raw
from corefed.models.own import Factory
from corefed.settings.run import MEMORY
from corefed.training import measured, record, saving
from corefed.training.fitted import Fitted
from corefed.training.newcomers import Newcomer
from corefed.training.reach import Reach
from corefed.training.setup import Setup, Trees

TEST_FRACTION = 0.2
FEWEST = 2
"""Training points."""


def read(
    path: Path,
    model: Fitted,
    g: int,
    name: str,
    test_fraction: float | None,
    memory_mb: int,
    validation: float = 0.0,
    raw: Raw | None = None,
) -> FederatedData:
    """The newcomer as a federation of one client, with training and test points.

    `raw` has the points where the file was read already.

    Test points are those of the file (X_test) or a random part of the others; `validation` is the
    part of what remains that is held back for the newcomer's own temperature. Where clients have
    their own scales, the newcomer's is that of the points read first: X_train, or all.
    """
    preparation = model.preparations[g]
    if test_fraction is not None and not 0 <= test_fraction < 1:
        raise UserError(f"--test-fraction is {test_fraction:g}; it must be in [0, 1).")
    if not 0 <= validation < 1:
        raise UserError(f"--validation is {validation:g}; it must be in [0, 1).")
    if raw is None:
        raw = read_raw(path, model, g)
    found = inputs.prepare(raw, preparation, name)
    notes, seed = list(found.notes), model.experiment.run.seeds[g]
    if test_fraction is None and has_test_part(path):
        train, notes = found, []  # its note is that the test part was not read
        test = inputs.read(path, found.preparation, name, memory_mb=memory_mb)
    else:
        part = TEST_FRACTION if test_fraction is None else test_fraction
        train, test = divide(found, part, seed, path)
    held = None
    if validation:
        train, held = divide(train, validation, seed, path, "validation")
    if len(train.x) < FEWEST:
        raise UserError(f"{path} has {len(train.x)} training points; it takes at least {FEWEST}.")
    own = found.preparation
    kept = dataclasses.replace(own, clients={k: v for k, v in own.clients.items() if k == name})
    assert train.y is not None and test.y is not None
    return FederatedData(
        train=_stacked(train._replace(y=own.standardise(train.y) if own.targets else train.y)),
        test=_stacked(test),
        classes=len(own.labels),
        targets=len(own.targets),
        names=[name],
        labels=own.labels,
        notes=(*notes, *_notes(name, train, own.labels)),
        preparations=(kept,),
        validation=None if held is None else _stacked(held),
    )


def read_raw(path: Path, model: Fitted, g: int) -> Raw:
    """All points of the file with their targets, before scaling."""
    memory = model.experiment.run.memory_mb
    return inputs.read_raw(path, model.preparations[g], target_wanted=True, memory_mb=memory)


def rows_of(raw: Raw, path: Path, name: str | None) -> tuple[str, Raw]:
    """The newcomer's name and its rows; a table's client column may have rows of several clients.

    Without a name, it is the one of the column, or that of the file.
    """
    there = [each for each in dict.fromkeys(raw.clients) if each]
    if not there:
        return path.stem if name is None else name, raw
    if len(there) > 1 and name not in there:
        who = "no rows of " + repr(name) if name is not None else "rows of several clients"
        raise UserError(
            f"{path} has {who}; it has those of {shorten(there, 5)}. Say whose by --name, or give "
            "a file with the rows of one client."
        )
    if name is None or name in there:
        name = there[0] if name is None else name
        rows = [row for row, each in enumerate(raw.clients) if each == name]
        others = len(raw.clients) - len(rows)
        note = f"{others} of {len(raw.clients)} rows are not of {name}; they are left out."
        return name, raw.of(rows)._replace(notes=[*raw.notes, *([note] if others else [])])
    note = f"The rows are of {there[0]} by the client column; their model is named {name}."
    return name, raw._replace(notes=[*raw.notes, note])


def has_test_part(path: Path) -> bool:
    if path.suffix.lower() != ".npz":
        return False
    names = {name.lower() for name in arrays.headers(path)}
    return {"x_train", "x_test", "y_test"} <= names and "x" not in names


def divide(
    found: Inputs, part: float, seed: int, path: Path, what: str = "test"
) -> tuple[Inputs, Inputs]:
    """Training points and test (or validation) points, split at random."""
    n = len(found.x)
    held = round(part * n) or int(part > 0)
    if held and n < FEWEST + held:
        flag, verb = ("--test-fraction", "test") if what == "test" else ("--validation", "validate")
        raise UserError(
            f"{path} has {n} points, too few to train on {FEWEST} and {verb} on {held}; use "
            f"{flag} 0, which {verb}s on none."
        )
    purpose = "newcomer" if what == "test" else f"newcomer {what}"
    order = torch.randperm(n, generator=rng.generator(seed, 0, rng.SERVER, purpose))
    return _select(found, order[held:].sort().values), _select(found, order[:held].sort().values)


def _select(found: Inputs, rows: torch.Tensor) -> Inputs:
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


def in_memory(
    setup: Setup, trees: Trees, known: Sequence[Reach], factory: Factory | None = None
) -> Fitted:
    """Trained models, ready to predict without a folder."""
    described = saving.describe(setup.data)["clients"]
    return Fitted(
        Path(MEMORY),
        setup.experiment,
        setup.data.preparations,
        described,
        setup.method,
        saving.models_of(trees),
        factory,
        tuple(known),
    )


def ready(joined: Newcomer) -> Fitted:
    """Its model, ready to predict."""
    trees = joined.setup.trees([joined.server], joined.temperature)
    return in_memory(joined.setup, trees, joined.reach)


def keep(place: Path, joined: Newcomer) -> None:
    """Write the files of a run; summary.json is the last."""
    folder = record.Folder(place)
    folder.create(joined.setup.experiment)
    folder.keep(lambda path: saving.keep_data(path, joined.setup.data, joined.reach))
    for line in joined.lines:
        folder.append(line)
    trees = joined.setup.trees([joined.server], joined.temperature)
    folder.keep(lambda path: saving.keep_models(path, trees))
    folder.finish(joined.summary | measured.section(place, joined.summary))
