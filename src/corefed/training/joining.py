"""Join the models that workers keep, each of its own clients, into the files of one run.

    models/K-of-N/      fitted.safetensors and held_out.safetensors of worker K, for a moment

A worker writes its files as a run in one process does (`saving.py`). The first worker copies them
into the files of the run, some rows after the other, so that no process holds all models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base import files, tensor_file
from corefed.base.digests import DamagedError, Stream
from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.training import saving
from corefed.training.fitted import HELD_OUT, MODELS, ROWS, SCHEMA
from corefed.training.loop import size_of
from corefed.training.segments import PIECE
from corefed.training.setup import Trees

FOLDER = "models"
ROW = "row"
"""The tensor of held_out.safetensors that says whose points they are."""


class _Stretch(NamedTuple):
    """Entries of a worker's file that follow one another in the file of the run too."""

    file: Any  # of safetensors
    names: frozenset[str]
    first: int
    last: int


def keep_part(folder: Path, part: str, trees: Trees) -> None:
    """Write the models of this worker's clients; nothing where none is kept."""
    here = folder / FOLDER / part
    shutil.rmtree(here, ignore_errors=True)
    if trees.touched is None or bool(trees.touched.any()):
        here.mkdir(parents=True)
        saving.keep_models(here, trees)


def join(
    folder: Path, owned: Mapping[str, Sequence[int]], clients: int, temperature: Tree | None
) -> None:
    """Write both files of the run, or neither, and remove the workers'.

    `owned` has the rows of the clients of each part that was written, of `clients` clients per
    seed. `temperature` is what `calibration.stored` gives for all clients.
    """
    try:
        with ExitStack() as stack:
            models = _open(folder, MODELS, owned, stack)
            tested = _open(folder, HELD_OUT, owned, stack)
            kept = [_kept(file, torch.tensor(rows)) for file, rows in models]
            points = [torch.tensor(rows)[file.get_tensor(ROW)] for file, rows in tested]
            shared = {**_shared(models[0][0]), **(temperature or {})}
            if ROWS in shared:
                shared[ROWS] = torch.cat(kept).sort().values
            alone = {ROW: torch.cat(points).sort().values}
            contents = [
                (MODELS, _encode([file for file, _ in models], kept, clients, shared)),
                (HELD_OUT, _encode([file for file, _ in tested], points, clients, alone)),
            ]
            files.replace_all(folder, contents)
    finally:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _open(
    folder: Path, name: str, owned: Mapping[str, Sequence[int]], stack: ExitStack
) -> list[tuple[Any, Sequence[int]]]:
    """Each worker's file of this name, with the rows of its clients."""
    from safetensors import SafetensorError, safe_open  # checked by `checkpoint.require_library`

    found = []
    for part, rows in owned.items():
        path = folder / FOLDER / part / name
        if not path.exists():
            raise UserError(
                f"{path} is missing; all workers need the folder of the run, as on a shared disk."
            )
        try:
            tensor_file.check(path)
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (DamagedError, SafetensorError) as error:
            raise UserError(
                f"{path} is damaged ({error}); resume the run to make it again."
            ) from error
        found.append((file, rows))
    return found


def _kept(file: Any, rows: Tensor) -> Tensor:
    """The rows of the clients whose models are in a worker's file."""
    return rows[file.get_tensor(ROWS)] if ROWS in _names(file) else rows


def _names(file: Any) -> frozenset[str]:
    return frozenset(file.keys())


def _shared(file: Any) -> Tree:
    """What does not belong to single clients."""
    names = [each for each in _names(file) if not each.startswith("personal.") and each != "weight"]
    return {name: file.get_tensor(name) for name in names}


def _encode(parts: Sequence[Any], rows: Sequence[Tensor], clients: int, shared: Tree) -> Stream:
    """The file of the run: `shared`, and the entries of all workers in the order of rows.

    `rows` are those of each part's entries, ascending.
    """
    stretches = list(_stretches(parts, rows, clients))
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in shared.items()}
    for name in frozenset.union(*map(_names, parts)) - shapes.keys():
        here = [each for each in stretches if name in each.names]
        count = sum(each.last - each.first for each in here)
        one = _read(here[0], name, 1) if here else parts[0].get_tensor(name)
        shapes[name] = (one.dtype, (count, *one.shape[1:]))

    def content(name: str) -> Iterator[Tensor]:
        if name in shared:
            yield shared[name]
            return
        for each in stretches:
            if name not in each.names:
                continue
            most = max(1, PIECE // max(1, size_of({name: _read(each, name, 1)})))
            for first in range(each.first, each.last, most):
                yield _read(each._replace(first=first), name, most)

    return tensor_file.encode(shapes, content, {"corefed": json.dumps({"schema": SCHEMA})})


def _stretches(parts: Sequence[Any], rows: Sequence[Tensor], clients: int) -> Iterator[_Stretch]:
    """Seed by seed, and of each seed worker by worker."""
    runs = max((int(each[-1]) // clients + 1 for each in rows if len(each)), default=0)
    for run in range(runs):
        for file, mine in zip(parts, rows, strict=True):
            ends = torch.tensor([run * clients, (run + 1) * clients])
            first, last = torch.searchsorted(mine, ends).tolist()
            if first < last:
                yield _Stretch(file, _names(file), first, last)


def _read(stretch: _Stretch, name: str, most: int) -> Tensor:
    """At most so many of its first entries."""
    found: Tensor = stretch.file.get_slice(name)[
        stretch.first : min(stretch.last, stretch.first + most)
    ]
    return found
