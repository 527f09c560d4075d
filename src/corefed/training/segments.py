"""The files of a checkpoint, and which of them are written again.

    state.json                  the manifest: which experiment, and the files of each save
    000012-server.safetensors   the server's state at the twelfth save: server.G.NAME
    000012-000.safetensors      rows of clients' private state: `rows` [n], private.NAME [n, ...]

A file never changes, and its name is new. The manifest has the SHA-256 of every file and of itself
(`digests.py`), and is replaced last, so that a killed process leaves one whose files are all there.
A save adds the rows that changed since the save before; of several versions of a row the newest
counts. A file without a newest version of any row is dropped. When files hold twice as many rows as
count, or are too many, the small and the outdated ones are merged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corefed import __version__
from corefed.base import digests, files
from corefed.base.digests import Hashed
from corefed.base.errors import UserError
from corefed.base.tensor_file import TYPES
from corefed.base.types import Tree
from corefed.settings.config import differences, fingerprint

MANIFEST = "state.json"
SCHEMA = 4
"""Increase it when names or meanings of tensors, or of the manifest's keys, change."""

PIECE = 128 << 20
"""Bytes of clients' rows in one file, about: what is in memory at a time."""
WASTE = 2
"""Rows in all files over rows that count, above which files are merged."""
MOST_FILES = 100
"""Files of rows, above which files are merged."""

SMALL = 1 << 20
"""Bytes of a file, below which it is written in one part."""

CHANGED = "its content is not what was written"

Rows = list[int]
Part = bytes | memoryview


class Segment(NamedTuple):
    """A file of a checkpoint, as the manifest names it."""

    file: str
    bytes: int
    sha256: str

    def read(self, folder: Path) -> Tree:
        """Its tensors; refused unless it is the file that was written."""
        from safetensors.torch import load

        path = folder / self.file
        self.check(folder)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}.") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise damaged(path, CHANGED)
        return load(content)

    def verify(self, folder: Path) -> None:
        """Refuse a file that is not the one that was written, without its content in memory."""
        path = folder / self.file
        self.check(folder)
        try:
            if digests.hash_file(path) != self.sha256:
                raise damaged(path, CHANGED)
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}.") from error

    def check(self, folder: Path) -> None:
        """Refuse a file that is missing or has another length."""
        path = folder / self.file
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise damaged(path, "it is missing") from error
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}.") from error
        if found != self.bytes:
            raise damaged(path, f"it has {found:,} bytes and had {self.bytes:,}")


class Save(NamedTuple):
    """A run after `round` rounds."""

    round: int
    server: Segment
    segments: list[Segment]  # of clients' rows, oldest first

    @property
    def files(self) -> list[Segment]:
        return [self.server, *self.segments]

    def verify(self, folder: Path) -> None:
        """Refuse it if one of its files is not what was written."""
        for each in self.files:
            each.verify(folder)


# --- the manifest ---------------------------------------------------------------------------------


def about(values: Mapping[str, object], schema: int) -> dict[str, Any]:
    """Which experiment a checkpoint belongs to; its settings are `values`."""
    return {
        "schema": schema,
        "version": __version__,
        "fingerprint": fingerprint(values),
        "config": dict(values),
    }


def refuse_foreign(
    found: Mapping[str, Any], values: Mapping[str, object], schema: int, where: Path | str
) -> None:
    """Refuse a checkpoint that this version or this experiment cannot go on from."""
    if (found["schema"], found["version"]) != (schema, __version__):
        raise UserError(
            f"{where} was written by corefed {found['version']} (checkpoint schema "
            f"{found['schema']}) and this is {__version__} (schema {schema}); resume with that "
            "version, or start a new run."
        )
    if found["fingerprint"] != fingerprint(values):
        changed = ", ".join(differences(found["config"], values)) or "unknown settings"
        raise UserError(
            f"{where} belongs to another experiment: {changed}; resume with the settings it was "
            "written with, or start a new run."
        )


def damaged(where: Path | str, why: object) -> UserError:
    return UserError(f"{where} is truncated or damaged ({why}); the run cannot be resumed from it.")


def read_manifest(folder: Path, values: Mapping[str, object]) -> list[Save]:
    """The saves, oldest first; none where there is no manifest."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    try:
        found = digests.from_json(content, path)
        refuse_foreign(found, values, SCHEMA, path)
        return [
            Save(
                int(each["round"]),
                Segment(**each["server"]),
                [Segment(**one) for one in each["segments"]],
            )
            for each in found["saves"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, repr(error)) from error


def write_manifest(folder: Path, values: Mapping[str, object], saves: Sequence[Save]) -> None:
    """Replace the manifest."""
    described = [
        {
            "round": save.round,
            "server": save.server._asdict(),
            "segments": [each._asdict() for each in save.segments],
        }
        for save in saves
    ]
    content = digests.to_json({**about(values, SCHEMA), "saves": described})
    files.replace(folder / MANIFEST, content)


def remove_others(folder: Path, values: Mapping[str, object]) -> None:
    """Remove what the manifest on the disk does not name, as far as that is possible.

    These are files that are no longer needed, or that a failed or killed save left behind.
    """
    with suppress(OSError, UserError):
        named = {each.file for save in read_manifest(folder, values) for each in save.files}
        for path in folder.iterdir():
            if path.is_file() and path.name not in named | {MANIFEST}:
                path.unlink(missing_ok=True)


def next_number(saves: Sequence[Save]) -> int:
    """For the names of a new save's files."""
    return 1 + max((int(save.server.file.partition("-")[0]) for save in saves), default=0)


# --- files of rows --------------------------------------------------------------------------------


def encode(tensors: Tree) -> Hashed:
    """A file in the format of safetensors, in parts that are the tensors' own memory.

    The library's `save` copies all of them twice and holds Python's lock, so that training waits.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # keeps all aligned
    header, parts, end = {}, [], 0
    for name in order:
        value = tensors[name].contiguous()
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": TYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]
        }  # fmt: skip
        parts.append(value.reshape(-1).view(torch.uint8).numpy().data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    content: list[Part] = [len(head).to_bytes(8, "little") + head, *parts]
    if end < SMALL:
        content = [b"".join(content)]
    return Hashed(content, 8 + len(head) + end)


def pack_server(servers: Sequence[Tree]) -> Tree:
    return {f"server.{g}.{k}": v for g, server in enumerate(servers) for k, v in server.items()}


def unpack_server(tensors: Tree) -> list[Tree]:
    servers: dict[int, Tree] = {}
    for name, value in tensors.items():
        _, g, own = name.split(".", 2)
        # Tensors in the file's memory may be misaligned, which can change the last bit of a sum.
        servers.setdefault(int(g), {})[own] = value.clone()
    return [servers[g] for g in sorted(servers)]


def pack_rows(rows: Sequence[int], tree: Tree) -> Tree:
    return {"rows": torch.tensor(list(rows)), **{f"private.{k}": v for k, v in tree.items()}}


def unpack_rows(tensors: Tree) -> tuple[Rows, Tree]:
    rows: Rows = tensors["rows"].tolist()
    names = (name for name in tensors if name != "rows")
    return rows, {name.removeprefix("private."): tensors[name] for name in names}


def read_rows(folder: Path, segment: Segment) -> Rows:
    """Only which rows a file has; refused as in `read`."""
    from safetensors import SafetensorError, safe_open

    path = folder / segment.file
    segment.verify(folder)
    try:
        with safe_open(path, framework="pt") as file:
            rows: Rows = file.get_tensor("rows").tolist()
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error
    return rows


# --- which files to keep --------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a save does with the files of the save before."""

    kept: list[Segment]
    merged: list[tuple[Segment, Rows]]  # with the rows of each that still count


def plan(held: Sequence[tuple[Segment, Rows]], new: Collection[int]) -> Plan:
    """`held` are the files and their rows, oldest first; `new` are the rows to be added."""
    seen = set(new)
    live: list[tuple[Segment, Rows, bool]] = []
    for segment, rows in reversed(held):
        count = [row for row in rows if row not in seen]
        seen.update(count)
        if count:
            live.insert(0, (segment, count, len(count) < len(rows) or segment.bytes < PIECE // 2))
    needed = {segment for segment, *_ in live}
    stored = len(new) + sum(len(rows) for segment, rows in held if segment in needed)
    if stored <= WASTE * len(seen) and len(live) < MOST_FILES:
        return Plan([segment for segment, *_ in live], [])
    return Plan(
        [segment for segment, _, worn in live if not worn],
        [(segment, count) for segment, count, worn in live if worn],
    )


def merge(folder: Path, parts: Sequence[tuple[Segment, Rows]]) -> Iterator[tuple[Rows, Tree]]:
    """The given rows of these files, in pieces of about `PIECE` bytes."""
    rows: Rows = []
    trees: list[Tree] = []
    size = 0
    for segment, wanted in parts:
        there, tree = unpack_rows(segment.read(folder))
        at = {row: i for i, row in enumerate(there)}
        places = torch.tensor([at[row] for row in wanted])
        rows += wanted
        trees.append({k: v[places] for k, v in tree.items()})
        size += sum(v.numel() * v.element_size() for v in trees[-1].values())
        if size >= PIECE:
            yield rows, _joined(trees)
            rows, trees, size = [], [], 0
    if rows:
        yield rows, _joined(trees)


def _joined(trees: Sequence[Tree]) -> Tree:
    return {k: torch.cat([tree[k] for tree in trees]) for k in trees[0]}
