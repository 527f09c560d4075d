"""Cells side by side until the time is over, most telling first; a later call goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from corefed_studies.leaders import results
from corefed_studies.leaders.cells import SHOWN, TUNED, Line, identity, work
from corefed_studies.leaders.results import Lines
from corefed_studies.leaders.rows import LeadersRow, known_rows
from corefed_studies.leaders.settings import LeadersSetting
from corefed_studies.workers import workers

Cell = tuple[LeadersSetting, LeadersRow]


def planned(settings: Sequence[LeadersSetting]) -> list[Cell]:
    """All cells, those of the most telling methods first."""
    cells = [(setting, row) for setting in settings for row in known_rows(setting)[0]]
    return sorted(cells, key=lambda cell: cell[1].rank)


def usable(cell: Cell, part: str, lines: Lines) -> Line | None:
    """The line of a part, if one of the same setting is on record."""
    expected = identity(*cell, part)
    found = lines.get(results.key_of(expected))
    if found is None or found.get("again") or found.get("about") != expected["about"]:
        return None
    return found


def next_part(cell: Cell, lines: Lines) -> tuple[str, Line] | None:
    """What a cell lacks, and the search it goes by; None: nothing, or its search failed."""
    tuned = usable(cell, TUNED, lines)
    if tuned is None:
        return TUNED, {}
    if "failure" in tuned or usable(cell, SHOWN, lines) is not None:
        return None
    return SHOWN, tuned


def run(
    scale: str,
    cells: Sequence[Cell],
    folder: Path,
    device: str,
    jobs: int,
    minutes: float | None,
    say: Callable[[str], None],
) -> Lines:
    """Train what is missing. After `minutes` no new part starts; those that run are ended."""
    path = folder / results.LINES
    lines = results.read_lines(path)
    until = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    waiting = [cell for cell in cells if next_part(cell, lines) is not None]
    say(f"{len(cells) - len(waiting)} of {len(cells)} cells are on record")

    def ended(line: Line) -> None:
        results.append(path, line)
        lines[results.key_of(line)] = line
        told = line.get("failure") or f"{line['wall_seconds']:.0f} s"
        say(f"{line['setting']}, {line['row']}, {line['part']}: {told}")

    if jobs == 1:
        for cell in waiting:
            while (part := next_part(cell, lines)) and time.monotonic() < until:
                line = work(scale, cell[0].name, cell[1].name, *part, device)
                ended(line)
                if line.get("again"):
                    break
        return lines
    with workers(jobs) as pool:
        running: dict[Future[Line], Cell] = {}
        while True:
            # A cell that was tuned goes on before another one begins.
            while waiting and len(running) < jobs and time.monotonic() < until:
                cell = waiting.pop(0)
                part = next_part(cell, lines)
                if part is not None:
                    future = pool.submit(work, scale, cell[0].name, cell[1].name, *part, device)
                    running[future] = cell
            if not running:
                return lines
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                cell, line = running.pop(future), future.result()
                ended(line)
                if not line.get("again"):
                    waiting.insert(0, cell)
