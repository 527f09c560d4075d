"""The command line. Nothing here imports torch until a command needs it: `--help` answers at once.

Exit codes: 0 done, 2 a mistake the user can mend (one line on stderr), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Annotated, Any

import click
import typer

from corefed import __version__
from corefed.base import machine
from corefed.base.errors import NO_MEMORY, UserError, is_lack_of_memory
from corefed.base.shown import one_line, say
from corefed.commands import (
    compare,
    coreset,
    crossval,
    datasets,
    export,
    federation,
    measures,
    methods,
    personalize,
    predict,
    report,
    run,
    studies,
    tune,
    watch,
)

HINTED_TWICE = re.compile(r"( Did you mean '[^']*'\?)\1")
"""Both click and typer hint at the nearest command."""

if "torch" not in sys.modules:  # where it is loaded, it has read them, and the program is another's
    os.environ.update(machine.polite(os.environ))

app = typer.Typer(
    help="Personalised Bayesian federated learning on coresets.",
    epilog="Start with: corefed run. Then: corefed run --method pfedbayes, and corefed compare "
    "runs/*.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(epilog=run.EXAMPLES)(run.run)
app.command(epilog=tune.EXAMPLES)(tune.tune)
app.command(epilog=crossval.EXAMPLES)(crossval.crossval)
app.command()(compare.compare)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=measures.EXAMPLES)(measures.measures)
app.command()(watch.watch)
app.command(epilog=predict.EXAMPLES)(predict.predict)
app.command(epilog=personalize.EXAMPLES)(personalize.personalize)
app.command(epilog=export.EXAMPLES)(export.export)
app.command()(methods.methods)
app.command()(datasets.datasets)
app.command(epilog=coreset.EXAMPLES)(coreset.coreset)
studies.add_to(app)
app.add_typer(federation.app, name="federation")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"corefed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `corefed` itself."""


@cache
def command() -> click.Command:
    """All commands, from the signatures of their functions: a tenth of a second, once."""
    found = typer.main.get_command(app)
    for parameter in _parameters(found):
        if isinstance(parameter.type, click.Path):
            convert = partial(_named, parameter.type.convert)
            parameter.type.convert = convert  # type: ignore[method-assign]
    return found


def _parameters(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    for one in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _parameters(one)


def _named(
    convert: Callable[..., Any], value: Any, parameter: click.Parameter, context: click.Context
) -> Any:
    """A path; an empty text would be the working folder."""
    if value == "":
        raise click.BadParameter("it is empty; name a file or folder.", context, parameter)
    return convert(value, parameter, context)


def main(arguments: list[str] | None = None) -> None:
    """The entry point: runs a command and turns every expected failure into one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without ± prints ? in its place
            stream.reconfigure(errors="replace")
    try:
        code = command()(arguments, standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except click.ClickException as error:  # a flag that click itself refuses
        sentence = error.format_message()
        if not sentence:  # no command: the help has been printed
            sys.exit(error.exit_code)
        _fail(HINTED_TWICE.sub(r"\1", sentence))
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        _fail(NO_MEMORY)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)  # 128 + SIGINT, what a shell expects
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str) -> None:
    say(f"error: {one_line(' '.join(sentence.split()))}", file=sys.stderr)
    sys.exit(2)
