"""What the documentation shows is run or checked: examples, commands, pins and versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import corefed
from corefed import cli, running
from corefed.config import resolve
from corefed.coreset import Coreset
from corefed.methods import registry
from corefed.runtime import rounds

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


class Command(NamedTuple):
    page: str
    words: tuple[str, ...]  # without environment variables, redirections and comments

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def blocks(text: str, *languages: str) -> list[str]:
    """The contents of a page's fenced blocks in these languages."""
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```\s*$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in fenced if language.strip() in languages]


def commands(page: str, text: str) -> list[Command]:
    """Every simple command of a page's shell blocks.

    Where a block has prompts ("$ ..."), the lines without one are output.
    """
    found = []
    for block in blocks(text, "console", "sh", "bash", "shell"):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
        for line in prompted or lines:
            found += [Command(page, words) for words in simple_commands(line)]
    return found


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


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))


def shown() -> list[Command]:
    """Commands of all pages; a page that is missing is a failure of its own test, not of import."""
    return [
        command
        for page in PAGES
        if page.exists()
        for command in commands(page.name, page.read_text(encoding="utf-8"))
    ]


SHOWN = shown()
MAKE = [command for command in SHOWN if command.words[0] == "make"]
COREFED = [command for command in SHOWN if corefed_arguments(command.words) is not None]
RUN = [command for command in COREFED if (corefed_arguments(command.words) or [""])[0] == "run"]


def test_commands_are_found() -> None:
    """The reader of pages itself, on a page with all it must cope with."""
    page = """
```console
$ make run   # a comment
written to runs/x
$ COREFED_DATA=data corefed run --set hidden=200,100 \\
    --out runs/x && python -m corefed compare runs/*  > table.txt
```
```sh
git clone somewhere
.venv/bin/corefed --version
```
```python
corefed = "not a command"
```
"""
    found = [command.words for command in commands("page", page)]
    assert found == [
        ("make", "run"),
        ("corefed", "run", "--set", "hidden=200,100", "--out", "runs/x"),
        ("python", "-m", "corefed", "compare", "runs/*"),
        ("table.txt",),
        ("git", "clone", "somewhere"),
        (".venv/bin/corefed", "--version"),
    ]
    assert [corefed_arguments(words) for words in found[:3]] == [
        None,
        ["run", "--set", "hidden=200,100", "--out", "runs/x"],
        ["compare", "runs/*"],
    ]


def test_readme_shows_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    words = [command.words for command in commands("README.md", readme)]
    assert ("make", "run") in words
    assert ("make", "test") in words
    assert any(corefed_arguments(each) is not None for each in words)


@pytest.mark.parametrize("command", MAKE, ids=str)
def test_make_target_exists(command: Command) -> None:
    known = make_targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    wanted = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    assert set(wanted) <= known, f"no such target; the Makefile has {sorted(known)}"


@pytest.mark.parametrize("command", COREFED, ids=str)
def test_corefed_command_exists(command: Command) -> None:
    """The subcommand and each of its options are those of the command line."""
    arguments = corefed_arguments(command.words)
    assert arguments is not None
    known = typer.main.get_command(cli.app)
    for word in arguments:
        subcommands = getattr(known, "commands", {})
        if not subcommands or word.startswith("-"):
            break
        assert word in subcommands, f"there are {sorted(subcommands)}"
        known = subcommands[word]
    options = {"--help"} | {name for p in known.params for name in (*p.opts, *p.secondary_opts)}
    used = {word.partition("=")[0] for word in arguments if re.match(r"--?[A-Za-z]", word)}
    assert used <= options, f"there are {sorted(options)}"


@pytest.mark.parametrize("command", RUN, ids=str)
def test_corefed_run_is_accepted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """`corefed run` as shown gets as far as training: methods, settings and values are real ones.

    Nothing is trained, and files or folders that a line names need not exist.
    """
    arguments = corefed_arguments(command.words)
    assert arguments is not None
    reached = []

    def stop_before_training(
        config: Path | None, flags: Mapping[str, object], assignments: Sequence[str], **rest: object
    ) -> int:
        if config is None and rest["resume"] is None:
            resolve(None, flags, assignments)
        reached.append(True)
        return 0

    monkeypatch.setattr(running, "execute", stop_before_training)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert reached


def test_python_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    federation, coreset = blocks(text, "python")
    exec(compile(federation, "README.md", "exec"), {})
    assert 0 < float(capsys.readouterr().out) < 1
    exec(compile(coreset, "README.md", "exec"), {})


def test_a_coreset_for_a_network_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "coresets.md").read_text(encoding="utf-8")
    (source,) = blocks(text, "python")
    found: dict[str, object] = {}
    exec(compile(source, "coresets.md", "exec"), found)
    assert capsys.readouterr().out.startswith("Coreset of 90 of 1,797 points")
    coreset = found["coreset"]
    assert isinstance(coreset, Coreset)
    assert coreset.diagnostics.ratio < 0.1


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Python of CONTRIBUTING.md, run as one module."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = tmp_path / "contributed.py"
    source.write_text("\n\n".join(blocks(text, "python")), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("contributed", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "contributed", module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_contributed_method_learns(example: ModuleType) -> None:
    """Executing the page is most of the test: its last line asserts that the loss halved."""
    assert example.method.name == "fedprox"
    assert example.losses[-1] < example.losses[0]


@pytest.mark.parametrize("runtime", ["loop", "vmap"])
def test_contributed_method_needs_only_a_row(
    example: ModuleType,
    runtime: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its row, the example is a method of the command line, from settings to metrics."""
    entry = registry.Entry("contributed", "fedavg with clients held near the broadcast")
    monkeypatch.setitem(registry.METHODS, "fedprox", entry)
    with pytest.raises(SystemExit):
        cli.main(["methods", "fedprox"])
    assert "Learning rate of the local steps." in capsys.readouterr().out
    settings = ["clients=3", "rounds=2", f"runtime={runtime}", "learning_rate=0.2"]
    trained = rounds.train(resolve(None, {"method": "fedprox"}, settings))
    assert trained.summary["metrics"]["global_accuracy"]["mean"] > 0.2  # 0.1 is chance


def read_pins() -> dict[str, Version]:
    """constraints.txt, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, equals, version = line.partition("==")
            assert equals, f"{line!r} is not an exact pin"
            pins[normalised(name)] = Version(version)
    return pins


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, to use corefed, to develop it and to build it."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = content["project"]["optional-dependencies"].values()
    lists = [content["project"]["dependencies"], content["build-system"]["requires"], *extras]
    return [Requirement(text) for texts in lists for text in texts]


def test_constraints_satisfy_the_project() -> None:
    pins = read_pins()
    for requirement in declared():
        pin = pins.get(normalised(requirement.name))
        assert pin is not None, f"constraints.txt has no pin of {requirement.name}"
        assert pin in requirement.specifier, f"the pin {pin} does not satisfy {requirement}"


def test_constraints_pin_what_dependencies_pull_in() -> None:
    """Followed through the packages that are installed as pinned.

    Not through torch: what it pulls in (CUDA, say) differs from platform to platform.
    """
    pins = read_pins()
    waiting = [normalised(requirement.name) for requirement in declared()]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        if name != "torch" and name in pins:
            waiting += pulled_in(name, pins[name])
    assert reached - pins.keys() == set()


def pulled_in(name: str, pin: Version) -> list[str]:
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    if Version(package.version) != pin:
        return []
    needed = [Requirement(text) for text in package.requires or []]
    return [
        normalised(each.name)
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": ""})
    ]


def test_constraints_are_for_every_platform() -> None:
    """A local version such as 2.13.0+cpu exists on one index only."""
    assert [name for name, version in read_pins().items() if version.local] == []


@pytest.mark.parametrize(
    ("name", "bound"), [("typer", "<0.21"), ("rich", "<15"), ("packaging", "<26")]
)
def test_constraints_leave_room_for_flower(name: str, bound: str) -> None:
    """flwr 1.41.0 has these bounds, and is to be installed beside corefed."""
    assert read_pins()[name] in SpecifierSet(bound)


def test_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {corefed.__version__}\n" in citation
    newest = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == corefed.__version__
