"""What there is and what came out: `corefed datasets`, `compare`, `report`, `watch`."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from corefed.base.errors import UserError
from corefed.commands.options import ClientColumn, Json, Target

REPORT_EXAMPLES = """Examples:

corefed report runs/digits — everything about one run, in report.html.

corefed report runs/a runs/b runs/c --out comparison.html --baseline runs/b"""


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="DIR...")],
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the learning curves into this file (.png, .svg).")
    ] = None,
) -> None:
    """Put runs side by side: accuracies, calibration, cost. Unfinished runs are shown as such."""
    from corefed.show import report

    results = report.load(folders)
    if plot is not None:
        report.plot(results, plot)
    if json:
        typer.echo(jsonlib.dumps(report.comparison_json(results), indent=1))
    else:
        report.console().print(report.comparison_table(results))


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="DIR...")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title; what was run by default.")] = "",
    baseline: Annotated[
        Path | None,
        typer.Option(help="The run others are compared with; the first.", metavar="DIR"),
    ] = None,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Show no points of the data, only figures.")
    ] = False,
) -> None:
    """Write one page about runs: curves, clients, coresets, calibration, doubtful points, cost.

    It needs no other file and no network. Several runs are compared, with paired tests.
    """
    from corefed.show import page

    size = page.write(folders, out, title=title, baseline=baseline, images=not no_images)
    print(f"wrote {out} ({size / 1e6:.1f} MB); open it in a browser")


def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")],
    once: Annotated[bool, typer.Option("--once", help="Show it once, and do not wait.")] = False,
) -> None:
    """Follow a run in the terminal: rounds, time left, metrics, curves, cost. Ctrl-C leaves it."""
    from corefed.show import watch as watching

    raise typer.Exit(watching.watch(folder, once=once))


def datasets(
    show: Annotated[str | None, typer.Option(help="Print how this data set is dealt.")] = None,
    target: Target = None,
    client: ClientColumn = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of a table: a setting of `run`.", metavar="KEY=VALUE"),
    ] = None,
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

    Of tables, also what each column is, and what may go wrong.
    With --write, each client's points go into a file that a client of a real federation can read.
    """
    from rich.table import Table

    from corefed.data import datasets as known
    from corefed.data import partition as partitions
    from corefed.data import validation
    from corefed.settings.config import OWN, resolve
    from corefed.show.report import console

    if show is None:
        if write is not None:
            raise UserError("--write needs --show with the data set to write.")
        table = Table("data", "what it is", "usual partition")
        for name, text in known.names().items():
            table.add_row(name, text, partitions.default_for(name))
        console().print(table)
        return
    if show.startswith(OWN):
        from corefed.training import setup

        flags = {
            "data": show,
            "target": target,
            "client_column": client,
            "partition": partition,
            "clients": clients,
            "seeds": str(seed),
            "data_dir": None if data_dir is None else str(data_dir),
        }
        given = {key: value for key, value in flags.items() if value is not None}
        run = setup.concrete(resolve(None, given, assignments or [])).run
        spec = run.partition
        dataset = setup.pool(run, spec, seed)
    else:
        if target or client or assignments:
            raise UserError("--target, --client and --set are for table:PATH and npz:PATH.")
        labels_only = write is None
        dataset = known.load(show, data_dir, seed=seed, clients=clients, labels_only=labels_only)
        spec = partition or partitions.default_for(show)
    clients = partitions.client_count(spec, dataset, clients)
    splits = partitions.split(spec, dataset, clients, seed)
    if (about := validation.columns(dataset)) is not None:
        console().print(about)
    table = Table(title=f"{show}, {spec}, seed {seed}: training points")
    numbers = tuple(map(str, range(dataset.classes))) or ("points",)
    columns = dataset.labels or numbers
    for heading in ("client", *columns, "all", "test"):
        table.add_column(heading, justify="right")
    names = partitions.client_names(spec, dataset, clients)
    rows = partitions.table(splits, dataset)
    for name, row, one in zip(names, rows, splits, strict=True):
        table.add_row(
            name.removeprefix("client "), *map(str, row), str(sum(row)), str(len(one.test))
        )
    console().print(table)
    if write is not None:
        from corefed.data import export

        export.write(dataset, splits, write)
        print(f"wrote {clients} files, client-0.npz and so on, into {write}", file=sys.stderr)
    own = validation.warnings(dataset) if show.startswith((*OWN, "image-folder:")) else []
    for note in (*dataset.notes, *partitions.notes(spec, splits, dataset), *own):
        print(f"note: {note}", file=sys.stderr)
