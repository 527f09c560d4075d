"""The fenced blocks of the pages: found, checked against the program, and executed.

A block in a language of `EXECUTED` is run, unless a comment right above it says why not or where
it is run instead:

    <!-- not executed: an hour on a GPU -->
    <!-- executed by test_deploy_page.py -->

A block in a language of `SHOWN` is only shown. One with a title (```python title="network.py") is
that file: it is written, for later blocks to use.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from corefed.commands import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SHELL = ("console", "sh")
EXECUTED = (*SHELL, "python")
SHOWN = ("text", "toml", "json", "csv")
ELSEWHERE = ("make", "pip")
"""Programs that are not started: `make test` runs the targets, and installs."""
QUICKSTART = ("make", "run")
"""Of this the corefed commands are executed, since a page shows what they print."""
WITHIN = {"personal": 0.5, "global": 0.5, "NLL": 0.01, "ECE": 0.01}
"""How far numbers of a table may be off on another processor, which rounds differently."""
FREE = ("sec", "±")
"""Seconds are of a machine; a standard deviation of three seeds went from 0.06 to 0.92 points."""

FENCE = re.compile(r"^( *)(```+|~~~+)(.*)$", re.MULTILINE)
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:not executed: |executed by )[^\n]*) -->\n+)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    page: str
    line: int  # of its first line of content
    language: str
    title: str  # the file that the block is; empty: none
    mark: str  # why it is not executed, or by which test; empty: it is executed
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The words of each of its commands."""
        if self.language not in SHELL:
            return []
        return [words for line in lines(self.body) for words in simple_commands(line)]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return read(name, text)


def read(name: str, text: str) -> list[Block]:
    """The fenced blocks of a page. A fence that belongs to none is an error."""
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        language, title, mark = (match[key] or "" for key in ("language", "title", "mark"))
        assert language in (*EXECUTED, *SHOWN), (
            f"{name}:{line - 1}: a block in {language!r}; executed are {EXECUTED}, shown {SHOWN}"
        )
        found.append(Block(name, line, language, title, mark, match["body"]))
    fences, ours = len(FENCE.findall(text)), 2 * len(found)
    assert fences == ours, f"{name} has {fences} fences, of which {ours} begin or end a block"
    return found


def lines(body: str) -> list[str]:
    """The commands of a shell block. Where there are prompts, lines without one are output."""
    joined = body.replace("\\\n", " ").splitlines()
    prompted = [line.lstrip()[2:] for line in joined if line.lstrip().startswith("$ ")]
    return prompted or joined


def simple_commands(line: str) -> list[tuple[str, ...]]:
    """`A=1 make run && corefed compare x > y` -> (make, run), (corefed, compare, x), (y)."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            parts.append([])
        elif parts[-1] or not re.match(r"[A-Za-z_]\w*=", word):
            parts[-1].append(word)
    return [tuple(part) for part in parts if part]


def corefed_arguments(words: Sequence[str]) -> list[str] | None:
    """What follows `corefed` or `python -m corefed`; None for another program."""
    program = Path(words[0]).name
    if program == "corefed":
        return list(words[1:])
    if program.startswith("python") and tuple(words[1:3]) == ("-m", "corefed"):
        return list(words[3:])
    return None


def of_make(target: str) -> list[list[str]]:
    """What a target of the Makefile gives to corefed."""
    dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    words = [words for line in lines(dry.stdout) for words in simple_commands(line)]
    return [given for each in words if (given := corefed_arguments(each)) is not None]


class Table(NamedTuple):
    """A table of `corefed compare` as it is printed."""

    title: str
    heads: list[str]
    rows: list[list[str]]

    def stale(self, printed: Table) -> list[str]:
        """Where it is not what is printed: titles, columns, methods and order exactly."""
        if self[:2] != printed[:2]:
            return [f"{printed[:2]} in place of {self[:2]}"]
        names = [[row[0] for row in each.rows] for each in (self, printed)]
        if names[0] != names[1]:
            return [f"{names[1]} in place of {names[0]}"]
        return [
            f"{row[0]}, {head}: {found} in place of {cell}"
            for row, other in zip(self.rows, printed.rows, strict=True)
            for head, cell, found in zip(self.heads, row, other, strict=True)
            if not near(head, cell, found)
        ]


def near(head: str, cell: str, found: str) -> bool:
    if head not in WITHIN or "-" in (cell, found):
        return head in FREE or cell == found
    return abs(float(cell) - float(found)) <= WITHIN[head] + 1e-9


def tables(text: str) -> list[Table]:
    """A title, heads, a line, and rows up to an empty line. Rows are numbered."""
    found, given = [], text.splitlines()
    for place, line in enumerate(given):
        if set(line.strip()) == {"─"}:
            rows = list(takewhile(str.strip, given[place + 1 :]))
            heads, *cells = (re.split(r" {2,}", row.strip()) for row in (given[place - 1], *rows))
            found.append(Table(given[place - 2].strip(), heads, [row[1:] for row in cells]))
    return found


class Scratch:
    """An empty folder that a page is executed in, and what its Python has defined so far."""

    def __init__(self, folder: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.module = ModuleType("page_" + re.sub(r"\W", "_", page))
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)  # dataclasses ask there
        monkeypatch.chdir(folder)
        monkeypatch.delenv("COREFED_DATA", raising=False)  # pages need nothing but what they make
        monkeypatch.setenv("COREFED_CACHE", str(folder / "cache"))

    def forget(self) -> None:
        """What was imported from the folder: another page may have a module of the same name."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]

    def execute(self, block: Block) -> None:
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            self.python(block)
        else:
            self.shell(block)

    def python(self, block: Block) -> None:
        source = "\n" * (block.line - 1) + block.body  # so that errors name the page's line
        code = compile(source, block.page, "exec", dont_inherit=True)
        sys.path.insert(0, str(self.folder))  # where a script's own modules are found
        try:
            exec(code, self.module.__dict__)
        finally:
            sys.path.remove(str(self.folder))

    def shell(self, block: Block) -> None:
        """By bash, or, where nothing needs one, in this process, which has torch imported."""
        if re.search(r"[;|&<>$*?`~]|^\w+=", "\n".join(lines(block.body)), re.MULTILINE):
            self.bash(block)
            return
        for words in block.commands:
            arguments = corefed_arguments(words)
            if arguments is None:
                assert words[0] in ELSEWHERE, f"{block}: {words[0]} is executed by bash only"
            each = [arguments] if arguments else of_make(words[1]) if words == QUICKSTART else []
            for given in each:
                with pytest.raises(SystemExit) as ended:
                    cli.main(given)
                assert ended.value.code == 0, f"{block}: {' '.join(given)} ended with {ended.value}"

    def bash(self, block: Block) -> None:
        functions = [f'corefed() {{ "{sys.executable}" -m corefed "$@"; }}']
        functions += [f"{program}() {{ :; }}" for program in ELSEWHERE]
        script = "\n".join([*functions, *lines(block.body)])
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        print(ended.stdout, ended.stderr)
        assert ended.returncode == 0, f"{block} ended with {ended.returncode}"
