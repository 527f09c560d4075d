"""`corefed compare`: runs side by side."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from corefed.commands.options import Json


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="DIR...")],
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the learning curves into this file (.png, .svg).")
    ] = None,
) -> None:
    """Put runs side by side: accuracies, calibration, cost. Unfinished runs are shown as such."""
    from corefed.show import report  # torch takes a second

    results = report.load(folders)
    if plot is not None:
        report.plot(results, plot)
    if json:
        typer.echo(jsonlib.dumps(report.comparison_json(results), indent=1))
    else:
        report.console().print(report.comparison_table(results))
