"""`corefed compare`: runs side by side, and sentences that say what the table shows."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from corefed.base.shown import say, say_note
from corefed.commands.options import Json


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or folders that hold some.", metavar="DIR..."),
    ],
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the learning curves into this file (.png, .svg).")
    ] = None,
) -> None:
    """Put runs side by side: accuracies, calibration, cost. Unfinished runs are shown as such.

    Beneath the table are the folders, the settings in which runs differ,
    and sentences that say what the table shows. Seconds are of training,
    selection included. A pass is one point forward and backward through the
    network; a forward pass alone counts a third. Both are sums over seeds.
    """
    from corefed.show import curves, report, verdict  # rich takes a while

    runs, others = report.find_runs(folders)
    if runs and others:
        say_note(f"no runs: {', '.join(map(str, others))}")
    results = report.load(runs or folders)
    if plot is not None:
        curves.plot(results, plot)
    if json:
        say(jsonlib.dumps(report.comparison_json(results), indent=1))
    else:
        report.console().print(report.comparison_table(results))
        for line in ("", *report.legend(results), "", *verdict.sentences(results)):
            say(report.wrapped(line))
