"""`corefed methods`: what methods there are, and their settings."""

from __future__ import annotations

from typing import Annotated

import typer

from corefed.methods.registry import METHODS


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method's settings.")] = None,
) -> None:
    """List the methods, or every setting of one."""
    from rich.console import Console
    from rich.table import Table

    if name is None:
        table = Table("method", "what it is")
        for known, entry in METHODS.items():
            table.add_row(known, entry.description)
        Console().print(table)
        return
    from corefed.settings import describe
    from corefed.show import report

    own = describe.of_method(name)
    for title, settings in ((f"settings of {name}", own), ("of every run", describe.of_run())):
        table = Table("setting", "type", "default", "what it is", title=title)
        for setting in settings:
            table.add_row(*setting)
        report.console().print(table)
