"""`corefed run`: train a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corefed.commands.options import ClientColumn, Json, Target
from corefed.methods.registry import METHODS

RUN_EXAMPLES = """Examples:

corefed run — ten clients learn the built-in digits on coresets.

corefed run --data mnist --partition shards-medium --fraction 0.1 --rounds 100 --seed 0,1,2

corefed run --method random-subset --fraction 0.1 --set redraw_every=100 --out runs/random

corefed run --data table:patients.csv --target outcome --client site --set ignore=patient

corefed run --config experiment.toml --hidden 200,100 --set zeta=10

corefed run --model nets:make — nets.py in this folder has def make(inputs, outputs).

corefed run --resume runs/random — after a crash or Ctrl-C; ends as if it had never stopped.

Settings without a flag are given by --set; `corefed methods NAME --all` lists them."""

Names = ", ".join(METHODS)


def run(
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    method: Annotated[str | None, typer.Option(help=f"One of {Names}.")] = None,
    data: Annotated[str | None, typer.Option(help="A data set; see `corefed datasets`.")] = None,
    target: Target = None,
    client: ClientColumn = None,
    partition: Annotated[
        str | None, typer.Option(help="How data are dealt: shards-medium, labels:C, dirichlet:A...")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    local_steps: Annotated[int | None, typer.Option(help="Gradient steps a round.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Part of each client's points it trains on, in (0, 1].")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="mlp, cnn, or package.module:factory for one of your own.")
    ] = None,
    hidden: Annotated[
        str | None, typer.Option(help="Widths of the hidden layers: 200,100.")
    ] = None,
    channels: Annotated[
        str | None, typer.Option(help="Channels of a cnn's convolutions: 32,64.")
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
    track: Annotated[
        list[str] | None,
        typer.Option(help="Log to mlflow or tensorboard too. May be repeated.", metavar="TOOL"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")] = False,
    json: Json = False,
) -> None:
    """Train a federation and evaluate it. With no option: coreset-pfedbayes on the digits."""
    flags = {
        "method": method,
        "data": data,
        "target": target,
        "client_column": client,
        "partition": partition,
        "clients": clients,
        "rounds": rounds,
        "local_steps": local_steps,
        "fraction": fraction,
        "model": model,
        "hidden": hidden,
        "channels": channels,
        "seeds": ",".join(seed) if seed else None,
        "device": device,
        "data_dir": str(data_dir) if data_dir is not None else None,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    from corefed.commands.running import execute

    code = execute(
        config,
        given,
        assignments or [],
        out=out,
        resume=resume,
        track=track or [],
        quiet=quiet,
        json=json,
    )
    raise typer.Exit(code)
