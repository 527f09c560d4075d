"""`corefed methods`: list the methods, or the settings of one."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from corefed.base.errors import UserError
from corefed.base.shown import console, say
from corefed.commands import completing
from corefed.commands.options import Json
from corefed.methods.registry import METHODS, config_class, module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from corefed.settings.fields import Setting


def methods(
    name: Annotated[
        str | None,
        typer.Argument(autocompletion=completing.method_names, help="Show this method's settings."),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Show every setting: also those that only ablation studies change, and those "
            "that every run has.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """List the methods, or the settings of one.

    A setting is given by `corefed run --set NAME=VALUE` or as a line of a TOML file.
    """
    if name is None:
        if every:
            raise UserError("--all is for the settings of a method: corefed methods NAME --all.")
        _list_methods(json)
        return
    module(name)  # an unknown name is refused before anything else

    from corefed.settings.fields import list_settings
    from corefed.settings.run import Run  # takes a second: torch
    from corefed.show import report

    own, shared = list_settings(config_class(name)), list_settings(Run)
    if json:
        found = {
            "method": name,
            "description": METHODS[name].description,
            "settings": [each.to_json() for each in own],
            "settings_of_every_run": [each.to_json() for each in shared],
        }
        say(jsonlib.dumps(found, indent=1, ensure_ascii=False))
        return
    console = report.console()
    if not every:
        shown = [each for each in own if not each.ablation]
        console.print(_table(f"settings of {name}", shown))
        hidden = len(own) - len(shown)
        rare = f"{hidden} that only ablation studies change, and " if hidden else ""
        say(
            f"There are {hidden + len(shared)} more settings ({rare}{len(shared)} of every run): "
            f"corefed methods {name} --all"
        )
        return
    for group in dict.fromkeys(each.group for each in own):
        title = f"settings of {name}: {group}" if group else f"settings of {name}"
        console.print(_table(title, [each for each in own if each.group == group]))
    console.print(_table("settings of every run", shared))


def _list_methods(json: bool) -> None:
    if json:
        known = [{"method": n, "description": entry.description} for n, entry in METHODS.items()]
        say(jsonlib.dumps(known, indent=1, ensure_ascii=False))
        return
    from rich.table import Table  # rich takes a tenth of a second

    table = Table("method", "what it is")
    for known_name, entry in METHODS.items():
        table.add_row(known_name, entry.description)
    console().print(table)


def _table(title: str, settings: Sequence[Setting]) -> Table:
    from rich.table import Table  # as above

    table = Table("setting", "value", "default", "what it is", title=title)
    for each in settings:
        value = ", ".join(filter(None, (each.type_words, each.range_words)))
        mark = " (ablation)" if each.ablation else ""
        table.add_row(each.name, value, each.default_words, each.help + mark)
    return table
