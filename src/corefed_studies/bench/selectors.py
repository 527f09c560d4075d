"""`corefed bench selectors`: every way to choose a coreset, on real problems, over seeds.

Writes selectors.json, from which all else is made: selectors.md, selectors.html, a picture per
problem, and a part of a page. What is compared is in `corefed_studies/reproduce/selectors/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from rich.console import Console

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed_studies import pages
from corefed_studies.reproduce import results
from corefed_studies.reproduce.cells import StudyCell, outcomes
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.selectors import picture, report, runs, study

NAME = "selectors"
DEFAULTS = "selectors-defaults"
IMAGES = "images/"
"""Where a page has its pictures."""


class Options(TypedDict, total=False):
    """What the command line may say."""

    page: Path
    jobs: int
    source: Path


def main(
    scale: str, out: Path | None, console: Console, device: str, **options: Unpack[Options]
) -> None:
    """Every selector with the paper's constants, and variations of the default."""
    _study(NAME, scale, out, console, device, **options)


def defaults(
    scale: str, out: Path | None, console: Console, device: str, **options: Unpack[Options]
) -> None:
    """The first four rows with corefed's defaults."""
    scale = "defaults" if scale == "paper" else scale
    _study(DEFAULTS, scale, out, console, device, **options)


def _study(
    name: str,
    scale: str,
    out: Path | None,
    console: Console,
    device: str,
    *,
    page: Path | None = None,
    jobs: int = 0,
    source: Path | None = None,
) -> None:
    """Train what is missing in `out`, or take the results of a file; show them."""
    folder = out or Path("runs") / f"bench-{NAME}-{scale}"
    marked = pages.Marked(page, f"bench {name}") if page is not None else None
    known = _read(source, name) if source is not None else None
    problems = []
    if known is None:
        device_for(device)  # a device that is missing would fail every run
        problems = at_hand(scale, console)
    pages.make(folder)
    if known is None:
        path = folder / f"{name}.json"
        results.write(path, name, scale, train_all(scale, problems, folder, console, device, jobs))
        known = _read(path, name)  # as rounded, so that the page is what the file makes it
    (folder / f"{name}.md").write_text(report.text(known, f"{name}-"), encoding="utf-8")
    html = pages.web(f"corefed: {name}", report.tables(known))
    (folder / f"{name}.html").write_text(html, encoding="utf-8")
    draw(known, folder, name)
    if page is not None and marked is not None:
        (page.parent / IMAGES).mkdir(exist_ok=True)
        draw(known, page.parent / IMAGES, name)
        marked.write(report.text(known, f"{IMAGES}{name}-"))
    console.print(f"written to {page or folder / f'{name}.md'}")


def at_hand(scale: str, console: Console) -> list[str]:
    """Problems whose data are here; what is left out is said."""
    names = []
    for problem in study.SCALES[scale].problems:
        sentence = study.absent(problem)
        if sentence:
            console.print(sentence)
        else:
            names.append(problem.name)
    if not names:
        raise UserError("None of the data sets of this study is at hand.")
    return names


def train_all(
    scale: str, names: Sequence[str], folder: Path, console: Console, device: str, jobs: int
) -> Results:
    """Of the problems named: side by side, then what is timed alone."""
    found: Results = {}
    for planned, side_by_side in (
        (study.plan(scale, names), jobs),
        (study.alone(scale, names), 1),
    ):
        found |= _trained([_on(cell, device) for cell in planned], folder, console, side_by_side)
    return found


def _on(cell: StudyCell, device: str) -> StudyCell:
    return cell if device == "auto" else cell._replace(flags={**cell.flags, "device": device})


def _trained(cells: Sequence[StudyCell], folder: Path, console: Console, jobs: int) -> Results:
    trained = outcomes(cells, folder, console, jobs) if cells else {}
    found: Results = {}
    for cell in cells:
        found |= runs.results_of(cell, trained[cell.row, cell.column])
    return found


def draw(found: Results, folder: Path, name: str) -> None:
    for problem in report.problems(found):
        picture.draw(found, problem, folder / f"{name}-{report.picture(problem)}")


def _read(path: Path, name: str) -> Results:
    """The results of a file, each with the parts that tables are made of."""
    found = results.read(path, name)
    for (row, column), result in found.items():
        study.spot_of(column)
        parts = [result.get(part) for part in ("metrics", "coreset", "cost")]
        if "failure" not in result and not all(isinstance(part, dict) for part in parts):
            raise UserError(f"{path} is not whole: its cell {row}, {column} lacks figures.")
    return found
