"""What is printed: control characters are visible, markup is text, and Markdown has no HTML."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
from rich.table import Table

import corefed
from corefed.base import shown

EVIL = "\x1b]0;evil\x07\x1b[2J\x9b31m"
SEEN = "\\x1b]0;evil\\x07\\x1b[2J\\x9b31m"


def test_control_characters_are_visible() -> None:
    assert shown.printable(f"a{EVIL}b\r\n\tc") == f"a{SEEN}b\\r\n\tc"
    assert shown.one_line("north\nnote: all is well") == "north\\nnote: all is well"
    assert shown.one_line("\u202e\u2066\u2028\ufeff\ud800\x00") == (
        "\\u202e\\u2066\\u2028\\ufeff\\ud800\\x00"
    )


@pytest.mark.parametrize(
    "name", ["Zürich", "北京", "São Paulo", "دانش\u200cآموز", "a\u00a0b", "😀"]
)
def test_names_stay_as_they_are(name: str) -> None:
    assert shown.one_line(name) == shown.printable(name) == shown.markdown(name) == name


def test_lines_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    shown.say(f"written to {EVIL}\nand more")
    shown.say_note(f"class {EVIL}\nnote: forged")
    said = capsys.readouterr()
    assert said.out == f"written to {SEEN}\nand more\n"
    assert said.err == f"note: class {SEEN}\\nnote: forged\n"


def test_tables_of_rich_show_names_as_they_are() -> None:
    """Neither escapes nor rich's own markup; on a terminal, where rich has colours of its own."""
    file = io.StringIO()
    console = shown.console(file=file, force_terminal=True, width=120)
    names = ("[red]north[/red]", "[link=http://evil]x[/link]", ":skull:", EVIL, "a]0;b[/")
    table = Table("[bold]client", title=f"[blink]{EVIL}", width=80)
    for name in names:
        table.add_row(name)
    console.print(table)
    console.print(f"[red]{EVIL}")
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())  # rich's own colours
    for name in (*names[:3], SEEN, names[4], "[bold]client", f"[blink]{SEEN}", f"[red]{SEEN}"):
        assert name in text
    assert "\x07" not in text and "\x1b" not in text and "\x9b" not in text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"),
        ("[click](http://evil)", "\\[click\\](http:&#47;&#47;evil)"),
        ("![x](y)", "!\\[x\\](y)"),
        ("a|b", "a\\|b"),
        ("`code`", "\\`code\\`"),
        ("**bold** _it_ ~~no~~", "\\*\\*bold\\*\\* \\_it\\_ \\~\\~no\\~\\~"),
        ("a\n# Title", "a\\\\n# Title"),
        ("&lt;", "&amp;lt;"),
        ("age_group", "age_group"),
    ],
)
def test_names_in_markdown(name: str, wanted: str) -> None:
    assert shown.markdown(name) == wanted


def test_code_in_markdown() -> None:
    assert shown.code("a`b|c\n") == "`a'b¦c\\n`"


def test_nothing_is_printed_past_it() -> None:
    """Elsewhere there is no print, no echo and no console, but for what names no file or client:
    JSON, the line that says what is loading, and Flower's processes.
    """
    package = Path(corefed.__file__).parent
    past = []
    for path in package.rglob("*.py"):
        place = path.relative_to(package)
        if place.parts[:2] == ("federation", "engine") or place.name in ("shown.py", "progress.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            argument = ast.unparse(node.args[0]) if node.args else ""
            if name in ("print", "typer.echo", "click.echo", "Console", "rich.print") and not (
                argument.startswith(("json.dumps", "jsonlib.dumps"))
            ):
                past.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
    assert past == []
