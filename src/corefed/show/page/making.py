"""From runs to the page: sections are rendered, scripts inlined, and the size kept below 5 MB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from corefed.base import files
from corefed.base.errors import UserError
from corefed.show.page import charts, gather, paired, points
from corefed.show.page.content import Chapter, Missing, Section, View
from corefed.show.page.gather import RunFolder
from corefed.show.page.html import whole
from corefed.show.page.sections import (
    chosen,
    classes,
    clients,
    comparison,
    cost,
    examples,
    in_short,
    learning,
    overview,
    sites,
    trust,
)
from corefed.show.page.sections.chosen import Most

LARGEST = 5_000_000
"""Bytes of a page: small enough for a phone and for most mail servers."""


class _Level(NamedTuple):
    """How much of each run is shown, and a note on the rest."""

    most: Most
    pictures: bool = True
    chapters: int | None = None  # runs that are shown one by one; None: all
    note: str = ""


LEVELS = (
    _Level(Most()),
    _Level(
        Most(clients=5, per_class=2, examples=6),
        note="To keep this page small, it shows fewer points of each run.",
    ),
    _Level(Most(), pictures=False, note="To keep this page small, it shows no points."),
    _Level(
        Most(),
        pictures=False,
        chapters=8,
        note="To keep this page small, it shows no points, and details of the first 8 runs only; "
        "make separate pages for the others.",
    ),
    _Level(
        Most(),
        pictures=False,
        chapters=0,
        note="To keep this page small, it shows the comparison only; make separate pages for "
        "single runs.",
    ),
)


def write(
    folders: Sequence[Path],
    out: Path,
    *,
    title: str = "",
    baseline: Path | None = None,
    images: bool = True,
    places: Mapping[Path, str] | None = None,
) -> int:
    """Write the page of these runs; returns its size in bytes.

    `places` are what to call folders that a reader will not find.
    """
    charts.require_library()
    if out.is_dir():
        raise UserError(f"{out} is a folder; --out needs a file, such as {out / 'report.html'}.")
    content = text(folders, title=title, baseline=baseline, images=images, places=places).encode()
    files.write_folder(out.parent, [(out.name, content)])
    return len(content)


def text(
    folders: Sequence[Path],
    *,
    title: str = "",
    baseline: Path | None = None,
    images: bool = True,
    places: Mapping[Path, str] | None = None,
) -> str:
    """The page of these runs, as rich as fits below 5 MB."""
    runs, first = _runs(folders, baseline, places)
    found = [points.load(run) if images else HIDDEN for run in runs]
    size = 0
    for level in LEVELS:
        if level.chapters is not None and len(runs) <= max(1, level.chapters):
            continue  # it would leave nothing out
        content = render(runs, first, found, title, level)
        size = len(content.encode())
        if size < LARGEST:
            return content
    raise UserError(f"The page would have {size / 1e6:.1f} MB; name fewer runs.")


VIEWS = {"summary": "Summary", "sites": "Sites", "coresets": "Coresets"}
HIDDEN = Missing("Points are not shown: this page was made with --no-images.")


def _runs(
    folders: Sequence[Path], baseline: Path | None, shown: Mapping[Path, str] | None = None
) -> tuple[list[RunFolder], RunFolder]:
    """All runs, and the baseline, which need not be named twice."""
    places = [folder.resolve() for folder in folders]
    if baseline is not None and baseline.resolve() not in places:
        folders, places = [baseline, *folders], [baseline.resolve(), *places]
    runs = gather.read(folders, shown)
    return runs, runs[0 if baseline is None else places.index(baseline.resolve())]


def render(
    runs: Sequence[RunFolder],
    baseline: RunFolder,
    found: Sequence[points.ShownPoints | Missing],
    title: str,
    level: _Level,
) -> str:
    """The page as text."""
    views = _views(runs, baseline, found, level)
    specs = {
        figure.id: figure.spec
        for view in views
        for figure in view.figures
        if figure.spec is not None
    }
    several = len(runs) > 1
    compared = f"{len(runs)} runs, compared with {baseline.label}"
    return whole(
        "page.html",
        title=title or _title(runs),
        subtitle=compared if several else overview.sentence(runs[0]),
        specs=specs,
        notes=[level.note] if level.note else [],
        views=views,
    )


def _views(
    runs: Sequence[RunFolder],
    baseline: RunFolder,
    found: Sequence[points.ShownPoints | Missing],
    level: _Level,
) -> list[View]:
    """The summary, the sites and the coresets, of all runs and of single ones."""
    several = len(runs) > 1
    shown = [
        each if level.pictures or isinstance(each, Missing)
        else Missing("Points are left out to keep this page small.")
        for each in found
    ]  # fmt: skip
    own = [
        _of_run(run, each, level.most, f"run-{number}-" if several else "")
        for number, (run, each) in enumerate(zip(runs, shown, strict=True), 1)
        if level.chapters is None or number <= level.chapters
    ]
    compared = paired.comparisons(runs, baseline)
    shared: dict[str, list[Section]] = {"summary": [in_short.section(runs, compared)]}
    if several:
        shared["summary"] += comparison.sections(runs, baseline, compared)
        shared["sites"], shared["coresets"] = sites.section(runs), chosen.compared(runs)
    views = []
    for name, title in VIEWS.items():
        sections = shared.get(name, [])
        if not several:
            views.append(View(name, title, [*sections, *own[0][name]]))
            continue
        end = "" if name == "summary" else f"-{name}"
        first = _opened(name, runs)
        chapters = [
            Chapter(f"run-{number}{end}", run.label, run.where, parts[name], number == first)
            for number, (run, parts) in enumerate(zip(runs, own, strict=False), 1)
        ]
        if sections or chapters:
            views.append(View(name, title, sections, chapters))
    return views


def _opened(view: str, runs: Sequence[RunFolder]) -> int:
    """Number of the run whose chapter is open: of coresets, the first run that has one."""
    if view == "summary":
        return 0  # the comparison is enough at first
    small = [n for n, run in enumerate(runs, 1) if run.summary["coreset"]["fraction"] < 1]
    return small[0] if view == "coresets" and small else 1


def _of_run(
    run: RunFolder, found: points.ShownPoints | Missing, most: Most, prefix: str
) -> dict[str, list[Section]]:
    """The sections of one run, by view."""
    return {
        "summary": [
            overview.section(run, prefix),
            learning.section(run, prefix),
            trust.section(run, prefix),
            cost.section(run, prefix),
        ],
        "sites": [
            clients.section(run, prefix),
            classes.section(run, prefix),
            examples.section(run, found, most, prefix),
        ],
        "coresets": [chosen.section(run, found, most, prefix)],
    }


def _title(runs: Sequence[RunFolder]) -> str:
    data = list(dict.fromkeys(_short(run.summary["data"]) for run in runs))
    if len(runs) == 1:
        return f"{runs[0].summary['method']} on {data[0]}"
    return f"{len(runs)} runs on {data[0]}" if len(data) == 1 else f"{len(runs)} runs"


def _short(data: str) -> str:
    """Without the folders of a path."""
    kind, _, path = data.partition(":")
    return f"{kind} {Path(path).name}" if path else overview.data_name(data)
