"""`corefed coreset`, `bench`, `reproduce`: coresets alone, measurements, the experiments."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from corefed.commands.options import Json
from corefed.coreset.solvers import DEFAULT, SOLVERS
from corefed.errors import UserError
from corefed.reproduce import NAMES

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

selectors: ways to choose a coreset compared by training on it; paper is hours on a GPU.

million: a coreset of a million points, time and memory.

submodular: greedy selection, beside submodlib where it is installed.

review: whether predictions kept by `corefed predict` reach the promised error rate."""


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


def bench(
    name: Annotated[str, typer.Argument(help="One of the names below.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the figures.")] = None,
    scale: Annotated[
        str, typer.Option(help="Of all but runtime and coreset: quick or paper.")
    ] = "paper",
    page: Annotated[
        Path | None,
        typer.Option(help="Of solvers and selectors: a Markdown page to put the tables into."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Of selectors: runs side by side; as suits the machine if not given."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Of selectors: show this result file, train nothing."),
    ] = None,
) -> None:
    """Measure speed, memory and quality on this machine."""
    _check_scale(scale)
    _check_jobs(jobs)
    import_module("corefed.bench").main(
        name, device=device, out=out, scale=scale, page=page, jobs=jobs, results=source
    )


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="table1, table2, table3, figure2 to figure5; shards-medium, shards-large, grid, "
            "solvers, glm, newcomer, rates."
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
    _check_jobs(jobs)
    import_module("corefed.reproduce").main(
        name, scale, out, jobs=jobs, results=source, page=page, data=data, postcodes=postcodes
    )


def _check_scale(scale: str) -> None:
    if scale not in ("quick", "paper"):
        raise UserError(f"scale is {scale!r}; it must be 'quick' or 'paper'.")


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1.")
