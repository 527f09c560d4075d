"""`corefed export`: a client's model as files for use without corefed, with a model card."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.shown import say
from corefed.commands.options import Json, OwnModel, RunFolder, Seed

EXAMPLES = """Examples:

corefed export runs/site-model --client north --out north-model

corefed export runs/site-model --global --out shared-model"""


def export(
    folder: RunFolder,
    out: Annotated[Path, typer.Option(help="A new folder for the files.")],
    client: Annotated[str | None, typer.Option(help="Whose model, by the client's name.")] = None,
    shared: Annotated[
        bool, typer.Option("--global", help="The shared model in place of a personal one.")
    ] = False,
    seed: Seed = None,
    model: OwnModel = None,
    program: Annotated[bool, typer.Option(help="Make the program of torch.export too.")] = True,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also an ONNX program, checked (extra onnx).")
    ] = False,
    json: Json = False,
) -> None:
    """Write a model for use without corefed: weights, a program of torch.export, a model card."""
    from corefed.models import own
    from corefed.training import fitted
    from corefed.use.export import measures, onnx_program, package  # torch takes a second

    if onnx:
        onnx_program.require()
        if not program:
            raise UserError("--onnx makes a program, and --no-program makes none; leave one out.")
    files.refuse_existing(out, "name a new folder for --out")
    run = fitted.load(folder, own.named(model), client=client or "")
    taken = package.take(run, client, shared=shared, seed=seed)
    made = dict(package.contents(taken, whole=client is None, with_program=program, with_onnx=onnx))
    files.write_folder(out, made.items())
    if json:
        numbers = measures.measure(run, taken.kind, taken.g, client)
        say(jsonlib.dumps({"folder": str(out), "files": list(made), **numbers}, indent=1))
    else:
        say("\n".join(f"{out / name}  {len(content):,} bytes" for name, content in made.items()))
        say(f"start with {out / package.CARD}", file=sys.stderr)
