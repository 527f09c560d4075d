"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[
    str | None, typer.Option(help="Of a table: the column to predict.", metavar="COLUMN")
]
ClientColumn = Annotated[
    str | None,
    typer.Option(help="Of a table: the column whose values are clients.", metavar="COLUMN"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
