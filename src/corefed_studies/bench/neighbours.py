"""`corefed bench neighbours`: a run beside busy processes against the same run alone, on a CPU.

PFedBayes, 10 clients, 784-100-10, 20 steps of 100 points per round, in a process of its own. The
neighbours are plain Python loops, each of which would keep a core busy. Nothing is given a
priority. Three ways to run are compared:

    corefed   threads wait passively, and each trains its own clients
    default   OpenMP as it comes, and every operation is split between all threads
    active    the same, and threads spin for as long as they wait (OMP_WAIT_POLICY=ACTIVE)

The user's own OpenMP variables are left out, so that the table shows what corefed chooses. Ratios
are within one repetition, in which alone and beside follow each other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from corefed.base import files, machine
from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed_studies import pages
from corefed_studies.bench import isolated

NAME = "neighbours"
CLIENTS, POINTS = 10, 200
AIM = 2.5
"""A run beside neighbours is to take at most this many times its time alone."""
ENOUGH_SECONDS = 5.0
"""A measurement ends with the round in which this is reached."""
QUIET = 0.1
"""Share of the machine that other programs may use before a measurement; more spoils it."""


class NeighboursSetting(NamedTuple):
    """How much is measured at a scale."""

    per_core: tuple[float, ...]  # busy processes
    repeats: int


SETTINGS = {
    "paper": NeighboursSetting((1, 1.5, 2), 3),
    "quick": NeighboursSetting((2,), 1),
}

COLUMNS = {"corefed": "corefed", "default": "OpenMP's defaults", "active": "active waiting"}

BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:  # ends with whoever started it, however that ends
    for _ in range(1_000_000):
        pass
"""


def main(
    scale: str, out: Path | None, console: Console, device: str, *, page: Path | None = None
) -> None:
    """Measure, and write neighbours.json, .md and .html into `out`; the table also into a page."""
    if device not in ("auto", "cpu"):
        raise UserError(f"bench {NAME} measures a CPU; device is {device!r}, leave it out.")
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    folder = pages.make(out or Path("runs") / f"bench-{NAME}-{scale}")
    study = measure_all(SETTINGS[scale], console)
    content = json.dumps(study, indent=1) + "\n"
    files.write_folder(folder, [(f"{NAME}.json", content.encode())])
    found = table(study)
    pages.put(folder, NAME, [found], marked)
    console.print(pages.markdown([found]), markup=False, soft_wrap=True)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def measure_all(setting: NeighboursSetting, console: Console) -> dict[str, Any]:
    """Seconds per round by number of busy processes and way to run, one entry per repetition."""
    cores = machine.usable_cores()
    numbers = [0, *(round(each * cores) for each in setting.per_core)]
    ways = environments(os.environ, cores)
    seconds: dict[int, dict[str, list[float]]] = {n: {way: [] for way in ways} for n in numbers}
    threads: dict[str, int] = {}
    others: list[float] = []
    plan = [(n, way) for _ in range(setting.repeats) for way in ways for n in numbers]
    with bars(console=console) as shown:
        for done, (number, way) in enumerate(plan):
            shown.show("measurements", done, len(plan), f"{way}, {number} busy processes")
            others.append(used_share())
            with busy_processes(number):
                row = isolated.measure(__name__, way, environment=ways[way])
            seconds[number][way].append(statistics.median(row["seconds"]))
            threads[way] = row["threads"]
    return {
        "cores": cores,
        "threads": threads,
        "others": max(others),
        "rows": [
            {
                "busy": number,
                "fair": fair_share(threads["corefed"], number, cores),
                "seconds": seconds[number],
                "ratio": {way: ratio(seconds[number][way], seconds[0][way]) for way in ways},
            }
            for number in numbers
        ],
    }


def environments(environment: Mapping[str, str], cores: int) -> dict[str, dict[str, str]]:
    """By way to run."""
    ours = {*machine.NUMBER, *machine.WAITING}
    bare = {key: value for key, value in environment.items() if key not in ours}
    active = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": str(cores)}
    return {"corefed": machine.polite(bare), "default": bare, "active": bare | active}


def used_share(seconds: float = 1.0) -> float:
    """Share of the machine's CPU time that is used in this time, while we sleep (Linux)."""
    begin = _used_and_all()
    time.sleep(seconds)
    used, whole = (after - before for after, before in zip(_used_and_all(), begin, strict=True))
    return used / max(1, whole)


def _used_and_all() -> tuple[int, int]:
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError as error:
        raise UserError(f"bench {NAME} needs Linux: it reads /proc/stat.") from error
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(word) for word in first.split()[1:9]]
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


@contextmanager
def busy_processes(number: int) -> Iterator[list[int]]:
    """So many processes that do nothing but compute; yields their ids, and ends them."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            started.append(subprocess.Popen([sys.executable, "-c", BUSY]))
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def ratio(beside: Sequence[float], alone: Sequence[float]) -> float:
    """The median over repetitions of one time to the other."""
    return statistics.median(a / b for a, b in zip(beside, alone, strict=True))


def fair_share(threads: int, busy: int, cores: int) -> float:
    """How much longer a run takes if all threads of the machine get equal shares of its cores.

    The threads of the run are taken to be busy all the time, and are no more than the cores.
    """
    return max(1.0, (threads + busy) / cores)


def table(study: Mapping[str, Any]) -> pages.Table:
    cores, threads = study["cores"], study["threads"]["corefed"]
    columns = ["busy processes", "fair share"]
    for heading in COLUMNS.values():
        columns += [f"{heading}, s per round", "times alone"]
    quiet = "" if study["others"] <= QUIET else " The machine was not quiet: measure again."
    repeats, rows = len(study["rows"][0]["seconds"]["corefed"]), []
    for row in study["rows"]:
        cells = [str(row["busy"]), f"{row['fair']:.1f}"]
        for way in COLUMNS:
            cells += [f"{statistics.median(row['seconds'][way]):.2f}", f"{row['ratio'][way]:.1f}"]
        rows.append(cells)
    return pages.Table(
        "PFedBayes, 10 clients, 784-100-10, 20 steps",
        columns,
        rows,
        f"Measured on {cores} cores with {threads} threads; repetitions: {repeats}. Before a "
        f"measurement other programs used at most {study['others']:.0%} of the machine.{quiet} "
        + sentences(study["rows"]),
    )


def sentences(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the aim is reached, and where a fair share of the machine is above it."""
    beside = [row for row in rows if row["busy"]]
    reached = [str(row["busy"]) for row in beside if row["ratio"]["corefed"] <= AIM]
    missed = [str(row["busy"]) for row in beside if row["ratio"]["corefed"] > AIM]
    unfair = [str(row["busy"]) for row in beside if row["fair"] > AIM]
    text = f"The aim is at most {AIM} times the time alone."
    for busy, what in (
        (reached, "it is reached."),
        (missed, "it is missed."),
        (unfair, "it is below the fair share: a run whose threads never wait cannot reach it."),
    ):
        text += f" Beside {' and '.join(busy)} busy processes {what}" if busy else ""
    return text


def one(way: str) -> dict[str, Any]:
    """Seconds of each round, and the number of threads, in this process."""
    import torch  # the process that starts others needs none of it

    from corefed.base import threads
    from corefed_studies.bench.timed import make_clients, random_data

    if way != "corefed":
        threads.WORTH_THREADS = sys.maxsize  # no thread has clients of its own
    data = random_data(CLIENTS, POINTS)
    group = make_clients(data, torch.device("cpu"), method="pfedbayes")
    group.train()  # warm up
    seconds: list[float] = []
    while sum(seconds) < ENOUGH_SECONDS:
        began = time.perf_counter()
        group.train(round_=len(seconds))
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1])))
