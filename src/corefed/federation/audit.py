"""The audit log of a client: one line for every reply, written before the reply is sent.

    {"time": "2026-11-17T14:02:38Z", "run": "first", "round": 3, "kind": "train",
     "numbers": {"examples": 3}, "tensors": {"v": {"shape": [2, 650], "bytes": 5200}},
     "digest": "...", "error": "", "epsilon": 4.38, "sha256": "..."}

`numbers` has the name of each number that was sent and its length as text. `digest` is that of
numbers and tensors together, so that a stored reply can be compared with what left. `epsilon` is
what the client's uploads have spent so far, in all runs. `sha256` is that of the line. The log
itself stays on the machine.

A reply that cannot be logged is not sent. Lines are only added, but for the one that a crash has
cut off: its reply was never sent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.base.shown import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from corefed.federation.protocol import Reply

FILE = "audit.jsonl"
LONGEST = 200
"""Characters of a text that a server can choose."""


def enter(state: Path, reply: Reply, epsilon: float | None) -> None:
    """Add the line of a reply; only then may it be sent."""
    from corefed.federation import digest  # torch takes a second, and `read` does without

    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": reply.run[:LONGEST],
        "round": reply.round + 1,
        "kind": reply.kind,
        "numbers": {name: len(json.dumps(value)) for name, value in reply.figures.items()},
        "tensors": {
            name: {"shape": list(value.shape), "bytes": value.numel() * value.element_size()}
            for name, value in reply.tree.items()
        },
        "digest": digest.hash_tree(reply.tree, json.dumps(reply.figures)),
        "error": reply.error[:LONGEST],
        "epsilon": epsilon,
    }
    path = state / FILE
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = _whole(handle)
            try:
                files.write(handle, digests.to_line(line))
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(
            f"Cannot write {path}: {error.strerror}; the reply was not sent, since it would not be "
            "in the log."
        ) from error


def _whole(handle: int) -> int:
    """Cut off what follows the last whole line; the size of the file."""
    size = end = os.fstat(handle).st_size
    while end and os.pread(handle, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(handle, end)
    return end


def read(state: Path) -> list[dict[str, Any]]:
    """The lines of the log; a line that a crash has cut off is left out."""
    path = state / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    found = []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            one = digests.from_line(line, path)
            _row(one)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"Line {number} of {path} is damaged; restore it from a copy."
            ) from error
        found.append(one)
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """For a terminal."""
    from rich.table import Table

    shown = Table("time", "run", "round", "task", "numbers", "tensors", "digest", "epsilon")
    for line in lines:
        shown.add_row(*map(one_line, _row(line)))  # a server can choose names
    return shown


def _row(line: Mapping[str, Any]) -> list[str]:
    tensors = [f"{name} {each['shape']}" for name, each in line["tensors"].items()]
    epsilon = line["epsilon"]
    return [
        line["time"],
        line["run"],
        str(line["round"]),
        line["kind"],
        line["error"] or ", ".join(line["numbers"]),
        ", ".join(tensors),
        line["digest"][:12],
        "" if epsilon is None else f"{epsilon:.3g}",
    ]
