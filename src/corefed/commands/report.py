"""`corefed report`: one page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corefed.base import files
from corefed.base.shown import say
from corefed.commands.options import Force

EXAMPLES = """Examples:

corefed report runs/digits — everything about one run, in report.html.

corefed report runs/a runs/b runs/c --out comparison.html --baseline runs/b"""


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="DIR...")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title; what was run by default.")] = "",
    baseline: Annotated[
        Path | None,
        typer.Option(help="The run others are compared with; the first.", metavar="DIR"),
    ] = None,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Show no points of the data, only numbers.")
    ] = False,
    force: Force = False,
) -> None:
    """Write one page about runs: curves, clients, coresets, calibration, doubtful points, cost.

    It needs no other file and no network. Several runs are compared, with paired tests.
    """
    from corefed.show import page  # torch takes a second

    files.refuse_file(out, force=force)
    size = page.write(folders, out, title=title, baseline=baseline, images=not no_images)
    say(f"wrote {out} ({size / 1e6:.1f} MB); open it in a browser")
