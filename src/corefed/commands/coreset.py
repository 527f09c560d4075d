"""`corefed coreset`: a coreset of one data set, without a federation."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.base.shown import say
from corefed.commands.options import DataDir, Json, Quiet
from corefed.coreset.solvers import DEFAULT, SOLVERS

EXAMPLES = """Examples:

corefed coreset --data digits --size 100 — the built-in digits, a small network.

corefed coreset --data mnist --size 1% --out runs/mnist-coreset

corefed coreset --data npz:points.npz --size 500 --model logistic — arrays X and y of a file.

corefed coreset --data digits --size 100 --solver aiht-2 --draws 400 --json

Solvers:

""" + "\n\n".join(f"{name}: {entry.description}." for name, entry in SOLVERS.items())

PICTURE = "coreset.png"

NETWORK_DRAWS = 1000
"""Fewest draws for a network. Its posterior has many directions, and draws that share bodies are
cheap. MNIST, 100 points, error on fresh draws: 0.63 with 200, 0.18 with 2000."""


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
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; runs/coreset-<data>-<time> by default.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Choose a weighted subset that stands in for all data: indices, weights, how good it is."""
    from corefed.base.device import device_for
    from corefed.coreset import engine, options, picture, solvers  # torch takes a second
    from corefed.coreset.coreset import encode
    from corefed.training import record
    from corefed.use import posteriors

    solvers.get(solver)
    wanted = parse_size(size)
    for name, value, least in (
        ("hidden", hidden, 0), ("steps", steps, 1), ("draws", draws, 0), ("seed", seed, 0)
    ):  # fmt: skip
        if value < least:
            raise UserError(f"--{name} is {value}; it must be {least} or more.")
    place = device_for(device)
    short = Path(data).stem if data.startswith("npz:") else data
    folder = out or record.default_folder("coreset", short)
    files.refuse_existing(folder, "choose another --out")
    table = posteriors.load(data, data_dir, seed)
    chosen = posteriors.choose(model, table)
    if wanted > len(table.x):
        raise UserError(f"--size is {wanted}, but the data have only {len(table.x)} points.")
    resample = SOLVERS[solver].resample
    if resample and chosen == "mlp":
        raise UserError(
            "sparse-vi needs the posterior of every coreset on its way, which takes seconds for a "
            "regression and minutes for a network; choose another solver or model."
        )
    if not draws and chosen == "mlp":
        points = round(wanted * len(table.x)) if isinstance(wanted, float) else wanted
        draws = max(options.MANY * points, NETWORK_DRAWS)
    with bars(keep=True, silent=quiet or json) as shown:

        def show(stage: str, done: int, total: int) -> None:
            line = f"{stage} {done}/{total}" if done == total else ""
            shown.show(stage, done, total, line=line)

        fitted = posteriors.fit(chosen, table, hidden, steps, seed, place, show)
        found = engine.build(
            fitted.log_likelihood,
            fitted.draws,
            fitted.data,
            wanted,
            solver=solver,
            samples=draws,
            seed=seed,
            device=place if chosen == "mlp" else None,
            progress=show,
            resample=fitted.resample if resample else None,
        )
    note = {"data": data, "model": fitted.text}
    contents = {**encode(found, note), PICTURE: picture.render(found)}
    files.write_folder(folder, contents.items())
    if json:
        about = dataclasses.asdict(found.diagnostics)
        say(jsonlib.dumps({"folder": str(folder), **note, **about}, indent=1))
    elif quiet:
        say(folder)
    else:
        say(f"{data}: {fitted.text}")
        say(found)
        say(f"written to {folder}")


def parse_size(text: str) -> int | float:
    """ "500" points; "0.05" or "5%" of them."""
    bare = text.strip().removesuffix("%").strip()
    percent = text.strip().endswith("%")
    try:
        if percent or "." in bare or "e" in bare.lower():
            value: int | float = float(bare) / (100 if percent else 1)
        else:
            value = int(bare)
    except ValueError:
        raise UserError(
            f"--size is {text!r}; give a number of points (500) or a part of them (0.05 or 5%)."
        ) from None
    if isinstance(value, float) and not 0 < value < 1:
        raise UserError(f"--size is {text!r}; a part of the points lies between 0 and 1 (100 %).")
    if value <= 0:
        raise UserError(f"--size is {text!r}; a coreset has at least one point.")
    return value
