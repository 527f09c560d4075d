"""What a shell offers when a name is half typed: methods, data sets, settings.

`corefed --install-completion` sets it up for the shell in use.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from corefed.methods import registry


def method_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Methods, with what each does."""
    for name, entry in registry.METHODS.items():
        if name.startswith(incomplete):
            yield name, entry.description


def data_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Data sets; of those that take a path, what stands before it."""
    from corefed.data.datasets import names  # torch takes a second

    for name, text in names().items():
        before, colon, _ = name.partition(":")
        if f"{before}{colon}".startswith(incomplete):
            yield f"{before}{colon}", text


def setting_names(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """`KEY=` for every setting of the run and of its method."""
    from corefed.settings.fields import list_settings
    from corefed.settings.run import Run

    method = str(ctx.params.get("method") or Run.method)
    if method not in registry.METHODS:
        return
    for owner in (Run, registry.config_class(method)):
        for setting in list_settings(owner):
            if setting.name.startswith(incomplete):
                yield f"{setting.name}=", " ".join(setting.help.split())
