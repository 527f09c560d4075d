"""What the three tables share: from cells to results, and from results to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from corefed import pages
from corefed.reproduce import results
from corefed.reproduce.cells import Cell, outcomes
from corefed.reproduce.results import Results

Lay = Callable[[Results], Sequence[pages.Table]]


def make(
    name: str,
    scale: str,
    folder: Path,
    console: Console,
    cells: Callable[[], Sequence[Cell]],
    lay: Lay,
    *,
    jobs: int = 0,
    source: Path | None = None,
    page: Path | None = None,
) -> Results:
    """Train or read the cells; write NAME.json, NAME.md and NAME.html, and a part of `page`."""
    marked = pages.Marked(page, name) if page is not None else None
    if source is not None:
        found = results.read(source, name)
    else:
        found = results.of(outcomes(cells(), folder, console, jobs))
        results.write(folder / f"{name}.json", name, scale, found)
    laid = lay(found)
    text = pages.markdown(laid)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.html").write_text(pages.web(f"corefed: {name}", laid), encoding="utf-8")
    if marked is not None:
        marked.write(text)
    return found
