"""`corefed watch`: follow a run in the terminal, or as a page in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corefed.base.errors import UserError
from corefed.commands.options import RunFolder

if TYPE_CHECKING:
    from corefed.show.live import News


def watch(
    folder: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and do not wait.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Show it as a page in a browser of this machine.")
    ] = False,
    port: Annotated[
        int, typer.Option(help="Of the page; any free one by default.", min=0, max=65535)
    ] = 0,
) -> None:
    """Follow a run in the terminal: rounds, time left, metrics, curves, cost. Ctrl-C leaves it.

    With --web it is a page that refreshes itself, with a button that stops the run after its round.
    It is served on 127.0.0.1, at an address that nobody else can guess.
    """
    if web and once:
        raise UserError("--web and --once exclude each other.")
    if port and not web:
        raise UserError("--port is the port of the page; it needs --web.")
    if web:
        from corefed.show import live  # torch takes a second

        raise typer.Exit(live.serve(folder, port=port, news=_news))
    from corefed.show.watch import follow  # rich takes a tenth of a second

    raise typer.Exit(follow(folder, once=once))


def _news(folder: Path) -> News:
    """Of a real federation's run, what its server knows beside the rounds."""
    from corefed.federation import events
    from corefed.federation.operate.run_state import read_silent
    from corefed.show.live import News
    from corefed.training import record

    if not (folder / record.EVENTS).exists():
        return News()
    silent = read_silent(folder)
    said = [events.sentence(event) for event in events.read(folder / record.EVENTS)]
    return News(silent.names, silent.since, said)
