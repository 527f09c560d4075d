"""`corefed bench defaults`: choose defaults on some problems, judge them on others.

Writes defaults.json, from which all else is made: defaults.md, defaults.html, and a part of a page.
What is compared is in `corefed_studies/defaults/`. A study that was stopped goes on: each problem
of a method, and each row of a problem, is a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path

from rich.console import Console

from corefed.base.device import device_for
from corefed.base.progress import bars
from corefed_studies import pages
from corefed_studies.defaults import choosing, judging, report, results, tuning
from corefed_studies.defaults.prepare import prepare
from corefed_studies.defaults.problems import PROBLEMS, TUNING, DefaultsProblem, problem_of
from corefed_studies.reproduce.cells import default_jobs
from corefed_studies.workers import workers

NAME = results.NAME
QUICK = ("digits", "chile")
"""Problems of scale quick: one to choose on, one to judge by."""

Task = Callable[[], None]


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
    if source is not None:
        study = results.read(source)
    else:
        place = str(device_for(device))  # a device that is missing would fail every run
        problems = [problem_of(name) for name in QUICK] if scale == "quick" else list(PROBLEMS)
        prepare(pages.make(folder / "files"), console, tuple(problems))
        _side_by_side([*tasks(problems, folder, place)], console, jobs or default_jobs())
        results.write(folder / f"{NAME}.json", results.gather(folder, scale))
        study = results.read(folder / f"{NAME}.json")
    pages.put(pages.make(folder), NAME, report.tables(study), marked)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def tasks(problems: list[DefaultsProblem], folder: Path, device: str) -> Iterator[Task]:
    """What is not finished yet, as functions that a process can be given."""
    files = folder / "files"
    for problem in problems:
        if problem.role == TUNING:
            for method in choosing.CANDIDATES:
                if not choosing.place_of(folder, problem.name, method).exists():
                    yield partial(_choose, problem.name, method, folder, files, device)
            continue
        for row in judging.ROWS:
            same = row == judging.ONE_RATE and problem.name not in judging.WIDE
            if not same and not judging.place_of(folder, problem.name, row).exists():
                yield partial(_judge, problem.name, row, folder, files, device)
        tables = problem.file.endswith(".csv")
        if tables and not tuning.place_of(folder, problem.name).exists():
            yield partial(_tune, problem.name, folder, files, device)


def _choose(problem: str, method: str, folder: Path, files: Path, device: str) -> None:
    scores = choosing.train(problem_of(problem), method, choosing.CANDIDATES[method], files, device)
    choosing.keep(choosing.place_of(folder, problem, method), scores)


def _judge(problem: str, row: str, folder: Path, files: Path, device: str) -> None:
    cell = judging.train(problem_of(problem), row, files, device)
    judging.keep(judging.place_of(folder, problem, row), cell)


def _tune(problem: str, folder: Path, files: Path, device: str) -> None:
    found = tuning.train(problem_of(problem), files, device)
    judging.keep(tuning.place_of(folder, problem), found)


def _side_by_side(many: list[Task], console: Console, jobs: int) -> None:
    if not many:
        return
    with bars(console=console) as shown, workers(jobs) as pool:
        shown.show("parts of the study", 0, len(many))
        running = [pool.submit(task) for task in many]
        for done, future in enumerate(as_completed(running)):
            future.result()
            shown.show("parts of the study", done + 1, len(many))
