"""Options of `build`: checked alone, before anything is computed, and completed from the data."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.coreset import solvers
from corefed.coreset.draws import Draws, Posterior, hold, leaves, refuse_equal, split

STORES = ("auto", "memory", "disk", "recompute")
FRESH = 100
"""Fresh draws, where draws can be made: the relative error of their error is about
sqrt(2 / 100)."""
MANY, MINIMUM = 4, 400
"""Fitted draws, if draws can be made: MANY k, and at least MINIMUM. On a logistic regression of 20
coefficients with k = 100 the error on fresh draws is 0.075, 0.019, 0.0084 and 0.0046 with S = 2k,
4k, 8k and 16k."""


def check(
    solver: str,
    samples: int,
    shrink: float | str,
    chunk: int,
    memory_mb: int,
    store: str,
    iterations: int,
    resample: object,
) -> None:
    """Every option alone, before anything is computed."""
    if store not in STORES:
        raise UserError(f"store is {store!r}; it must be one of {', '.join(STORES)}.")
    if samples != 0 and samples < 2:
        raise UserError(f"samples is {samples}; it must be 2 or more, or 0 to be chosen by size.")
    for name, value, least in (
        ("chunk", chunk, 0), ("memory_mb", memory_mb, 1), ("iterations", iterations, 0)
    ):  # fmt: skip
        if value < least:
            raise UserError(f"{name} is {value}; it must be {least} or more.")
    if shrink != "auto" and not (isinstance(shrink, int | float) and 0 <= shrink < float("inf")):
        raise UserError(f"shrink is {shrink!r}; it must be 'auto' or a number that is 0 or more.")
    needed = solvers.find(solver).resample
    if needed and resample is None:
        raise UserError(
            "sparse-vi draws from the coreset's own posterior at every step: give resample, a "
            "function of (indices, weights, draws, generator), or choose another solver."
        )
    if not needed and resample is not None:
        raise UserError(f"resample is for the solver sparse-vi; {solver} has no use for it.")


def number(size: int | float | str, n: int) -> int:
    """k from a number of points or a part of them."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise UserError(f"size is {size!r}; it must be a number of points or a fraction of them.")
    if isinstance(size, float):
        if not 0 < size < 1:
            raise UserError(
                f"size is {size!r}; a float is a part between 0 and 1, a number of points an int."
            )
        return max(1, round(size * n))
    if size < 1:
        raise UserError(f"size is {size}; a coreset has at least one point.")
    if size > n:
        raise UserError(f"size is {size}, but the data have only {n} points.")
    return size


def place(
    posterior: Posterior, device: str | torch.device | None
) -> tuple[torch.device, torch.dtype]:
    """Where to compute, and the precision of the draws."""
    one = posterior if isinstance(posterior, Draws) else posterior(1, 0, "shape")
    first = leaves(one.block(0, 1))[0]
    if isinstance(device, str):
        device = device_for(device)
    return first.device if device is None else device, first.dtype


def draws_for(
    posterior: Posterior, k: int, n: int, samples: int, seed: int, where: torch.device, memory: int
) -> tuple[Draws, Draws]:
    """Draws to fit and to judge by. With S - 1 <= k the fit is degenerate."""
    if not isinstance(posterior, Draws):
        samples = samples or max(MANY * k if k < n else 0, MINIMUM)
    fitted, fresh = split(posterior, samples, FRESH, seed)
    refuse_equal(fitted)
    return hold(fitted, where, memory // 8), hold(fresh, where, memory // 8)


def store_for(wanted: str, size: int, memory: int, scratch: Path | None) -> str:
    """auto: memory within half the bound, else the disk, or neither where that has no room."""
    if wanted != "auto":
        return wanted
    if size <= memory // 2:
        return "memory"
    folder = scratch or Path(tempfile.gettempdir())
    try:
        return "disk" if shutil.disk_usage(folder).free > 1.05 * size else "recompute"
    except OSError as error:
        raise UserError(f"The scratch folder {folder}: {error.strerror}.") from error
