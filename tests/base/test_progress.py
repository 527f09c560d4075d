"""Bars on a terminal, plain lines elsewhere, nothing where silence was asked for."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from corefed.base.progress import bars, loading, track


def terminal() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=True, width=100), written


def test_a_terminal_gets_one_bar_per_title_and_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console, written = terminal()
    with bars(keep=True, console=console) as shown:
        assert written.getvalue() == ""  # a bar appears with its first step
        shown.show("first", 3, 3, line="a line")
        shown.show("second", 1, None, "1.5 [MB]")
    last = written.getvalue().rsplit("first", 1)[1]
    assert "3/3" in last and "second" in last and "1.5 [MB]" in last
    assert capsys.readouterr() == ("", "")


def test_elsewhere_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with bars() as shown:
        shown.show("first", 1, 2)
        shown.show("first", 2, 2, line="first 2/2")
    assert capsys.readouterr() == ("", "first 2/2\n")


@pytest.mark.parametrize("module", ["rich", "rich.progress"])
def test_without_rich_lines_are_printed(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with bars() as shown:
        shown.show("first", 2, 2, line="first 2/2")
    assert capsys.readouterr() == ("", "first 2/2\n")


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    console, written = terminal()
    with bars(silent=True, console=console) as shown:
        shown.show("first", 2, 2, line="first 2/2")
    assert capsys.readouterr() == ("", "") and written.getvalue() == ""


def test_tracked_items_come_in_their_order_and_are_counted() -> None:
    console, written = terminal()
    assert list(track(range(4), "items", console)) == [0, 1, 2, 3]
    assert "items" in written.getvalue()
    assert list(track([], "items", console)) == []


def test_a_bar_ends_with_its_work() -> None:
    console, _ = terminal()
    for _ in track([1, 2], "cut off", console):
        break
    with bars(console=console) as shown:  # rich refuses a second live display on a console
        shown.show("first", 1, 2)


def test_only_one_module_draws_bars() -> None:
    source = Path(__file__).parents[2] / "src"
    imported = re.compile(r"rich\.progress import|rich import .*progress")
    users = [path for path in source.rglob("*.py") if imported.search(path.read_text())]
    assert users == [source / "corefed" / "base" / "progress.py"]


def test_loading_is_said_on_a_terminal_and_taken_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with loading("PyTorch"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading("PyTorch"):
        assert capsys.readouterr().err == "loading PyTorch ..."
    assert capsys.readouterr().err == "\r\x1b[2K"
    with loading("PyTorch", silent=True):
        pass
    assert capsys.readouterr() == ("", "")
