"""Tables as Markdown, as a page of HTML, and as a marked part of a page that people wrote."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from corefed.base.errors import UserError
from corefed.base.tables import markdown_table


class Table(NamedTuple):
    """Text by row and column; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""  # below the table


def markdown(tables: Sequence[Table]) -> str:
    text: list[str] = []
    for table in tables:
        text += [f"**{table.title}**", "", *markdown_table(table.columns, table.rows), ""]
        text += [table.note, ""] if table.note else []
    return "\n".join(text)


STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
td, tbody th { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #8888; vertical-align: bottom; }
td.up { color: light-dark(#0a6b2d, #6fd493); }
td.down { color: light-dark(#a3230f, #f2937f); }
p.note { max-width: 46rem; color: light-dark(#444, #bbb); }
@media print { body { margin: 0; } }
"""


def web(title: str, tables: Sequence[Table]) -> str:
    """One self-contained HTML file. Differences are coloured by their sign."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for table in tables:
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.columns)
        rows = "\n".join(_web_row(row) for row in table.rows)
        body += [
            f"<h2>{html.escape(table.title)}</h2>",
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n'
            "</tbody></table></div>",
        ]
        body += [f'<p class="note">{html.escape(table.note)}</p>'] if table.note else []
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _web_row(row: Sequence[str]) -> str:
    first, *rest = row
    cells = [f'<th scope="row">{html.escape(first)}</th>']
    signs = {"+": ' class="up"', "-": ' class="down"'}
    for cell in rest:
        differs = len(cell) > 1 and not cell.startswith("+0.00")
        cells.append(f"<td{signs.get(cell[0], '') if differs else ''}>{html.escape(cell)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


class Marked:
    """The part of a page between two marks, which a command rewrites."""

    def __init__(self, page: Path, name: str) -> None:
        """Reads the page now, so that a page without marks is refused before any work."""
        self.page = page
        self.begin, self.end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        try:
            text = page.read_text(encoding="utf-8")
            self._before, rest = text.split(self.begin)
            self.part, self._after = rest.split(self.end)
        except OSError as error:
            raise UserError(f"Cannot read {page}: {error.strerror}.") from error
        except ValueError as error:
            raise UserError(
                f"{page} must have {self.begin} and {self.end} once each, in this order."
            ) from error

    def write(self, text: str) -> None:
        content = f"{self._before}{self.begin}\n{text}{self.end}{self._after}"
        self.page.write_text(content, encoding="utf-8")


def make(folder: Path) -> Path:
    """The folder, made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot make the folder {folder}: {error.strerror}.") from error
    return folder


def put(folder: Path, name: str, tables: Sequence[Table], marked: Marked | None = None) -> None:
    """Tables as NAME.md and NAME.html in a folder, and in the marked part of a page."""
    text = markdown(tables)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.html").write_text(web(f"corefed: {name}", tables), encoding="utf-8")
    if marked is not None:
        marked.write(text)
