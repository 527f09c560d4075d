"""`corefed bench`, `reproduce` and `theory`, if the package `corefed_studies` is there.

It adds its commands to ours. A checkout has it beside corefed; the wheel does not.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import typer

from corefed.base.errors import UserError

PACKAGE = "corefed_studies"
NAMES = ("bench", "reproduce", "theory")


def add_to(app: typer.Typer) -> None:
    """Add the studies' commands, or commands that say where to find them."""
    if find_spec(PACKAGE) is not None:
        import_module(f"{PACKAGE}.commands").add_to(app)
        return
    for name in NAMES:
        accepts_all = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, hidden=True, context_settings=accepts_all)(_missing(name))


def _missing(name: str) -> Callable[[], None]:
    def command() -> None:
        raise UserError(
            f"corefed {name} belongs to the studies, which the installed package does not have: "
            "type it in a checkout of the repository, after `make install`."
        )

    return command
