"""The cells of a table, each a run in its own folder: train those that are missing, read all.

A table that was stopped continues where it was: cell by cell, and within a cell from its
checkpoint. Cells are independent, so several can be trained at the same time, each in a process
with one thread. On a CPU this is faster than one process with all threads; on a GPU, one process
leaves room for others while it waits for kernels to be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from corefed.base import machine
from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.settings import config
from corefed.settings.config import resolve
from corefed.settings.run import Run
from corefed.training import record, rounds
from corefed.training.interrupt import stop_on_interrupt
from corefed.training.record import Line
from corefed.training.setup import concrete
from corefed_studies.workers import workers

Flags = dict[str, object]

MATCHING: Flags = {"method": "coreset-pfedbayes", "preset": "matching"}
"""Coresets that solve the paper's Eq. 4; its tables and figures stand beside these."""
DEFAULT: Flags = {"method": "coreset-pfedbayes"}
"""Coresets as they come, by the default selector."""

_BAYESIAN: Flags = {
    "eta_1": 0.001, "eta_2": 0.001, "initial_rho": -3.0, "anneal": 0.0, "by_layer": False,
}  # fmt: skip
_SGD: Flags = {"learning_rate": 0.02, "initial_std": 0.1}


def published(flags: Flags) -> Flags:
    """The flags of a run with the constants of the paper where they do not name others.

    Studies that were measured with them, and not with the defaults of docs/defaults.md, say so.
    """
    own = {"fedavg": _SGD, "independent": _SGD}.get(
        str(flags.get("base") or flags.get("method", Run.method)), _BAYESIAN
    )
    return {**own, **flags}


GPU_JOBS = 4
"""Processes that share a GPU: its kernels here are shorter than launching them takes."""

CPU_JOBS = 8
"""More processes than that would want tens of gigabytes: each holds data and clients of its own."""

ELSEWHERE = frozenset({"device", "memory_mb", "runtime", "compile"})
"""Settings that may differ between the machine that trained a cell and the one that reads it."""


class StudyCell(NamedTuple):
    """One run of a table: where it stands, and what defines it."""

    row: str
    column: str
    flags: Flags


class CellOutcome(NamedTuple):
    """What became of a cell: its summary and its rounds, or the sentence it failed with."""

    summary: dict[str, Any]
    lines: list[Line]
    failure: str = ""


Found = dict[tuple[str, str], CellOutcome]


def place_of(cell: StudyCell, folder: Path) -> Path:
    """The run folder of a cell."""
    words = f"{cell.row} {cell.column}".replace("%", "").replace(",", "").lower().split()
    return folder / "-".join(words)


def summaries(
    cells: Sequence[StudyCell], folder: Path, console: Console
) -> dict[tuple[str, str], dict[str, Any]]:
    """The summary of every cell; a cell that fails ends the command."""
    found = outcomes(cells, folder, console, jobs=1)
    for outcome in found.values():
        if outcome.failure:
            raise UserError(outcome.failure)
    return {key: outcome.summary for key, outcome in found.items()}


def outcomes(cells: Sequence[StudyCell], folder: Path, console: Console, jobs: int = 0) -> Found:
    """Train what is missing, `jobs` cells at a time (0: as suits the machine), and read all."""
    missing = [cell for cell in cells if not _finished(cell, folder)]
    jobs = min(len(missing), jobs or default_jobs())
    total = sum(resolve(flags=cell.flags).run.rounds for cell in cells)
    failures: dict[tuple[str, str], str] = {}
    with bars(console=console) as shown:

        def show() -> None:
            done = sum(_rounds(cell, folder) for cell in cells)
            shown.show("rounds of all cells", done, total)

        def ended(cell: StudyCell, failure: str) -> None:
            if failure:
                failures[cell.row, cell.column] = failure
            console.print(f"{cell.row}, {cell.column}: {failure or 'done'}")

        show()
        if jobs > 1:
            _side_by_side(missing, folder, jobs, show, ended)
        else:
            for cell in missing:
                ended(cell, train(cell, folder, show))
    found: Found = {}
    for cell in cells:
        failure = failures.get((cell.row, cell.column), "")
        read = ({}, []) if failure else record.read(place_of(cell, folder))
        found[cell.row, cell.column] = CellOutcome(*read, failure)
    return found


def default_jobs() -> int:
    return GPU_JOBS if torch.cuda.is_available() else min(CPU_JOBS, machine.usable_cores())


def train(cell: StudyCell, folder: Path, on_round: Callable[[], None] = lambda: None) -> str:
    """Train or resume one cell; the sentence it failed with, if it did (it may have diverged)."""
    place = place_of(cell, folder)
    with stop_on_interrupt(place) as stop:
        try:
            done = rounds.train(
                resolve(flags=cell.flags),
                place,
                resume=record.begun(place),
                on_round=lambda line: on_round(),
                stop=lambda: bool(stop),
            )
        except UserError as error:
            return str(error)
    if not done.finished:
        raise KeyboardInterrupt
    return ""


def _side_by_side(
    cells: Sequence[StudyCell],
    folder: Path,
    jobs: int,
    show: Callable[[], None],
    ended: Callable[[StudyCell, str], None],
) -> None:
    """Long cells first, so that none is left over at the end; looks at the folders to show how
    far they are. Ctrl-C reaches the workers as well, which finish their round and stop."""
    by_length = sorted(cells, key=lambda cell: -resolve(flags=cell.flags).run.rounds)
    with workers(jobs) as pool:
        running: dict[Future[str], StudyCell] = {
            pool.submit(train, cell, folder): cell for cell in by_length
        }
        while running:
            done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                ended(running.pop(future), future.result())
            show()


def _finished(cell: StudyCell, folder: Path) -> bool:
    """Whether a cell is complete; one of other settings under the same name is refused."""
    place = place_of(cell, folder)
    if not (place / record.SUMMARY).exists():
        return False
    experiment = concrete(resolve(flags=cell.flags))
    summary, lines = record.read(place)
    here = config.to_dict(experiment)
    there = {**summary["config"], **{key: here[key] for key in ELSEWHERE}}
    changed = config.differences(there, here)
    if changed:
        raise UserError(
            f"{place} holds a run with other settings: {', '.join(changed)}; choose another "
            "--out, or remove it."
        )
    return len(lines) == experiment.run.rounds


def _rounds(cell: StudyCell, folder: Path) -> int:
    """Rounds on record, by counting lines."""
    path = place_of(cell, folder) / record.ROUNDS
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0
