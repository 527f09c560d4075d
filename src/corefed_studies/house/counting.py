"""The command: run the probe on a source tree, print its table, write it into the page."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from corefed.base.errors import UserError
from corefed.base.tables import markdown_table
from corefed_studies.house import picture
from corefed_studies.pages import Marked

Counts = dict[str, Any]
"""What the probe gives."""

HERE = Path(__file__).resolve()
SRC = HERE.parents[2]
BEFORE = SRC.parent / "results" / "house-before.json"
RUN = "run --data digits --rounds 2"
COMMAND = "python -m corefed_studies.house"

ROWS = (
    ("files at the root of the package", "files_at_root"),
    ("packages in an import cycle", "packages_in_cycles"),
    ("imports from a room to one above it", "upward_imports"),
    ("package switches of `corefed run`", "package_switches"),
    ("file switches of `corefed run`", "file_switches"),
    ("functions that `corefed run` calls", "functions"),
    ("files that they lie in", "files"),
    ("lines of Python, studies included", "lines"),
    ("lines without the studies", "lines_without_studies"),
    ("settings of the default method", "settings"),
    ("of these, shown without `--all`", "settings_shown"),
    ("fields of `Method`", "method_fields"),
    ("with the fields of its groups", "method_fields_with_groups"),
)


def main(
    src: Annotated[Path, typer.Option(help="The source tree to count.")] = SRC,
    studies: Annotated[
        list[str] | None,
        typer.Option(help="Files inside the package that are studies.", metavar="PATTERN"),
    ] = None,
    run: Annotated[str, typer.Option(help="The command to follow; empty: none.")] = RUN,
    out: Annotated[Path | None, typer.Option(help="Write the counts as JSON.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write table and picture into a page.")] = None,
) -> None:
    """Count the structure of a source tree."""
    marked = None if page is None else Marked(page, "house")
    found = count(src, studies or [], run.split())
    text = "\n".join(table(found)) + "\n"
    print(text, end="")
    if out is not None:
        written = {"command": f"{COMMAND} {shlex.join(sys.argv[1:])}", **found}
        out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if page is not None and marked is not None:
        marked.write(text)
        picture.draw(found["rooms"], found["edges"], page.parent / "images" / "rooms.svg")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)


def count(src: Path, studies: Sequence[str] = (), run: Sequence[str] = ()) -> Counts:
    """The numbers of a source tree, counted by `probe.py` in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-P", HERE.parent / "probe.py", src, json.dumps([studies, run])],
        env={**os.environ, "PYTHONPATH": str(src)},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise UserError(f"{src} cannot be counted: {ended.stderr.strip().splitlines()[-1]}")
    counts: Counts = json.loads(ended.stdout)
    return counts


def table(counts: Counts) -> list[str]:
    """Before the rooms and now, a row per number."""
    before = json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.exists() else {}
    rows = [[text, _shown(before, key), _shown(counts, key)] for text, key in ROWS]
    return markdown_table(["", "before", "now"], rows)


def _shown(counts: Counts, key: str) -> str:
    if counts.get(key) is None:
        return "not defined"
    of = f" of {counts['packages']}" if key == "packages_in_cycles" else ""
    return f"{counts[key]:,}{of}"
