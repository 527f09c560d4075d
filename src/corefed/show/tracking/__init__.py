"""A run followed in another tool: `corefed run --track mlflow`, `--track tensorboard`.

    reach     before anything is written: is the tool installed, does it answer?
    start     once the run's folder exists, with the rounds that it has already
    round     after each round
    finish    with the files of the run and what became of it

The run's own record (`record.py`) is what counts; a tool gets a copy of it. So a tool that fails
midway costs a warning and never the training, and what it missed is logged by a resumed run. Every
curve ends at the figure of summary.json that has its name: metrics, loss and coreset figures are
means over seeds, costs are those so far of all seeds together.
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

MARKS = {"mlflow": "mlflow.json", "tensorboard": "tensorboard"}
"""The tools, each with what it leaves in the folder of a run that it follows."""

Outcome = Literal["finished", "stopped", "failed"]


class LoggedRound(NamedTuple):
    """What is logged of one round."""

    round: int
    means: dict[str, float]
    by_seed: dict[str, dict[int, float]]  # name -> seed -> figure; empty where there is one seed


class Tracker(Protocol):
    """One tool. Any exception of these means that it failed."""

    def start(
        self, folder: Path, values: Mapping[str, Any], points: Sequence[LoggedRound]
    ) -> None: ...

    def round(self, point: LoggedRound) -> None: ...

    def finish(self, summary: Mapping[str, Any] | None, outcome: Outcome) -> None: ...


class RoundLog:
    """Lines of rounds.jsonl, in their order, as points of curves."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._cost = dict.fromkeys(("seconds", "evaluate_seconds", "peak_memory_mb"), 0.0)
        self._cost |= dict.fromkeys(("bytes_up", "bytes_down", "examples_processed"), 0.0)

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
        means |= {f"cost/{name}": value for name, value in cost.items()}
        means["cost/seconds_per_round"] = cost["seconds"] / line["round"]
        several = each if len(self._seeds) > 1 else {}
        by_seed = {n: dict(zip(self._seeds, v, strict=True)) for n, v in several.items()}
        return LoggedRound(line["round"], means, by_seed)


class Trackers:
    """All tools that follow a run. One that fails is left out from there on, with one warning."""

    def __init__(self, trackers: Mapping[str, Tracker], folder: Path) -> None:
        self._live = dict(trackers)
        self._folder = folder
        self._figures: RoundLog | None = None  # until the run has begun
        self._ended = False

    def start(self, values: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """The run has begun to record itself, or goes on after `lines`."""
        figures = self._figures = RoundLog(values["seeds"])
        points = [figures.add(line) for line in lines] if self._live else []
        self._each(lambda tracker: tracker.start(self._folder, values, points))

    def round(self, line: Mapping[str, Any]) -> None:
        if self._live and self._figures is not None:
            point = self._figures.add(line)
            self._each(lambda tracker: tracker.round(point))

    def finish(self, summary: Mapping[str, Any] | None, outcome: Outcome) -> None:
        """Once; nothing was started where a run was refused before it began."""
        if self._figures is not None and not self._ended:
            self._ended = True
            self._each(lambda tracker: tracker.finish(summary, outcome))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._live[name]
                again = f"corefed run --resume {shlex.quote(str(self._folder))} --track {name}"
                print(
                    f"warning: --track {name} failed and is left out from here on, training goes "
                    f"on: {reason(error)}. What it misses is logged by: {again}",
                    file=sys.stderr,
                    flush=True,
                )


@contextmanager
def following(given: Sequence[str], folder: Path) -> Iterator[Trackers]:
    """The tools of `--track`, reached or refused; told so where the run ends by an exception."""
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
    """`--track`, repeated or with commas, as names of tools, each once."""
    found: dict[str, None] = {}
    for name in (part.strip() for text in given for part in text.split(",")):
        if name not in MARKS:
            hint = did_you_mean(name, MARKS, otherwise=f"there are {' and '.join(MARKS)}")
            raise UserError(f"There is no tracker {name!r} (--track){hint}")
        found[name] = None
    return list(found)


def forgotten(given: Sequence[str], folder: Path) -> list[str]:
    """Tools that followed the run in this folder before, and are not asked for now."""
    return [n for n, mark in MARKS.items() if n not in given and (folder / mark).exists()]


def public(text: str) -> str:
    """Addresses without the user and password in them, to be printed and remembered."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def reason(error: BaseException) -> str:
    """The first line of an exception, without its full stop; of a long one, both ends."""
    lines = public(str(error)).strip().splitlines()
    text = (lines[0] if lines else type(error).__name__).rstrip(".")
    return text if len(text) <= 240 else f"{text[:120]} ... {text[-115:]}"
