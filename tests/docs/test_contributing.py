"""CONTRIBUTING.md followed to the letter, in a copy of the checkout.

Its files are written, its rows are added where it says, and its commands are run. Then: a wrong
setting is refused, the report invents nothing, and any method trains on a subset.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import ROOT, Block, blocks, lines

PAGE = ROOT / "CONTRIBUTING.md"
BLOCKS = [each for each in blocks(PAGE) if each.mark == f"executed by {Path(__file__).name}"]
FILES = {each.title: each.body for each in BLOCKS if each.title}
COMMANDS = [each for each in BLOCKS if each.language == "console"]
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(
    r"The row in `(\w+)` of `([\w/.]+)`[^\n]*\n\n```text\n(.+?)```",
    re.DOTALL,
)
ROWS = ROW.findall(TEXT)
"""(name of the table, its file, the row)."""

METHODS = ("METHODS", "src/corefed/methods/registry.py")
CHOSEN = "Weights of the chosen points"
"""A heading of the report about a method that trains on a subset."""

TENTH = '''"""FedAvgM on a random tenth of each client's points, redrawn every 20 local steps."""

from corefed.methods import fedavgm
from corefed.methods.fedavgm import Config
from corefed.methods.subset import on_subset
from corefed.selectors.subset import uniform


def build(config, model):
    def choose(data, streams, points):
        return uniform(data, 0.1, streams, points)

    return on_subset(fedavgm.build(config, model), "tenth", choose, 20)
'''

WEIGHT = '''"""FedAvgM with private state whose names a subset might have."""

import torch

from corefed.methods import fedavgm
from corefed.methods.fedavgm import Config


def build(config, model):
    base = fedavgm.build(config, model)

    def add(private, like):
        number = torch.ones(len(like["theta"]), 7, device=like["theta"].device)
        return {**private, **{name: number.clone() for name in ("weight", "looked", "age")}}

    def end(broadcast, working):
        message, private = base.end(broadcast, working)
        return message, add(private, broadcast)

    return base._replace(
        name="weight",
        init_client=lambda broadcast, data: add(base.init_client(broadcast, data), broadcast),
        end=end,
    )
'''


def add_row(checkout: Path, table: str, file: str, row: str) -> None:
    """Put a row at the end of a dictionary at the top level of a file."""
    path = checkout / file
    begin, found, rest = path.read_text(encoding="utf-8").partition(f"\n{table}: dict")
    assert found, f"{file} has no {table}"
    inside, closed, end = rest.partition("\n}\n")
    assert closed
    path.write_text(f"{begin}{found}{inside}\n{row.rstrip()}{closed}{end}", encoding="utf-8")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout after the steps of the page, with two more methods."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "corefed", folder / "src" / "corefed", ignore=ignored)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests").symlink_to(ROOT / "tests")
    own = {"src/corefed/methods/tenth.py": TENTH, "src/corefed/methods/weight.py": WEIGHT}
    for name, body in {**FILES, **own}.items():
        assert not (folder / name).exists()
        (folder / name).write_text(body, encoding="utf-8")
    for table, file, row in ROWS:
        add_row(folder, table, file, row)
    for name in ("tenth", "weight"):
        row = f'    "{name}": Entry("corefed.methods.{name}", "for this test"),'
        add_row(folder, *METHODS, row)
    return folder


class Ended(NamedTuple):
    code: int
    out: str
    err: str


DRIVER = """
import json, os, runpy, sys, traceback

import pytest, scipy.stats, sklearn.metrics
from corefed.commands import cli
from corefed.show.page import html, making
from corefed.training import rounds

def program(name, *words):
    sys.argv = [name, *words]
    try:
        if name == "corefed":
            return int(cli.main(words) or 0)
        if name == "pytest":
            return int(pytest.main(["-p", "no:cacheprovider", *words]))
        runpy.run_path(words[0], run_name="__main__")
        return 0
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1

for line in sys.stdin:
    commands, out, err = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
        code = 0
        for words in commands:
            code = code or program(*words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs commands one after the other in a fork of a process that has imported the package: a process
for each command would spend most of the time on importing torch."""


class Shell:
    """Runs commands in the checkout, with a package."""

    def __init__(self, checkout: Path, package: Path) -> None:
        self.checkout, self.count = checkout, 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(package), "COLUMNS": "160"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, script: str) -> Ended:
        """Up to the first command that fails."""
        self.count += 1
        out, err = (self.checkout / f"{self.count}.{name}" for name in ("out", "err"))
        commands = [shlex.split(line) for line in lines(script) if line.strip()]
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([commands, str(out), str(err)]), file=self.process.stdin, flush=True)
        code = self.process.stdout.readline()
        assert code, "the process that runs the commands has ended"
        return Ended(int(code), out.read_text("utf-8"), err.read_text("utf-8"))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def shell(checkout: Path) -> Iterator[Shell]:
    """With the package of the copy."""
    running = Shell(checkout, checkout / "src")
    yield running
    running.close()


def test_the_page_has_files_rows_and_commands() -> None:
    assert list(FILES) == ["src/corefed/methods/fedavgm.py", "src/corefed/selectors/hardest.py"]
    assert [(table, file) for table, file, _ in ROWS] == [
        METHODS,
        ("SELECTORS", "src/corefed/selectors/__init__.py"),
    ]
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_of_the_page(block: Block, checkout: Path, shell: Shell) -> None:
    """Those before the first row have the package as it is."""
    first = ROW.search(TEXT)
    assert first is not None
    before = block.line < TEXT.count("\n", 0, first.start())
    own = Shell(checkout, ROOT / "src") if before else shell
    try:
        ended = own(block.body)
    finally:
        if before:
            own.close()
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.parametrize(
    ("example", "file", "names"),
    [
        ("new_method.py", "src/corefed/methods/fedavgm.py", ["Config", "build"]),
        ("new_selector.py", "src/corefed/selectors/hardest.py", ["select"]),
    ],
)
def test_examples_have_the_code_of_the_page(example: str, file: str, names: list[str]) -> None:
    own, shown = (ROOT / "examples" / example).read_text(encoding="utf-8"), FILES[file]
    for name in names:
        assert part(own, name) == part(shown, name)


def part(source: str, name: str) -> str:
    node = next(each for each in ast.parse(source).body if getattr(each, "name", "") == name)
    return ast.unparse(node)


def test_the_settings_and_their_help_are_shown(shell: Shell) -> None:
    ended = shell("corefed methods fedavgm")
    assert "How much of the last round's move the server repeats" in ended.out


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--method fedavgm --set server_momentum=-5", "server_momentum is -5.0; it must be"),
        (
            "--method fedavgm --set server_momentum=nan",
            "server_momentum is nan; it must be a finite number",
        ),
        ("--method fedavgm --set server_momentum=much", "must be a number, not 'much'"),
        ("--method fedavgm --set server_momentm=1", "did you mean 'server_momentum'?"),
        ("--method fedavgmm", "Did you mean 'fedavgm'?"),
        ("--set selector=hardset", "Did you mean 'hardest'?"),
    ],
)
def test_a_wrong_value_is_refused(given: str, sentence: str, shell: Shell) -> None:
    """The author of the method did nothing but declare the field."""
    ended = shell(f"corefed run {given} --out runs/wrong")
    assert ended.code == 2
    assert sentence.lower() in ended.err.lower()
    assert not (shell.checkout / "runs" / "wrong").exists()


RUN = "corefed run --method {0} --clients 3 --rounds 2 --out runs/{0}\n"
REPORT = "corefed report runs/{0} --out {0}.html"


@pytest.mark.parametrize(("method", "chosen"), [("tenth", True), ("weight", False)])
def test_the_report_shows_a_subset_where_there_is_one(
    method: str, chosen: bool, shell: Shell
) -> None:
    """Names of private tensors mean nothing; a method trains on a subset without knowing it."""
    ended = shell(RUN.format(method) + REPORT.format(method))
    assert ended.code == 0, ended.out + ended.err
    page = (shell.checkout / f"{method}.html").read_text(encoding="utf-8")
    assert (CHOSEN in page) == chosen
    rounds = (shell.checkout / "runs" / method / "rounds.jsonl").read_text(encoding="utf-8")
    assert "selection_examples" not in rounds
