"""CONTRIBUTING.md followed to the letter, in a copy of the checkout.

Its files are written, its rows are added where it says, and its commands are run. Then: a wrong
setting is refused, the report invents nothing, and any method trains on a subset.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
    base = fedavgm.build(config, model)
    return on_subset(base, "tenth", lambda data, streams: uniform(data, 0.1, streams), 20)
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


def bash(
    checkout: Path, script: str, package: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in the checkout, with its package or with another one."""
    functions = [
        f'corefed() {{ "{sys.executable}" -m corefed "$@"; }}',
        f'python() {{ "{sys.executable}" "$@"; }}',
        f'pytest() {{ "{sys.executable}" -m pytest -p no:cacheprovider "$@"; }}',
    ]
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join([*functions, script])],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(package or checkout / "src"), "COLUMNS": "160"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_page_has_files_rows_and_commands() -> None:
    assert list(FILES) == ["src/corefed/methods/fedavgm.py", "src/corefed/selectors/hardest.py"]
    assert [(table, file) for table, file, _ in ROWS] == [
        METHODS,
        ("SELECTORS", "src/corefed/selectors/__init__.py"),
    ]
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_of_the_page(block: Block, checkout: Path) -> None:
    """Those before the first row have the package as it is."""
    first = ROW.search(TEXT)
    assert first is not None
    before = block.line < TEXT.count("\n", 0, first.start())
    ended = bash(checkout, "\n".join(lines(block.body)), ROOT / "src" if before else None)
    assert ended.returncode == 0, ended.stdout + ended.stderr


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


def test_the_settings_and_their_help_are_shown(checkout: Path) -> None:
    ended = bash(checkout, "corefed methods fedavgm")
    assert "How much of the last round's move the server repeats" in ended.stdout


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
def test_a_wrong_value_is_refused(given: str, sentence: str, checkout: Path) -> None:
    """The author of the method did nothing but declare the field."""
    ended = bash(checkout, f"corefed run {given} --out runs/wrong")
    assert ended.returncode == 2
    assert sentence.lower() in ended.stderr.lower()
    assert not (checkout / "runs" / "wrong").exists()


RUN = "corefed run --method {0} --clients 3 --rounds 2 --out runs/{0}\n"
REPORT = "corefed report runs/{0} --out {0}.html"


@pytest.mark.parametrize(("method", "chosen"), [("tenth", True), ("weight", False)])
def test_the_report_shows_a_subset_where_there_is_one(
    method: str, chosen: bool, checkout: Path
) -> None:
    """Names of private tensors mean nothing; a method trains on a subset without knowing it."""
    ended = bash(checkout, RUN.format(method) + REPORT.format(method))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    page = (checkout / f"{method}.html").read_text(encoding="utf-8")
    assert (CHOSEN in page) == chosen
    rounds = (checkout / "runs" / method / "rounds.jsonl").read_text(encoding="utf-8")
    assert "selection_examples" not in rounds
