"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from corefed.commands import completing
from corefed.methods.registry import METHODS

RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DIR")]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
MethodName = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(METHODS)}.", autocompletion=completing.method_names),
]
DataName = Annotated[
    str | None,
    typer.Option(help="A data set; see `corefed datasets`.", autocompletion=completing.data_names),
]
Target = Annotated[
    str | None, typer.Option(help="Of a table: the column to predict.", metavar="COLUMN")
]
ClientColumn = Annotated[
    str | None,
    typer.Option(
        help="Of a table: the column whose values are clients. Of images: `folder` for "
        "SITE/CLASS/, or a CSV file with columns file and site.",
        metavar="COLUMN",
    ),
]
PartitionName = Annotated[
    str | None,
    typer.Option(help="How the data are split: shards-medium, labels:C, dirichlet:A..."),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Rounds = Annotated[int | None, typer.Option(help="Communication rounds.")]
LocalSteps = Annotated[int | None, typer.Option(help="Gradient steps per round.")]
Fraction = Annotated[
    float | None, typer.Option(help="Part of each client's points it trains on, in (0, 1].")
]
ModelName = Annotated[
    str | None, typer.Option(help="mlp, cnn, or package.module:factory for one of your own.")
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Of a run with a network of your own: package.module:factory. It runs that code.",
    ),
]
Hidden = Annotated[str | None, typer.Option(help="Widths of the hidden layers: 200,100.")]
Channels = Annotated[str | None, typer.Option(help="Channels of a cnn's convolutions: 32,64.")]
Seeds = Annotated[
    list[str] | None, typer.Option(help="A seed, or several: 0,1,2. May be repeated.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data lie, before $COREFED_DATA and the cache.")
]
SettingOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any setting.",
        metavar="KEY=VALUE",
        autocompletion=completing.setting_names,
    ),
]
Seed = Annotated[int | None, typer.Option(help="A seed of the run; its first if not given.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]


def named_code(model: str, given: Mapping[str, Any], assignments: Sequence[str]) -> str | None:
    """The network of a run, if it was named on the command line and not only in a file."""
    pairs = [text.partition("=") for text in assignments]
    said = [value.strip() for key, _, value in pairs if key.strip() == "model"]
    return model if model in (given.get("model"), *said) else None


def run_flags(*, client: str | None, seed: list[str] | None, **flags: Any) -> dict[str, Any]:
    """The settings that were given by options of `corefed run`."""
    flags |= {"client_column": client, "seeds": ",".join(seed) if seed else None}
    given = {key: value for key, value in flags.items() if value is not None}
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
