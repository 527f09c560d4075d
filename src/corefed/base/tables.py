"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of one table."""
    head, *body = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    return [head, "|---" * len(columns) + "|", *body]
