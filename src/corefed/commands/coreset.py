"""`corefed coreset`: a coreset of one data set, without a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corefed.commands.options import Json
from corefed.coreset.solvers import DEFAULT, SOLVERS

CORESET_EXAMPLES = """Examples:

corefed coreset --data digits --size 100 — the built-in digits, a small network.

corefed coreset --data mnist --size 1% --out runs/mnist-coreset

corefed coreset --data npz:points.npz --size 500 --model logistic — arrays X and y of a file.

corefed coreset --data digits --size 100 --solver aiht-2 --draws 400 --json

Solvers:

""" + "\n\n".join(f"{name}: {entry.description}." for name, entry in SOLVERS.items())


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
    from corefed.commands.building import execute

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
