"""Run a benchmark of several parts: measure, keep rows as they come, write tables and pages.

A part is a module with two functions: `measure` yields its figures a row at a time, less those it
is given from an earlier run, and `table` makes Markdown of rows. NAME.json is written after every
row, so that a run that is stopped keeps what it has measured and goes on from there. The tables are
NAME.md, and between a part's own marks of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from corefed.base import files
from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed_studies import pages
from corefed_studies.bench import study

Row = dict[str, Any]


class Shown(Protocol):
    """Where lines are shown: a console of rich, or the terminal itself."""

    def print(self, text: str) -> object: ...


Measure = Callable[[str, Any, Sequence[Row]], Iterator[Row]]
"""From a scale, where to show lines, and the rows that are known, to all rows."""


class Module(Protocol):
    measure: Measure

    def table(self, rows: Sequence[Row]) -> str: ...


class Part(NamedTuple):
    module: str
    marks: str  # on a page

    @property
    def code(self) -> Module:
        """Imported on request: NUTS needs JAX."""
        return cast("Module", import_module(f"corefed_studies.bench.{self.module}"))


class Parted(NamedTuple):
    name: str
    parts: Mapping[str, Part]  # by the field of NAME.json that has its rows

    def main(
        self,
        scale: str,
        out: Path | None,
        console: Shown,
        *,
        page: Path | None = None,
        source: Path | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        """Measure the parts, or read NAME.json of `source`; write the figures and their tables.

        Without names, all parts are measured, and of a file those that it has are shown.
        """
        for each in parts:
            if each not in self.parts:
                raise UserError(
                    f"There is no part {each!r} of bench {self.name}; there are "
                    f"{', '.join(self.parts)}."
                )
        shown = list(parts or self.parts)
        if source is not None:
            path = source / f"{self.name}.json" if source.is_dir() else source
            found = study.read(path, self.name, list(parts))
            shown = [each for each in shown if each in found]
        if page is not None:
            for each in shown:
                pages.Marked(page, self.parts[each].marks)  # refused before any work
        folder = out or Path("runs") / f"bench-{self.name}-{scale}"
        if source is None:
            found = self.measured(scale, folder, console, shown)
        about = f"Scale `{found['scale']}`, {found['machine']}.\n\n"
        texts = [self.parts[each].code.table(found[each]) for each in shown]
        if source is None:
            written = f"{self.name}.md"
            files.write_folder(folder, [(written, (about + "\n".join(texts)).encode())])
            console.print(f"written to {folder / written}")
        for each, text in zip(shown, texts, strict=True):
            if page is not None:
                pages.Marked(page, self.parts[each].marks).write(about + text)
                console.print(f"written to {page}")

    def measured(
        self,
        scale: str,
        folder: Path,
        console: Shown,
        parts: Sequence[str],
        measure: Measure | None = None,
    ) -> dict[str, Any]:
        """All rows of these parts; those of NAME.json in the folder are not measured again.

        Rows of the file that `measure` (a part's own, unless given) does not come to are kept.
        """
        path = folder / f"{self.name}.json"
        found = {**study.about(self.name, scale, device_for("cpu")), **{p: [] for p in parts}}
        if path.exists():
            before = study.read(path, self.name, [])
            if before["scale"] != scale:
                raise UserError(f"{path} is of scale {before['scale']}; choose another --out.")
            found |= {each: before[each] for each in self.parts if each in before}
        for each in parts:
            known, found[each] = found[each], []
            for row in (measure or self.parts[each].code.measure)(scale, console, known):
                found[each].append(row)
                kept = [r for r in known if r not in found[each]]
                study.write(path, {**found, each: [*found[each], *kept]})
            found[each] += [r for r in known if r not in found[each]]
        return study.write(path, found)
