"""`corefed reproduce pfllib`, `niid-bench`, `own-problems` and `cifar10`.

All four write into one folder and one page: they are parts of one study. A command that was
stopped, or that `--minutes` ended, goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed_studies import pages
from corefed_studies.leaders import overview, report, results, running
from corefed_studies.leaders.rows import known_rows
from corefed_studies.leaders.settings import STUDIES, settings_of

if TYPE_CHECKING:
    from rich.console import Console

GPU_JOBS = 3
"""Processes that share a GPU: each holds up to eight candidates and their data."""


def reproduce(
    name: str,
    scale: str,
    folder: Path,
    console: Console,
    jobs: int | None = None,
    results: Path | None = None,
    page: Path | None = None,
    minutes: float | None = None,
) -> None:
    """One study's settings, and the tables of all that are on record."""
    work((name,), scale, folder, console.print, jobs=jobs, source=results, page=page,
         minutes=minutes, called=name)  # fmt: skip


def work(
    studies: tuple[str, ...],
    scale: str,
    folder: Path,
    say: Callable[[str], None],
    *,
    jobs: int | None = None,
    source: Path | None = None,
    page: Path | None = None,
    minutes: float | None = None,
    device: str = "auto",
    show: bool = True,
    called: str = results.NAME,
    only: tuple[str, ...] = (),
    only_settings: tuple[str, ...] = (),
) -> None:
    """Train what is missing in a folder, or take the results of a file; show them."""
    brief = page is not None and f"<!-- {overview.MARK}: begin -->" in _text(page)
    mark = overview.MARK if brief else results.NAME
    marked = pages.Marked(page, mark) if page is not None else None
    if minutes is not None and not minutes > 0:
        raise UserError(f"--minutes is {minutes:g}; it must be above 0.")
    if source is not None:
        lines = results.read(source)
    else:
        place = str(device_for(device))
        settings = settings_of(scale, studies)
        for missing in sorted({name for each in settings for name in known_rows(each)[1]}):
            say(f"left out, since the registry has no such method: {missing}")
        cells = running.planned(settings)
        cells = [
            (setting, row)
            for setting, row in cells
            if (not only or row.name in only)
            and (not only_settings or setting.name in only_settings)
        ]
        pages.make(folder)
        many = jobs or (GPU_JOBS if place.startswith("cuda") else 1)
        lines = running.run(scale, cells, folder, place, many, minutes, say)
        results.write(folder / results.RESULT, lines.values())
        left = sum(running.next_part(cell, lines) is not None for cell in cells)
        say(f"{len(cells) - left} of {len(cells)} cells are done; {folder / results.RESULT}")
    if show:
        tables = overview.tables(lines) if brief else report.tables(lines)
        pages.put(pages.make(folder), called, tables, marked)


def _text(page: Path) -> str:
    """Of a page; one that cannot be read has none, and `Marked` says so."""
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def check_studies(names: tuple[str, ...]) -> None:
    wrong = [name for name in names if name not in STUDIES]
    if wrong:
        raise UserError(f"There is no study {wrong[0]!r}; there are {', '.join(STUDIES)}.")
