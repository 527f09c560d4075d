"""`corefed datasets`: list the data sets, or show how one is split."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corefed.base.errors import UserError
from corefed.base.shown import say, say_note
from corefed.commands.options import ClientColumn, DataDir, Target

if TYPE_CHECKING:
    from corefed.data.dataset import Dataset
    from corefed.data.partition import Split


def datasets(
    show: Annotated[str | None, typer.Option(help="Print how this data set is split.")] = None,
    target: Target = None,
    client: ClientColumn = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of a table: a setting of `run`.", metavar="KEY=VALUE"),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="The partition to show.")] = None,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    data_dir: DataDir = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Of --show: a new folder for client-0.npz, ...", metavar="DIR"),
    ] = None,
) -> None:
    """List the data sets, or print a partition: training points of each client and class.

    For tables, also what each column is, and what may go wrong.
    With --write, each client's points go into a file that a client of a real federation can read.
    Rows of a table are written as a run trains on them: scaled, and missing numbers filled in.
    """
    from corefed.data import export, hints, validation
    from corefed.data.datasets import load  # torch takes a second
    from corefed.data.partition import default_for, notes
    from corefed.settings.config import resolve
    from corefed.settings.run import OWN
    from corefed.training import setup

    if show is None:
        if write is not None:
            raise UserError("--write needs --show with the data set to write.")
        _print_names()
        return
    own, labels_only = show.startswith(OWN), write is None
    if own or (show.startswith("image-folder:") and (client or assignments)):
        flags = {
            "data": show,
            "target": target,
            "client_column": client,
            "partition": partition,
            "clients": clients,
            "seeds": str(seed),
            "data_dir": None if data_dir is None else str(data_dir),
            "embedding": "none" if labels_only and not own else None,
        }
        given = {key: value for key, value in flags.items() if value is not None}
        run = setup.concrete(resolve(None, given, assignments or [])).run
        spec, scale = run.partition, run.scale
        dataset = setup.pool(run, spec, seed, labels_only=labels_only and not own)
    else:
        if target or client or assignments:
            raise UserError(
                "--target, --client and --set are for table:PATH and npz:PATH, --client and --set "
                "also for image-folder:PATH."
            )
        dataset = load(show, data_dir, seed=seed, clients=clients, labels_only=labels_only)
        spec, scale = partition or default_for(show), "unit"
    splits = _print_split(show, dataset, spec, clients, seed)
    if write is not None:
        export.write(dataset, splits, write, scale)
        say(f"wrote {len(splits)} files, client-0.npz and so on, into {write}", file=sys.stderr)
    checked = own or show.startswith("image-folder:")
    warnings = validation.find_warnings(dataset) if checked else []
    warnings += hints.find(dataset, splits) if own else []
    for note in (*dataset.notes, *notes(spec, splits, dataset), *warnings):
        say_note(note)


def _print_names() -> None:
    from rich.table import Table

    from corefed.data.datasets import names  # torch takes a second
    from corefed.data.partition import default_for
    from corefed.show.report import console

    table = Table("data", "what it is", "usual partition")
    for name, text in names().items():
        table.add_row(name, text, default_for(name))
    console().print(table)


def _print_split(name: str, dataset: Dataset, spec: str, clients: int, seed: int) -> list[Split]:
    """Print a partition; for tables, also what each column is."""
    from rich.table import Table

    from corefed.data import partition, validation  # torch takes a second
    from corefed.show.report import console

    clients = partition.client_count(spec, dataset, clients)
    splits = partition.split(spec, dataset, clients, seed)
    if (about := validation.column_table(dataset)) is not None:
        console().print(about)
    table = Table(title=f"{name}, {spec}, seed {seed}: training points")
    numbers = tuple(map(str, range(dataset.classes))) or ("points",)
    for heading in ("client", *(dataset.labels or numbers), "all", "test"):
        table.add_column(heading, justify="right")
    names = partition.client_names(spec, dataset, clients)
    rows = partition.count_classes(splits, dataset)
    for client, row, one in zip(names, rows, splits, strict=True):
        cells = map(str, (*row, sum(row), len(one.test)))
        table.add_row(client.removeprefix("client "), *cells)
    console().print(table)
    return splits
