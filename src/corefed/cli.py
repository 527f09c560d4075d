"""The command line. Nothing here imports torch until a command needs it: `--help` answers at once.

Exit codes: 0 done, 2 a mistake the user can mend (one line on stderr), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json as jsonlib
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import click
import typer

from corefed import __version__
from corefed.coreset.solvers import DEFAULT, SOLVERS
from corefed.errors import UserError
from corefed.federation.operate.commands import app as federation
from corefed.methods.registry import METHODS
from corefed.reproduce import NAMES

app = typer.Typer(
    help="Personalised Bayesian federated learning on coresets.",
    epilog="Start with: corefed run. Then: corefed run --method pfedbayes, and corefed compare "
    "runs/*.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(federation, name="federation")

RUN_EXAMPLES = """Examples:

corefed run — ten clients learn the built-in digits on coresets.

corefed run --data mnist --partition shards-medium --fraction 0.1 --rounds 100 --seed 0,1,2

corefed run --method random-subset --fraction 0.1 --set redraw_every=100 --out runs/random

corefed run --config experiment.toml --set zeta=10 --set hidden=200,100

corefed run --resume runs/random — after a crash or Ctrl-C; ends as if it had never stopped.

Settings without a flag are given by --set; `corefed methods NAME` lists them all."""

CORESET_EXAMPLES = """Examples:

corefed coreset --data digits --size 100 — the built-in digits, a small network.

corefed coreset --data mnist --size 1% --out runs/mnist-coreset

corefed coreset --data npz:points.npz --size 500 --model logistic — arrays X and y of a file.

corefed coreset --data digits --size 100 --solver aiht-2 --draws 400 --json

Solvers:

""" + "\n\n".join(f"{name}: {entry.description}." for name, entry in SOLVERS.items())

# The command line's own help of a positional argument is not shown by every typer and click.
REPRODUCE_NAMES = "Names:\n\n" + "\n\n".join(
    f"{name}: {entry.description}." for name, entry in NAMES.items()
)

BENCH_NAMES = """Names:

runtime: all clients at once against one after the other.

coreset: what a round on coresets costs beside one on all data.

solvers: the coreset solvers compared, quality and time.

million: a coreset of a million points, time and memory.

submodular: greedy selection, beside submodlib where it is installed."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Names = ", ".join(METHODS)


@app.command(epilog=RUN_EXAMPLES)
def run(
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    method: Annotated[str | None, typer.Option(help=f"One of {Names}.")] = None,
    data: Annotated[str | None, typer.Option(help="A data set; see `corefed datasets`.")] = None,
    partition: Annotated[
        str | None, typer.Option(help="How data are dealt: shards-medium, labels:C, dirichlet:A...")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    local_steps: Annotated[int | None, typer.Option(help="Gradient steps a round.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Part of each client's points it trains on, in (0, 1].")
    ] = None,
    seed: Annotated[
        list[str] | None, typer.Option(help="A seed, or several: 0,1,2. May be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; runs/<data>-<method>-<time> by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder.", metavar="DIR")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting.", metavar="KEY=VALUE")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data lie, before $COREFED_DATA and the cache.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")] = False,
    json: Json = False,
) -> None:
    """Train a federation and evaluate it. With no option: coreset-pfedbayes on the digits."""
    flags = {
        "method": method,
        "data": data,
        "partition": partition,
        "clients": clients,
        "rounds": rounds,
        "local_steps": local_steps,
        "fraction": fraction,
        "seeds": ",".join(seed) if seed else None,
        "device": device,
        "data_dir": str(data_dir) if data_dir is not None else None,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    from corefed.running import execute

    code = execute(config, given, assignments or [], out=out, resume=resume, quiet=quiet, json=json)
    raise typer.Exit(code)


@app.command(epilog=CORESET_EXAMPLES)
def coreset(
    data: Annotated[
        str, typer.Option(help="A data set (see `corefed datasets`), or npz:PATH with X and y.")
    ],
    size: Annotated[str, typer.Option(help="Points to keep: 500, or 0.05 or 5% of them.")],
    solver: Annotated[str, typer.Option(help="One of the solvers below.")] = DEFAULT,
    model: Annotated[str, typer.Option(help="auto, mlp, logistic, poisson or linear.")] = "auto",
    hidden: Annotated[int, typer.Option(help="Width of the network's hidden layer, or 0.")] = 100,
    steps: Annotated[int, typer.Option(help="Training steps of the network's posterior.")] = 1000,
    draws: Annotated[
        int,
        typer.Option(
            help="Draws to fit on; 0 takes four times the size, at least 400 (a network: 1000)."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data lie, before $COREFED_DATA and the cache.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; runs/coreset-<data>-<time> by default.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")] = False,
    json: Json = False,
) -> None:
    """Choose a weighted subset that stands in for all data: indices, weights, how good it is."""
    from corefed.building import execute

    code = execute(
        data,
        size,
        solver=solver,
        model=model,
        hidden=hidden,
        steps=steps,
        draws=draws,
        seed=seed,
        device=device,
        data_dir=data_dir,
        out=out,
        json=json,
        quiet=quiet,
    )
    raise typer.Exit(code)


@app.command()
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


@app.command()
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


@app.command()
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


@app.command(epilog=BENCH_NAMES)
def bench(
    name: Annotated[str, typer.Argument(help="runtime, coreset, solvers, million or submodular.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the figures.")] = None,
    scale: Annotated[
        str, typer.Option(help="Of solvers, million and submodular: quick or paper.")
    ] = "paper",
    page: Annotated[
        Path | None, typer.Option(help="Of solvers: a Markdown page to put the tables into.")
    ] = None,
) -> None:
    """Measure speed, memory and (solvers) quality on this machine."""
    _check_scale(scale)
    import_module("corefed.bench").main(name, device=device, out=out, scale=scale, page=page)


@app.command(epilog=REPRODUCE_NAMES)
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="table1, table2, table3, figure2 to figure5; shards-medium, shards-large, grid, "
            "solvers, glm."
        ),
    ],
    scale: Annotated[
        str, typer.Option(help="quick: minutes on two cores; paper: what the documentation shows.")
    ] = "quick",
    out: Annotated[Path | None, typer.Option(help="Folder for the runs.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Of tables: runs side by side; as suits the machine if not given."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Of tables: make them from this result file, train nothing."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Of tables: a Markdown page with marks to put them into.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Of figure2: a CSV or array of latitude, longitude and price; of table2: a folder "
            "of images."
        ),
    ] = None,
    postcodes: Annotated[
        Path | None,
        typer.Option(help="Of figure2: where postcodes are, for a Land Registry price-paid CSV."),
    ] = None,
) -> None:
    """Run the experiments behind a table or figure, with the paper's figures beside ours.

    A command that was stopped goes on where it was.
    """
    _check_scale(scale)
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1.")
    import_module("corefed.reproduce").main(
        name, scale, out, jobs=jobs, results=source, page=page, data=data, postcodes=postcodes
    )


def _check_scale(scale: str) -> None:
    if scale not in ("quick", "paper"):
        raise UserError(f"scale is {scale!r}; it must be 'quick' or 'paper'.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"corefed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `corefed` itself."""


def main(arguments: list[str] | None = None) -> None:
    """The entry point: runs a command and turns every expected failure into one line."""
    try:
        code = app(arguments, standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except click.ClickException as error:  # a flag that click itself refuses
        _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)  # 128 + SIGINT, what a shell expects
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str) -> None:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(2)
