"""What the three tables share: from cells to results, and from results to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from rich.console import Console

from corefed import pages
from corefed.reproduce import results
from corefed.reproduce.cells import Cell, outcomes
from corefed.reproduce.results import Results

Lay = Callable[[Results], Sequence[pages.Table]]


class Options(TypedDict, total=False):
    """What the command line may say about a table."""

    jobs: int  # cells trained side by side; as suits the machine if not given
    results: Path  # a result file to make the table from, in place of training
    page: Path  # a page with marks to put the table into


def make(
    name: str,
    scale: str,
    folder: Path,
    console: Console,
    cells: Callable[[], Sequence[Cell]],
    lay: Lay,
    *,
    classes: bool = False,
    **options: Unpack[Options],
) -> Results:
    """Train or read the cells; write NAME.json, NAME.md and NAME.html, and a part of a page."""
    marked = pages.Marked(options["page"], name) if "page" in options else None
    if "results" in options:
        found = results.read(options["results"], name)
    else:
        trained = outcomes(cells(), folder, console, options.get("jobs", 0))
        found = results.of(trained, classes=classes)
        results.write(folder / f"{name}.json", name, scale, found)
    pages.put(folder, name, lay(found), marked)
    return found
