"""`corefed.report`: the page of `corefed report`, from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from corefed.base import files
from corefed.show.page import making
from corefed.use.estimator import Federation

Run = Federation | str | Path
"""A fitted federation, or the folder of a run."""


def report(
    runs: Run | Sequence[Run],
    out: str | Path = "report.html",
    *,
    title: str = "",
    baseline: Run | None = None,
    images: bool = True,
    force: bool = False,
) -> Path:
    """Write one self-contained page about runs.

    Args:
        runs: A fitted `Federation`, the folder of a run, or several of these.
        out: The page to write.
        title: Its title; what was run by default.
        baseline: The run that others are compared with; the first by default.
        images: Whether single points of the data are shown. Those of a federation that was fitted
            in memory are not.
        force: Whether a file that exists is overwritten.

    Returns:
        The page that was written.
    """
    given = [runs] if isinstance(runs, Federation | str | Path) else list(runs)
    target = Path(out)
    files.refuse_file(target, force=force)
    with tempfile.TemporaryDirectory(prefix="corefed-report-") as scratch:
        places: dict[int, Path] = {}
        shown: dict[Path, str] = {}

        def folder_of(run: Run) -> Path:
            if not isinstance(run, Federation):
                return Path(run)
            if id(run) not in places:
                number = len(places) + 1
                places[id(run)] = run.save(Path(scratch) / f"federation-{number}")
                shown[places[id(run)]] = f"Federation object {number}, in memory"
            return places[id(run)]

        folders = [folder_of(run) for run in given]
        first = None if baseline is None else folder_of(baseline)
        making.write(folders, target, title=title, baseline=first, images=images, places=shown)
    return target
