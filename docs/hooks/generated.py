"""Pages that are made when the site is built, from the code itself, so that they cannot go stale.

The command line from typer, the settings from the dataclasses, and CONTRIBUTING.md, which stays
where a code host looks for it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.models import ParameterInfo

from corefed.base.tables import markdown_table
from corefed.commands import cli
from corefed.federation.rules import Rules
from corefed.methods.registry import METHODS, config_class
from corefed.settings.fields import Setting, list_settings
from corefed.settings.run import Run

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    made = {
        "contributing.md": contributing.replace("](docs/", "]("),
        "reference/command-line.md": command_line(),
        "reference/settings.md": settings(),
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of docs/ on a code host stay inside the site."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./CONTRIBUTING\.md", r"](\1contributing.md", markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The contract is read as source: its fields are explained by comments."""
    if page.file.src_uri != "reference/contract.md":
        return content
    return content.replace('<details class="mkdocstrings-source">', "<details open>")


# --- the command line ----------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its help, as `corefed COMMAND --help` prints it."""
    text = ["# Command line", "", "`corefed COMMAND --help` prints the same.", ""]
    for words, command in commands(("corefed",), typer.main.get_command(cli.app)):
        text += [f"## {' '.join(words)}", "", *paragraphs(command.help), ""]
        text += ["```text", usage(words, command), "```", "", *parameters(command), ""]
        text += [*paragraphs(command.epilog), ""]
    return "\n".join(text)


def commands(
    words: tuple[str, ...], command: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The command and those below it, in the order of the help."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    for name, below in command.commands.items():
        yield from commands((*words, name), below)


def usage(words: tuple[str, ...], command: click.Command) -> str:
    context = click.Context(command, info_name=" ".join(words))
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def parameters(command: click.Command) -> list[str]:
    rows = []
    for each in command.params:
        text = cell(help_of(command, each))
        if each.required:
            text += " Required."
        elif each.default not in (None, False, (), ""):
            text += f" Default: `{each.default}`."
        rows.append([f"`{named(each)}`", text])
    return markdown_table(["", "what it is"], rows)


def help_of(command: click.Command, parameter: click.Parameter) -> str | None:
    """From the function itself: typer 0.20 loses an argument's help under the click we pin."""
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    found = [each for each in get_args(hints[parameter.name]) if isinstance(each, ParameterInfo)]
    return found[0].help if found else None


def named(parameter: click.Parameter) -> str:
    """`--out PATH`, `--quiet, -q`, `DIR...`."""
    if isinstance(parameter, click.Argument):
        return parameter.make_metavar(click.Context(click.Command("")))
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if getattr(parameter, "is_flag", False):
        return names
    return f"{names} {parameter.metavar or parameter.type.name.upper()}"


def paragraphs(text: str | None) -> list[str]:
    """As Markdown: an example, "corefed ... — what it does", is code and what follows it."""
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", (text or "").strip())]
    examples = [re.sub(r"^(corefed .*?)( — .*)?$", r"`\1`\2", escaped(part)) for part in found]
    return [line for each in examples for line in (each, "")]


def cell(text: str | None) -> str:
    return escaped(" ".join((text or "").split())).replace("|", r"\|")


def escaped(text: str) -> str:
    """<data> is not an element of HTML."""
    return text if text.startswith("corefed ") else text.replace("<", "&lt;")


# --- settings ------------------------------------------------------------------------------------


def settings() -> str:
    """What `corefed methods NAME --all` prints, for every method."""
    text = [
        "# Settings",
        "",
        "Given by `--set KEY=VALUE`, as lines of a TOML file (`--config`), or to",
        "`Federation` and `resolve` in Python. `corefed methods NAME --all` prints the same.",
        "",
        "A setting in a group can be written with the group or without: `--set draws=64` and",
        "`--set selection.draws=64` are the same, and so is `draws = 64` in a table",
        "`[selection]` of a TOML file. Settings marked *ablation* are only changed by ablation",
        "studies.",
        "",
        "## Of every run",
        "",
        *table(list_settings(Run)),
        "",
    ]
    for name, entry in METHODS.items():
        text += [f"## {name}", "", f"{entry.description[0].upper()}{entry.description[1:]}.", ""]
        own = list_settings(config_class(name))
        for group in dict.fromkeys(each.group for each in own):
            members = [each for each in own if each.group == group]
            if group:
                heading = f"### {name}: group {group}"
                text += [heading, "", cell(inspect.getdoc(members[0].owner)), ""]
            text += [*table(members), ""]
    text += ["## Rules of a federation", "", "`[rules]` of `federation.toml`.", ""]
    text += table(list_settings(Rules))
    return "\n".join(text)


def table(settings: Sequence[Setting]) -> list[str]:
    rows = [
        [
            f"`{each.name}`",
            cell(each.type_words),
            cell(each.range_words),
            f"`{each.default_words}`" if each.default_words else "",
            cell(each.help) + (" *Ablation.*" if each.ablation else ""),
        ]
        for each in settings
    ]
    return markdown_table(["setting", "type", "range", "default", "what it is"], rows)
