"""Shared by tables and studies: from cells to results, and from results to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from rich.console import Console

from corefed_studies import pages
from corefed_studies.reproduce import results
from corefed_studies.reproduce.cells import StudyCell, outcomes
from corefed_studies.reproduce.results import Results

MakeTables = Callable[[Results], Sequence[pages.Table]]


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
    cells: Callable[[], Sequence[StudyCell]],
    make_tables: MakeTables,
    *,
    classes: bool = False,
    **options: Unpack[Options],
) -> Results:
    """`show` of cells."""

    def study() -> Results:
        trained = outcomes(cells(), folder, console, options.get("jobs", 0))
        return results.keep(trained, classes=classes)

    return show(name, scale, folder, study, make_tables, options)


def show(
    name: str,
    scale: str,
    folder: Path,
    study: Callable[[], Results],
    make_tables: MakeTables,
    options: Options,
) -> Results:
    """Run a study, or read its results; write NAME.json, .md and .html, and a part of a page."""
    marked = pages.Marked(options["page"], name) if "page" in options else None
    source = options.get("results", folder / f"{name}.json")
    if "results" not in options:
        results.write(source, name, scale, study())
    found = results.read(source, name)  # as rounded, so that the page is what the file makes it
    pages.put(folder, name, make_tables(found), marked)
    return found
