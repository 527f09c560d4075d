"""`corefed watch`: follow a run in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from corefed.commands.options import RunFolder


def watch(
    folder: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and do not wait.")] = False,
) -> None:
    """Follow a run in the terminal: rounds, time left, metrics, curves, cost. Ctrl-C leaves it."""
    from corefed.show.watch import follow  # rich takes a tenth of a second

    raise typer.Exit(follow(folder, once=once))
