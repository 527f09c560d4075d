"""Names in data and folders that a terminal, rich, Markdown or HTML would obey."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from commands import corefed

from corefed.commands import predict

SITES = (
    "\x1b]0;evil\x07north", "<img src=x onerror=alert(1)>", "[link=http://evil]south[/link]"
)  # fmt: skip
CLASSES = ("[red]yes[/red]", "<script>no</script>\x1b[2J")
COLUMN = "do\x9b31mse"
HARMFUL = ("\x1b", "\x07", "\x9b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with such names, in a folder with such a name."""
    here = tmp_path_factory.mktemp("evil")
    with (here / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([COLUMN, "weight", "site", "outcome"])
        for i in range(90):
            rows.writerow([i % 7, i % 5, SITES[i % 3], CLASSES[(i % 7) // 4]])
    run = here / "ru\x1b[31mn"
    done = corefed(
        "run", "--data", f"table:{here / 'rows.csv'}", "--target=outcome", "--client=site",
        "--method=pfedbayes", "--rounds=1", "--local-steps=2", "--set=hidden=4", "--out", run,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert_harmless(done.out + done.err)
    assert "ru\\x1b[31mn" in done.out
    return run


def assert_harmless(text: str) -> None:
    for each in HARMFUL:
        assert each not in text, repr(text)


def test_commands_print_what_is_there(folder: Path, tmp_path: Path) -> None:
    rows = folder.parent / "rows.csv"
    data = ("--data", f"table:{rows}", "--target=outcome", "--client=site")
    for words in (
        ("compare", folder),
        ("watch", folder, "--once"),
        ("predict", folder, "--client", SITES[0], "--input", rows, "--out", tmp_path / "p.csv"),
        ("datasets", "--show", *data[1:]),
        ("export", folder, "--client", SITES[0], "--no-program", "--out", tmp_path / "\x1b[1mm"),
    ):
        done = corefed(*words)
        assert done.code == 0, done.err
        assert_harmless(done.out + done.err)


def test_mistakes_are_told_harmlessly(folder: Path, tmp_path: Path) -> None:
    for words, said in (
        (("predict", folder, "--client", "no\x1b[1mrth", "--input", "x.csv"), "has no client"),
        (("compare", tmp_path / "no\x1b[1mne"), "no\\x1b[1mne holds no run"),
        (("run", "--resume", tmp_path / "no\x9bne"), "no\\x9bne holds no run"),
        (("run", "--data", "no\x1b]0;x\x07ne"), "x1b]0;x"),
    ):
        done = corefed(*words)
        assert done.code == 2
        assert said in done.err
        assert_harmless(done.out + done.err)


def test_a_model_card_has_no_html(folder: Path, tmp_path: Path) -> None:
    assert corefed("export", folder, "--client", SITES[1], "--no-program", "--out",
                   tmp_path / "model").code == 0  # fmt: skip
    card = (tmp_path / "model" / "model_card.md").read_text()
    assert_harmless(card)
    assert "<img" not in card and "<script" not in card
    assert "&lt;img src=x onerror=alert(1)&gt;" in card and "&lt;script&gt;no" in card
    assert "\\[red\\]yes" in card


def test_predictions_are_harmless_on_a_terminal_and_exact_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    table = f"id,predicted\n1,{CLASSES[1]}\n"
    for stream, wanted in (
        (io.StringIO(), table),
        (Terminal(), table.replace("\x1b", "\\x1b")),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        predict._print(table)
        assert stream.getvalue() == wanted
