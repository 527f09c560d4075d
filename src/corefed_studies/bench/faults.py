"""`corefed bench faults`: a real federation in which a part dies, freezes or is cut off.

A small federation on the loopback (`fault_federation.py`) trains one run per fault. In the middle
of its second round, one thing happens: a process is killed (kill -9) or frozen (SIGSTOP), a disk is
full, or a connection stops. Every round needs all clients, so nobody can be left out.

    recovered   the next round was finished, so many seconds after the fault
    run ended   `corefed federation run` ended with code 1 and a sentence, so many seconds after the
                fault; `resume` then went on
    equal       the model of the last round has the bits of the undisturbed run
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console

from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.base.types import Tree
from corefed.settings.config import resolve, to_dict
from corefed.training import checkpoint, record
from corefed_studies import pages
from corefed_studies.bench import study
from corefed_studies.bench.fault_federation import Testbed, last_error, testbed

NAME = "faults"
AIM = 60.0
"""Seconds in which a fault is to end in recovery, or in an exit with a reason."""
FROZEN, FULL, CUT = 50.0, 30.0, 30.0
"""Seconds that a fault lasts which does not end by itself; a frozen process that nobody has killed
by then is continued."""
LIMIT = 300.0
"""Seconds for a run, on a busy machine."""
ROLES = {
    "server": ("service", "SuperLink", "gate", "executor", "nursery", "task"),
    "client": ("service", "SuperNode", "executor", "nursery", "task"),
}


class Fault(NamedTuple):
    side: str  # "server" or "client"
    role: str  # of a process, "disk" or "connection"
    kind: str  # "killed", "frozen", "full" or "cut"


def faults(scale: str, bed: Testbed) -> list[Fault]:
    """All of them, or for `quick` two."""
    if scale == "quick":
        return [Fault("client", "executor", "killed"), Fault("client", "SuperNode", "frozen")]
    there = {side: bed.service(side).processes() for side in ROLES}
    found = [
        Fault(side, role, kind)
        for side, roles in ROLES.items()
        for role in roles
        if role in there[side] or role == "task"
        for kind in ("killed", "frozen")
    ]
    return [
        Fault("server", "disk", "full"),
        Fault("client", "disk", "full"),
        Fault("client", "connection", "cut"),
        *found,
    ]


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device: str,
    *,
    page: Path | None = None,
    sources: Sequence[Path] = (),
) -> None:
    """Measure, or take the results of a file; show them as a table, also in a page."""
    if device not in ("auto", "cpu"):
        raise UserError(f"bench {NAME} trains on a CPU; device is {device!r}, leave it out.")
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    folder = pages.make(out or Path("runs") / f"bench-{NAME}-{scale}")
    studies = [study.read(path, NAME, ["rows"]) for path in sources]
    if not studies:
        found = study.about(NAME, scale, torch.device("cpu"))
        with TemporaryDirectory(prefix="corefed-faults-") as place:
            for measured in measure_all(scale, Path(place), console):  # kept as it grows
                studies = [study.write(folder / f"{NAME}.json", found | measured)]
    tables = [table(each) for each in studies]
    pages.put(folder, NAME, tables, marked)
    console.print(pages.markdown(tables), markup=False, soft_wrap=True)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def measure_all(scale: str, place: Path, console: Console) -> Iterator[dict[str, Any]]:
    """What was measured so far, after each fault."""
    rows: list[dict[str, Any]] = []
    with testbed(place) as bed, bars(console=console) as shown:
        bed.wait_ready()
        began = time.monotonic()
        code = bed.begin("run", "undisturbed").wait(LIMIT)
        if code:
            raise UserError(
                f"The undisturbed run failed: {last_error(bed.said('run', 'undisturbed'))}"
            )
        wanted, whole = server_of(bed.run_folder("undisturbed")), time.monotonic() - began
        plan = faults(scale, bed)
        for done, fault in enumerate(plan):
            what = f"{fault.side}: {fault.role} {fault.kind}"
            shown.show("faults", done, len(plan), what, line=what)
            if fault.kind == "full" and not bed.disks:
                rows.append({**fault._asdict(), "outcome": "not tried: disks cannot be mounted"})
                continue
            rows.append({**fault._asdict(), **measure(bed, fault, f"fault-{done}", wanted)})
            console.print(outcome(rows[-1]), markup=False, soft_wrap=True)
            yield {"undisturbed_seconds": whole, "rows": rows}


def measure(bed: Testbed, fault: Fault, name: str, wanted: Tree) -> dict[str, Any]:
    """One run with one fault in its second round."""
    bed.wait_ready()
    service = bed.service(fault.side)
    exits = len(service.exits)
    run = bed.begin("run", name)
    folder = bed.run_folder(name)
    rounds = folder / record.ROUNDS

    def done() -> int:
        return len(record.read_lines(rounds)[0])

    wait(lambda: done() >= 1 or run.poll() is not None, LIMIT)
    wait(lambda: fault.role != "task" or "task" in service.processes(), LIMIT)
    before, began = done(), time.monotonic()
    with happening(bed, fault):
        wait(lambda: done() > before or run.poll() is not None, LIMIT)
        after = time.monotonic() - began
    with suppress(subprocess.TimeoutExpired):
        run.wait(LIMIT)
    row: dict[str, Any] = {"outcome": "recovered", "seconds": after, "sentence": ""}
    if len(service.exits) > exits:
        at, code, words = service.exits[exits]
        row["service"] = {"seconds": at - began, "code": code, "sentence": words}
    if run.returncode is None:
        run.kill()
        run.wait()
        row["outcome"] = "hung"
    if run.returncode:
        sentence = last_error(bed.said("run", name))
        row |= {"outcome": "run ended", "seconds": after, "sentence": plain(sentence, bed)}
        bed.wait_ready()
        resumed = bed.begin("resume", name)
        with suppress(subprocess.TimeoutExpired):
            resumed.wait(LIMIT)
        if resumed.returncode:
            row |= {"outcome": "lost", "sentence": last_error(bed.said("resume", name))}
    lines = record.read_lines(rounds)[0]
    row["again"] = sum(line["federation"]["attempts"] > 1 for line in lines)
    complete = (folder / record.SUMMARY).exists()
    row["equal"] = complete and same(server_of(folder), wanted)
    return row


@contextmanager
def happening(bed: Testbed, fault: Fault) -> Iterator[None]:
    """Let the fault happen, and undo what does not undo itself."""
    service = bed.service(fault.side)
    undo: Callable[[], None]
    if fault.kind in ("killed", "frozen"):
        pid = service.processes()[fault.role]
        os.kill(pid, signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP)
        undo, seconds = lambda: os.kill(pid, signal.SIGCONT), FROZEN
    elif fault.kind == "full":
        fill, seconds = bed.disk(fault.side) / "fill", FULL
        with suppress(OSError), fill.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        undo = fill.unlink
    else:
        bed.forwarder.open.clear()
        undo, seconds = bed.forwarder.open.set, CUT
    timer = threading.Timer(seconds, _quietly, [undo])
    timer.start()
    try:
        yield
    finally:
        if fault.kind in ("full", "cut"):
            timer.join()
        timer.cancel()
        _quietly(undo)


def _quietly(undo: Callable[[], None]) -> None:
    with suppress(OSError):
        undo()


def wait(true: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.05)


def plain(sentence: str, bed: Testbed) -> str:
    """Without the path of this machine."""
    return sentence.replace(f"{bed.path}/", "")


def server_of(folder: Path) -> Tree:
    """The server's state in a run's last checkpoint."""
    values = to_dict(resolve(folder / record.EXPERIMENT))
    found = checkpoint.load(folder, values)
    if found is None:
        raise UserError(f"{folder} has no checkpoint.")
    (server,) = found.servers
    return server


def same(one: Tree, other: Tree) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def table(found: dict[str, Any]) -> pages.Table:
    """One row per fault."""
    columns = ("where", "fault", "what happened", "rounds asked again", "same model")
    rows = [
        (
            row["side"],
            f"{row['role']} {row['kind']}",
            outcome(row),
            str(row.get("again", "")),
            {True: "yes", False: "NO", None: ""}[row.get("equal")],
        )
        for row in found["rows"]
    ]
    note = (
        f"An undisturbed run of 4 rounds took {found['undisturbed_seconds']:.0f} s. The aim is "
        f"recovery or an exit with a reason within {AIM:.0f} s."
    )
    return pages.Table("Faults in the second of four rounds", columns, rows, note)


def outcome(row: dict[str, Any]) -> str:
    """In words."""
    if "seconds" not in row:
        return str(row["outcome"])
    words = {
        "recovered": f"next round after {row['seconds']:.0f} s",
        "run ended": f"`run` ended after {row['seconds']:.0f} s: {row['sentence']} Resumed.",
        "hung": "HUNG",
        "lost": f"LOST: {row['sentence']}",
    }[row["outcome"]]
    if "service" in row:
        about = row["service"]
        ended = "was killed" if about["code"] < 0 else f"ended with code {about['code']}"
        words += f" (the service {ended} and was started again)"
    return words
