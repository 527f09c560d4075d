"""Log a run to another tool: `corefed run --track mlflow`, `--track tensorboard`.

    reach     before anything is written: is the tool installed, does it answer?
    start     once the run's folder exists, with the rounds that it already has
    round     after each round
    finish    with the files of the run and its outcome

A tool gets a copy of the run's own record (`record.py`). If a tool fails, training goes on with a
warning, and a resumed run logs what is missing. The last point of every curve is the value of the
same name in summary.json; NLL, ECE and Brier score of a calibrated run are those before its
temperatures. Metrics, loss and coreset values are means over seeds; costs are totals over seeds.
"""

from __future__ import annotations

import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from corefed.base.errors import UserError, did_you_mean
from corefed.base.shown import say
from corefed.training import cost as cost_of

MARKS = {"mlflow": "mlflow.json", "tensorboard": "tensorboard"}
"""The tools, each with the file or folder that it leaves in a run's folder."""

Outcome = Literal["finished", "stopped", "failed"]


class LoggedRound(NamedTuple):
    """What is logged for one round."""

    round: int
    means: dict[str, float]
    by_seed: dict[str, dict[int, float]]  # name -> seed -> value; empty where there is one seed


class Tracker(Protocol):
    """One tool. Any exception means that it failed."""

    def start(
        self, folder: Path, values: Mapping[str, Any], points: Sequence[LoggedRound]
    ) -> None: ...

    def round(self, point: LoggedRound) -> None: ...

    def finish(self, summary: Mapping[str, Any] | None, outcome: Outcome) -> None: ...


class RoundLog:
    """Turns lines of rounds.jsonl, in order, into points of curves."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._cost = dict.fromkeys(("seconds", "evaluate_seconds", "peak_memory_mb"), 0.0)
        self._cost |= dict.fromkeys(("bytes_up", "bytes_down", "examples_processed", "passes"), 0.0)

    def add(self, line: Mapping[str, Any]) -> LoggedRound:
        each: dict[str, list[float]] = {
            name: values
            for name, values in {**line.get("metrics", {}), "loss": line["loss"]}.items()
            if None not in values
        }
        means = {name: statistics.fmean(values) for name, values in each.items()}
        for name, values in line["coreset"].items():
            if None not in values:
                means[f"coreset/{name}"] = statistics.fmean(values)
        cost = self._cost
        cost["seconds"] += line["seconds"]
        cost["evaluate_seconds"] += line.get("evaluate_seconds", 0.0)
        cost["peak_memory_mb"] = max(cost["peak_memory_mb"], line["peak_memory_mb"])
        cost["bytes_up"] += sum(line["bytes_up"])
        cost["bytes_down"] += sum(line["bytes_down"])
        cost["examples_processed"] += sum(line["examples"])
        cost["passes"] += sum(cost_of.completed({}, [dict(line)])[0]["passes"])
        means |= {f"cost/{name}": value for name, value in cost.items()}
        means["cost/seconds_per_round"] = cost["seconds"] / line["round"]
        several = each if len(self._seeds) > 1 else {}
        by_seed = {n: dict(zip(self._seeds, v, strict=True)) for n, v in several.items()}
        return LoggedRound(line["round"], means, by_seed)


class Trackers:
    """All tools of a run. One that fails is dropped with one warning."""

    def __init__(self, trackers: Mapping[str, Tracker], folder: Path) -> None:
        self._live = dict(trackers)
        self._folder = folder
        self._log: RoundLog | None = None  # until the run has begun
        self._ended = False

    def start(self, values: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """The run has begun, or is resumed after `lines`."""
        log = self._log = RoundLog(values["seeds"])
        points = [log.add(line) for line in lines] if self._live else []
        self._each(lambda tracker: tracker.start(self._folder, values, points))

    def round(self, line: Mapping[str, Any]) -> None:
        if self._live and self._log is not None:
            point = self._log.add(line)
            self._each(lambda tracker: tracker.round(point))

    def finish(self, summary: Mapping[str, Any] | None, outcome: Outcome) -> None:
        """Finish once; a run that was refused before it began has started nothing."""
        if self._log is not None and not self._ended:
            self._ended = True
            self._each(lambda tracker: tracker.finish(summary, outcome))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._live[name]
                again = f"corefed run --resume {shlex.quote(str(self._folder))} --track {name}"
                say(
                    f"warning: --track {name} failed and is left out from here on, training goes "
                    f"on: {reason(error)}. What it misses is logged by: {again}",
                    file=sys.stderr,
                )


@contextmanager
def following(given: Sequence[str], folder: Path) -> Iterator[Trackers]:
    """The tools of `--track`, reached or refused; they learn it if an exception ends the run."""
    reached = {n: import_module(f"corefed.show.tracking.{n}").reach(folder) for n in names(given)}
    trackers = Trackers(reached, folder)
    try:
        yield trackers
    except KeyboardInterrupt:
        trackers.finish(None, "stopped")
        raise
    except BaseException:
        trackers.finish(None, "failed")
        raise


def names(given: Sequence[str]) -> list[str]:
    """The names in `--track`, repeated or with commas, each once."""
    found: dict[str, None] = {}
    for name in (part.strip() for text in given for part in text.split(",")):
        if name not in MARKS:
            hint = did_you_mean(name, MARKS, otherwise=f"there are {' and '.join(MARKS)}")
            raise UserError(f"There is no tracker {name!r} (--track){hint}")
        found[name] = None
    return list(found)


def forgotten(given: Sequence[str], folder: Path) -> list[str]:
    """Tools that tracked the run in this folder before, and are not asked for now."""
    return [n for n, mark in MARKS.items() if n not in given and (folder / mark).exists()]


def public(text: str) -> str:
    """The text with user names and passwords removed from addresses."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def reason(error: BaseException) -> str:
    """The first line of an exception, shortened in the middle, without its full stop."""
    lines = public(str(error)).strip().splitlines()
    text = (lines[0] if lines else type(error).__name__).rstrip(".")
    return text if len(text) <= 240 else f"{text[:120]} ... {text[-115:]}"
