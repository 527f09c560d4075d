"""`corefed bench pays`: where a coreset pays, a part per promise.

    nuts    NUTS on all data, against building a coreset and NUTS on it (`pays_nuts.py`)
    passes  passes and seconds of training, against minibatches of all data (`pays_passes.py`)

A part is a module with two functions: `measure` yields its figures a row at a time, less those it
is given from an earlier run, and `table` makes Markdown of rows. pays.json is written after every
row, so that a run that is stopped keeps what it has measured and goes on from there. The tables are
pays.md, and between a part's own marks of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from corefed.base import files
from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed_studies import pages
from corefed_studies.bench import study

NAME, FILE = "pays", "pays.json"
Row = dict[str, Any]


class Shown(Protocol):
    """Where lines are shown: a console of rich, or the terminal itself."""

    def print(self, text: str) -> object: ...


class Part(Protocol):
    def measure(self, scale: str, console: Shown, known: Sequence[Row]) -> Iterator[Row]: ...
    def table(self, rows: Sequence[Row]) -> str: ...


PARTS = {"nuts": "bench pays", "passes": "bench pays passes"}
"""Names of the parts, and the marks of each on a page."""


def main(
    scale: str,
    out: Path | None,
    console: Shown,
    device_name: str,
    *,
    page: Path | None = None,
    source: Path | None = None,
    parts: Sequence[str] = (),
) -> None:
    """Measure the parts, or read pays.json of `source`; write the figures and their tables.

    Without names, all parts are measured, and of a file those that it has are shown.
    """
    for name in parts:
        if name not in PARTS:
            raise UserError(
                f"There is no part {name!r} of bench pays; there are {', '.join(PARTS)}."
            )
    if source is not None:
        found = study.read(source / FILE if source.is_dir() else source, NAME, list(parts))
        shown = list(parts) or [name for name in PARTS if name in found]
    else:
        shown = list(parts or PARTS)
    if page is not None:
        for name in shown:
            pages.Marked(page, PARTS[name])  # without its marks, it is refused before any work
    if source is None:
        folder = out or Path("runs") / f"bench-pays-{scale}"
        found = measured(scale, folder, console, shown)
    about = f"Scale `{found['scale']}`, {found['machine']}.\n\n"
    texts = [_part(name).table(found[name]) for name in shown]
    if source is None:
        files.write_folder(folder, [("pays.md", (about + "\n".join(texts)).encode())])
        console.print(f"written to {folder / 'pays.md'}")
    for name, text in zip(shown, texts, strict=True):
        if page is not None:
            pages.Marked(page, PARTS[name]).write(about + text)
            console.print(f"written to {page}")


def _part(name: str) -> Part:
    """Imported on request: NUTS needs JAX."""
    return cast("Part", import_module(f"corefed_studies.bench.pays_{name}"))


def measured(
    scale: str,
    folder: Path,
    console: Shown,
    parts: Sequence[str],
    measure: Callable[[str, Shown, Sequence[Row]], Iterator[Row]] | None = None,
) -> dict[str, Any]:
    """All rows of these parts; those of pays.json in the folder are not measured again.

    Rows of the file that `measure` (a part's own, unless given) does not come to are kept.
    """
    path = folder / FILE
    found = {**study.about(NAME, scale, device_for("cpu")), **{name: [] for name in parts}}
    if path.exists():
        before = study.read(path, NAME, [])
        if before["scale"] != scale:
            raise UserError(f"{path} is of scale {before['scale']}; choose another --out.")
        found |= {name: before[name] for name in PARTS if name in before}
    for name in parts:
        known, found[name] = found[name], []
        for row in (measure or _part(name).measure)(scale, console, known):
            found[name].append(row)
            kept = [r for r in known if r not in found[name]]
            study.write(path, {**found, name: [*found[name], *kept]})
        found[name] += [r for r in known if r not in found[name]]
    return study.write(path, found)
