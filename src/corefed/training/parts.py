"""Checkpoints of a run whose clients are shared out between workers: one part per worker.

    checkpoint/K-of-N/state.safetensors       the last checkpoint of worker K of N
    checkpoint/K-of-N/previous.safetensors    the one before

A worker may be killed while another one has already written its part. So each keeps two, and a run
goes on from the newest round that all parts have. A part has the server's state and the private
state of the worker's clients, so other workers, of any number, can go on from all parts together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.place import share
from corefed.base.types import Tree
from corefed.training import checkpoint, record

STATE, PREVIOUS = "state.safetensors", "previous.safetensors"
FOLDER = Path(record.STATE).parent

Rounds = dict[int, list[list[int]]]
"""By number of workers, the rounds that each part has."""


class Parts:
    """The checkpoints of one worker."""

    def __init__(
        self, folder: Path, values: Mapping[str, object], every: int, rank: int, size: int
    ) -> None:
        self.path = _part(folder, rank, size)
        self.values, self.every = values, every

    def due(self, round_: int, last: bool) -> bool:
        """Whether to save after this round; the first worker decides for all."""
        return bool(self.every) and (last or round_ % self.every == 0)

    def save(self, round_: int, servers: Sequence[Tree], private: Tree) -> None:
        """Write the part; the one before is kept."""
        content = checkpoint.encode(self.values, round_, servers, private)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                os.replace(self.path / STATE, self.path / PREVIOUS)
            files.replace(self.path / STATE, content)
        except OSError as error:
            raise UserError(
                f"Cannot write into {self.path}: {error.strerror}. The checkpoint before round "
                f"{round_} is kept, if there was one."
            ) from error


def refuse(folder: Path) -> None:
    """Refuse to go on with a run of several workers in one process."""
    sizes = [size for size in find(folder) if size > 1]
    if sizes:
        raise UserError(
            f"The run in {folder} was trained by {sizes[-1]} workers; go on with it by corefed run "
            f"--resume {folder} --workers {sizes[-1]}, or any other number from 2."
        )


def find(folder: Path) -> Rounds:
    """The rounds of all parts that are in the folder, those of one process included."""
    found: Rounds = {}
    for path in (folder / FOLDER).glob("*-of-*"):
        named = re.fullmatch(r"(\d+)-of-(\d+)", path.name)
        if named and int(named[1]) < int(named[2]):
            rank, size = int(named[1]), int(named[2])
            parts = found.setdefault(size, [[] for _ in range(size)])
            parts[rank] = [checkpoint.round_of(each) for each in _files(path)]
    if (folder / record.STATE).exists():
        found[1] = [[checkpoint.round_of(folder / record.STATE)]]
    return dict(sorted(found.items()))


def newest(every: Sequence[Rounds]) -> tuple[int, int]:
    """(workers, round) of the newest round that all parts have; round 0: there is none.

    `every` has what each worker finds: they may have folders of their own.
    """
    best = (1, 0)
    for size in sorted({size for found in every for size in found}):
        views = [found[size] for found in every if size in found]
        parts = [set().union(*(view[rank] for view in views)) for rank in range(size)]
        common = set.intersection(*parts)
        if common and max(common) >= best[1]:
            best = (size, max(common))
    return best


def load(
    folder: Path,
    values: Mapping[str, object],
    written: tuple[int, int],
    servers: Sequence[Tree],
    private: Tree,
    mine: range,
    clients: int,
) -> tuple[list[Tree], Tree]:
    """The state of the clients `mine` of `clients`, from what (workers, round) wrote.

    `servers` and `private` are the fresh ones, whose shapes and devices it has.
    """
    size, round_ = written
    runs = len(servers)
    found: dict[str, list[list[torch.Tensor]]] = {}
    kept: Tree = {}
    for rank in range(size):
        theirs = share(clients, size, rank)
        both = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
        if not both:
            continue
        state = _read(folder, values, rank, size, round_)
        kept = {k: v for k, v in state.tensors.items() if k.startswith("server.")}
        part = slice(both.start - theirs.start, both.stop - theirs.start)
        for name, value in state.tensors.items():
            if name.startswith("private."):
                rows = value.view(runs, len(theirs), *value.shape[1:])[:, part]
                found.setdefault(name, []).append([each.clone() for each in rows])
    # Row g n + i is client i of the g-th seed.
    joined = {
        name: torch.cat([piece[g] for g in range(runs) for piece in pieces])
        for name, pieces in found.items()
    }
    return checkpoint.unpack(checkpoint.State(round_, {**kept, **joined}), servers, private)


def _read(
    folder: Path, values: Mapping[str, object], rank: int, size: int, round_: int
) -> checkpoint.State:
    path = folder / FOLDER if size == 1 else _part(folder, rank, size)
    for each in _files(path):
        if checkpoint.round_of(each) == round_:
            return checkpoint.decode(each.read_bytes(), values, str(each))
    raise UserError(
        f"{path} has no checkpoint of round {round_}; all workers need the folder of the run, as "
        "on a shared disk."
    )


def _files(path: Path) -> list[Path]:
    return [path / name for name in (STATE, PREVIOUS) if (path / name).exists()]


def _part(folder: Path, rank: int, size: int) -> Path:
    return folder / FOLDER / f"{rank}-of-{size}"
