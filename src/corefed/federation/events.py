"""events.jsonl of a run: who was missing, refused or late, in which round and why.

    {"time": "2026-01-31T12:00:00+00:00", "round": 3, "client": "alice", "event": "refused",
     "reason": "..."}

Every line ends with a digest (`base/digests.py`). `round` counts from 1 as in rounds.jsonl, and is
0 before the first; `client` is empty where an event is about all of them. Clients' own words are
cut to one line of 300 characters.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from corefed.base import digests
from corefed.base.shown import say

Event = Literal[
    "started", "resumed", "joined", "missing", "refused", "late", "no-quorum", "robust", "left-out",
    "stopped", "finished",
]  # fmt: skip

LONGEST = 300


class Log:
    """Appends to the file and prints the same on stderr, which is the server's own log."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, event: Event, round_: int, client: str = "", reason: str = "") -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "round": round_,
            "client": client,
            "event": event,
            "reason": one_line(reason),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(digests.to_line(line).decode())
        say(sentence(line), file=sys.stderr)


def one_line(text: str) -> str:
    """Printable, in one line, and not too long: a client's words must not forge a log."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    bare = " ".join(printable.split())
    return bare if len(bare) <= LONGEST else bare[: LONGEST - 1] + "…"


def sentence(line: dict[str, object]) -> str:
    """An event for a reader: 'round 3: alice refused: ...'."""
    who = f"{line['client']} " if line["client"] else ""
    where = f"round {line['round']}: " if line["round"] else ""
    why = f": {line['reason']}" if line["reason"] else ""
    return f"{where}{who}{line['event']}{why}"


def read(path: Path) -> list[dict[str, object]]:
    """The whole lines of a file that may be growing; a damaged one is an event of its own."""
    lines: list[dict[str, object]] = []
    *whole, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if digests.ends_sealed(rest):
        whole.append(rest)  # or else it is unfinished
    for number, raw in enumerate(whole, 1):
        try:
            line = digests.from_line(raw + b"\n", path)
            if not {"round", "client", "event", "reason"} <= line.keys():
                raise digests.DamagedError("it is no event")
        except ValueError as error:
            reason = f"line {number} of {path.name} is damaged ({error})"
            line = {"round": 0, "client": "", "event": "damaged", "reason": reason}
        lines.append(line)
    return lines
