"""Progress on stderr: bars on a terminal, plain lines elsewhere.

rich draws the bars. It is imported when they are needed, since it takes a tenth of a second, and
training works without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from corefed.base import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Item = TypeVar("Item")


class Bars:
    """One bar per title. A bar appears when it is first shown."""

    def __init__(self, drawn: Progress | None, silent: bool) -> None:
        self._drawn, self._silent = drawn, silent
        self._tasks: dict[str, TaskID] = {}

    def show(
        self, title: str, done: int, total: int | None, text: str = "", *, line: str = ""
    ) -> None:
        """Move a bar. `text` stands beside it, by default `done/total`.

        `line` is printed where there is no terminal.
        """
        if self._silent:
            return
        if self._drawn is None:
            if line:
                shown.say(line, file=sys.stderr)
            return
        if not self._tasks:
            self._drawn.start()
        if title not in self._tasks:
            self._tasks[title] = self._drawn.add_task(title, total=total, text="")
        text = text or (f"{done}/{total}" if total is not None else str(done))
        self._drawn.update(self._tasks[title], completed=done, total=total, text=text)


@contextmanager
def bars(
    *, keep: bool = False, silent: bool = False, console: Console | None = None
) -> Iterator[Bars]:
    """Bars that stay on the screen at the end (`keep`) or go. `silent` shows nothing at all."""
    drawn = None if silent else _make_bars(keep, console)
    try:
        yield Bars(drawn, silent)
    finally:
        if drawn is not None and drawn.live.is_started:
            drawn.stop()


@contextmanager
def loading(what: str, *, silent: bool = False) -> Iterator[None]:
    """Say on a terminal that something is loaded, for as long as it takes."""
    if silent or not sys.stderr.isatty():
        yield
        return
    print(f"loading {what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def track(items: Sequence[Item], title: str, console: Console | None = None) -> Iterator[Item]:
    """The items one by one, with a bar that counts them."""
    with bars(console=console) as shown:
        for done, item in enumerate(items):
            shown.show(title, done, len(items))
            yield item
        shown.show(title, len(items), len(items))


def _make_bars(keep: bool, console: Console | None) -> Progress | None:
    """None where there is no terminal, or no rich."""
    try:
        from rich import progress  # see the top of the file
    except ImportError:
        return None
    console = console or shown.console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=30),
        progress.TextColumn("{task.fields[text]}", markup=False),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    return progress.Progress(*columns, console=console, transient=not keep)
