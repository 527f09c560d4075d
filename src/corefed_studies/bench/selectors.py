"""`corefed bench selectors`: every way to choose a coreset, on real problems, over seeds.

Writes selectors.json, from which all else is made: selectors.md, selectors.html, a picture per
problem, and a part of a page. What is compared is in `corefed_studies/reproduce/selectors/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed_studies import pages
from corefed_studies.reproduce import results
from corefed_studies.reproduce.cells import StudyCell, outcomes
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.selectors import picture, report, runs, study

NAME = "selectors"
IMAGES = "images/"
"""Where a page has its pictures."""


def main(
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
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    known = _read(source) if source is not None else None
    names = []
    if known is None:
        device_for(device)  # a device that is missing would fail every run
        names = at_hand(scale, console)
    pages.make(folder)
    if known is None:
        path = folder / f"{NAME}.json"
        results.write(path, NAME, scale, train_all(scale, names, folder, console, device, jobs))
        known = _read(path)  # as rounded, so that the page is what the file makes it
    (folder / f"{NAME}.md").write_text(report.text(known, ""), encoding="utf-8")
    html = pages.web(f"corefed: {NAME}", report.tables(known))
    (folder / f"{NAME}.html").write_text(html, encoding="utf-8")
    draw(known, folder)
    if page is not None and marked is not None:
        (page.parent / IMAGES).mkdir(exist_ok=True)
        draw(known, page.parent / IMAGES)
        marked.write(report.text(known, IMAGES))
    console.print(f"written to {page or folder / f'{NAME}.md'}")


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


def draw(found: Results, folder: Path) -> None:
    for problem in report.problems(found):
        picture.draw(found, problem, folder / report.picture(problem))


def _read(path: Path) -> Results:
    """The results of a file, each with the parts that tables are made of."""
    found = results.read(path, NAME)
    for (row, column), result in found.items():
        study.spot_of(column)
        parts = [result.get(part) for part in ("metrics", "coreset", "cost")]
        if "failure" not in result and not all(isinstance(part, dict) for part in parts):
            raise UserError(f"{path} is not whole: its cell {row}, {column} lacks figures.")
    return found
