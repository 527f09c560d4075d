"""`corefed bench engine`: how fast rounds and whole runs are, and what many clients take.

All in one command, so that ratios are within one run of it. Writes engine-DEVICE.json, from which
the tables are made (`engine_tables.py`). What is measured is in `engine_rounds.py` and
`engine_runs.py`. A part that fails, for example for want of memory, is a row that says so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed_studies import pages
from corefed_studies.bench import engine_rounds, engine_runs, engine_tables, study, timed
from corefed_studies.bench.engine_settings import EngineSetting, setting_for

NAME = "engine"
METHODS = ("pfedbayes", "coreset-pfedbayes")

Row = dict[str, Any]
Parts = dict[str, list[Row]]


class Measurement(NamedTuple):
    """Some rows of a part."""

    part: str
    what: str  # for people
    work: Callable[[], Row | Iterator[Row]]


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device: str,
    *,
    page: Path | None = None,
    sources: Sequence[Path] = (),
) -> None:
    """Measure, or take the results of files; show them as tables, also in a page."""
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    studies = [study.read(path, NAME, ["parts"]) for path in sources]
    where = device_for(device)
    folder = pages.make(out or Path("runs") / f"bench-{NAME}-{scale}")
    if not sources:
        found = study.about(NAME, scale, where)
        found["parts"] = measure_all(scale, where, folder, console)
        studies = [study.write(folder / f"{NAME}-{where.type}.json", found)]
    tables = [table for each in studies for table in engine_tables.tables(each)]
    pages.put(folder, NAME, tables, marked)
    console.print(pages.markdown(tables), markup=False, soft_wrap=True)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def measure_all(scale: str, device: torch.device, scratch: Path, console: Console) -> Parts:
    """All parts; runs are recorded in `scratch` for as long as they take."""
    setting = setting_for(scale, device.type)
    parts: Parts = {name: [] for name in engine_tables.PARTS}
    steps = measurements(scale, setting, device, scratch, parts)
    with (
        _empty_cache("compiled" in engine_rounds.ways(device, setting)),
        bars(console=console) as shown,
    ):
        for done, (part, what, work) in enumerate(steps):
            shown.show("measuring", done, None, what, line=f"measuring {what}")
            parts[part] += attempt(what, work)
    return parts


def measurements(
    scale: str, setting: EngineSetting, device: torch.device, scratch: Path, parts: Parts
) -> Iterator[Measurement]:
    """One after the other; later ones look at the rows that earlier ones gave."""
    for clients in setting.clients:
        work = partial(engine_rounds.rounds, device, setting, clients)
        yield Measurement("rounds", f"a round of {clients} clients", work)
    for clients in setting.coreset_clients:
        best = fastest(parts["rounds"], clients)
        work = partial(engine_rounds.coreset, device, setting, clients, best)
        yield Measurement("coreset", f"coresets of {clients} clients", work)
    best = fastest(parts["rounds"], setting.stacked_clients)
    stacked = partial(engine_rounds.stacking, device, setting, best)
    yield Measurement("stacking", "seeds and settings side by side", stacked)
    for method in METHODS:
        whole = partial(engine_runs.run, device, setting, method, scratch)
        yield Measurement("runs", f"a run of {method}", whole)
    work = partial(engine_runs.saved, device, setting, scratch)
    yield Measurement("saved", f"checkpoints of {setting.saved_clients} clients", work)
    sizes = {"cohort": setting.many_clients, "linear": setting.linear_clients}
    for kind, number in sizes.items():
        work = partial(engine_runs.many, device, scale, kind, scratch)
        yield Measurement("many", f"{number:,} clients", work)


def attempt(what: str, work: Callable[[], Row | Iterator[Row]]) -> list[Row]:
    """The rows of a measurement, or one that says why there are none."""
    try:
        found = work()
        return [found] if isinstance(found, dict) else list(found)
    except (UserError, RuntimeError, MemoryError, OSError) as error:
        return [{"failed": what, "why": timed.reason(error)}]
    finally:
        gc.collect()  # what it held, for the next one
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fastest(rows: Sequence[Row], clients: int) -> str:
    """The fastest runtime for the nearest number of clients that was measured."""
    measured = [row for row in rows if "failed" not in row]
    if not measured:
        return "stacked"
    best: str = min(measured, key=lambda row: abs(row["clients"] - clients))["best"]
    return best


def _empty_cache(wanted: bool) -> AbstractContextManager[Any]:
    """So that the compiler finds nothing from earlier commands."""
    if not wanted:
        return nullcontext()
    from torch._inductor.utils import fresh_cache  # a second, where nothing is compiled

    context: AbstractContextManager[Any] = fresh_cache()
    return context
