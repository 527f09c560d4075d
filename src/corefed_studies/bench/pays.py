"""`corefed bench pays`: where a coreset pays, a part per promise.

    nuts    NUTS on all data, against building a coreset and NUTS on it (`pays_nuts.py`)

A part is a function that yields its figures a row at a time, less those it is given from an earlier
run, and one of rows -> Markdown; both are in `PARTS`. pays.json is written after every row, so that
a run that is stopped keeps what it has measured and goes on from there. The tables are pays.md, and
between the marks of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from corefed.base import files
from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed_studies import pages
from corefed_studies.bench import pays_nuts, study

NAME, FILE = "pays", "pays.json"
Row = dict[str, Any]


class Part(NamedTuple):
    measure: Callable[[str, Console, Sequence[Row]], Iterator[Row]]
    table: Callable[[Sequence[Row]], str]


PARTS = {"nuts": Part(pays_nuts.measure, pays_nuts.table)}


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device_name: str,
    *,
    page: Path | None = None,
    source: Path | None = None,
) -> None:
    """Measure every part, or read pays.json of `source`; write the figures and their tables."""
    marked = pages.Marked(page, "bench pays") if page is not None else None
    if source is not None:
        found = study.read(source / FILE if source.is_dir() else source, NAME, list(PARTS))
    else:
        folder = out or Path("runs") / f"bench-pays-{scale}"
        found = measured(scale, folder, console)
    text = f"Scale `{found['scale']}`, {found['machine']}.\n\n"
    text += "\n".join(part.table(found[name]) for name, part in PARTS.items())
    if source is None:
        files.write_folder(folder, [("pays.md", text.encode())])
        console.print(f"written to {folder / 'pays.md'}")
    if marked is not None:
        marked.write(text)
        console.print(f"written to {page}")


def measured(scale: str, folder: Path, console: Console) -> dict[str, Any]:
    """All rows of all parts; those of pays.json in the folder are not measured again."""
    path = folder / FILE
    found = {**study.about(NAME, scale, device_for("cpu")), **{name: [] for name in PARTS}}
    if path.exists():
        before = study.read(path, NAME, list(PARTS))
        if before["scale"] != scale:
            raise UserError(f"{path} is of scale {before['scale']}; choose another --out.")
        found |= {name: before[name] for name in PARTS}
    for name, part in PARTS.items():
        known, found[name] = found[name], []
        for row in part.measure(scale, console, known):
            found[name].append(row)
            kept = [r for r in known if r not in found[name]]
            study.write(path, {**found, name: [*found[name], *kept]})
    return study.write(path, found)
