"""Checkpoints of a run: written in the background, at a cost of what changed since the last one.

    saves = Checkpoints(folder, values, every, share, minutes)
    after each round:
        saves.mark(rows)                        # whose private state changed
        if saves.due(round, last):
            saves.save(round, servers, take)    # copies the rows; a thread writes them
    saves.close()                               # the last one is on the disk

At most one save is under way. A run that is killed at any moment goes on from the newest save that
is complete, see `segments.py` for its files. Clients that never took part are not in it: they are
as the run's start made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.shown import say_note
from corefed.base.types import Tree
from corefed.training import segments, state_file
from corefed.training.pace import Pace
from corefed.training.segments import Rows, Save, Segment
from corefed.training.writer import AbandonedError, Writer

FOLDER = "checkpoint"
AHEAD = 8
"""Pieces in memory that wait for the writer: 1 GiB. With more, the run waits."""

Take = Callable[[Sequence[int]], Tree]


class Clients(Protocol):
    """Whose private state is restored."""

    def take(self, rows: Sequence[int]) -> Tree: ...

    def put(self, rows: Sequence[int], tree: Tree) -> None: ...


def require_library() -> None:
    """Refuse before the first round, not after it, if checkpoints cannot be written."""
    if find_spec("safetensors") is None:
        raise UserError(
            "Checkpoints need safetensors, which is not installed: pip install safetensors, or "
            "run without them by --set checkpoint_every=0."
        )


# --- writing --------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of a run, or of one of several processes that train it together.

    `folder` is the run's, `values` its settings. `part` names a process ("2-of-4"), which has files
    of its own and keeps its last two saves: processes that are killed may be one save apart. Others
    keep `kept`. A run that is resumed adds to what `load` gave.
    """

    def __init__(
        self,
        folder: Path,
        values: Mapping[str, object],
        every: int,
        share: float,
        minutes: float,
        part: str = "",
        kept: int = 1,
    ) -> None:
        self.run, self.values, self.kept = folder, values, 2 if part else kept
        self.folder = folder / FOLDER / part
        self.pace = Pace(every, share, minutes)
        self._writer = Writer[tuple[Rows, Tree]](AHEAD)
        self._changed: set[int] = set()
        self._saves = segments.read_manifest(self.folder, values)
        newest = self._saves[-1].segments if self._saves else []
        self._held = [(each, segments.read_rows(self.folder, each)) for each in newest]
        segments.remove_others(self.folder, values)

    @property
    def begun(self) -> bool:
        """Whether there is a save to add to."""
        return bool(self._saves)

    def mark(self, rows: Sequence[int]) -> None:
        """Rows of private state that changed."""
        self._changed.update(rows)

    def due(self, round_: int, last: bool) -> bool:
        """Whether to save after this round; raises what went wrong with the save before."""
        if not self._writer.busy:
            self._writer.wait()
        return self.pace.due(round_, last, self._writer.busy)

    def save(self, round_: int, servers: Sequence[Tree], take: Take) -> None:
        """Hand over the state after `round_` rounds: the servers' and the marked rows.

        `take` gives rows of every private tensor, on any device. They are copied before this
        returns, so the run may go on and change them.
        """
        called = self.pace.clock()
        self._writer.wait()
        rows = sorted(self._changed)
        self._changed.clear()
        server = _on_host(segments.pack_server(servers))
        began = self.pace.begin()

        def write(pieces: Iterator[tuple[Rows, Tree]]) -> None:
            self._write(round_, rows, server, pieces)

        def written(seconds: float) -> None:
            self.pace.end(began, held, seconds, self.pace.clock())

        held = 0.0
        try:
            self._writer.start(write, written)
            for piece in _pieces(rows, take):
                self._writer.give((piece, _on_host(take(piece))))
            held = self.pace.clock() - called
            self._writer.give(None)
        except BaseException:  # Ctrl-C as well
            self._writer.abandon()
            raise

    def close(self) -> None:
        """Wait until the last save is on the disk; raises what went wrong with it."""
        self._writer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt):  # the second Ctrl-C: at once
            self._writer.abandon()
        else:
            with suppress(UserError):  # the first error is the one to tell
                self.close()

    def _write(
        self, round_: int, rows: Rows, server: Tree, pieces: Iterator[tuple[Rows, Tree]]
    ) -> None:
        """In the writer's thread: the new files, then the manifest."""
        plan = segments.plan(self._held, rows)
        number = segments.next_number(self._saves)
        made: list[Segment] = []
        added: list[tuple[Segment, Rows]] = []

        def contents() -> Iterator[tuple[str, files.Content]]:
            name, content = f"{number:06d}-server.safetensors", segments.encode(server)
            yield name, content
            made.append(Segment(name, content.bytes, content.hexdigest()))  # it is written
            for source in (pieces, segments.merge(self.folder, plan.merged)):
                for mine, tree in source:
                    name = f"{number:06d}-{len(added):03d}.safetensors"
                    content = segments.encode(segments.pack_rows(mine, tree))
                    yield name, content
                    segment = Segment(name, content.bytes, content.hexdigest())
                    added.append((segment, mine))

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.replace_all(self.folder, contents())
            if self._writer.abandoned:
                raise AbandonedError
            held = [each for each in self._held if each[0] in plan.kept] + added
            save = Save(round_, made[0], [segment for segment, _ in held])
            saves = [*self._saves, save][-self.kept :]
            segments.write_manifest(self.folder, self.values, saves)
            self._saves, self._held = saves, held
        except OSError as error:
            raise UserError(
                f"Cannot write into {self.run}: {error.strerror}. The checkpoint before round "
                f"{round_} is kept, if there was one."
            ) from error
        finally:
            segments.remove_others(self.folder, self.values)


def _pieces(rows: Rows, take: Take) -> Iterator[Rows]:
    """The rows in parts of about `PIECE` bytes."""
    if not rows:
        return
    one = sum(value.numel() * value.element_size() for value in take(rows[:1]).values())
    count = max(1, segments.PIECE // max(1, one))
    for first in range(0, len(rows), count):
        yield rows[first : first + count]


def _on_host(tree: Tree) -> Tree:
    """A copy that nobody changes."""
    return {
        k: v.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for k, v in tree.items()
    }


# --- reading --------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """The state of a run after `round` rounds."""

    round: int
    servers: list[Tree]
    folder: Path
    segments: list[Segment]
    wanted: frozenset[int] | None = None  # rows to restore; None: all

    def pieces(self) -> Iterator[tuple[Rows, Tree]]:
        """Rows of private state, file by file; of several versions of a row the last counts."""
        for segment in self.segments:
            if self.wanted is None:
                yield segments.unpack_rows(segment.read(self.folder))
            elif here := [
                row for row in segments.read_rows(self.folder, segment) if row in self.wanted
            ]:
                yield from segments.merge(self.folder, [(segment, here)])


def load(
    folder: Path, values: Mapping[str, object], part: str = "", upto: int | None = None
) -> Loaded | None:
    """The newest checkpoint of a run, or the newest of at most `upto` rounds; None without one.

    Refused unless this version and these settings can go on from it. Where it is damaged, the one
    before it is taken, if there is one; then call `forget`.
    """
    here = folder / FOLDER / part
    saves = segments.read_manifest(here, values)
    old = here / state_file.NAME
    if not saves and old.exists():
        state_file.refuse(old, values, segments.SCHEMA)
    fitting = [save for save in saves if upto is None or save.round <= upto]
    if not fitting:
        return None
    newest = _newest_whole(here, fitting)
    servers = segments.unpack_server(newest.server.read(here))
    return Loaded(newest.round, servers, here, newest.segments)


def _newest_whole(folder: Path, saves: Sequence[Save]) -> Save:
    """The newest save whose files are what was written; what is wrong with the newest if none is.

    A note says so where it is not the newest of all.
    """
    wrong: UserError | None = None
    for save in reversed(saves):
        try:
            save.verify(folder)
        except UserError as error:
            wrong = wrong or error
            continue
        if wrong is not None:
            say_note(f"{wrong} The checkpoint before it, of round {save.round}, is used.")
        return save
    assert wrong is not None
    raise wrong


def forget(folder: Path, values: Mapping[str, object], part: str, after: int) -> None:
    """Drop the saves of a part after so many rounds, so that `Checkpoints` adds to those before."""
    here = folder / FOLDER / part
    saves = segments.read_manifest(here, values)
    kept = [save for save in saves if save.round <= after]
    if len(kept) == len(saves):
        return
    try:
        if kept:
            segments.write_manifest(here, values, kept)
        else:
            (here / segments.MANIFEST).unlink()
    except OSError as error:
        raise UserError(
            f"Cannot write into {here}: {error.strerror}. The checkpoint is as it was."
        ) from error


def restore(loaded: Loaded, servers: Sequence[Tree], clients: Clients | None = None) -> list[Tree]:
    """Put the rows back into `clients`; the servers' states, on the devices of the fresh ones."""
    found = [
        state_file.like(tree, fresh) for tree, fresh in zip(loaded.servers, servers, strict=True)
    ]
    if clients is None:
        return found
    for rows, tree in loaded.pieces():
        try:
            fresh = clients.take([max(rows)])
        except IndexError:  # there are fewer clients now
            fresh = {}
        state_file.like({k: v[:1] for k, v in tree.items()}, fresh)
        clients.put(rows, tree)
    return found
