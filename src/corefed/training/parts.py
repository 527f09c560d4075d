"""Checkpoints of a run whose clients are shared out between workers: one part per worker.

    checkpoint/K-of-N/      the last two saves of worker K of N, see `segments.py`

A worker may be killed while another one has already written its part. So each keeps two saves, and
a run goes on from the newest round that all parts have. Clients have the rows that they have in one
process: row g C + i is client i of C of the g-th seed. So other workers, of any number, can go on
from all parts together, and from the checkpoint of one process.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from corefed.base.errors import UserError
from corefed.base.place import share
from corefed.base.shown import say_note
from corefed.base.types import Tree
from corefed.training import checkpoint, segments
from corefed.training.checkpoint import FOLDER, Clients
from corefed.training.segments import Save

Rounds = dict[int, list[list[int]]]
"""By number of workers, the rounds that each part has."""

Written = tuple[int, int]
"""How many workers wrote a checkpoint, and after which round; round 0: there is none."""


class Shard:
    """The clients of a worker, by their rows among all clients of the run."""

    def __init__(self, clients: Clients, rows: Sequence[int]) -> None:
        self.clients, self.rows = clients, rows
        self._place = {row: place for place, row in enumerate(rows)}

    def take(self, rows: Sequence[int]) -> Tree:
        return self.clients.take([self._place[row] for row in rows])

    def put(self, rows: Sequence[int], tree: Tree) -> None:
        self.clients.put([self._place[row] for row in rows], tree)


def name(rank: int, size: int) -> str:
    """The part of a worker."""
    return f"{rank}-of-{size}"


def refuse(folder: Path) -> None:
    """Refuse to go on with a run of several workers in one process."""
    sizes = [size for path, _, size in _parts(folder) if (path / segments.MANIFEST).exists()]
    if sizes:
        raise UserError(
            f"The run in {folder} was trained by {max(sizes)} workers; go on with it by corefed "
            f"run --resume {folder} --workers {max(sizes)}, or any other number from 2."
        )


def find(folder: Path, values: Mapping[str, object]) -> Rounds:
    """The rounds of all parts that are in the folder, those of one process included."""
    found: Rounds = {}
    for path, rank, size in _parts(folder):
        parts = found.setdefault(size, [[] for _ in range(size)])
        parts[rank] = [
            save.round for save in segments.read_manifest(path, values) if _whole(path, save)
        ]
    whole = checkpoint.load(folder, values)
    if whole is not None:
        found[1] = [[whole.round]]
    return dict(sorted(found.items()))


def _whole(path: Path, save: Save) -> bool:
    """Whether a save can be read; a note says why not."""
    try:
        save.verify(path)
    except UserError as error:
        say_note(error)
        return False
    return True


def newest(every: Sequence[Rounds]) -> Written:
    """The newest round that all parts of some number of workers have.

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


def restore(
    folder: Path,
    values: Mapping[str, object],
    written: Written,
    servers: Sequence[Tree],
    shard: Shard,
    clients: int,
) -> list[Tree]:
    """Put the state of a worker's clients back; the servers' states, like the fresh ones.

    There are `clients` clients per seed.
    """
    size, round_ = written
    mine = {row % clients for row in shard.rows}
    found: list[Tree] = []
    for rank in range(size):
        theirs = share(clients, size, rank)
        if mine.isdisjoint(theirs):
            continue
        part = "" if size == 1 else name(rank, size)
        loaded = checkpoint.load(folder, values, part, round_)
        if loaded is None or loaded.round != round_:
            raise UserError(
                f"{folder / FOLDER / part} has no checkpoint of round {round_}; all workers need "
                "the folder of the run, as on a shared disk."
            )
        if not mine.issuperset(theirs):
            loaded = loaded._replace(wanted=frozenset(shard.rows))
        found = checkpoint.restore(loaded, servers, shard)
    return found


def remove_others(folder: Path, values: Mapping[str, object], size: int) -> None:
    """Remove what another number of workers wrote, as soon as `size` workers have all saved."""
    stale = [path for path, _, n in _parts(folder) if n != size]
    alone = folder / FOLDER / segments.MANIFEST
    if not stale and not alone.exists():
        return
    found = {n: parts for n, parts in find(folder, values).items() if n == size}
    if newest([found])[1] == 0:
        return
    with suppress(OSError):
        alone.unlink(missing_ok=True)
        segments.remove_others(alone.parent, values)
        for path in stale:
            (path / segments.MANIFEST).unlink(missing_ok=True)  # what is left of it never counts
            shutil.rmtree(path, ignore_errors=True)


def _parts(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Folders of parts, with the worker's rank and the number of workers."""
    for path in (folder / FOLDER).glob("*-of-*"):
        named = re.fullmatch(r"(\d+)-of-(\d+)", path.name)
        if named and int(named[1]) < int(named[2]):
            yield path, int(named[1]), int(named[2])
