"""Every fenced block of every page is executed, or says why not and is held to the program.

`pages.py` says what counts as which.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
from packaging.requirements import Requirement
from pages import (
    EXECUTED,
    PAGES,
    ROOT,
    Block,
    Scratch,
    blocks,
    corefed_arguments,
    read,
    tables,
)

from corefed.commands import cli
from corefed.coreset import Coreset
from corefed.settings import config
from corefed.settings.config import resolve
from corefed.training import record

ALL = [block for page in PAGES for block in blocks(page)]
MARKED = [block for block in ALL if block.mark]
TO_RUN = [block for block in ALL if not block.mark and (block.language in EXECUTED or block.title)]
COMMANDS = sorted({(block.page, words) for block in ALL for words in block.commands})


def named(case: tuple[str, Sequence[str]]) -> str:
    return f"{case[0]}: {' '.join(case[1])}"


def of_program(*programs: str) -> list[tuple[str, tuple[str, ...]]]:
    return [case for case in COMMANDS if case[1][0] in programs]


# --- the reader of pages ------------------------------------------------------------------------


def test_blocks_are_found() -> None:
    """On a page with all that it must cope with."""
    page = """
```console
$ make run   # a comment
written to runs/x
$ COREFED_DATA=data corefed run --set hidden=200,100 \\
    --out runs/x && python -m corefed compare runs/*  > table.txt
```
<!-- not executed: fetches -->

```sh
git clone somewhere
.venv/bin/corefed --version
```
<!-- executed by test_docs.py -->
```python title="network.py"
corefed = "not a command"
```
"""
    shell, marked, file = read("page.md", page)
    assert shell.commands == [
        ("make", "run"),
        ("corefed", "run", "--set", "hidden=200,100", "--out", "runs/x"),
        ("python", "-m", "corefed", "compare", "runs/*"),
        ("table.txt",),
    ]
    assert [corefed_arguments(words) for words in shell.commands[:3]] == [
        None,
        ["run", "--set", "hidden=200,100", "--out", "runs/x"],
        ["compare", "runs/*"],
    ]
    assert marked.commands == [("git", "clone", "somewhere"), (".venv/bin/corefed", "--version")]
    assert (shell.mark, marked.mark) == ("", "not executed: fetches")
    assert (file.mark, file.title, file.line) == ("executed by test_docs.py", "network.py", 16)


@pytest.mark.parametrize(
    "page",
    [
        "```bash\nls\n```\n",
        "```\nls\n```\n",
        "* an item\n\n  ```sh\n  ls\n  ```\n",
        "~~~sh\nls\n~~~\n",
        "```sh\nls\n",
        '```sh linenums="1"\nls\n```\n',
    ],
    ids=["language", "none", "indented", "tildes", "open", "attributes"],
)
def test_a_block_cannot_be_overlooked(page: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md"):
        read("page.md", page)


TABLE = """
       accuracy %, data digits, seeds 3, rounds 40, ± std over seeds
   method             k/n  personal  global     ±    NLL    ECE  sec  passes
────────────────────────────────────────────────────────────────────────────
1  independent          1     95.51       -  0.43  0.156  0.042  2.2   1.8 M
2  coreset-pfedbayes  0.2     97.23   94.28  0.06  0.103  0.027  7.8   707 k

1  runs/independent
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0.06", "0.92", []),  # a standard deviation
        ("7.8", "78.", []),  # seconds
        ("97.23", "96.73", []),
        ("97.23", "96.72", ["coreset-pfedbayes, personal: 96.72 in place of 97.23"]),
        ("0.103", "0.114", ["coreset-pfedbayes, NLL: 0.114 in place of 0.103"]),
        ("707 k", "708 k", ["coreset-pfedbayes, passes: 708 k in place of 707 k"]),
        ("    -", "95.51", ["independent, global: 95.51 in place of -"]),
        ("independent", "pfedbayes  ",
         ["['pfedbayes', 'coreset-pfedbayes'] in place of ['independent', 'coreset-pfedbayes']"]),
    ],
)  # fmt: skip
def test_a_stale_table_is_noticed(old: str, new: str, words: list[str]) -> None:
    (shown,), (printed,) = tables(TABLE), tables(TABLE.replace(old, new, 1))
    assert shown.stale(printed) == words


def test_a_table_with_other_columns_is_stale() -> None:
    (shown,), (printed,) = tables(TABLE), tables(TABLE.replace("  sec ", "  time"))
    assert len(shown.stale(printed)) == 1


# --- executed blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.jax] if page == "docs/pays.md" else [])
        for page in sorted({block.page for block in TO_RUN})
    ],
)
def test_page(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its blocks, one after the other, in a folder of their own with the checkout's results."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    (tmp_path / "docs").mkdir()
    for each in (ROOT / "docs").glob("*.md"):
        shutil.copy(each, tmp_path / "docs")
    scratch = Scratch(tmp_path, page, monkeypatch)
    said = []
    try:
        for block in TO_RUN:
            if block.page == page:
                scratch.execute(block)
                said.append(capsys.readouterr().out)
                print(said[-1])
        assert stale(page, "".join(said)) == []
        if page in AFTERWARDS:
            AFTERWARDS[page](scratch, "".join(said), monkeypatch)
    finally:
        scratch.forget()


def stale(page: str, said: str) -> list[str]:
    """Where tables of the page are not what its commands print, one after the other."""
    shown = [t for b in ALL if (b.page, b.language) == (page, "text") for t in tables(b.body)]
    assert shown or page not in WITH_TABLES
    printed = tables(said)
    assert len(printed) >= len(shown)
    found = [min((each.stale(other) for other in printed), key=len) for each in shown]
    return [words for each in found for words in each]


def readme(scratch: Scratch, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [words for page, words in COMMANDS if page == "README.md"]
    assert ("make", "run") in words and ("make", "test") in words
    assert scratch.module.probabilities.shape == (5, 3)
    assert scratch.module.folder.is_dir()


def coresets(scratch: Scratch, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Coreset of 90 of 1,797 points" in said
    coreset = scratch.module.coreset
    assert isinstance(coreset, Coreset)
    assert coreset.diagnostics.ratio < 0.1


def theory(scratch: Scratch, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page shows as output is what its blocks print."""
    shown = [b for b in ALL if (b.page, b.language) == ("docs/theory-study.md", "text")]
    assert shown
    assert [str(block) for block in shown if block.body not in said] == []


WITH_TABLES = ("README.md", "docs/start.md")
"""Pages that show what `corefed compare` prints."""

AFTERWARDS: dict[str, Callable[[Scratch, str, pytest.MonkeyPatch], None]] = {
    "README.md": readme,
    "docs/coresets.md": coresets,
    "docs/theory-study.md": theory,
}
"""What must hold once a page has been executed, beside that nothing failed."""


# --- what is shown without being executed ---------------------------------------------------------


@pytest.mark.parametrize("block", MARKED, ids=str)
def test_a_mark_is_true(block: Block) -> None:
    """A reason is given, or a test that reads the page; Python is Python."""
    kind, reason = re.split(r"(?<=executed): |(?<=executed) by ", block.mark, maxsplit=1)
    assert len(reason) > 5, "say why"
    if kind == "executed":
        test = next((ROOT / "tests").rglob(reason))
        assert Path(block.page).name in test.read_text(encoding="utf-8")
    if block.language == "python":
        compile(block.body, block.page, "exec")


def test_links_of_the_readme_lead_somewhere() -> None:
    """`test_site.py` follows those of the other pages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("case", of_program("make"), ids=named)
def test_make_target_exists(case: tuple[str, Sequence[str]]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))
    wanted = [word for word in case[1][1:] if "=" not in word and not word.startswith("-")]
    assert set(wanted) <= known, f"no such target; the Makefile has {sorted(known)}"


@pytest.mark.parametrize("case", of_program("pip"), ids=named)
def test_extra_exists(case: tuple[str, Sequence[str]]) -> None:
    """`pip install -e '.[report]'` installs something."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for word in case[1]:
        if word.startswith(".["):
            extras = Requirement(f"corefed{word[1:]}").extras
            assert extras <= content["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize(
    "case", [case for case in COMMANDS if corefed_arguments(case[1]) is not None], ids=named
)
def test_corefed_command_exists(case: tuple[str, Sequence[str]]) -> None:
    """The subcommand and each of its options are those of the command line."""
    arguments = corefed_arguments(case[1])
    assert arguments is not None
    known: Any = cli.command()
    for word in arguments:
        subcommands = getattr(known, "commands", {})
        if not subcommands or word.startswith("-"):
            break
        assert word in subcommands, f"there are {sorted(subcommands)}"
        known = subcommands[word]
    options = {"--help"} | {name for p in known.params for name in (*p.opts, *p.secondary_opts)}
    used = {word.partition("=")[0] for word in arguments if re.match(r"--?[A-Za-z]", word)}
    assert used <= options, f"there are {sorted(options)}"


RUN = sorted(
    {
        (block.page, words)
        for block in MARKED
        if block.mark.startswith("not executed")
        for words in block.commands
        if (corefed_arguments(words) or [""])[0] == "run"
    }
)


@pytest.mark.parametrize("case", RUN, ids=named)
def test_corefed_run_is_accepted(
    case: tuple[str, Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`corefed run` as shown gets as far as training: methods, settings and values are real ones.

    Nothing is trained, and files or folders that a line names need not exist.
    """
    arguments = corefed_arguments(case[1])
    assert arguments is not None
    reached = []
    for module in (
        "final",
        "fitted",
    ):  # which keep the `resolve` that they find when first imported
        import_module(f"corefed.training.{module}")

    def stop_before_training(
        path: Path | None, flags: Mapping[str, object], assignments: Sequence[str]
    ) -> NoReturn:
        if path is None:
            resolve(None, flags, assignments)
        reached.append(True)
        raise SystemExit(0)

    monkeypatch.setattr(config, "resolve", stop_before_training)
    monkeypatch.setattr(record.Folder, "refuse_missing", lambda folder: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert reached
