"""From runs to the page: sections are rendered, scripts inlined, and the size kept below 5 MB."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from corefed import __version__
from corefed.base import files
from corefed.base.errors import UserError
from corefed.show.page import charts, gather, points
from corefed.show.page.content import Chapter, Figures, Missing
from corefed.show.page.gather import RunFolder
from corefed.show.page.sections import (
    chosen,
    classes,
    clients,
    comparison,
    cost,
    examples,
    learning,
    overview,
    trust,
)
from corefed.show.page.sections.chosen import Most

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

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
) -> int:
    """Write the page of these runs; returns its size in bytes."""
    charts.require_library()
    if out.is_dir():
        raise UserError(f"{out} is a folder; --out needs a file, such as {out / 'report.html'}.")
    runs, first = _runs(folders, baseline)
    found = [points.load(run) if images else HIDDEN for run in runs]
    content = b""
    for level in LEVELS:
        if level.chapters is not None and len(runs) <= max(1, level.chapters):
            continue  # it would leave nothing out
        content = render(runs, first, found, title, level).encode()
        if len(content) < LARGEST:
            break
    else:
        raise UserError(f"The page would have {len(content) / 1e6:.1f} MB; name fewer runs.")
    files.write_folder(out.parent, [(out.name, content)])
    return len(content)


HIDDEN = Missing("Points are not shown: this page was made with --no-images.")


def _runs(folders: Sequence[Path], baseline: Path | None) -> tuple[list[RunFolder], RunFolder]:
    """All runs, and the baseline, which need not be named twice."""
    places = [folder.resolve() for folder in folders]
    if baseline is not None and baseline.resolve() not in places:
        folders, places = [baseline, *folders], [baseline.resolve(), *places]
    runs = gather.read(folders)
    return runs, runs[0 if baseline is None else places.index(baseline.resolve())]


def render(
    runs: Sequence[RunFolder],
    baseline: RunFolder,
    found: Sequence[points.ShownPoints | Missing],
    title: str,
    level: _Level,
) -> str:
    """The page as text."""
    several = len(runs) > 1
    sections = comparison.sections(runs, baseline) if several else []
    shown = [
        each if level.pictures or isinstance(each, Missing)
        else Missing("Points are left out to keep this page small.")
        for each in found
    ]  # fmt: skip
    chapters = [
        _chapter(run, each, level.most, f"run-{number}-" if several else "", number)
        for number, (run, each) in enumerate(zip(runs, shown, strict=True), 1)
        if level.chapters is None or number <= level.chapters
    ]
    everything = [*sections, *(one for chapter in chapters for one in chapter.sections)]
    contents = [(one.id, one.title) for one in sections or chapters[0].sections]
    contents += [(chapter.id, chapter.title) for chapter in chapters] if several else []
    figures = [
        figure
        for section in everything
        for part in section.parts
        if isinstance(part, Figures)
        for figure in part.items
    ]
    library, script = _library(), _read_asset("script.js")
    compared = f"{len(runs)} runs, compared with {baseline.label}"
    return _template().render(
        title=title or _title(runs),
        subtitle=compared if several else overview.sentence(runs[0]),
        version=__version__,
        date=time.strftime("%d %B %Y, %H:%M"),
        hashes=_hashes(library, script),
        style=_safe(_read_asset("style.css")),
        library=_safe(library),
        script=_safe(script),
        specs=_json({figure.id: figure.spec for figure in figures}),
        notes=[level.note] if level.note else [],
        contents=contents,
        sections=sections,
        chapters=chapters,
    )


def _chapter(
    run: RunFolder, found: points.ShownPoints | Missing, most: Most, prefix: str, number: int
) -> Chapter:
    sections = [
        overview.section(run, prefix),
        learning.section(run, prefix),
        clients.section(run, prefix),
        chosen.section(run, found, most, prefix),
        classes.section(run, prefix),
        trust.section(run, prefix),
        examples.section(run, found, most, prefix),
        cost.section(run, prefix),
    ]
    return Chapter(f"run-{number}", run.label, str(run.path), sections)


def _title(runs: Sequence[RunFolder]) -> str:
    data = list(dict.fromkeys(_short(run.summary["data"]) for run in runs))
    if len(runs) == 1:
        return f"{runs[0].summary['method']} on {data[0]}"
    return f"{len(runs)} runs on {data[0]}" if len(data) == 1 else f"{len(runs)} runs"


def _short(data: str) -> str:
    """Without the folders of a path."""
    kind, _, path = data.partition(":")
    return f"{kind} {Path(path).name}" if path else overview.data_name(data)


# --- HTML -----------------------------------------------------------------------------------------


def _read_asset(name: str) -> str:
    return (resources("corefed.show.page") / name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, in a scope of its own."""
    from vl_convert import javascript_bundle  # of an extra

    bundle = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return _inside_script(f"(()=>{{{bundle}}})();")


def _inside_script(text: str) -> str:
    """Escape whatever could end the script element."""
    return re.sub(r"<(?=/script|!--|script)", r"\\x3C", text, flags=re.IGNORECASE)


def _hashes(*scripts: str) -> str:
    """The only scripts that a browser may run in this page."""
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts]
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # of an extra

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_bind_percent
    )
    return environment.from_string(_read_asset("page.html"))


def _bind_percent(value: object) -> object:
    """Keep a number and its percent sign on one line."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


def _json(value: object) -> Markup:
    from jinja2.utils import htmlsafe_json_dumps  # of an extra

    return htmlsafe_json_dumps(value, separators=(",", ":"))


def _safe(text: str) -> Markup:
    from markupsafe import Markup  # of an extra

    return Markup(text)
