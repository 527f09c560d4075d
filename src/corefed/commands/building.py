"""What `corefed coreset` does around `corefed.coreset.build`: posterior, progress, files."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corefed.base import files
from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.coreset import picture, solvers
from corefed.coreset.coreset import encode
from corefed.coreset.engine import MANY, build
from corefed.coreset.solvers import SOLVERS
from corefed.training import record
from corefed.use import posteriors

PICTURE = "coreset.png"


def execute(
    data: str,
    size: str,
    *,
    solver: str,
    model: str,
    hidden: int,
    steps: int,
    draws: int,
    seed: int,
    device: str,
    data_dir: Path | None,
    out: Path | None,
    json: bool,
    quiet: bool,
) -> int:
    """Load, fit a posterior, build, write, print; nothing is written before the end."""
    solvers.get(solver)
    wanted = parse_size(size)
    for name, value, least in (("hidden", hidden, 0), ("steps", steps, 1), ("draws", draws, 0)):
        if value < least:
            raise UserError(f"--{name} is {value}; it must be {least} or more.")
    if seed < 0:
        raise UserError(f"--seed is {seed}; it must be 0 or more.")
    place = device_for(device)
    short = Path(data).stem if data.startswith("npz:") else data
    folder = out or record.default_folder("coreset", short)
    _refuse_existing(folder)
    table = posteriors.load(data, data_dir, seed)
    chosen = posteriors.choose(model, table)
    _check_size(wanted, len(table.x))
    if SOLVERS[solver].resample and chosen == "mlp":
        raise UserError(
            "sparse-vi needs the posterior of every coreset on its way, which takes seconds for a "
            "regression and minutes for a network; choose another solver or model."
        )
    with _progress(silent=quiet or json) as show:
        fitted = posteriors.fit(chosen, table, hidden, steps, seed, place, show)
        coreset = build(
            fitted.log_likelihood,
            fitted.draws,
            fitted.data,
            wanted,
            solver=solver,
            samples=draws or (_draws(wanted, len(table.x)) if chosen == "mlp" else 0),
            seed=seed,
            device=place if chosen == "mlp" else None,
            progress=show,
            resample=fitted.resample if SOLVERS[solver].resample else None,
        )
    note = {"data": data, "model": fitted.text}
    contents = {**encode(coreset, note), PICTURE: picture.render(coreset)}
    files.write_folder(folder, contents.items())
    if json:
        about = dataclasses.asdict(coreset.diagnostics)
        print(jsonlib.dumps({"folder": str(folder), **note, **about}, indent=1))
    elif quiet:
        print(folder)
    else:
        print(f"{data}: {fitted.text}")
        print(coreset)
        print(f"written to {folder}")
    return 0


def parse_size(text: str) -> int | float:
    """ "500" points; "0.05" or "5%" of them."""
    bare = text.strip().removesuffix("%").strip()
    percent = text.strip().endswith("%")
    try:
        if percent or "." in bare or "e" in bare.lower():
            value: int | float = float(bare) / (100 if percent else 1)
        else:
            value = int(bare)
    except ValueError:
        raise UserError(
            f"--size is {text!r}; give a number of points (500) or a part of them (0.05 or 5%)."
        ) from None
    if isinstance(value, float) and not 0 < value < 1:
        raise UserError(f"--size is {text!r}; a part of the points lies between 0 and 1 (100 %).")
    if value <= 0:
        raise UserError(f"--size is {text!r}; a coreset has at least one point.")
    return value


def _check_size(size: int | float, n: int) -> None:
    """Before a posterior is fitted, not after it."""
    if size > n:
        raise UserError(f"--size is {size}, but the data have only {n} points.")


NETWORK_DRAWS = 1000
"""Draws of a network at least: its posterior has many directions, and draws that share bodies are
cheap. MNIST, 100 points, error on fresh draws: 0.63 with 200, 0.18 with 2000."""


def _draws(size: int | float, n: int) -> int:
    """S for a network, of a size that `parse_size` gave."""
    return max(MANY * (round(size * n) if isinstance(size, float) else size), NETWORK_DRAWS)


def _refuse_existing(folder: Path) -> None:
    """A result must not be overwritten by a slip, nor mixed with another."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; --out needs a folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another --out.")


@contextmanager
def _progress(silent: bool) -> Iterator[Any]:
    """A bar a stage on stderr; one line a finished stage where stderr is not a terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if silent:
            return
        if not console.is_terminal:
            if done == total:
                print(f"{stage} {done}/{total}", file=sys.stderr, flush=True)
            return
        if stage not in tasks:
            bar.start()
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=done)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
