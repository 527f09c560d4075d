"""`corefed watch DIR`: a run in the terminal, from its folder alone, during or after training.

The training process is not involved. Each look reads what was added to the files since the last
one. A resumed run shortens rounds.jsonl and rewrites experiment.toml; then all is read again.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from corefed.base import digests
from corefed.base.errors import UserError
from corefed.base.shown import printable
from corefed.settings import toml
from corefed.show import report
from corefed.training import record, summaries
from corefed.training.cost import of_summary

LOOK = 1.0
"""Seconds between looks."""
QUIET = 300.0
"""Seconds without a new round after which a run may have stopped, unless its rounds are slow."""
SLOW = 5
"""A round may take this many times as long as the longest before it."""
MARKS, PLAIN_MARKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WIDTH = 40
"""Characters of a curve, at most."""


class Snapshot(NamedTuple):
    """The state of a run's folder at one moment."""

    path: Path
    values: dict[str, Any]  # every setting
    lines: list[record.Line]
    finished: bool
    written: float  # when the last round was written, or else the settings


class Reader:
    """Reads a run's folder; each look reads only what was added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._settings: tuple[int, int] | None = None  # which experiment.toml was read
        self._lines: list[record.Line] = []
        self._end = 0  # of the last whole line

    def look(self) -> Snapshot:
        path = self._path
        try:
            about = (path / record.EXPERIMENT).stat()
            if self._settings != (about.st_ino, about.st_mtime_ns):
                self._values = toml.read(record.settings_file(path))
                self._settings = about.st_ino, about.st_mtime_ns
                self._forget()
            written = self._read(path / record.ROUNDS) or about.st_mtime
            finished = (path / record.SUMMARY).exists()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"{path} holds no run of corefed: it has no {record.EXPERIMENT}."
            ) from error
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}.") from error
        missing = {"method", "data", "partition", "clients", "seeds", "rounds"} - set(self._values)
        if missing:
            raise UserError(
                f"{path / record.EXPERIMENT} is not of a run: it has no {min(missing)}."
            )
        return Snapshot(path, self._values, list(self._lines), finished, written)

    def _read(self, file: Path) -> float | None:
        """Read new whole lines; returns when the last was written, None before the first."""
        try:
            with file.open("rb") as content:
                if content.seek(0, 2) < self._end:
                    self._forget()
                content.seek(self._end)
                added = content.read()
        except FileNotFoundError:
            self._forget()
            return None
        if not self._take(added):  # shortened, and already longer again, or damaged
            self._forget()
            self._lines, self._end = record.read_lines(file)  # refuses damaged lines
        return file.stat().st_mtime if self._lines else None

    def _take(self, added: bytes) -> bool:
        """Whether the added lines continue the ones we have."""
        *whole, rest = added.split(b"\n")
        for raw in whole:
            try:
                line = record.read_line(raw + b"\n", len(self._lines) + 1, self._path)
            except ValueError:
                return False
            self._lines.append(line)
            self._end += len(raw) + 1
        return not digests.ends_sealed(rest)  # or else it is unfinished

    def _forget(self) -> None:
        self._lines, self._end = [], 0


def follow(
    path: Path,
    *,
    once: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show a run until it has finished, or once; returns an exit code."""
    console = console or report.console()
    reader = Reader(path)
    look = reader.look()
    plain = console.options.ascii_only
    if once or not console.is_terminal:
        console.print(picture(look, clock(), plain=plain))
        return 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(picture(look, clock(), plain=plain), refresh=True)
                if look.finished:
                    return 0
                sleep(LOOK)
                look = reader.look()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # what a shell expects


def picture(look: Snapshot, now: float, *, plain: bool = False) -> RenderableType:
    """Everything that is shown, from top to bottom."""
    parts: list[RenderableType] = [Text(printable(about(look)), style="bold"), _progress(look)]
    if look.lines:
        summary = summaries.summarise(look.values, look.lines, {})
        if summary["metrics"]:
            table = report.metrics_table(summary)
            seeds = len(summary["seeds"])
            over = f", mean ± std over {seeds} seeds" if seeds > 1 else ""
            table.title = table.caption = None  # they are for finished runs
            parts += [Text(f"after round {evaluated(look.lines)}{over}"), table]
        parts += [_curves(look.lines, plain=plain), Text(cost_words(summary))]
        if "federation" in look.lines[-1]:
            parts.append(Text(printable(_answers(look.lines[-1]["federation"]))))
    parts.append(_state(look, max(0.0, now - look.written)))
    return Group(*parts)


def about(look: Snapshot) -> str:
    values = look.values
    seeds = values["seeds"]
    words = [
        f"{values['method']} on {values['data']}",
        *([values["partition"]] if values["partition"] else []),
        f"{values['clients']} clients",
        f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}",
    ]
    return ", ".join(words)


def _progress(look: Snapshot) -> Table:
    done, rounds = len(look.lines), look.values["rounds"]
    row = Table.grid(padding=(0, 1))
    words = time_left(look)
    bar = ProgressBar(total=max(1, rounds), completed=done, width=30)
    early = f"stopped early, after {done} of {rounds} rounds"
    words = early if look.finished and done < rounds else words
    row.add_row(f"round {done}/{rounds}", bar, words)
    return row


def time_left(look: Snapshot) -> str:
    """By the mean of the rounds so far; empty where there is nothing to say."""
    done = len(look.lines)
    left = sum(map(seconds_of, look.lines)) / max(1, done) * (look.values["rounds"] - done)
    return f"{duration(left)} left" if done and not look.finished else ""


def _curves(lines: Sequence[record.Line], *, plain: bool) -> Table:
    """The main metric and the coreset error over rounds, with their first and last values."""
    table = Table.grid(padding=(0, 2))
    metrics: dict[str, Any] = next((m for line in lines if (m := line.get("metrics"))), {})
    model = record.main_model(metrics)
    name = next((n for m in report.HEADINGS if (n := f"{model}_{m}") in metrics), "")
    rows = {name.replace("_", " "): [line.get("metrics", {}).get(name) for line in lines]}
    rows["coreset error"] = [line["coreset"].get("held_out_error") for line in lines]
    for label, by_round in rows.items():
        means = [sum(each) / len(each) for each in by_round if each and None not in each]
        curve = [mean for mean in means if isfinite(mean)]
        if label and curve:
            ends = f"{_format(label, curve[0])} to {_format(label, curve[-1])}"
            table.add_row(label, sparkline(curve, marks=PLAIN_MARKS if plain else MARKS), ends)
    return table


def sparkline(values: Sequence[float], width: int = WIDTH, marks: str = MARKS) -> str:
    """Values as heights between the smallest and the largest; long curves are averaged."""
    number = min(width, len(values))
    cuts = [i * len(values) // number for i in range(number + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    steps = (high - low) / (len(marks) - 1) or 1.0  # a flat curve lies at the bottom
    return "".join(marks[round((mean - low) / steps)] for mean in means)


def _format(label: str, value: float) -> str:
    return f"{100 * value:.1f} %" if label.endswith("accuracy") else f"{value:.3f}"


def cost_words(summary: dict[str, Any]) -> str:
    cost, fraction = summary["cost"], summary["coreset"]["fraction"]
    return (
        f"{100 * fraction:g} % of the data, {of_summary(summary).words}, "
        f"{size(cost['bytes_up'])} up, {size(cost['bytes_down'])} down, "
        f"{duration(cost['seconds'])} of training ({cost['seconds_per_round']:.2f} s per round), "
        f"{duration(cost['evaluate_seconds'])} of evaluation"
    )


def _answers(federation: dict[str, Any]) -> str:
    """Who took part in the last round of a real federation."""
    lost = [f"{name} ({reason})" for name, reason in federation["lost"].items()]
    words = f"last round: {len(federation['accepted'])} clients answered"
    return f"{words}; left out: {', '.join(lost)}" if lost else words


def _state(look: Snapshot, ago: float) -> Text:
    words, style = state_words(look, ago)
    return Text(printable(words), style=style)


def state_words(look: Snapshot, ago: float) -> tuple[str, str]:
    """How recent the last round is, and what to do if it is old; and a style."""
    if look.finished:
        return f"finished {duration(ago)} ago", "green"
    if ago > max(QUIET, SLOW * max(map(seconds_of, look.lines), default=0.0)):
        words = f"nothing new for {duration(ago)}: stopped? Go on with: {resume_command(look.path)}"
        return words, "yellow"
    what = f"round {len(look.lines)} was written" if look.lines else "began"
    first = "" if look.lines else "; its first round is not finished"
    return f"{what} {duration(ago)} ago{first}", "dim"


def resume_command(path: Path) -> str:
    if (path / record.EVENTS).exists():  # DIR/server/runs/RUN of a federation
        folder = path.resolve()
        directory = shlex.quote(str(folder.parents[2]))
        return f"corefed federation resume {directory} --name {shlex.quote(folder.name)}"
    return f"corefed run --resume {shlex.quote(str(path))}"


def seconds_of(line: record.Line) -> float:
    return float(line["seconds"] + line.get("evaluate_seconds", 0.0))


def evaluated(lines: Sequence[record.Line]) -> int:
    return int(next(line["round"] for line in reversed(lines) if line.get("metrics")))


def duration(seconds: float) -> str:
    """3 s, 5 min, 2.5 h, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def size(number: float) -> str:
    """Bytes with a unit, with one to three digits before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
