"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")]
Target = Annotated[
    str | None, typer.Option(help="Of a table: the column to predict.", metavar="COLUMN")
]
ClientColumn = Annotated[
    str | None,
    typer.Option(help="Of a table: the column whose values are clients.", metavar="COLUMN"),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data lie, before $COREFED_DATA and the cache.")
]
SettingOptions = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting.", metavar="KEY=VALUE")
]
Seed = Annotated[int | None, typer.Option(help="A seed of the run; its first if not given.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
