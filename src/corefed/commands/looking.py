"""What there is and what came out: `corefed methods`, `datasets`, `compare`."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from corefed.commands.options import Json
from corefed.errors import UserError
from corefed.methods.registry import METHODS


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="DIR...")],
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the learning curves into this file (.png, .svg).")
    ] = None,
) -> None:
    """Put runs side by side: accuracies, calibration, cost. Unfinished runs are shown as such."""
    from corefed import report

    results = report.load(folders)
    if plot is not None:
        report.plot(results, plot)
    if json:
        typer.echo(jsonlib.dumps(report.comparison_json(results), indent=1))
    else:
        report.console().print(report.comparison_table(results))


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
    from corefed import describe, report

    own = describe.of_method(name)
    for title, settings in ((f"settings of {name}", own), ("of every run", describe.of_run())):
        table = Table("setting", "type", "default", "what it is", title=title)
        for setting in settings:
            table.add_row(*setting)
        report.console().print(table)


def datasets(
    show: Annotated[str | None, typer.Option(help="Print how this data set is dealt.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition to show.")] = None,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Where data lie.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Of --show: a new folder for client-0.npz, ...", metavar="DIR"),
    ] = None,
) -> None:
    """List the data sets, or print a partition: training points of each client and class.

    With --write, each client's points go into a file that a client of a real federation can read.
    """
    from rich.table import Table

    from corefed.data import datasets as known
    from corefed.data import partition as partitions
    from corefed.report import console

    if show is None:
        if write is not None:
            raise UserError("--write needs --show with the data set to write.")
        table = Table("data", "what it is", "usual partition")
        for name, text in known.names().items():
            table.add_row(name, text, partitions.default_for(name))
        console().print(table)
        return
    labels_only = write is None
    dataset = known.load(show, data_dir, seed=seed, clients=clients, labels_only=labels_only)
    spec = partition or partitions.default_for(show)
    splits = partitions.split(spec, dataset, clients, seed)
    table = Table(title=f"{show}, {spec}, seed {seed}: training points")
    numbers = tuple(map(str, range(dataset.classes))) or ("points",)
    columns = dataset.labels or numbers
    for heading in ("client", *columns, "all", "test"):
        table.add_column(heading, justify="right")
    for client, (row, one) in enumerate(
        zip(partitions.table(splits, dataset), splits, strict=True)
    ):
        table.add_row(str(client), *map(str, row), str(sum(row)), str(len(one.test)))
    console().print(table)
    if write is not None:
        from corefed.data import export

        export.write(dataset, splits, write)
        print(f"wrote {clients} files, client-0.npz and so on, into {write}", file=sys.stderr)
    for note in (*dataset.notes, *partitions.notes(spec, splits, dataset)):
        print(f"note: {note}", file=sys.stderr)
