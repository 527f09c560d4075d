"""`corefed federation ...`: the operator's commands. Each imports what it needs when it runs.

Exit codes: 0 done, 1 a training or a server that failed, 2 a mistake the user can mend, 130 Ctrl-C.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperCommand

from corefed.base.shown import say, say_note
from corefed.commands.options import Json, Quiet, SettingOptions

app = typer.Typer(
    help="A federation of separate machines, on Flower.",
    epilog="Start with: corefed federation init DIR --clients a b c. DIR/README.md says the rest.",
    no_args_is_help=True,
)

FolderArgument = Annotated[Path, typer.Argument(help="The federation's folder.", metavar="DIR")]
RunName = Annotated[str | None, typer.Option("--name", help="Name of the run.", metavar="RUN")]


class Listing(TyperCommand):
    """A command whose --clients takes all words up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_repeated(args)))


def _repeated(words: list[str]) -> Iterator[str]:
    """--clients a b c as --clients a --clients b --clients c."""
    listing = False
    for word in words:
        if word.startswith("-"):
            listing = word == "--clients"
            if not listing:
                yield word
        elif listing:
            yield from ("--clients", word)
        else:
            yield word


@app.command(cls=Listing)
def init(
    directory: FolderArgument,
    clients: Annotated[
        list[str], typer.Option("--clients", help="Names of the clients.", metavar="NAME...")
    ],
    address: Annotated[
        str, typer.Option(help="Where clients reach the server.", metavar="HOST:PORT")
    ] = "127.0.0.1:8000",
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    assignments: SettingOptions = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--rule", help="A rule of federation.toml.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Make a federation: certificates, keys, settings, and what to copy where."""
    from corefed.federation.operate import creating, processes  # cryptography is an extra

    processes.require_flower()
    names = [name for word in clients for name in word.split(",") if name]
    notes = creating.create(directory, names, address, config, assignments or [], rules or [])
    for note in notes:
        say_note(note)
    say(f"written to {directory}; read {directory / 'README.md'} first")


@app.command()
def add(
    directory: FolderArgument, name: Annotated[str, typer.Argument(help="Name of the new client.")]
) -> None:
    """Make another client for a federation; a server that runs takes it within seconds."""
    from corefed.federation.operate import creating, processes  # cryptography is an extra

    processes.require_flower()
    say(f"written to {creating.add(directory, name)}; copy it to the client's machine")


@app.command()
def remove(
    directory: FolderArgument, name: Annotated[str, typer.Argument(help="Name of the client.")]
) -> None:
    """Exclude a client for good: it gets no tasks, and its key is not admitted again."""
    from corefed.federation.operate import (
        folder,
        processes,
        registering,
    )  # cryptography is an extra

    processes.require_flower()
    say(registering.remove(folder.ServerFolder.read(directory), name))


@app.command()
def renew(directory: FolderArgument) -> None:
    """Sign another certificate for the server, before the old one expires."""
    from corefed.federation.operate import creating, processes  # cryptography is an extra

    processes.require_flower()
    creating.renew(directory)
    say("renewed; start the server again")


@app.command()
def server(directory: FolderArgument) -> None:
    """Run the server (Flower's SuperLink) until Ctrl-C."""
    from corefed.federation.operate import serving  # cryptography is an extra

    raise typer.Exit(serving.serve(directory))


@app.command()
def client(
    directory: FolderArgument,
    data: Annotated[str, typer.Option(help="Image folder, .npz file or table to learn from.")],
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda; over client.toml's.")
    ] = None,
) -> None:
    """Run a client (Flower's SuperNode) until Ctrl-C. DIR is the client's own folder."""
    from corefed.federation.operate import serving  # cryptography is an extra

    raise typer.Exit(serving.join(directory, data, device))


@app.command()
def run(
    directory: FolderArgument,
    name: RunName = None,
    assignments: SettingOptions = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the experiment of DIR/server/experiment.toml and follow it, on the server's machine."""
    from corefed.federation.operate import following  # torch takes a second

    raise typer.Exit(following.start(directory, name, assignments or [], json=json, quiet=quiet))


@app.command()
def resume(
    directory: FolderArgument,
    name: RunName = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to have in the end.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run, the last one if none is named, from its last finished round."""
    from corefed.federation.operate import following  # torch takes a second

    raise typer.Exit(following.resume(directory, name, rounds, json=json, quiet=quiet))


@app.command()
def status(directory: FolderArgument, json: Json = False) -> None:
    """Say who is connected, which runs there are, and who is missing."""
    from corefed.federation.operate import status  # torch takes a second
    from corefed.show import report

    found = status.read_status(directory)
    if json:
        say(jsonlib.dumps(found, indent=1))
    else:
        say(f"The server {found['server']}.")
        for table in status.tables(found):
            report.console().print(table)


@app.command()
def audit(directory: FolderArgument, json: Json = False) -> None:
    """Show what left a client, reply by reply. DIR is the client's own folder."""
    from corefed.federation import audit
    from corefed.federation.operate.folder import ClientFolder
    from corefed.show import report  # rich takes a tenth of a second

    lines = audit.read(ClientFolder.read(directory).state)
    if json:
        typer.echo(jsonlib.dumps(lines, indent=1))
    elif lines:
        report.console().print(audit.table(lines))
    else:
        say("Nothing has left this client.")


@app.command()
def stop(directory: FolderArgument, name: RunName = None) -> None:
    """End the training that is going on; it can be resumed."""
    from corefed.federation.operate import following  # torch takes a second

    following.stop(directory, name)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="A new folder for all of it.")] = Path(
        "runs/federation-demo"
    ),
) -> None:
    """A whole federation on this machine, with a client killed on the way, beside a simulation."""
    from corefed.federation.operate import demo, processes  # torch takes a second

    processes.require_flower()
    raise typer.Exit(demo.main(out))
